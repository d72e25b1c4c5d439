"""Schedules of very many microbatches against the same schedules pass by pass, which `verify` knows all of."""

from __future__ import annotations

import json
import random
import re
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbsolve.search.many as many
from zbsolve import BadInput, Infeasible, NotFound, Problem, Step, pipeline, verify
from zbsolve.build.mixing import with_microbatches
from zbsolve.cli.app import main
from zbsolve.cli.solve_many import repeated_step
from zbsolve.greedy.arrays.microbatch import microbatch_graph, of_length
from zbsolve.greedy.decoding import repeated_targets, serial_order
from zbsolve.ilp import recheck
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.ilp.bounds.many import bound_of_many, repeated_microbatch
from zbsolve.ilp.proof_check import recheck_of_many
from zbsolve.interchange.exports import Options, export, export_long
from zbsolve.long_steps import files
from zbsolve.long_steps.check import earliest_starts, peaks, value_of, violations
from zbsolve.long_steps.files import as_text, from_text, schedule_to_show
from zbsolve.long_steps.repeated import RepeatedSchedule, find_round, times_apart
from zbsolve.partition.cuts import balanced
from zbsolve.problem.form import MessageRoom
from zbsolve.schedule.handover import needed
from zbsolve.search.many import ManySearch, solve_many, worth_repeating
from zbsolve.show import schedule_as_page
from zbsolve.show.solved_text import repeated_as_text
from zbsolve.systems import preset
from zbsolve.systems.table import lane_order, long_systems_of
from zbsolve.util.clock import Clock
from zbsolve.util.text import format_time

from ..support.profiles import equal_layers
from ..support.unrolled_rounds import judge


def value_of_whole(long: RepeatedSchedule) -> int:
    """What the whole step takes, µs, by a schedule that holds."""
    return value_of(long.one, earliest_starts(long.one, long.few, long.order, long.round)) + long.further * long.round.period


def drifts(long: RepeatedSchedule) -> bool:
    """Whether passes of its rounds wait for the rounds before, so that without waits the step may be shorter."""
    return bool((times_apart(long.round, earliest_starts(long.one, long.few, long.order)) != long.round.period).any())


STEPS: dict[str, dict[str, Any]] = {
    "single, tight": {"F": [20] * 4, "B": [20] * 4, "W": [18] * 4, "comm": 1, "capacity": 18},
    "vee": {"F": [10] * 6, "B": [12] * 6, "W": [8] * 6, "placement": "vee", "comm": 1, "capacity": 24},
    "loop, uneven": {"F": [3, 5, 4, 2], "B": [4, 7, 3, 5], "W": [2, 1, 3, 2], "placement": "loop", "capacity": 40},
    "fused, span": {"F": [3, 4, 5], "BW": [7, 6, 9], "comm": 2, "capacity": 18, "objective": "span"},
}


def step(name: str, microbatches: int) -> Problem:
    return pipeline(**STEPS[name], microbatches=microbatches, held_until_B=4, held_until_W=2)


@cache
def solved(name: str) -> RepeatedSchedule:
    return solve_many(step(name, 1), 2_000_000, effort=0.6)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_with_any_number_of_rounds_it_is_the_schedule_that_it_says(name: str) -> None:
    long = solved(name)
    assert violations(long) == ()
    assert long.certificate is not None
    assert long.certificate.gap < 0.2
    for rounds in (0, 1, 2, 7):
        count = long.few + rounds * long.round.every
        short = replace(long, microbatches=count, certificate=None)
        whole = short.unrolled()
        assert verify(step(name, count), whole) == ()
        assert whole.timeline().value == value_of_whole(short) or drifts(long)
        assert whole.timeline().value <= value_of_whole(short)
        assert whole.timeline().peak_bytes == tuple(peaks(long.one, long.order))
        lanes, at = (column.tolist() for column in short.rank_order(1))
        assert whole.order[long.streams[1]] == tuple(map(short.name_of, lanes, at))
    assert long.certificate.value == value_of_whole(long)
    stated = Bound(long.certificate.bound, "", long.certificate.relaxation, long.certificate.ranks)
    assert recheck_of_many(long.one, long.microbatches, stated, 60.0).value == long.certificate.bound


@pytest.mark.parametrize("name", STEPS)
def test_a_picture_leaves_out_rounds_and_nothing_else(name: str) -> None:
    """Every pass of the part starts as in the step of few microbatches, or so many periods earlier as rounds are left out
    before it; the whole's makespan is the part's and a period for each round that is left out."""
    long = solved(name)
    part = schedule_to_show(long, "x.json")
    count, every, period = part.problem.microbatches, long.round.every, long.round.period
    assert verify(part.problem, replace(part, certificate=None)) == ()
    assert replace(part.problem, source="") == step(name, count)
    whole, short = (one.timeline().start.reshape(-1, n) for one, n in ((long.sample(), long.few), (part, count)))
    out = (long.few - count) // every
    assert out > 0
    assert ((short == whole[:, :count]) | (short == whole[:, out * every :] - out * period)).all()
    assert value_of_whole(long) == part.timeline().value + (out + long.further) * period
    assert (
        f"2,000,000 microbatches and {format_time(value_of_whole(long))}: {out + long.further:,} of its"
        in part.problem.source
    )
    objective = f"the whole step's {long.certificate.objective}"
    assert part.certificate == replace(long.certificate, objective=objective)
    figure = f"<dt>{objective}</dt><dd>{format_time(value_of_whole(long))}<".replace("'", "&#39;")
    assert figure in schedule_as_page(part)
    few = replace(long, microbatches=long.few, certificate=None)
    assert schedule_to_show(few, "x.json").problem == few.unrolled().problem


def test_with_all_its_passes_its_bound_is_proven_again_from_one_microbatch() -> None:
    long = solved("vee")
    whole = replace(long, microbatches=long.few + 4 * long.round.every)
    stated = bound_of_many(whole.one, whole.microbatches)
    problem = step("vee", whole.microbatches)
    assert repeated_microbatch(problem) == long.one
    assert recheck(problem, stated, 10.0) == stated
    higher = replace(stated, value=stated.value + 1000)
    assert recheck(problem, higher, 10.0).value < higher.value
    assert repeated_microbatch(pipeline([2, 3], [2, 2], [1, 1], placement=((0, 1), (1, 0)), microbatches=4)) is None


def damaged(long: RepeatedSchedule) -> dict[str, RepeatedSchedule]:
    """What is wrong → a repeated schedule that is wrong so."""
    round, own, certificate = long.round, long.order[0].copy(), long.certificate
    assert certificate is not None
    first = int(round.begin[long.one.passes.rank == 0].sum())
    swap = first + int(np.flatnonzero(np.diff(own[first:]))[0])  # neighbours in the first copy that differ
    own[[swap, swap + 1]] = own[[swap + 1, swap]]
    return {
        "does not start": replace(long, round=replace(round, period=round.period - 1), certificate=None),
        "does not begin": replace(long, round=replace(round, begin=round.begin + np.eye(len(round.begin), dtype=int)[0])),
        "copies of the round do not reach": replace(long, round=replace(round, copies=2)),
        "are more than the order": replace(long, round=replace(round, copies=round.copies + 99)),
        "make no sense": replace(long, round=replace(round, every=0)),
        "do not add up": replace(long, microbatches=long.few - 1),
        "each of its lanes": replace(long, order=(long.order[1], *long.order[1:])),
        "orders of": replace(long, order=long.order[1:]),
        "it states": replace(long, certificate=replace(certificate, value=certificate.value - 1)),
        "above the value": replace(long, certificate=replace(certificate, bound=certificate.value + 1)),
        "not for": replace(long, certificate=replace(certificate, digest="0")),
        "it is about": replace(long, certificate=replace(certificate, objective="span")),
        "its capacity is": replace(long, one=replace(long.one, capacity=(1,) * long.one.ranks), certificate=None),
        "another order": replace(long, order=(own, *long.order[1:]), certificate=None),
    }


def test_what_is_wrong_is_found() -> None:
    long = solved("single, tight")
    for what, wrong in damaged(long).items():
        found = " ".join(map(str, violations(wrong)))
        assert what in found or (what == "another order" and ("round" in found or "deadlock" in found)), (what, found)


def test_files_say_the_same_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    long, path = solved("vee"), tmp_path / "rounds.json"
    files.save(long, path)
    again = files.load(path)
    assert again.one == long.one
    assert again.certificate == long.certificate
    assert "\nplacement vee: 6 stages on 3 ranks, 2 a rank\n" in repeated_as_text(again)
    assert all(np.array_equal(a, b) for a, b in zip(again.order, long.order, strict=True))
    assert violations(again) == ()
    body = json.loads(path.read_text())
    for where, value, why in (
        (("microbatches",), -1, "microbatches"),
        (("few",), 2**40, "few"),
        (("order", "compute:0"), "0F*3 (0F 0B", "no part such as"),
        (("order", "compute:0"), "(0F 0B)*999999999", "more than"),
        (("order", "compute:0"), "1F", "the step has no passes 1F"),
        (("order",), {}, "order"),
        (("round", "begin"), "x", "no run"),
        (("certificate", "gap"), 0.9, "gap"),
    ):
        wrong = json.loads(json.dumps(body))
        at = wrong
        for name in where[:-1]:
            at = at[name]
        at[where[-1]] = value
        path.write_text(json.dumps(wrong))
        with pytest.raises(BadInput, match=why):
            files.load(path)


@pytest.mark.parametrize("placement", ["single", "loop", "loop3", "vee"])
@pytest.mark.parametrize("split", [True, False])
def test_named_orders_by_lanes_are_those_pass_by_pass(placement: str, split: bool) -> None:
    stages = {"single": 3, "loop": 6, "loop3": 9, "vee": 6}[placement]
    costs = {"F": [2] * stages} | ({"B": [2] * stages, "W": [1] * stages} if split else {"BW": [3] * stages})
    one = pipeline(**costs, placement=placement, microbatches=1)
    systems = list(long_systems_of(one))
    assert [system.split for system in systems] == [split] * (placement != "vee" or split)
    for system in systems:
        for count in (1, 4, 9):
            whole = with_microbatches(one, count)
            rows = preset(system.name, whole).sequences.values()
            assert all(
                np.array_equal(*pair)
                for pair in zip(lane_order(one, count, system), (r // count for r in rows), strict=True)
            )


@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
def test_without_a_search_named_orders_show_their_rounds(placement: str) -> None:
    stages = 12 * (1 + (placement != "single"))
    step = {"F": [20] * stages, "B": [20] * stages, "W": [18] * stages, "comm": 1, "placement": placement}
    long = solve_many(pipeline(**step, microbatches=1), 12_000, effort=1e-9)
    assert violations(long) == ()
    assert long.certificate is not None
    assert long.certificate.solver in ("zb-h1", "interleaved-zb", "zb-v")
    assert long.certificate.gap < 0.002
    assert long.few < 75


def drifting() -> Iterator[RepeatedSchedule]:
    """Rounds of random short orders whose starts do not yet repeat with them."""
    draw = random.Random(3)
    for _ in range(40):
        one = pipeline(*([draw.randint(3, 9) for _ in range(12)] for _ in range(3)), microbatches=1, comm=draw.randint(0, 9))
        offset = np.sort([draw.randint(0, 100) for _ in range(36)])
        g = of_length(graph := microbatch_graph(one), 16)
        order = serial_order(g, repeated_targets(g, offset, 12))
        own = tuple(np.split(g.passes[order // 16, 0] // 16, np.cumsum(np.diff(graph.rank_lane_first) * 16)[:-1]))
        start = earliest_starts(one, 16, own)
        round = find_round(one, own, start, draw.choice((1, 2, 3)))
        if round is None or (times_apart(round, start) == round.period).all():
            continue
        if (times_apart(round, earliest_starts(one, 16, own, round)) == round.period).all():
            yield RepeatedSchedule(one, 16, 16, own, round)


def test_rounds_may_drift_and_then_wait_for_each_other() -> None:
    """With a period between the rounds the step takes what is stated, and without waits no longer."""
    found = 0
    for long in drifting():
        assert drifts(long)
        assert violations(long) == ()
        assert [fault.rule for fault in violations(replace(long, round=replace(long.round, period=1)))] == ["round"]
        for rounds in (0, 1, 4):
            whole = replace(long, microbatches=long.few + rounds * long.round.every)
            assert verify(whole.unrolled().problem, whole.unrolled()) == ()
            assert whole.unrolled().timeline().value <= value_of_whole(whole)
        whole = replace(long, microbatches=long.few + 1_000_000 * long.round.every)
        shown = schedule_to_show(whole, "x.json")
        left_out = (whole.microbatches - shown.problem.microbatches) // long.round.every * long.round.period
        assert value_of_whole(whole) == shown.timeline().value + left_out
        found += 1
    assert found >= 5


def test_messages_that_wait_fit_the_memory_also_while_rounds_wait() -> None:
    """Rounds that wait for each other may keep more messages than the same order without these waits: an order is not kept
    in a memory that takes the messages of the latter alone."""
    fits = []
    for long in drifting():
        room = MessageRoom((1,) * (long.one.stages - 1), (0,) * long.one.ranks)
        short = replace(long, one=replace(long.one, messages=room, capacity=(99,) * long.one.ranks))
        start = earliest_starts(long.one, long.few, long.order, long.round)
        free, paced = (needed(sample) for sample in (short.sample(), short.sample(start)))
        for least in (free, np.maximum(free, paced)):
            one = replace(short.one, capacity=tuple(least.tolist()))
            search = ManySearch(one, long.few, microbatch_graph(one), Bound(0, ""), Clock(60.0), 0, print)
            search.offer(long.few, np.concatenate(long.order), "", (long.round.every,))
            assert (search.best is not None) == (paced <= least).all()
            fits.append(search.best is not None)
    assert all(fits[1::2])
    assert not all(fits)


def small_files() -> Iterator[RepeatedSchedule]:
    """Repeated schedules that are short enough to be unrolled: of searches, cut short, and of named orders."""
    for name in STEPS:
        long = solved(name)
        assert long.certificate is not None
        short = replace(long, microbatches=long.few + 9 * long.round.every)
        yield replace(short, certificate=replace(long.certificate, value=value_of_whole(short), bound=0))
    for placement in ("single", "loop", "vee"):
        stages = 4 * (1 + (placement != "single"))
        step = {"F": [20] * stages, "B": [21] * stages, "W": [18] * stages, "comm": 1, "placement": placement}
        held = {"held_until_B": 4, "held_until_W": 2, "capacity": 6 * stages}
        yield solve_many(pipeline(**step, **held, microbatches=1), 400, effort=1e-9)


def test_code_of_its_own_finds_that_files_hold_as_they_say(tmp_path: Path) -> None:
    path = tmp_path / "rounds.json"
    for long in small_files():
        files.save(long, path)
        judged = judge(path)
        assert judged.wrong == []
        assert judged.passes == long.passes
        assert judged.peaks == list(peaks(long.one, long.order))
    body = json.loads(path.read_text())
    last = f"compute:{long.one.ranks - 1}"
    for field, value, why in (
        (("certificate", "value"), judged.value - 1, "it takes"),
        (("step", "capacity"), [5] * long.one.ranks, "over its capacity"),
        (
            ("order", last),
            " ".join(re.findall(r"\([^)]*\)\S*|\S+", body["order"][last])[::-1]),
            "wait for each other|not there|it takes",
        ),
    ):
        wrong = json.loads(json.dumps(body))
        wrong[field[0]][field[1]] = value
        path.write_text(json.dumps(wrong))
        assert any(re.search(why, one) for one in judge(path).wrong), field


@pytest.mark.parametrize("name", STEPS)
def test_exports_a_rank_at_a_time_are_those_of_all_passes(name: str) -> None:
    long = replace(solved(name), certificate=None)
    long = replace(long, microbatches=long.few + 5 * long.round.every)
    unrolled = long.unrolled()
    for to in ("torch-csv", "torchtitan"):
        whole, by_rank = export(unrolled, to), export_long(long, to, Options())
        assert by_rank is not None
        assert "".join(by_rank.lines) == whole.text
        assert by_rank.made.notes == whole.notes
        assert by_rank.made.facts == whole.facts
    assert whole.facts["overtaken"] or name != "vee"
    assert export_long(long, "jaxpp", Options()) is None


def test_exports_a_rank_at_a_time_refuse_what_does_not_hold() -> None:
    long = solved("vee")
    edges = long.one.edges
    gradient = np.flatnonzero(edges.carrying("gradient"))[0]
    one = replace(long.one, edges=edges.only(np.delete(np.arange(len(edges)), gradient)))
    with pytest.raises(BadInput, match="capacity"):
        export_long(damaged(long)["its capacity is"], "torch-csv", Options())
    with pytest.raises(BadInput, match="torch lets it wait"):
        export_long(replace(long, one=one, certificate=None), "torch-csv", Options())


def test_as_many_layers_as_stages_need_no_search_of_cuts() -> None:
    assert balanced(list(range(1, 1501)), 1500) == (1,) * 1500


def random_step(draw: random.Random) -> dict[str, Any] | None:
    """A small random step, without its number of microbatches."""
    ranks, placement = draw.randint(1, 4), draw.choice(("single", "vee", "loop"))
    stages = ranks * (1 if placement == "single" else 2)
    until_b, until_w = draw.randint(0, 4), draw.randint(0, 4)
    times = [[draw.randint(1, 9) for _ in range(stages)] for _ in range(3)]
    held = max(1, until_b + until_w) * (stages // ranks)
    given = {"F": times[0], "BW": times[1]} if draw.random() < 0.3 else dict(zip("FBW", times, strict=True))
    return {
        **given,
        "placement": placement,
        "comm": draw.randint(0, 3),
        "held_until_B": until_b,
        "held_until_W": until_w,
        "capacity": draw.choice((None, held * draw.randint(1, ranks + 1))),
        "objective": draw.choice(("makespan", "makespan", "span")),
    }


@pytest.mark.slow
def test_random_steps_hold_pass_by_pass() -> None:
    draw, found = random.Random(5), 0
    for _ in range(9):
        given = random_step(draw)
        try:
            one = pipeline(**given, microbatches=1)
            long = solve_many(one, 10_000 + draw.randint(0, 30), effort=0.05)
        except (Infeasible, NotFound):
            continue
        found += 1
        assert violations(long) == ()
        whole = replace(long, microbatches=long.few + 3 * long.round.every, certificate=None)
        assert with_microbatches(one, whole.microbatches) == pipeline(**given, microbatches=whole.microbatches)
        assert verify(whole.unrolled().problem, whole.unrolled()) == ()
        assert whole.unrolled().timeline().value == value_of_whole(whole) or drifts(whole)
        assert whole.unrolled().timeline().value <= value_of_whole(whole)
    assert found >= 6


def test_words_that_repeat_are_written_once() -> None:
    draw = random.Random(1)
    for _ in range(60):
        parts = (
            [draw.randrange(3) for _ in range(draw.randint(1, 5))] * draw.randint(1, 9) for _ in range(draw.randint(1, 6))
        )
        row = np.array([one for part in parts for one in part], np.int64)
        text = as_text(row, ("0F", "0B", "1F.2"))
        assert (from_text(text, {"0F": 0, "0B": 1, "1F.2": 2}, len(row), "x") == row).all()
    assert as_text(np.array([0] * 9 + [0, 1] * 7), ("F", "B")) == "F*10 (B F)*6 B"


def test_steps_that_cannot_be_repeated_are_left_to_the_search_pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MIN_PASSES", 0)
    assert worth_repeating(step("vee", 1), 10_000)
    assert not worth_repeating(step("vee", 1), 10)
    assert not worth_repeating(step("vee", 2), 10_000)
    assert not worth_repeating(pipeline([2], [2], [0], microbatches=1), 10_000)
    assert not worth_repeating(pipeline([3, 2], BW=[2, 4], microbatches=1, AF=2, AB=2), 10_000)


def test_microbatches_that_are_not_alike_are_searched_pass_by_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "MIN_PASSES", 0)
    options = Namespace(method="auto", hint=None, prefer="time")
    plain = equal_layers(4)
    for step, repeated in ((Step(2, 300), True), (Step(2, 300, "mirror"), False), (Step(2, 300, "auto"), False)):
        assert (repeated_step(options, plain, step) is not None) == repeated
    uneven = replace(plain, microbatch_factors=tuple(1 + i % 2 for i in range(300)))
    assert repeated_step(options, uneven, Step(2, 300)) is None
    assert repeated_step(Namespace(method="zb-h1", hint=None, prefer="time"), plain, Step(2, 300)) is None


def test_solve_check_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(many, "MIN_PASSES", 0)
    profile, rounds = str(tmp_path / "profile.json"), tmp_path / "rounds.json"
    assert main(["numbers", "--ranks", "3", "--F", "20", "--B", "20", "--W", "18", "-o", profile]) == 0
    given = ["solve", profile, "--ranks", "3", "--microbatches", "300", "--effort", "0.3"]
    assert main([*given, "-o", str(rounds)]) == 0
    said = capsys.readouterr().out
    assert "2,700 passes of 300 microbatches" in said
    assert "makespan" in said
    assert main(["check", str(rounds)]) == 0
    assert "by induction over rounds" in capsys.readouterr().out
    assert main(["show", str(rounds)]) == 0
    assert main(["export", str(rounds), "--to", "torch-csv", "-o", str(tmp_path / "order.csv")]) == 0
    assert (tmp_path / "order.csv").read_text().count("F299") > 0
    body = json.loads(rounds.read_text())
    body["certificate"]["bound"] += 1
    body["certificate"].pop("gap")
    body["certificate"].pop("status")
    rounds.write_text(json.dumps(body))
    capsys.readouterr()
    assert main(["check", str(rounds)]) == 1
    assert "bound" in capsys.readouterr().out
    rounds.write_text(json.dumps({**body, "certificate": None, "microbatches": body["few"] - 1}))
    assert main(["check", str(rounds), "--bound"]) == 1
    assert capsys.readouterr().out.startswith(f"{rounds}: round: {body['few'] - 1} microbatches: ")
    rounds.write_text(json.dumps({**body, "certificate": None}))
    assert main(["check", str(rounds)]) == 0
    assert "it states no bound" in capsys.readouterr().out
