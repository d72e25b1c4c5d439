"""Frontiers of one step side by side: with all activations kept, with each way to keep less, and with all of them. Also
bounds that hold for every choice of what is kept.

Each further frontier is a race (`solve_auto`) at each memory limit, from the tightest up: a schedule that fits less memory
also fits more, and a schedule of a frontier with fewer choices is also one of a frontier with more."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..build.mixing import one_microbatch_needs
from ..features.feature import AUTO, is_auto
from ..features.keeping import BOTH as FIELDS
from ..features.keeping import all_copied, all_kept, check_open, least_kept
from ..features.table import compared
from ..handover import needed
from ..ilp.bounds.any_choice import bound_over_choices
from ..ilp.bounds.closed_forms import closed_form
from ..partition.file import Partition
from ..profile.profile import Profile
from ..step import Step
from ..util.clock import Clock
from ..util.errors import Infeasible, NotFound, Unfit
from ..util.files import write_document
from .auto import closed_steps, solve_auto
from .memory_limits import Point
from .pareto import AMPLE, Frontier, frontier
from .state import State


def bound_of_every_choice(profile: Profile, step: Step) -> int:
    """A lower bound of the step, µs, for every choice of what is kept; the least over choices that are all compared.

    Keeping less only adds passes to the step that keeps everything, and a memory limit only excludes schedules. So bounds
    of that step without a memory limit hold (see `least_kept`). If only copies are open, bounds of `bound_over_choices`
    within the memory hold too. Raises BadInput for other open fields.
    """
    return min(_bound_of_kept(profile, chosen) for _, chosen in compared(step))


def _bound_of_kept(profile: Profile, step: Step) -> int:
    """`bound_of_every_choice` where only what is kept is open."""
    free = replace(least_kept(step), memory=None)
    host = None if profile.host is None else replace(profile.host, memory=None)
    bounds = [closed_form(free.problem(replace(profile, capacity=None, host=host))).value]
    if (whole := all_copied(step)) is not None:
        with suppress(Infeasible, Unfit):  # copying less may fit where all does not, or there is nothing to copy
            bounds.append(bound_over_choices(whole.problem(profile)).value)
    return max(bounds)


KEPT, BOTH = "keep only", "both"  # frontiers; those with one open field have its name
EVERY_CHOICE = "without a limit of memory, and whatever is kept, recomputed or offloaded: "


@dataclass(frozen=True)
class Curves:
    """Frontiers by name; in the first nothing is open. bound: a lower bound of the schedules of all, µs."""

    frontiers: dict[str, Frontier]
    bound: int

    @property
    def first(self) -> Frontier:
        """The frontier in which nothing was open."""
        return next(iter(self.frontiers.values()))

    def to_json(self) -> dict[str, Any]:
        """Everything but the schedules."""
        return {"bound": self.bound, "frontiers": {name: curve.to_json() for name, curve in self.frontiers.items()}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file with all frontiers, whole or not at all; `-` is standard output."""
        write_document(path, "frontiers", self.to_json())


def curves(
    profile: Profile,
    step: Step,
    *,
    points: int = 12,
    seconds: float = 60.0,
    effort: float | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Curves:
    """The frontiers of a step in which it is open what is kept.

    points, progress, stop, options: as in `frontier`. seconds, effort: of all frontiers, in equal parts. Half of a further
    frontier's part goes to `points` limits, half to peaks of known schedules between them where a shorter step may exist.
    Raises BadInput, Infeasible."""
    check_open(step, profile)
    if not isinstance(step.partition, Partition):  # bounds are about the layers that stages have without a limit of memory
        step = replace(step, partition=replace(all_kept(step), memory=None).staged(replace(profile, capacity=None)).counts)
    steps = _steps(step)
    clock, shared = Clock(seconds, effort), {"stop": stop, **options}
    (name, plain), *others = steps.items()
    part = clock.limit(clock.left / len(steps))
    base = frontier(profile, plain, points=points, progress=_named(progress, name), **part, **shared)
    if least_kept(step) != plain:  # what is copied differs where less is kept
        base = replace(base, free_bound=bound_of_every_choice(profile, step), free_proof="a bound in closed form")
    clock.spend(part.get("effort", 0.0))
    limits, frontiers = _limits(profile, step, base, points), {name: base}
    for i, (name, plain_step) in enumerate(others):
        race = _Race(profile, plain_step, base, [*frontiers.values()] if name == BOTH else [base])
        options = {"progress": _named(progress, name), **shared}
        keep = clock.left * (1 - 1 / (len(others) - i))  # for those behind
        race.solve_each(limits, clock, (clock.left + keep) / 2, options)
        while clock.left > keep and not stop() and (between := race.between()):
            race.solve_each(between[:1], clock, keep + (clock.left - keep) * (1 - 1 / len(between)), options)
        frontiers[name] = replace(base, points=race.frontier(), named=())
    return Curves(frontiers, base.free_bound)


def _steps(step: Step) -> dict[str, Step]:
    """The steps of the frontiers by name: with nothing open, then with each open field alone, then with both."""
    plain = all_kept(step)
    alone = {name: replace(plain, **{name: AUTO}) for name in FIELDS if is_auto(getattr(step, name))}
    return {KEPT: plain, **alone, **({BOTH: step} if len(alone) > 1 else {})}


def _named(progress: Callable[[str, State], None] | None, name: str) -> Callable[[str, State], None] | None:
    return None if progress is None else lambda label, state: progress(f"{name}, {label}", state)


def _limits(profile: Profile, step: Step, base: Frontier, points: int) -> list[int]:
    """Memory limits: from the least in which any choice may fit to the peak of the best schedule that keeps everything.
    Where the first frontier has points, limits are moved to the nearest of them."""
    least = base.points[0].memory
    for _, _, plain_step in closed_steps(step):
        try:
            problem = replace(plain_step, memory=AMPLE).problem(profile)
        except Infeasible:
            continue
        assert problem.capacity is not None
        fixed = AMPLE - np.array(problem.capacity)
        least = min(least, int((fixed + one_microbatch_needs(problem)[: problem.ranks]).max()))
    floor, top = int(max(base.fixed)), base.points[-1].memory
    low, high = max(1, least - floor), max(1, top - floor)
    ladder = {floor + round(low * (high / low) ** (i / (points - 1))) for i in range(points)}
    known = [point.memory for point in base.points]
    near = {min(known, key=lambda memory: abs(memory - at)) if at >= known[0] else max(at, least) for at in ladder}
    return sorted(near | {least, top})


@dataclass
class _Race:
    """The search for one frontier. others: frontiers with fewer choices, whose schedules count too."""

    profile: Profile
    step: Step
    base: Frontier
    others: list[Frontier]

    def __post_init__(self) -> None:
        self.proven: dict[str, Any] = {"bound": self.base.free_bound, "proof": f"{EVERY_CHOICE}{self.base.free_proof}"}
        known = [point for other in self.others for point in other.points]
        self.found = [replace(point, **self.proven) for point in known]
        self.raced = set[int]()

    def best(self, limit: int) -> Point | None:
        """The shortest known schedule that fits, or None."""
        fitting = [point for point in self.found if point.memory <= limit]
        return min(fitting, key=lambda point: (point.value, point.memory), default=None)

    def solve_each(self, limits: Sequence[int], clock: Clock, keep: float, options: dict[str, Any]) -> None:
        """Race at one limit after the other, until no more than `keep` is left on the clock."""
        for i, limit in enumerate(limits):
            if clock.left > keep and not options["stop"]():
                part = clock.limit((clock.left - keep) / (len(limits) - i))
                self.solve(limit, {**options, **part})
                self.raced.add(limit)
                clock.spend(part.get("effort", 0.0))

    def between(self) -> list[int]:
        """Peaks of known schedules that are no limits yet, if more memory gives a shorter schedule: one may fit them too."""
        known = sorted({point.memory for point in self.found})
        return [at for at, above in pairwise(known) if self._value(at) > self._value(above) and at not in self.raced]

    def _value(self, limit: int) -> float:
        """The value of `best`, µs; infinite if there is none."""
        best = self.best(limit)
        return math.inf if best is None else best.value

    def solve(self, limit: int, options: dict[str, Any]) -> None:
        """Race for a shorter schedule within so much memory."""
        best = self.best(limit)
        if best is not None:
            if best.value <= self.base.free_bound:
                return
            options = {**options, "hint": best.schedule}
        try:
            schedule, tried = solve_auto(self.profile, replace(self.step, memory=limit), prefer=None, **options)
        except (Infeasible, NotFound):
            return
        certificate, problem = schedule.certificate, schedule.problem
        assert certificate is not None
        assert problem.capacity is not None
        peak = int((limit - np.array(problem.capacity) + needed(schedule)).max())
        chosen = next(row for row in tried if not row.why).placement.removeprefix(self.step.title).strip()
        by: dict[str, Any] = {"solver": certificate.solver, "seconds": certificate.seconds, "choice": chosen}
        self.found.append(Point(limit, peak, certificate.value, **self.proven, **by, schedule=schedule))

    def frontier(self) -> tuple[Point, ...]:
        """All points by rising memory, each with its shortest schedule."""
        limits = sorted({point.memory for point in self.found})
        shortest = [(limit, best) for limit in limits if (best := self.best(limit)) is not None]
        return tuple(replace(best, memory=limit) for limit, best in shortest)
