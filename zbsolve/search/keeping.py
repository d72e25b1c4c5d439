"""Frontiers of one step side by side: with all activations kept, with recompute, with offload, and with both. Also bounds
that hold for every choice of recompute and offload, and for any slices.

Each further frontier is a race (`solve_auto`) at each memory limit, from the tightest up: a schedule that fits less memory
also fits more, and a schedule of a frontier with fewer choices is also one of a frontier with more.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ..build.mixing import one_microbatch_needs
from ..features.cuts import MAX_SLICES, SEQUENCE, tokens_of
from ..features.feature import AUTO, is_auto
from ..features.keeping import all_kept
from ..features.offload import FULL, NO_OFFLOAD, is_none, known_host
from ..features.sharded_vocabulary import BARRIERS, vocabularies
from ..features.slices import least_extra
from ..handover import needed
from ..ilp.bounds.any_choice import bound_over_choices
from ..ilp.bounds.closed_forms import closed_form
from ..layer import layer_ranges
from ..partition.file import Partition
from ..problem import Problem
from ..profile.profile import Profile
from ..step import Step
from ..timeline import Floats
from ..util.clock import Clock
from ..util.errors import Infeasible, NotFound
from ..util.files import write_document
from .auto import closed_steps, solve_auto
from .memory_limits import Point
from .pareto import AMPLE, Frontier, frontier
from .state import State


def bound_of_every_choice(profile: Profile, step: Step) -> int:
    """A lower bound of the step, µs, for every choice of recompute and offload that is open.

    Recompute and copies only add passes to the step that keeps everything, and a memory limit only excludes schedules. So
    bounds of that step without a memory limit hold. Given copies count if recompute is not open, which could shorten them.
    If only offload is open, bounds of `bound_over_choices` within the memory hold too. If the vocabulary is open, the least
    bound of its choices counts. Raises BadInput for an open placement, partition or number of gathers.
    """
    if is_auto(step.vocabulary):
        return min(bound_of_every_choice(profile, closed) for _, closed in vocabularies(step))
    again, away = is_auto(step.recompute), is_auto(step.offload)
    step = replace(step, recompute=() if again else step.recompute)
    plain = replace(step, offload=NO_OFFLOAD if away or again else step.offload, memory=None)
    host = None if profile.host is None else replace(profile.host, memory=None)
    bounds = [closed_form(plain.problem(replace(profile, capacity=None, host=host))).value]
    if away and not again:
        with suppress(Infeasible):  # copying less may fit where copying everything does not: then the first bound remains
            bounds.append(bound_over_choices(replace(step, offload=FULL).problem(profile)).value)
    return max(bounds)


class OfAnySlices(NamedTuple):
    """bound: a lower bound of every schedule in two slices or more, µs. longer_from: with so many slices or more, up to the
    tokens of the sequence, every schedule is longer than the value that was asked about; None: not proven."""

    bound: int
    longer_from: int | None


def bound_of_any_slices(profile: Profile, step: Step, layers: Sequence[int], value: int) -> OfAnySlices | None:
    """A lower bound for any slices of a step: the work of the busiest rank. layers: of each stage. value: µs, see
    `OfAnySlices.longer_from`.

    Slices share the time of the whole sequence, and each has its measured extra (see `SliceExtra`), whatever its length. An
    extra in proportion to length has the same sum for any lengths; one in proportion to length and position sums to at most
    half of its slope times the sequence. With attention exchange the mean over ranks counts. None if ranks or microbatches
    differ, if messages block their sender, or if a vocabulary is sharded: rounded parts may be below the whole there.
    Raises BadInput, Infeasible.
    """
    blocking = profile.link.blocking if step.blocking is None else step.blocking
    unlike = profile.rank_factors or profile.microbatch_factors
    if unlike or blocking or is_auto(step.vocabulary) or step.vocabulary in BARRIERS:
        return None
    whole = replace(step, slices=1, attention_exchange=False, partition=tuple(layers), memory=None, offload=NO_OFFLOAD)
    problem = replace(whole, recompute=() if is_auto(step.recompute) else step.recompute).problem(
        replace(profile, capacity=None)
    )
    works = _works(profile, problem, step.microbatches, tokens_of(profile.facts.get(SEQUENCE)) or MAX_SLICES)
    least = np.ceil(works.mean(axis=0) if step.attention_exchange else works.max(axis=0)).astype(np.int64)
    short = np.flatnonzero(least <= value)
    last = int(short[-1]) if len(short) else -1
    return None if not len(least) else OfAnySlices(int(least.min()), None if last + 1 == len(least) else last + 3)


def _works(profile: Profile, problem: Problem, microbatches: int, tokens: int) -> Floats:
    """µs that each rank computes at least in 2, 3, … slices, up to the number of tokens; shape (ranks, numbers)."""
    counts = np.arange(2, min(tokens, MAX_SLICES) + 1)
    p = problem.passes
    works = np.bincount(p.rank, p.duration, problem.ranks)[:, None] + np.zeros(len(counts))
    ranks = problem.routes[0]
    for stage, here in enumerate(layer_ranges(problem.layers)):
        for kind in p.kinds:
            if (p.are(kind) & (p.stage == stage)).any():
                works[ranks[stage]] += microbatches * least_extra([profile.layers[i] for i in here], kind, counts)
    return works


KEPT, RECOMPUTED, OFFLOADED, BOTH = "keep only", "recompute", "offload", "both"
WITHIN = {RECOMPUTED: (KEPT,), OFFLOADED: (KEPT,), BOTH: (KEPT, RECOMPUTED, OFFLOADED)}  # frontiers with fewer choices
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
    """The frontiers of a step with recompute, offload or both open.

    points, progress, stop, options: as in `frontier`. seconds, effort: of all frontiers, in equal parts. Half of a further
    frontier's part goes to `points` limits, half to peaks of known schedules between them where a shorter step may exist.
    Raises BadInput, Infeasible."""
    if is_auto(step.offload):
        known_host(profile.host)
    if not isinstance(step.partition, Partition):  # bounds are about the layers that stages have without a limit of memory
        step = replace(step, partition=replace(all_kept(step), memory=None).staged(replace(profile, capacity=None)).counts)
    steps = _steps(step)
    clock, shared = Clock(seconds, effort), {"stop": stop, **options}
    (name, plain), *others = steps.items()
    part = clock.limit(clock.left / len(steps))
    base = frontier(profile, plain, points=points, progress=_named(progress, name), **part, **shared)
    if not is_auto(step.offload) and not is_none(step.offload):  # what is copied differs where stages recompute
        base = replace(base, free_bound=bound_of_every_choice(profile, step), free_proof="a bound in closed form")
    clock.spend(part.get("effort", 0.0))
    limits, frontiers = _limits(profile, step, base, points), {name: base}
    for i, (name, plain_step) in enumerate(others):
        race = _Race(profile, plain_step, base, [frontiers[other] for other in WITHIN[name] if other in frontiers])
        options = {"progress": _named(progress, name), **shared}
        keep = clock.left * (1 - 1 / (len(others) - i))  # for those behind
        race.solve_each(limits, clock, (clock.left + keep) / 2, options)
        while clock.left > keep and not stop() and (between := race.between()):
            race.solve_each(between[:1], clock, keep + (clock.left - keep) * (1 - 1 / len(between)), options)
        frontiers[name] = replace(base, points=race.frontier(), named=())
    return Curves(frontiers, base.free_bound)


def _steps(step: Step) -> dict[str, Step]:
    """The steps of the frontiers by name: with nothing open, then with each open field alone, then with both."""
    again, away, plain = is_auto(step.recompute), is_auto(step.offload), all_kept(step)
    steps = {KEPT: plain}
    if again:
        steps[RECOMPUTED] = replace(plain, recompute=AUTO)
    if away:
        steps[OFFLOADED] = replace(plain, offload=AUTO)
    return {**steps, BOTH: step} if again and away else steps


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
        """Peaks of known schedules that are not yet limits, and above which more memory gives a shorter schedule: perhaps a
        shorter schedule fits them too."""
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
        by: dict[str, Any] = {
            "solver": certificate.solver,
            "seconds": certificate.seconds,
            "schedule": schedule,
            "choice": chosen,
        }
        self.found.append(Point(limit, peak, certificate.value, **self.proven, **by))

    def frontier(self) -> tuple[Point, ...]:
        """All points by rising memory, each with its shortest schedule."""
        limits = sorted({point.memory for point in self.found})
        shortest = [(limit, best) for limit in limits if (best := self.best(limit)) is not None]
        return tuple(replace(best, memory=limit) for limit, best in shortest)
