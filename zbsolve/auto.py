"""Placement `auto`: the same layers on the same ranks, stage by stage placed differently; the best placement wins."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from . import placement as placements
from .errors import BadInput, Infeasible
from .problem import Problem
from .profile import Profile
from .schedule import Schedule
from .search import State, check_bound, solve

CANDIDATES = ("single", "loop", "loop4", "vee")
LOOK = 0.2  # the share of the time in which every placement is looked at; the rest goes to those that can still win


@dataclass(frozen=True, slots=True)
class Tried:
    """What one placement reached: value and proven bound in µs (None where there is no schedule); `why` it lost, "" for
    the winner. `seconds` were spent on it (0 where effort, not time, was the limit)."""

    placement: str
    value: int | None
    bound: int | None
    seconds: float
    why: str

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


@dataclass
class _Run:
    """A placement in the race."""

    name: str
    problem: Problem | None = None
    schedule: Schedule | None = None
    seconds: float = 0.0
    failed: str = ""

    @property
    def value(self) -> int:
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate.value

    @property
    def bound(self) -> int:
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate.bound


@dataclass
class _Race:
    """All placements, what is left to spend, and how one of them is solved."""

    runs: list[_Run]
    left: float
    timed: bool
    options: dict[str, Any]
    hint: Schedule | None
    progress: Callable[[str, State], None] | None
    stop: Callable[[], bool]

    def solve(self, run: _Run, amount: float) -> None:
        """Spend `amount` seconds (or effort) on `run`; what it had is kept where nothing better comes."""
        assert run.problem is not None
        began = time.monotonic()
        options = {**self.options, "seconds" if self.timed else "effort": amount}
        hint = run.schedule or self._hint(run.problem)
        if hint is not None:
            options["hint"] = hint
        if self.progress is not None:
            show = self.progress
            options["progress"] = lambda state: show(run.name, state)
        try:
            found = solve(run.problem, **options)
            run.schedule = found if run.schedule is None else better(run.schedule, found)
        except Infeasible as error:
            run.failed = str(error) if run.schedule is None else ""
        except KeyboardInterrupt:
            if self.best() is None:
                raise
            run.failed = "interrupted before it had a schedule"
        spent = time.monotonic() - began
        self.left = max(0.0, self.left - (spent if self.timed else amount))
        run.seconds += spent if self.timed else 0.0

    def _hint(self, problem: Problem) -> Schedule | None:
        """The user's earlier schedule, for the placement that it was made for."""
        return self.hint if self.hint is not None and ranks_of(self.hint.problem) == ranks_of(problem) else None

    def best(self) -> _Run | None:
        """The run with the least value; of equals the first, which is the simplest."""
        return min((run for run in self.runs if run.schedule is not None), key=lambda run: run.value, default=None)


def solve_auto(
    profile: Profile,
    ranks: int,
    microbatches: int,
    *,
    memory: str | int | None = None,
    objective: str = "makespan",
    fused: bool = False,
    seconds: float = 30.0,
    effort: float | None = None,
    hint: Schedule | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> tuple[Schedule, tuple[Tried, ...]]:
    """The best schedule over the placements single, loop with 2 and 4 chunks and vee, and what became of each.

    Each placement is looked at for an equal part of a fifth of `seconds` (or `effort`). The rest goes to those whose
    bound does not rule them out: half of it to the best so far, half of what is left to the next, and so on.
    Further `options` go to `solve`; `progress` is called with the placement's name too; `stop` is asked between two
    solves. Raises Infeasible where no placement fits the memory, BadInput where nothing can be built.
    """
    if effort is None and not seconds > 0:
        raise BadInput(f"seconds: {seconds} is not a positive time")

    def build(name: str) -> _Run:
        try:
            return _Run(name, profile.problem(ranks, microbatches, name, memory, objective, fused=fused))
        except Infeasible as error:
            return _Run(name, failed=str(error))
        except BadInput as error:
            stages = len(placements.parse(name, ranks)) if ranks > 0 else 0
            if name == "single" or len(profile.layers) >= stages:
                raise
            return _Run(name, failed=str(error))

    runs = [build(name) for name in (CANDIDATES if ranks > 1 else CANDIDATES[:1])]
    amount = seconds if effort is None else effort
    race = _Race(runs, amount, effort is None, options, hint, progress, stop)
    _look(race, amount)
    _spend(race)
    best = race.best()
    if best is None:
        names: dict[str, list[str]] = {}
        for run in runs:
            names.setdefault(run.failed, []).append(run.name)
        raise Infeasible("no placement fits: " + "; ".join(f"{why} ({', '.join(of)})" for why, of in names.items()))
    assert best.schedule is not None
    return best.schedule, tuple(_tried(run, best) for run in runs)


def _look(race: _Race, amount: float) -> None:
    """A short look at every placement that can be built."""
    open_runs = [run for run in race.runs if run.problem is not None]
    for run in open_runs:
        if race.stop() and race.best() is not None:
            run.failed = "not tried: interrupted"
        else:
            race.solve(run, LOOK * amount / len(open_runs))


def _spend(race: _Race) -> None:
    """The rest, to those that can still win, the best first."""
    order = sorted((run for run in race.runs if run.schedule is not None), key=lambda run: run.value)
    for i, run in enumerate(order):
        best = race.best()
        if best is None or race.stop() or race.left <= 0:
            return
        if run.bound < best.value:
            race.solve(run, race.left if i == len(order) - 1 else race.left / 2)


def _tried(run: _Run, best: _Run) -> Tried:
    if run.schedule is None:
        return Tried(run.name, None, None, round(run.seconds, 3), run.failed)
    why = ""
    if run is not best:
        why = (
            f"{run.value / best.value - 1:.2%} longer than {best.name}" if run.value > best.value else f"equals {best.name}"
        )
        if run.bound >= best.value:
            why += "; proven: no schedule there beats it"
    return Tried(run.name, run.value, run.bound, round(run.seconds, 3), why)


def better(one: Schedule, other: Schedule) -> Schedule:
    """The shorter of two schedules of one problem (the first of equals), with the higher of both proven bounds."""
    a, b = one.certificate, other.certificate
    assert a is not None
    assert b is not None
    chosen, mine, proof = (one, a, b) if a.value <= b.value else (other, b, a)
    if proof.bound <= mine.bound:
        return chosen
    check_bound(chosen, proof.bound, proof.proof)
    return chosen.certified(
        replace(mine, bound=proof.bound, relaxation=proof.relaxation, ranks=proof.ranks, proof=proof.proof)
    )


def ranks_of(problem: Problem) -> tuple[int, ...]:
    """Stage → rank, as the passes have it (the last pass's rank where routes differ)."""
    home = np.zeros(int(problem.passes.stage.max()) + 1, np.int64)
    home[problem.passes.stage] = problem.passes.rank
    return tuple(home.tolist())
