"""`Candidate`: one layout with a partition and a schedule, and what its step takes."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from ..ilp.bounds.many import repeated_microbatch
from ..problem import Problem
from ..profile.profile import Profile
from ..schedule import GIVEN, Schedule
from ..search.certify import certified
from ..search.many import solve_many, worth_repeating
from ..search.solver import solve
from ..step import Step
from ..util.errors import Infeasible, NotFound
from ..verifier import verify
from .cluster import Cluster
from .layer_bytes import WEIGHT_BYTES
from .layer_costs import Model
from .layer_times import after_pipeline
from .layout import Layout
from .model_profile import layout_profile

MIN_EFFORT = 1.0  # of that: named schedules are tried at least
MIN_REPEATED = 20_000  # passes of a step whose steady state is repeated, where it has enough microbatches


@dataclass(frozen=True, eq=False)
class Candidate:
    """A layout that was solved. behind: µs that follow the pipeline, of the rank with most parameters."""

    layout: Layout
    step: Step
    profile: Profile
    schedule: Schedule
    behind: float

    @property
    def value(self) -> float:
        """µs of the whole step."""
        return self.schedule.timeline().makespan + self.behind

    @property
    def bound(self) -> float:
        """µs that no schedule of this partition's step undercuts."""
        assert self.schedule.certificate is not None
        return self.schedule.certificate.bound + self.behind

    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank, and its parts: states, activations at their peak, and messages with what passes take
        while they run."""
        counts, costs = self.schedule.problem.layers, self.step.costs(self.profile)
        fixed, moving = costs.memory.of_ranks(counts, costs.routes)
        parts = np.stack([fixed, self.schedule.timeline().peak_bytes, moving])
        rank = int(parts.sum(axis=0).argmax())
        names = ("states", "activations", "messages and inside passes")
        return dict(zip(names, (int(one) for one in np.ceil(parts[:, rank])), strict=True))


def candidate_of(model: Model, layout: Layout, cluster: Cluster, memory: int, **search: Any) -> Candidate | None:
    """The layout on its balanced partition, solved; None where nothing was found. search: options of `search.solve`."""
    profile, step = layout_profile(model, layout, cluster), step_of(layout, memory)
    found = [one for one in (_solved(replace(step, fused=fused), profile, search) for fused in (False, True)) if one]
    if not found:
        return None
    best, schedule = min(found, key=lambda one: one[1].timeline().makespan)
    return Candidate(layout, best, profile, schedule, behind_of(best, profile, schedule, layout, cluster, model.update_us))


def step_of(layout: Layout, memory: int, partition: tuple[int, ...] | None = None, fused: bool = False) -> Step:
    """The layout's step on devices of so many bytes. partition: layers of each stage; None: balanced."""
    vocabulary = "sharded" if layout.vocabulary else None
    placed = int(layout.pp), int(layout.count), layout.spot
    return Step(*placed, partition, memory, fused=fused, vocabulary=vocabulary, slices=int(layout.slices))


def retimed(candidate: Candidate, model: Model, cluster: Cluster, memory: int, below: float = inf) -> Candidate | None:
    """The candidate's partition and order with other numbers of model, cluster or memory; None where they do not hold, or
    where the step takes `below` µs or more."""
    layout, before = candidate.layout, candidate.schedule
    profile = layout_profile(model, layout, cluster)
    step = step_of(layout, memory, before.problem.layers, candidate.step.fused)
    try:
        schedule = Schedule(step.problem(profile), before.order, before.syncs)
    except Infeasible:
        return None
    again = Candidate(layout, step, profile, schedule, behind_of(step, profile, schedule, layout, cluster, model.update_us))
    if again.value >= below or verify(schedule.problem, schedule):
        return None
    return replace(again, schedule=certified(schedule, before.certificate.solver if before.certificate else GIVEN))


def improved(candidate: Candidate, **search: Any) -> Candidate:
    """The candidate after a further search that begins with its schedule."""
    problem = candidate.schedule.problem
    schedule = _repeated(problem, search) or solve(problem, hint=candidate.schedule, **search)
    better = schedule.timeline().makespan < candidate.schedule.timeline().makespan
    return replace(candidate, schedule=schedule) if better else candidate


def behind_of(
    step: Step, profile: Profile, schedule: Schedule, layout: Layout, cluster: Cluster, each: float | None = None
) -> float:
    """µs that follow the pipeline, where the fullest rank has the parameters that the schedule's partition gives it.
    each: µs of a parameter's update, where that was measured."""
    costs = step.costs(profile)
    fixed, _ = costs.memory.of_ranks(schedule.problem.layers, costs.routes)
    return float(after_pipeline(max(fixed) / profile.states / WEIGHT_BYTES, layout, cluster, each))


def _solved(step: Step, profile: Profile, search: dict[str, Any]) -> tuple[Step, Schedule] | None:
    try:
        problem = step.problem(profile)
        return step, _repeated(problem, search) or solve(problem, **search)
    except (Infeasible, NotFound):
        return None


def _repeated(problem: Problem, search: dict[str, Any]) -> Schedule | None:
    """A schedule of many microbatches, from few and their steady state, with all its passes; None where there are not so
    many, or none was found. search: as `search.solve` takes it."""
    large = len(problem.passes) >= MIN_REPEATED and search.get("method", "auto") in ("auto", "greedy")
    one = repeated_microbatch(problem) if large else None
    if one is None or not worth_repeating(one, problem.microbatches, MIN_REPEATED):
        return None
    limits = {name: search[name] for name in ("seconds", "effort", "seed") if name in search}
    if limits.get("effort"):
        limits["effort"] = max(limits["effort"], MIN_EFFORT)
    with suppress(NotFound):
        return solve_many(one, problem.microbatches, **limits).unrolled()
    return None
