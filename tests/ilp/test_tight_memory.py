"""docs/notes/tight-memory.md: one stage a rank in exactly 1F1B's memory."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from zbsolve import Schedule, pipeline, preset, solve, verify
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.ilp.proof_check import recheck

from ..support.exact import optimum
from ..support.tight_case import Case

# An order of p = 5, m = 9 that CP-SAT found: 10 shorter than ZB-H1.
BEST_OF_5_9 = """
F0 F1 F2 F3 F4 B0 W0 F5 B1 W1 F6 B2 B3 F7 B4 F8 W2 W3 W4 B5 W5 B6 W6 B7 W7 B8 W8
F0 F1 F2 F3 F4 B0 W0 B1 W1 F5 B2 B3 F6 B4 W2 F7 W3 F8 W4 B5 B6 W5 B7 W6 B8 W7 W8
F0 F1 F2 F3 B0 F4 B1 W0 B2 W1 B3 F5 B4 F6 W2 W3 F7 B5 F8 B6 W4 B7 W5 B8 W6 W7 W8
F0 F1 F2 B0 F3 B1 F4 B2 W0 B3 W1 B4 F5 W2 F6 B5 W3 F7 B6 F8 B7 W4 B8 W5 W6 W7 W8
F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 W0 W1 F5 B5 F6 B6 W2 F7 B7 F8 B8 W3 W4 W5 W6 W7 W8
"""


PLAIN = Case(5, 9, 20, 20, 18, 1, 4, 2)


def random_case(seed: int) -> Case:
    random = np.random.default_rng(seed)
    p = int(random.integers(2, 6))
    times = random.integers(2, 12, 3).tolist()
    return Case(p, p + int(random.integers(1, 8)), *times, int(random.integers(3)), *random.integers(1, 5, 2).tolist())


def test_zb_h1_is_not_optimal() -> None:
    problem = PLAIN.problem
    rows = [line.split() for line in BEST_OF_5_9.split("\n") if line]
    best = Schedule(problem, {f"compute:{r}": tuple(f"{r}{name}" for name in row) for r, row in enumerate(rows)})
    assert verify(problem, best) == ()
    work = 9 * 58
    assert [preset("zb-h1", problem).timeline().makespan - work, best.timeline().makespan - work] == [104, 94]
    assert PLAIN.theorem_1 - work == 88
    check_theorem_2(PLAIN, best)
    check_theorem_3(PLAIN, best)


@pytest.mark.parametrize("seed", range(20))
def test_theorems_hold_on_schedules(seed: int) -> None:
    """No schedule is shorter than theorem 1 says; windows and crossings are as said."""
    case = random_case(seed)
    problem = case.problem
    for schedule in (preset("zb-h1", problem), preset("1f1b-split", problem), solve(problem, effort=0.02, prefer=None)):
        if not verify(problem, schedule):
            assert case.theorem_1 <= schedule.timeline().makespan
            check_theorem_2(case, schedule)
            check_theorem_3(case, schedule)


def test_idle_time_is_as_high_as_theorem_1() -> None:
    for case in (PLAIN, *map(random_case, (33, 57, 117, 121, 210, *range(10)))):
        assert closed_form(case.problem).value >= case.theorem_1


@pytest.mark.parametrize("placement", ["single", "vee", "loop"])
def test_idle_time_of_uneven_steps_is_never_above_an_optimum(placement: str) -> None:
    random, reached = np.random.default_rng(21), 0
    for _ in range(8):
        stages, microbatches = (2, 4) if placement == "single" else (4, 2)
        times = random.integers(1, 9, (3, stages)).tolist()
        u, w = random.integers(1, 4, 2).tolist()
        p = stages if placement == "single" else stages // 2
        room = (u + w) * (stages // p) * int(random.integers(1, 4))
        held = {"held_until_B": u, "held_until_W": w, "capacity": room, "comm": int(random.integers(3))}
        problem = pipeline(*times, placement=placement, microbatches=microbatches, **held)
        best, bound = optimum(problem), closed_form(problem)
        assert best is not None
        assert bound.value <= best
        assert recheck(problem, bound, 1.0).value == bound.value
        reached += bound.value == best
    assert reached > 0


def test_corollary_1_is_zb_h1s_formula() -> None:
    for case in (Case(4, 8, 20, 20, 18, 0, 4, 4), Case(6, 14, 12, 14, 9, 0, 5, 5)):
        bubble = (case.p - 1) * (case.F + case.B - case.W)
        assert case.theorem_1 == case.m * (case.F + case.B + case.W) + bubble
        assert preset("zb-h1", case.problem).timeline().makespan == case.theorem_1


def starts(schedule: Schedule, rank: int) -> dict[str, list[int]]:
    """Starts of a rank's passes by kind, microbatches in order."""
    timeline, m = schedule.timeline(), schedule.problem.microbatches
    return {kind: [int(timeline[f"{rank}{kind}{j}"][0]) for j in range(m)] for kind in "FBW"}


def check_theorem_2(case: Case, schedule: Schedule) -> None:
    own = starts(schedule, 0)
    length = {"F": case.F, "B": case.B, "W": case.W}
    busy = [(begin, begin + length[kind]) for kind, row in own.items() for begin in row]

    def state(t: int) -> tuple[int, int]:
        """Others in flight, and weight gradients that wait, where an F starts at t."""
        begun = {kind: sum(one < t for one in row) for kind, row in own.items()}
        return begun["F"] - begun["B"], begun["B"] - begun["W"]

    for j, t in enumerate(own["F"]):
        x, y = state(t)
        i = j - 1 - x
        if i >= 0:
            x_before, y_before = state(own["F"][i])
            inside = sum(end - begin for begin, end in busy if own["F"][i] <= begin < t)
            least = case.away - x * case.F - x_before * case.B - (y_before + x_before + 1 - y) * case.W
            assert t - own["F"][i] - inside >= least


def check_theorem_3(case: Case, schedule: Schedule) -> None:
    for upper, lower in pairwise(range(case.p)):
        here, there = starts(schedule, upper), starts(schedule, lower)
        for j in range(case.m):
            for i in range(case.m):
                f, b = here["F"][j] + case.F, there["B"][i] + case.B
                at_once = there["F"][j] == f + case.c and here["B"][i] == b + case.c
                if at_once and here["F"][j] < here["B"][i] and there["B"][i] < there["F"][j]:
                    assert abs(f - b) <= case.c
