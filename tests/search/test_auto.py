"""Placement `auto`: the best of several, and what became of the others."""

from __future__ import annotations

import json
import re
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, Infeasible, Layer, Link, Profile, Schedule, solve, verify
from zbsolve.cli import main
from zbsolve.ilp.every_split import proven_again
from zbsolve.partition.by_name import NAMES
from zbsolve.partition.splits import Splits
from zbsolve.partition.stage_costs import least_step
from zbsolve.profile.step import Step
from zbsolve.search import auto
from zbsolve.search.auto import solve_auto
from zbsolve.search.climb import Moved, moved_layers
from zbsolve.show.solved_step import solved
from zbsolve.show.solved_text import PARTITION, solved_as_text
from zbsolve.systems import preset
from zbsolve.util.clock import Clock

from ..support.profiles import equal_layers


def test_the_best_placement_wins_and_the_others_say_why():
    schedule, tried = solve_auto(equal_layers(), Step(2, 4, "auto"), effort=0.5)
    assert [one.placement for one in tried] == ["single", "loop", "loop4", "vee"]
    winner = next(one for one in tried if not one.why)
    certificate = schedule.certificate
    assert certificate is not None
    assert verify(schedule.problem, schedule) == ()
    assert winner.value == certificate.value == min(one.value for one in tried if one.value is not None)
    assert all(("longer than" in one.why or "equals" in one.why) == (one is not winner) for one in tried)


def test_effort_gives_the_same_bytes():
    first, second = (solve_auto(equal_layers(), Step(2, 3, "auto"), effort=0.3, seed=4) for _ in range(2))
    assert first[0].to_json() == second[0].to_json()
    assert first[1] == second[1]


def test_a_row_that_was_not_searched_has_its_bound():
    """Rank 1 has 4 microbatches of 4 layers: F, F again, B and W take 40 + 40 + 48 + 32 µs each, the first after 40 µs of
    rank 0's F: 680 µs at least, where 520 are reached without recompute."""
    best, (first, second) = solve_auto(equal_layers(), Step(2, 4, recompute="auto"), seconds=600)
    assert (first.value, first.bound, first.why) == (best.timeline().makespan, 520, "")
    assert (second.value, second.bound) == (None, 680)
    assert second.why == "at least 30.77% longer than single: proven, not searched"


def test_too_few_layers_and_too_little_memory_are_told():
    _, tried = solve_auto(equal_layers(4), Step(2, 2, "auto"), effort=0.1)
    assert next(one for one in tried if one.placement == "loop4").why == "partition: 4 layers do not make 8 stages"
    uneven = equal_layers(4, 1000)  # single: 2 layers of 4000 bytes a rank
    with pytest.raises(Infeasible, match=r"no tried choice of placement fits: .*rank 0 needs .* \(single, loop, vee\)"):
        solve_auto(uneven, Step(2, 2, "auto", memory=7_000))
    with pytest.raises(BadInput, match="4 layers do not make 5 stages"):
        solve_auto(equal_layers(4), Step(5, 2, "auto"))
    with pytest.raises(BadInput, match="seconds"):
        solve_auto(equal_layers(4), Step(2, 2, "auto"), seconds=0)


def test_a_hint_starts_the_placement_that_it_was_made_for():
    earlier, _ = solve_auto(equal_layers(), Step(2, 4, "auto"), effort=0.2)
    again, _ = solve_auto(equal_layers(), Step(2, 4, "auto"), effort=0.1, hint=earlier)
    assert earlier.certificate is not None
    assert again.certificate is not None
    assert again.certificate.value <= earlier.certificate.value
    assert earlier.problem.placement[:2] == (0, 1)


def test_an_interrupted_race_returns_what_it_has():
    _, tried = solve_auto(equal_layers(), Step(2, 3, "auto"), effort=0.2, stop=lambda: True)
    assert tried[0].value is not None
    assert tried[1].why == "not tried: interrupted"


@pytest.mark.parametrize("where", ["run_threads", "_Bounds.go_on", "_improve"])
def test_an_interruption_outside_of_searches_keeps_the_best(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def pressed(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{auto.__name__}.{where}", pressed)
    schedule, tried = solve_auto(uneven(), Step(2, 4, partition="auto"), effort=0.2)
    assert verify(schedule.problem, schedule) == ()
    assert schedule.certificate.value == min(one.value for one in tried if one.value is not None)


def uneven(capacity: int | None = None) -> Profile:
    """A light embedding, a heavy output layer, many bytes in the first layers."""
    blocks = [Layer(f"block{i}", 100, 110, 90, 195, 40, 60, 120, 100) for i in range(9)]
    ends = Layer("embedding", 4, 0, 6, 6, 0, 8, 900, 100), Layer("head", 180, 190, 170, 350, 60, 30, 900, 4)
    return Profile("estimated", "toy", (ends[0], *blocks, ends[1]), Link(1.0, 100.0), 4.0, capacity, {}, {})


def test_partitions_race_too():
    schedule, tried = solve_auto(uneven(), Step(4, 4, partition="auto"), effort=2.0)
    names = {name: one for one in tried for name in one.partition.split("=")}
    assert {"equal", "balanced", "alpa", "memory", "F+B"} <= set(names)
    best = min((one for one in tried if one.value is not None), key=lambda one: one.value)
    assert schedule.certificate.value == best.value < names["equal"].value
    assert names["alpa"].value is not None or "proven" in names["alpa"].why
    assert schedule.problem.layers == best.layers
    assert verify(schedule.problem, schedule) == ()
    again, _ = solve_auto(uneven(), Step(4, 4, partition="auto"), effort=2.0)
    assert again.to_json() == schedule.to_json()


def test_a_split_by_the_bound_beats_every_named_partition() -> None:
    """With few microbatches the ends of the step count as much as the busiest rank. No split is shorter: the
    schedule says so, and that is proven again; one more is not."""
    profile = uneven()
    schedule, tried = solve_auto(profile, Step(4, 2, partition="auto"), effort=4.0)
    every = schedule.every_split
    assert every is not None
    named = [one for one in tried if set(NAMES) & set(one.partition.split("=")) and ", " not in one.partition]
    assert every.bound == schedule.certificate.value < min(one.value for one in named)
    assert proven_again(Splits.told(every, schedule.problem), every, 10.0) == ""
    higher = replace(every, bound=every.bound + 1)
    assert proven_again(Splits.told(higher, schedule.problem), higher, 10.0)


@pytest.mark.parametrize("memory", [None, "7200B,7200B"])
def test_no_partition_is_longer_than_orders_of_peoples_own(memory: str | None) -> None:
    """Than the named ones, nor than what a search of the equal split alone finds in the same time. That split is searched
    first, as if alone, for its share."""
    step = Step(2, 6, "loop", (4,) * 4, memory=memory, fused=True)
    profile = replace(equal_layers(16), link=Link(2.0, 1e12))
    uniform = step.problem(profile)
    schedule, tried = solve_auto(profile, replace(step, partition="auto"), effort=1.0)
    own = solve(uniform, effort=1.0).certificate.value
    equal = next(one for one in tried if "equal" in one.partition.split("="))
    assert equal.value <= solve(uniform, effort=auto.USUAL_SHARE).certificate.value
    named = [preset(name, uniform).timeline().value for name in ("breadth-first", "interleaved")]
    assert schedule.certificate.value < min(own, *named)


@pytest.mark.usefixtures("looks")
def test_layers_move_on_every_core(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of SlackPipe's grid that is open: on three cores, each with random numbers of its own. The equal split takes 840
    µs."""
    seen: list[tuple[int, int]] = []

    def noted(*given: Any) -> Moved | None:
        *what, _, seed = given
        seen.append((seed, threading.get_ident()))
        return moved_layers(*what, Clock(1.0, 0.3), seed)  # counted: it comes as far on any machine

    monkeypatch.setattr(auto, "moved_layers", noted)
    monkeypatch.setattr(auto, "cores", lambda: 3)
    layers = (replace(equal_layers(1).layers[0], F=1.0, BW=2.0, held_until_B=1, held_until_W=0),) * 128
    profile = replace(equal_layers(1), layers=layers, link=Link(0.0, 1e12))
    schedule, _ = solve_auto(profile, Step(4, 8, "loop4", "auto", memory="256B", fused=True), seconds=1.0)
    assert sorted(seed for seed, _ in seen) == [0, 1, 2]
    assert threading.get_ident() not in {thread for _, thread in seen}
    assert schedule.certificate.value < 840
    assert verify(schedule.problem, schedule) == ()


def test_what_was_proven_of_every_split_stays_with_its_placement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where what is preferred is not the shortest schedule, but one on another placement."""
    step = Step(2, 2, "auto", partition="auto")
    ours, _ = solve_auto(uneven(), step, effort=0.5)
    assert ours.every_split is not None

    def other(best: Schedule, *rest: Any) -> Schedule:
        return next(one for one in rest[-1] if one.problem.placement != best.problem.placement)

    monkeypatch.setattr(auto, "preferred", other)
    schedule, _ = solve_auto(uneven(), step, effort=0.5)
    assert schedule.problem.placement != ours.problem.placement
    assert schedule.every_split is None


def test_few_splits_are_all_tried() -> None:
    """Stage 1 makes its first layer again: 3 µs of layer 1, 6 of layer 6, 9 of those between. No single layer moved from
    an even split gains."""
    again = (9, 3, 9, 9, 9, 9, 6)
    layers = tuple(Layer(f"l{i}", 10, 0, 0, 20, 1, 0, 0, 0, X=float(time)) for i, time in enumerate(again))
    profile = Profile("given", "again", layers, Link(0.0, 1e12), 0.0, None, {}, {})
    schedule, _ = solve_auto(profile, Step(2, 1, partition="auto", fused=True, recompute="1:1"), effort=1.0)
    assert (schedule.certificate.value, schedule.problem.layers) == (7 * 30 + 3, (1, 6))


def test_a_split_without_a_name_is_tried_where_no_named_one_fits() -> None:
    """By name no split of a V fits, since names count what each stage keeps at most, all at once. With the first two layers
    together, rank 1 has freed the bytes of its last stage before the B of the other one takes 5 more."""
    times = (2, 4, 2), (8, 8, 9), (7, 7, 8), (8, 7, 1), (9, 7, 4)
    held = (0, 0, 0, 0), (3, 1, 0, 0), (0, 3, 0, 5), (4, 0, 0, 0), (3, 1, 1, 0)  # until B, until W, parameters, from B
    layers = tuple(
        Layer(f"l{i}", F, B, W, 11, until_b, until_w, parameters, 0, from_b)
        for i, ((F, B, W), (until_b, until_w, parameters, from_b)) in enumerate(zip(times, held, strict=True))
    )
    profile, step = Profile("given", "V", layers, Link(0.0, 1e12), 0.0, None, {}, {}), Step(2, 2, "vee", memory="13B,9B")
    for named in ("equal", "balanced", "alpa", "memory", "F+B"):
        with pytest.raises(Infeasible):
            replace(step, partition=named).problem(profile)
    schedule, _ = solve_auto(profile, replace(step, partition="auto"), effort=0.1)
    assert schedule.problem.layers == (2, 1, 1, 1)
    assert verify(schedule.problem, schedule) == ()


def test_the_higher_bound_of_every_split_is_told() -> None:
    """In little time the one that a file proves may be below the simple one."""
    step = Step(2, 2, "single", partition="auto")
    ours, tried = solve_auto(uneven(), step, effort=0.5)
    assert ours.every_split is not None
    low = replace(ours, every_split=replace(ours.every_split, bound=1))
    known = solved((uneven(), step), low, tried)
    assert known.bounds == {PARTITION: {"single": least_step(step.costs(uneven()), "makespan")}}
    assert "no certificate says that" in solved_as_text(known)


def test_a_file_claims_nothing_of_every_split_where_more_than_the_split_is_open() -> None:
    """The bound of a step that recomputes nothing counts its memory, and with recompute another split may be shorter."""
    step = Step(2, 2, "single", partition="auto", recompute="auto")
    ours, tried = solve_auto(uneven(), step, effort=0.5)
    assert ours.every_split is None
    assert "no certificate says that" in solved_as_text(solved((uneven(), step), ours, tried))


def test_layers_are_moved_for_a_given_order() -> None:
    """All partitions of eleven layers into three stages, each in 1F1B's order: the race has the shortest of them, and no
    other order, though a search finds a shorter one."""
    profile, step = uneven(), Step(3, 4, partition="auto", fused=True)
    count = len(profile.layers)
    splits = [(a, b, count - a - b) for a in range(1, count - 1) for b in range(1, count - a)]
    orders = {split: preset("1f1b", replace(step, partition=split).problem(profile)) for split in splits}
    least = min(orders.values(), key=lambda one: one.timeline().value)
    schedule, tried = solve_auto(profile, step, method="1f1b", effort=1.0)
    assert schedule.timeline().value == least.timeline().value
    assert schedule.order == orders[schedule.problem.layers].order
    assert all(one.value in (None, orders[one.layers].timeline().value) for one in tried)


def test_the_default_split_is_the_shorter_of_the_balanced_and_the_equal_one(tmp_path: Path, capsys: Any) -> None:
    """A vee of two ranks, where a greedy step takes the balanced split to be 1 % shorter. Proven optima: 10,883 µs there,
    10,583 on the equal split."""
    times = [(27, 54), *[(100, 200)] * 13, (266, 532)]
    layers = tuple(Layer(f"layer{i}", f, 0, 0, b, 100, 50, 0, 8) for i, (f, b) in enumerate(times))
    Profile("given", "ends", layers, Link(1.0, 100.0), 1.0, None, {}, {}).save(tmp_path / "p.json")
    given = ["solve", str(tmp_path / "p.json"), "--ranks", "2", "--microbatches", "4", "--placement", "vee", "--effort", "1"]
    assert main([*given, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert [(one["partition"], one["value"]) for one in body["tried"]] == [("balanced", 10883), ("equal", 10583)]
    assert (body["value"], body["bound"]) == (10583, 10583)
    assert body["moved"] == [[0, 3, 1]]
    assert main(given) == 0
    line = (
        "layers moved from the balanced split (5 4×2 2): 1 from stage 0 to stage 3; those between move along; 2.8% less time"
    )
    assert line in capsys.readouterr().out


def test_memory_chooses_the_partition():
    """Where the balanced partition does not fit, another one does."""
    profile = uneven()
    with pytest.raises(Infeasible):
        profile.problem(4, 8, memory=4_300)
    schedule, tried = solve_auto(profile, Step(4, 8, partition="auto", memory=4_300), effort=1.0)
    assert any(one.value is None and "rank" in one.why for one in tried)
    assert schedule.problem.layers != profile.problem(4, 8).layers
    assert verify(schedule.problem, schedule) == ()
    with pytest.raises(Infeasible, match=r"no tried choice of partition fits: .*balanced"):
        solve_auto(profile, Step(4, 8, partition="auto", memory=3_000), effort=0.1)


def test_placement_and_partition_race_together():
    _, tried = solve_auto(uneven(), Step(2, 4, "auto", "auto"), effort=1.0)
    assert {one.placement for one in tried} == {"single", "loop", "loop4", "vee"}
    _, tried = solve_auto(uneven(), Step(2, 4, partition=(5, 6)), effort=0.1)
    assert [one.layers for one in tried] == [(5, 6)]
    with pytest.raises(BadInput, match="does not split 11 layers into 2 stages"):
        solve_auto(uneven(), Step(2, 4, "auto", (5, 5)), effort=0.1)


@pytest.mark.usefixtures("looks")
def test_no_layers_are_moved_once_the_time_is_over(monkeypatch):
    moved = []
    monkeypatch.setattr("zbsolve.search.climb.built", lambda profile, run: moved.append(run))
    schedule, _ = solve_auto(uneven(), Step(2, 4, "auto", "auto"), seconds=0.01)  # the first look takes as long
    assert verify(schedule.problem, schedule) == ()
    assert moved == []


def test_the_command_line_says_which_bound_holds_for_what(tmp_path, capsys):
    path = str(tmp_path / "p.json")
    replace(uneven(), source="measured").save(path)
    step = ["solve", path, "--ranks", "3", "--microbatches", "4", "--partition", "auto", "--effort", "0.5"]
    assert main(step) == 0
    shown = capsys.readouterr().out
    assert "placement, partition" in shown
    assert re.search(r"for every partition: at least [\d,]+ µs on single; the schedule's file proves that", shown)
    assert main([*step, "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert 0 < body["bound_of_every_partition"]["single"] <= body["value"]
    assert {"equal", "alpa"} <= {name for one in body["tried"] for name in one["partition"].split("=")}
    assert main([*step[:-4], "--partition", "2,5,2,2", "--placement", "auto", "--effort", "0.2"]) == 2
    assert "no placement of 3 ranks that is tried has 4 stages" in capsys.readouterr().err
    assert main([*step[:-4], "--partition", "1,2,2,2,2,2", "--placement", "auto", "--effort", "0.2"]) == 0
    shown = capsys.readouterr().out
    assert "loop" in shown
    assert "single" not in shown
