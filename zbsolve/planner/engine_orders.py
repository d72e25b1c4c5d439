"""Orders of engines that take none: 1F1B with one stage a rank, interleaved 1F1B in groups of g microbatches with more
(Megatron core 0.16.1, `pipeline_parallel/schedules.py`; Galvatron 2.4.1 has one stage a rank)."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..greedy.side_streams.side_stream import with_side_streams, without_side_streams
from ..problem import Problem
from ..schedule import GIVEN, Schedule
from ..search.certify import certified
from ..systems.one_direction import interleaved_in_groups, takes_groups
from ..systems.table import preset
from ..util.errors import Infeasible
from ..verifier import verify
from .candidate import Candidate, behind_of, step_of
from .clusters.cluster import Cluster
from .costs.layer_costs import Model
from .costs.model_profile import layout_profile
from .layout import Layout

MAX_TRIED = 1_000_000  # passes of all orders that are tried: some seconds


def in_its_order(model: Model, layout: Layout, cluster: Cluster, memory: int) -> Candidate | None:
    """The layout with the best of these orders that holds within the memory; None where none does."""
    profile, step = layout_profile(model, layout, cluster), step_of(layout, memory, fused=True)
    try:
        problem = step.problem(profile)
    except Infeasible:
        return None
    powers = {problem.ranks << shift for shift in range(problem.microbatches.bit_length())} | {problem.microbatches}
    held = [one for _, one in grouped_orders(problem, powers) if not verify(problem, one)]
    if not held:
        return None
    schedule = certified(min(held, key=lambda one: one.timeline().makespan), GIVEN)
    behind = behind_of(step, profile, problem, layout, cluster, model.update_us)
    return Candidate(layout, step, profile, schedule, behind)


def grouped_orders(problem: Problem, only: Collection[int] = ()) -> Iterator[tuple[int | None, Schedule]]:
    """(g, order) of each g that Megatron allows, or as many as MAX_TRIED lets us try: then evenly spread ones, powers of two
    times p, and m. only: those of these alone. (None, 1F1B) with one stage a rank."""
    p, m = problem.ranks, problem.microbatches
    if problem.stages == p:
        yield None, preset("1f1b", problem)
        return
    alone = without_side_streams(problem)  # sums over replicas begin when their gradients are there
    allowed = [g for g in range(p, m + 1) if takes_groups(problem, g) and (not only or g in only)]
    if len(allowed) * len(problem.passes) > MAX_TRIED:
        powers = {p << shift for shift in range(m.bit_length())} | {m}
        spread = -(-len(allowed) * len(problem.passes) // MAX_TRIED)
        allowed = [g for i, g in enumerate(allowed) if g in powers or i % spread == 0]
    for g in allowed:
        yield g, with_side_streams(problem, interleaved_in_groups(alone, g))
