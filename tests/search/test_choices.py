"""What stages keep, `auto`: the race is never worse than a named choice, and finds what trying all choices finds."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from itertools import chain, combinations, product
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Infeasible, Layer, Link, NotFound, Profile, solve, verify
from zbsolve.build.offload import time_away
from zbsolve.cli import main
from zbsolve.features.feature import Now
from zbsolve.features.keeping import copy_moves, fewest_again, with_fewest
from zbsolve.layer import HostLink
from zbsolve.search.auto import solve_auto
from zbsolve.search.keeping import bound_of_every_choice, curves
from zbsolve.search.race import hint_on
from zbsolve.show.frontier_report import frontier_as_text
from zbsolve.show.solved_step import solved
from zbsolve.step import Step

AWAY = ("none", "full", "half", "1:1", "0:0.5")


def uneven() -> Profile:
    """Layers that keep more and more, and take unlike times; copies take about as long as passes."""
    layers = tuple(Layer(f"layer{i}", 20 + 7 * i, 31, 23 + 3 * i, 50, 30, 50 + 20 * i, 10, 8) for i in range(4))
    return Profile("estimated: by hand", "toy", layers, Link(1.0, 100.0), 1.0, None, {}, {}, host=HostLink(1, 4, 4, 3, 3))


def value_and_bound(profile: Profile, step: Step) -> tuple[int, int]:
    """Of a step, as far as a short search comes."""
    certificate = solve(step.problem(profile), effort=0.4).certificate
    assert certificate is not None
    return certificate.value, certificate.bound


def test_the_race_finds_what_trying_all_choices_finds() -> None:
    profile, step = uneven(), Step(3, 3, memory=380)
    chosen = chain.from_iterable(combinations(range(3), count) for count in range(4))
    both = {recompute: value_and_bound(profile, replace(step, recompute=recompute)) for recompute in chosen}
    found = {recompute: value for recompute, (value, _) in both.items()}
    least = min(found.values())
    assert least == min(bound for _, bound in both.values())  # proven over all choices
    schedule, tried = solve_auto(profile, replace(step, recompute="auto"), effort=2.0)
    assert schedule.certificate is not None
    assert schedule.certificate.value == least == min(one.value for one in tried if one.value is not None)
    assert verify(schedule.problem, schedule) == ()
    best = [name for name, again in (("0", (0,)), ("0-1", (0, 1))) if found[again] == least]
    assert next(one.placement.removeprefix("single recompute=") for one in tried if one.why == "") in best


def test_it_finds_as_much_over_every_number_of_layers() -> None:
    """All 16 choices of how many of two stages' three layers recompute. The only best one is two of the first stage, whose
    time is the bound of every choice. Of 310 bytes messages take 4 and a layer that runs again 60: 246 hold two microbatches
    of one layer's 60 and the 120 that X makes, or the one microbatch of all 180 that the second stage has."""
    layers = tuple(Layer(f"layer{i}", 20, 0, 0, 40, 60, 0, 0, 1) for i in range(6))
    profile = Profile("estimated: by hand", "six", layers, Link(1.0, 100.0), 1.0, None, {}, {})
    step, found = Step(2, 4, partition=(3, 3), fused=True, memory=370), {}
    for again in product(range(4), repeat=2):
        said = {stage: count for stage, count in enumerate(again) if count}
        found[again] = value_and_bound(profile, replace(step, recompute=said))
    assert min(found.items(), key=lambda one: one[1]) == ((2, 0), (902, 902))
    assert sorted(bound for _, bound in found.values())[1] == 904
    assert bound_of_every_choice(profile, replace(step, recompute="auto")) == 902
    bare = replace(profile, layers=tuple(replace(c, held_until_W=0) for c in layers), host=HostLink(1.0, 1.0, 1.0, 1.0, 1.0))
    assert bound_of_every_choice(bare, replace(step, offload="auto")) == 902  # there is nothing to copy
    schedule, tried = solve_auto(profile, replace(step, recompute="auto"), effort=2.0)
    assert schedule.timeline().value == 902
    assert schedule.problem.recomputed == (2, 0)
    assert verify(schedule.problem, schedule) == ()
    assert [one.placement for one in tried if one.why == ""] == ["single recompute=0:2"]
    assert fewest_again(replace(step, memory=310).costs(profile), (3, 3), 1.0) == (2, 0)


def test_the_published_case_of_layers_recomputed_in_part() -> None:
    """SAPP-PPB's Llama 2 70B (hyper-parallel #757): a layer held 994 MB, 32 of them its input. Whole stages: 168,039 ms."""
    sizes = {"held_until_B": "994MB", "parameter_bytes": "1710MB", "output_bytes": "32MB"}
    blocks = [{"name": f"block{i}", "F": "100ms", "BW": "200ms", "message": 0, **sizes} for i in range(96)]
    ends = [
        {"name": "embedding", "F": "13ms", "BW": "26ms", "parameter_bytes": "9236MB", "output_bytes": "32MB", "message": 0},
        {"name": "head", "F": "113ms", "BW": "226ms", "parameter_bytes": "5794MB"},
    ]
    rows = [ends[0], *blocks, ends[1]]
    body = {"source": "given", "model": "sapp", "capacity": "56000MB", "states": 1, "layers": rows}
    profile = Profile.from_json(body)
    step = Step(16, 64, fused=True, memory="56000MB")
    said, layers = replace(step, recompute="auto"), step.staged(profile).counts
    name, _ = next(with_fewest(Now(replace(step, recompute="all"), said, profile, " recompute=all", layers)))
    assert name == " recompute=0:6,1-4:4,5-6:3,7-8:2,9:1"
    schedule = solve(replace(step, recompute=name.partition("=")[2]).problem(profile), effort=0.6)
    assert schedule.timeline().value <= 163_935_000
    assert verify(schedule.problem, schedule) == ()


@pytest.mark.slow
def test_it_finds_as_much_over_stages_that_keep_recompute_or_offload() -> None:
    """All 16 choices of two stages, with a fraction of a half too; the bound of each choice holds for it alone."""
    profile, step = uneven(), Step(2, 2, memory=420, recompute="auto", offload="auto")
    ways = product([(False, 0.0), (True, 0.0), (False, 1.0), (False, 0.5)], repeat=2)
    found = {}
    for way in ways:
        again, away = tuple(i for i in range(2) if way[i][0]), tuple(share for _, share in way)
        one = replace(step, recompute=again, offload=away if any(away) else "none")
        with suppress(Infeasible):
            found[way] = value_and_bound(profile, one)
    assert len(found) > 8
    schedule, tried = solve_auto(profile, step, effort=2.0)
    certificate = schedule.certificate
    assert certificate is not None
    assert verify(schedule.problem, schedule) == ()
    assert certificate.value <= min(value for value, _ in found.values())
    assert certificate.value >= min(bound for _, bound in found.values())
    assert certificate.value == min(one.value for one in tried if one.value is not None)
    names = {one.placement for one in tried}
    assert {"single", "single offload=full", "single offload=half", "single recompute=all"} <= names


@pytest.mark.slow
def test_bounds_of_every_choice_are_below_all_of_them() -> None:
    """Copies that are given get shorter where their stage recomputes: then they are left out."""
    profile, step = uneven(), Step(2, 3, memory=600)
    for again, away in (("auto", "auto"), ((), "auto"), ("auto", "none"), ("auto", "full"), ("0", "auto")):
        bound = bound_of_every_choice(profile, replace(step, recompute=again, offload=away))
        others = product(("", "0", "1", "all") if again == "auto" else (again,), AWAY if away == "auto" else (away,))
        for one in (replace(step, recompute=a, offload=b) for a, b in others):
            with suppress(BadInput, Infeasible, NotFound):
                assert solve(one.problem(profile), effort=0.05, method="greedy").timeline().value >= bound
        assert bound >= step.problem(profile).work


def test_a_stage_that_keeps_nothing_may_be_among_those_that_offload() -> None:
    """Half of the first stage's bytes are none."""
    first, *rest = uneven().layers[:2]
    profile = replace(uneven(), layers=(replace(first, held_until_B=0, held_until_W=0), *rest))
    schedule, _ = solve_auto(profile, Step(2, 3, memory=140, recompute="auto", offload="half"), effort=0.1)
    assert verify(schedule.problem, schedule) == ()
    assert schedule.certificate is not None
    assert schedule.certificate.value <= value_and_bound(profile, Step(2, 3, memory=140, offload="half"))[0]


@pytest.mark.parametrize("said", [{"recompute": "auto"}, {"offload": "auto", "recompute": "auto"}])
@pytest.mark.slow
def test_auto_is_never_worse_than_a_named_choice(said: dict[str, Any]) -> None:
    profile, step = uneven(), Step(3, 3, memory=440)
    schedule, _ = solve_auto(profile, replace(step, **said), effort=1.0)
    named = [{}] + [{"offload": one} for one in ("full", "half") if "offload" in said]
    named += [{"recompute": "all"}] if "recompute" in said else []
    for one in named:
        alone = solve(replace(step, **one).problem(profile), effort=0.2)
        assert schedule.timeline().value <= alone.timeline().value, one


def test_a_schedule_starts_another_choice() -> None:
    """Its times say when what both have runs; copies of what was not there come at the last moment."""
    profile, step = uneven(), Step(3, 4)
    kept = solve(step.problem(profile), effort=0.5)
    more = replace(step, recompute="0,2").problem(profile)
    started = hint_on(more, kept)
    assert started is not None
    assert verify(more, started) == ()
    back = hint_on(kept.problem, started)
    assert back is not None
    assert back.timeline().value <= started.timeline().value
    assert hint_on(replace(step, placement="vee", ranks=2).problem(profile), kept) is None


def test_copies_of_those_that_are_away_shortest_are_left_out_first() -> None:
    profile, step = uneven(), Step(2, 4, offload="full")
    schedule = solve(step.problem(profile), effort=0.1)
    away = time_away(schedule)
    assert away.shape == (2, 4)
    assert away[1, 2] == schedule.timeline()["1R2"][1] - schedule.timeline()["1O2"][0]
    moves = dict(copy_moves(Now(step, step, profile, "", (), schedule)))
    assert " offload=0:1,1:1(2 of 4)" in moves
    for name, one in moves.items():
        problem = one.problem(profile)
        table = np.array(one.offload) > 0
        assert problem.passes.are("O").sum() == table.sum() < 8
        assert name.count(" of 4") == (table.any(axis=1) & ~table.all(axis=1)).sum()
        stays, goes = ([away[at] for at in np.ndindex(table.shape) if table[at] == side] for side in (False, True))
        if "0:1(4" not in name and "1:1(4" not in name:
            assert max(stays) <= max(goes)
        started = hint_on(problem, schedule)
        assert started is not None
        assert verify(problem, started) == ()
    table = ((1.0, 0.0), *[(1.0, 1.0)] * 3)
    solve(replace(step, placement="vee", microbatches=2, offload=table).problem(profile), effort=0.05)  # named ones ask
    assert np.isinf(time_away(hint_on(Step(2, 4).problem(profile), schedule))).all()


def test_effort_gives_the_same_bytes() -> None:
    step = Step(3, 4, memory=460, recompute="auto")
    first, second = (solve_auto(uneven(), step, effort=1.0, seed=3) for _ in range(2))
    assert first[0].to_json() == second[0].to_json()
    assert first[1] == second[1]


def test_placements_partitions_and_choices_race_together() -> None:
    schedule, tried = solve_auto(uneven(), Step(2, 4, "auto", "auto", memory=900, recompute="auto"), effort=2.0)
    assert verify(schedule.problem, schedule) == ()
    assert {"single", "single recompute=all", "loop", "loop recompute=all"} <= {one.placement for one in tried}
    assert len({one.partition for one in tried}) > 1


@pytest.mark.slow
def test_on_the_command_line(tmp_path, capsys) -> None:
    path = str(tmp_path / "p.json")
    uneven().save(path)
    step = ["solve", path, "--ranks", "3", "--microbatches", "4", "--memory", "460", "--recompute", "auto", "--effort", "1"]
    assert main(step) == 0
    assert "single recompute=all" in capsys.readouterr().out
    assert main([*step, "--offload", "auto", "--json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {"single", "single offload=full"} <= {one["placement"] for one in body["tried"]}
    assert 0 < body["bound_of_every_choice"]["single"] <= body["value"]
    assert main([*step[:-4], "--recompute", "0-1", "--offload", "2:1", "--effort", "0.1"]) == 0


def test_what_does_not_fit_is_told() -> None:
    with pytest.raises(Infeasible, match=r"no tried choice of recompute fits: .*\(single recompute=all\)"):
        solve_auto(uneven(), Step(3, 4, memory=100, recompute="auto"), effort=0.5)
    with pytest.raises(BadInput, match="the profile knows no host link"):
        solve_auto(replace(uneven(), host=None), Step(3, 4, memory=100, offload="auto"), effort=0.5)
    with pytest.raises(BadInput, match="recompute: 'often'"):
        Step(3, 4, recompute="often")


@pytest.mark.slow
def test_a_large_model_fits_with_offload_alone_and_the_frontier_says_the_price(tmp_path) -> None:
    """Llama 3 70B on 16 H100s, estimated: one microbatch of long sequences needs more than the device has."""
    pytest.importorskip("torch")
    path = tmp_path / "llama.json"
    model = ["llama3-70b@length=20480", "--estimate", "h100", "--optimizer-states", "adam"]
    assert main(["profile", *model, "-o", str(path)]) == 0
    profile, step = Profile.load(path), Step(16, 4, "vee", "memory")
    with pytest.raises(Infeasible, match="for one microbatch"):
        step.problem(profile)
    schedule, tried = solve_auto(profile, replace(step, offload="auto"), effort=0.02)
    assert verify(schedule.problem, schedule) == ()
    assert next(one for one in tried if one.placement == "vee").value is None
    found = curves(profile, replace(step, offload="auto"), points=2, effort=0.04)
    least = {name: one.points[0].memory for name, one in found.frontiers.items()}
    assert least["offload"] < profile.capacity < least["keep only"]
    assert "On the device's 74.5 GiB: keep only does not fit, offload " in frontier_as_text(found)


def test_bounds_of_every_choice_are_about_the_layers_that_were_tried() -> None:
    """Of two splits of a V the even one takes 141 µs, and people's own 135."""
    layers = tuple(Layer(f"layer{i}", time, 0, 0, 2 * time, 1, 0, 0, 0) for i, time in enumerate((2, 5, 2, 8, 8)))
    profile = Profile("given", "five", layers, Link(0.0, 1e12), 0.0, None, {}, {})
    step = Step(2, 3, "vee", "balanced", fused=True, recompute="auto")
    schedule, tried = solve_auto(profile, step, effort=0.5)
    assert (schedule.problem.layers, schedule.timeline().value) == ((2, 1, 1, 1), 135)
    assert solved((profile, step), schedule, tried).bounds == {"choice": {"vee": 135}}
    for one in curves(profile, step, points=2, effort=0.5).frontiers.values():
        assert {point.schedule.problem.layers for point in one.points} == {(1, 2, 1, 1)}
        assert all(point.bound <= point.value for point in one.points)
