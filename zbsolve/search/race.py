"""A race between problems of the same work: time goes to whichever can still win."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..ilp.bounds.closed_forms import closed_form
from ..problem import Problem
from ..schedule import Schedule
from ..step import Step
from ..util.errors import Infeasible, NotFound
from .certify import QUICK_PASSES, check_bound
from .hints import hint_on
from .solver import solve
from .state import State


@dataclass(eq=False)
class Run:
    """A step in the race. name: its placement and what else was chosen for it; place: the placement (and gathers) alone;
    `partition` has every name that gives these layers; moved: what was changed one by one to come here, or ""."""

    step: Step
    name: str
    partition: str = ""
    layers: tuple[int, ...] = ()
    problem: Problem | None = None
    schedule: Schedule | None = None
    seconds: float = 0.0
    failed: str = ""
    place: str = ""
    moved: str = ""

    @property
    def value(self) -> int:
        """The schedule's, µs."""
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate.value

    def beats(self, other: Run) -> bool:
        """It has a schedule, and a shorter one."""
        return self.schedule is not None and self.value < other.value

    @property
    def bound(self) -> int:
        """The highest proven, µs."""
        assert self.schedule is not None
        assert self.schedule.certificate is not None
        return self.schedule.certificate.bound


@dataclass
class Race:
    """All that are in it, what is left to spend, and how one of them is solved. `named`: whether partitions differ;
    `choosing`: whether passes do; `compared`: whether every place is looked at, also one that a bound rules out."""

    runs: list[Run]
    left: float
    timed: bool
    options: dict[str, Any]
    hint: Schedule | None
    progress: Callable[[str, State], None] | None
    stop: Callable[[], bool]
    named: bool = False
    choosing: bool = False
    compared: bool = False

    def label(self, run: Run) -> str:
        """What a run is called where runs are told apart."""
        return f"{run.name} {run.partition}" if self.named else run.name

    def solve(self, run: Run, amount: float, hint: Schedule | None = None, **options: Any) -> None:
        """Spend `amount` seconds (or effort) on `run`, from `hint` where it has nothing yet, with further options of
        `search.solve`; what it had is kept where nothing better comes. Where choices differ in their passes,
        nothing is spent on what a bound rules out."""
        assert run.problem is not None
        looked = not self.choosing or run.schedule is not None or (self.compared and run.name == run.place)
        if not looked and (why := self.ruled_out(run)):
            run.failed = why
            return
        began = time.monotonic()
        options = {**self.options, "seconds" if self.timed else "effort": amount, "prefer": None, **options}
        hint = run.schedule or hint or self._hint(run.problem)
        if hint is not None and self.choosing:
            hint = hint_on(run.problem, hint)
        if hint is not None:
            options["hint"] = hint
        if self.progress is not None:
            show = self.progress
            options["progress"] = lambda state: show(self.label(run), state)
        try:
            found = solve(run.problem, **options)
            run.schedule = found if run.schedule is None else better(run.schedule, found)
        except (Infeasible, NotFound) as error:
            run.failed = str(error) if run.schedule is None else ""
        except KeyboardInterrupt:
            if self.best() is None:
                raise
            run.failed = "interrupted before it had a schedule"
        spent = time.monotonic() - began
        self.left = max(0.0, self.left - (spent if self.timed else amount))
        run.seconds += spent if self.timed else 0.0

    def ruled_out(self, run: Run) -> str:
        """Why nothing in `run` is as short as the best so far, by a bound in closed form; or ""."""
        best = self.best()
        if best is None or run.problem is None or len(run.problem.passes) > QUICK_PASSES:
            return ""
        bound = max(run.problem.work, closed_form(run.problem).value)
        if bound <= best.value:
            return ""
        return f"at least {bound / best.value - 1:.2%} longer than {self.label(best)}: proven, not tried"

    def _hint(self, problem: Problem) -> Schedule | None:
        """The user's earlier schedule, for the placement that it was made for."""
        hint = self.hint
        return hint if hint is not None and hint.problem.stage_ranks == problem.stage_ranks else None

    def best(self) -> Run | None:
        """The run with the least value; of equals the first, which is the simplest."""
        return min((run for run in self.runs if run.schedule is not None), key=lambda run: run.value, default=None)

    def leanest(self) -> Run | None:
        """Of the runs with the least value the one whose schedule has the least peak, bytes; of equals the first."""
        best = self.best()
        if best is None:
            return None
        alike = [run for run in self.runs if run.schedule is not None and run.value == best.value]
        return min(alike, key=lambda run: max(run.schedule.timeline().peak_bytes))  # type: ignore[union-attr]


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
