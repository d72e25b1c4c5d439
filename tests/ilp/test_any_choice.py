"""The bound over every choice of what is offloaded: never above the best of all choices, each solved exactly."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from zbsolve import Problem, pipeline
from zbsolve.build import Host, with_offload
from zbsolve.cli import main
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.ilp.bounds.any_choice import bound_over_choices, stream_work
from zbsolve.ilp.bounds.bound import CHOICES
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.bounds.copies import Savings, least_work, with_more_room, without_copies
from zbsolve.ilp.bounds.necessary_arcs import heads_and_tails
from zbsolve.ilp.cp import solve_cp
from zbsolve.search.certify import certificate_of
from zbsolve.util.errors import NotFound

from ..support.exact_streams import optimum


class Open(NamedTuple):
    """A step, µs of copies a stage, and its host: what is offloaded is open."""

    step: Problem
    out: list[int]
    back: list[int]
    host: Host

    def choice(self, fraction: tuple[float, ...], which: np.ndarray | None = None) -> Problem:
        return with_offload(self.step, self.out, self.back, fraction=fraction, which=which, host=self.host)

    @property
    def whole(self) -> Problem:
        return self.choice((1.0,) * self.step.stages)

    def choices(self, *fractions: tuple[float, ...]) -> list[Problem]:
        """All subsets of passes, each with these fractions a stage."""
        shape = self.step.stages, self.step.microbatches
        subsets = [np.array(bits).reshape(shape) for bits in product([False, True], repeat=shape[0] * shape[1])]
        return [self.choice(fraction, which) for fraction in fractions for which in subsets]


def some(seed: int, objective: str = "makespan") -> Open:
    """A random step with two stages of one microbatch, or one or two of up to four; memory is short or not."""
    rng = random.Random(seed)
    p, m = rng.choice([(1, 2), (1, 3), (2, 1), (2, 2), (2, 2)])
    placement = (0, 0) if (p, m) == (1, 2) and rng.random() < 0.5 else tuple(range(p))

    def times(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in placement]

    backward = {"BW": times(2, 30)} if rng.random() < 0.6 else {"B": times(2, 20), "W": times(0, 15)}
    sizes = {"held_until_B": [20 * n for n in times(0, 4)], "held_until_W": [20 * n for n in times(1, 4)]}
    step = pipeline(times(2, 20), placement=placement, microbatches=m, comm=5, objective=objective, **sizes, **backward)
    one = np.bincount(step.passes.rank, np.where(step.passes.microbatch == 0, step.taken, 0), step.ranks)
    room = tuple(int(need * rng.choice([0.6, 0.8, 1, 1, 1.3, 1.6])) for need in one)
    whole, longest = int(one.sum()), rng.choice([10, 40, 120])
    host = Host(rng.choice([None, None, whole // 2, whole]), rng.choice([None, 1]), rng.choice([0, 0, 1, p]))
    return Open(replace(step, capacity=room), times(0, longest), times(0, longest), host)


@pytest.mark.parametrize("first", range(0, 36, 12))
def test_no_choice_is_below_the_bound(first: int) -> None:
    tried = reached = 0
    for seed in range(first, first + 12):
        case = some(seed)
        bound, stages = bound_over_choices(case.whole).value, case.step.stages
        shares = tuple(random.Random(seed).choice([0.25, 0.5, 0.8]) for _ in range(stages))
        found = [optimum(one) for one in case.choices((1.0,) * stages, shares) if len(one.passes) <= 15]
        values = [value for value in found if value is not None]
        if values:
            assert bound <= min(values)
            tried, reached = tried + 1, reached + (bound == min(values))
    assert tried > 3
    assert 3 * reached > tried


def test_no_choice_is_below_the_bound_of_the_span() -> None:
    tried = 0
    for case in (some(seed, "span") for seed in range(200, 210)):
        if case.step.stages * case.step.microbatches > 3:
            continue
        bound = bound_over_choices(case.whole).value
        for one in case.choices((1.0,) * case.step.stages):
            result = solve_cp(one, None, 0, 20, effort=2.0)
            tried += result.schedule is not None
            assert result.schedule is None or bound <= result.schedule.timeline().value
    assert tried > 10


def slow(copy: int, ranks: int = 4, microbatches: int = 8, **host) -> Open:
    step = pipeline([30] * ranks, [40] * ranks, [20] * ranks, comm=3, microbatches=microbatches, held_until_W=20)
    return Open(replace(step, capacity=(40,) * ranks), [copy] * ranks, [copy] * ranks, Host(**host))


def test_slow_copies_ask_for_time() -> None:
    """Without copies two microbatches in flight are too few; with fast ones memory is no limit; slow ones count."""
    case = slow(45)
    without, free = closed_form(case.step).value, closed_form(replace(case.step, capacity=None)).value
    values = [bound_over_choices(slow(copy).whole).value for copy in (1, 45, 100, 2000)]
    assert values == sorted(values)
    assert values[0] == free < values[2] < values[3] <= without
    assert "d2h:0: no copies there" in bound_over_choices(slow(2000).whole).proof
    assert values[2] < bound_over_choices(slow(100, shared_bus=4).whole).value  # all ranks on one bus


def test_a_host_without_room_is_no_help() -> None:
    case = slow(45, capacity=0)
    assert bound_over_choices(case.whole).value == closed_form(case.step).value


def test_a_problem_without_its_copies_is_the_step() -> None:
    case = some(3)
    base, copies = without_copies(case.whole)
    assert base.names == case.step.names
    assert (base.taken.tolist(), base.freed.tolist()) == (case.step.taken.tolist(), case.step.freed.tolist())
    assert len(copies.out) == case.step.stages * case.step.microbatches
    plain = case.step
    assert bound_over_choices(plain).value == closed_form(plain).value  # nothing to choose


def test_a_certificate_may_name_it_and_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a schedule of the problem that copies all: the bound as it is holds, one above it does not."""
    step = pipeline([30] * 4, [40] * 4, [20] * 4, comm=3, microbatches=8, held_until_W=20, capacity=40)
    whole = with_offload(step, 100, 100)
    schedule, bound = list_schedule(whole, deepest_first(whole)), bound_over_choices(whole)
    assert bound.kind == CHOICES
    certificate = certificate_of(schedule, bound, "greedy")
    assert (certificate.bound, certificate.relaxation) == (bound.value, CHOICES)
    for above in (0, 1):
        schedule.certified(replace(certificate, bound=bound.value + above)).save(tmp_path / "s.json")
        assert main(["check", str(tmp_path / "s.json"), "--bound"]) == above
        assert f"{bound.value + above} µs" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(12))
def test_no_fractions_save_as_much_in_less_time(seed: int) -> None:
    """Two pairs of copies, each of every fraction, with bytes and times rounded as in the problem."""
    rng = np.random.default_rng(seed)
    size, least = rng.integers(1, 40, (2, 2)), -np.sort(-rng.integers(0, 60, (2, 2)), axis=1)
    out, back = rng.integers(0, rng.choice([4, 40]), (2, 2))
    x = np.arange(201) / 200
    times = [np.rint(out[i] * x) for i in range(2)], [np.rint(back[i] * x) for i in range(2)]
    saved = [sum(np.floor(size[i, k] * x) * (least[i, k] - times[0][i] - times[1][i]) for k in range(2)) for i in range(2)]
    s = Savings(*(one.astype(float) for one in (size, least, np.ones(2), out, back)))
    tried = 0
    for missing in rng.integers(1, 1 + int((size * least).sum()), 30).tolist():
        enough = saved[0][:, None] + saved[1][None, :] >= missing
        for which in ((True, False), (False, True), (True, True)):
            work = sum(use * (one[0][:, None] + one[1][None, :]) for use, one in zip(which, times, strict=True))
            if enough.any():
                assert least_work(s, missing, *which) <= work[enough].min() + 1e-6
                tried += 1
    assert tried > 5


def test_before_the_first_copy_and_behind_the_last_is_as_much_time_as_said() -> None:
    tried = reached = 0
    for seed in range(60):
        case = some(seed)
        whole = replace(case.whole, capacity=tuple(3 * n for n in case.step.capacity or ()))
        base, copies = without_copies(whole)
        step = with_more_room(whole, base, copies)
        ranks = list(range(whole.ranks))
        try:
            timeline = list_schedule(whole, deepest_first(whole)).timeline()
        except NotFound:
            continue
        for stream, own, _ in stream_work(whole, step, copies, ranks, heads_and_tails(step, -1)):
            rows = whole.members[stream]
            around = timeline.start[rows].min() + timeline.makespan - timeline.end[rows].max()
            assert own <= around
            tried, reached = tried + 1, reached + (own == around)
    assert tried > 30
    assert reached > 5
