"""`Candidate`: one layout with a partition, a schedule and the time of its step; the profile that its problem is built from;
`Choice`, the best candidate of a plan without its space; and the orders of engines that run only their own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from ..greedy.side_stream import with_side_streams, without_side_streams
from ..partition.layer import Link
from ..problem import Problem
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import GIVEN, Schedule
from ..search.certify import certified
from ..search.task import Task
from ..systems.one_direction import interleaved_in_groups, takes_groups
from ..systems.table import preset, presets_of
from ..util.errors import Infeasible
from ..verifier import verify
from .cluster import Cluster
from .costs.layer_formulas import WEIGHT_BYTES, after_exchange, message_rate
from .costs.rank_costs import model_costs
from .layout import Layout
from .profiled_model import Model
from .space import AXES


def layout_profile(model: Model, layout: Layout, cluster: Cluster) -> Profile:
    """The profile of a model's layers on the devices of one pipeline rank, for a microbatch. Messages occupy their sender.

    model: a shape, or profiles at several sizes.
    layout: how the step is split; the profile is for the `Step` of `step_of`.
    cluster: its devices and links. The profile's capacity is the memory of a device.

    Layers' times are whole µs, so the passes of every partition are exact sums, and a bound over all partitions holds for
    each. Time after the exchange of gradients is not included (see `layer_formulas.after_exchange`). Raises BadInput where
    the model's profiles or the cluster lack the costs of this layout.
    """
    costs = model_costs(model, layout, cluster)
    first, block, last = costs.first, costs.block, costs.last
    profile = Profile(
        f"estimated: {model.source}, {cluster.title}",
        f"{model.name}, {layout.title}",
        (first.layer("embedding"), *(block.layer(f"block{i}") for i in range(model.layers)), last.layer("head")),
        Link(0.0, float(message_rate(layout, cluster)), blocking=True),
        float(costs.states),
        cluster.memory,
        {"cluster": cluster.name, "layout": layout.numbers},
        {},
        tied=((int(costs.shared), (0, model.layers + 1)),) if costs.shared else (),
    )
    for axis in AXES:
        profile = axis.profile(profile, model, layout, cluster)
    return profile


MIN_REPEATED = 20_000  # a step with this many passes repeats its steady state, where it has enough microbatches


@dataclass(frozen=True, eq=False)
class Candidate:
    """A solved layout. behind: µs after all exchanges of gradients, on the rank with the most parameters."""

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
        """A lower bound, µs, on every schedule of the step with this partition."""
        assert self.schedule.certificate is not None
        return self.schedule.certificate.bound + self.behind

    @property
    def unsolved(self) -> Unsolved:
        """Its layout and partition without the schedule, to be searched again."""
        return Unsolved(self.layout, self.step, self.profile, self.schedule.problem, self.behind)

    @property
    def exposed(self) -> float:
        """µs from the end of the last compute pass of all ranks to the end of the exchange of gradients."""
        timeline, computing = self.schedule.timeline(), self.schedule.problem.computing
        return float(timeline.end.max() - timeline.end[computing].max())

    def memory(self) -> dict[str, int]:
        """Bytes of the fullest rank, by part: states; gathered parameters with gradients not yet reduced, and activations,
        both when their sum is at its peak; and messages with what passes take while they run."""
        counts, costs = self.schedule.problem.layers, self.step.costs(self.profile)
        fixed, moving = costs.memory.of_ranks(counts, costs.routes)
        rank = int((np.array(fixed) + self.schedule.timeline().peak_bytes + moving).argmax())
        held = self._held(rank)
        names = ("states", "gathered", "activations", "messages and inside passes")
        parts = fixed[rank], *held, moving[rank]
        return dict(zip(names, (int(part) for part in np.ceil(parts)), strict=True))

    def _held(self, rank: int) -> tuple[int, int]:
        """Bytes of gathered parameters with unreduced gradients, and of activations, when a rank holds the most."""
        timeline = self.schedule.timeline()
        edges, repeated = timeline.problem.edges, timeline.problem.in_microbatch
        gathered = edges.bytes * ~(repeated[edges.before] & repeated[edges.after])
        activations = replace(timeline.problem, edges=replace(edges, bytes=edges.bytes - gathered))
        (_, held), (_, kept) = timeline.memory(rank), replace(timeline, problem=activations).memory(rank)
        at = int(held.argmax())
        return int(held[at] - kept[at]), int(kept[at])


@dataclass(frozen=True, eq=False)
class Unsolved:
    """A layout on its balanced partition, as a problem. behind: µs after all exchanges of gradients."""

    layout: Layout
    step: Step
    profile: Profile
    problem: Problem
    behind: float

    @classmethod
    def of(cls, model: Model, layout: Layout, cluster: Cluster, step: Step, profile: Profile) -> Unsolved:
        """The step of a layout as a problem. profile: of this layout; the partition decides `behind`. Raises Infeasible."""
        problem, costs = step.problem(profile), step.costs(profile)
        fixed, _ = costs.memory.of_ranks(problem.layers, costs.routes)
        parameters = max(fixed) * step.shards / profile.states / WEIGHT_BYTES
        behind = float(after_exchange(parameters, layout, cluster, model.update_us))
        return cls(layout, step, profile, problem, behind)

    def solved(self, schedule: Schedule) -> Candidate:
        """The candidate with this schedule."""
        return Candidate(self.layout, self.step, self.profile, schedule, self.behind)

    def task(self, options: Mapping[str, Any]) -> Task:
        """A task that solves it with these options of `search.solve`."""
        return Task(self, self.problem, options, self.behind, many=MIN_REPEATED)


def unsolved(
    model: Model, layout: Layout, cluster: Cluster, memory: int, kinds: Sequence[bool] = (False, True)
) -> Iterator[Unsolved]:
    """The layout with split backwards, then with fused ones, each where it can be built. kinds: whether fused, for each."""
    profile = layout_profile(model, layout, cluster)
    for step in (step_of(layout, memory, fused=fused) for fused in kinds):
        with suppress(Infeasible):
            yield Unsolved.of(model, layout, cluster, step, profile)


def step_of(layout: Layout, memory: int, partition: tuple[int, ...] | None = None, fused: bool = False) -> Step:
    """The step of a layout. memory: bytes of a device; partition: layers of each stage, None: balanced."""
    placed = int(layout.pp), int(layout.count), layout.spot
    further = {name: value for axis in AXES for name, value in axis.step(layout).items()}
    return Step(*placed, partition, memory, fused=fused, **further)


def retimed(candidate: Candidate, model: Model, cluster: Cluster, memory: int, below: float = inf) -> Candidate | None:
    """The candidate's partition and order with this model, cluster and memory; None: not legal, or not below `below` µs."""
    layout, before = candidate.layout, candidate.schedule
    profile = layout_profile(model, layout, cluster)
    step = step_of(layout, memory, before.problem.layers, candidate.step.fused)
    try:
        unsolved = Unsolved.of(model, layout, cluster, step, profile)
    except Infeasible:
        return None
    again = unsolved.solved(schedule := Schedule(unsolved.problem, before.order, before.syncs))
    if again.value >= below or verify(schedule.problem, schedule):
        return None
    return replace(again, schedule=certified(schedule, before.certificate.solver if before.certificate else GIVEN))


@dataclass(frozen=True, eq=False)
class Choice:
    """A layout with its schedule, and the inputs that it is for. batch: sequences in a step; memory: bytes of a device."""

    shape: Model
    cluster: Cluster
    batch: int
    memory: int
    best: Candidate


MAX_TRIED = 1_000_000  # most passes over all orders that are tried, which takes some seconds


def in_its_order(model: Model, layout: Layout, cluster: Cluster, memory: int) -> Candidate | None:
    """The layout in the best legal order of `grouped_orders`, within the memory; None where none is legal."""
    steps = unsolved(model, layout, cluster, memory, (True,))  # in groups of p times powers of two, and of m
    return _best(step.solved(order) for step in steps for _, order in grouped_orders(step.problem, _powers(step.problem)))


def in_a_named_order(model: Model, layout: Layout, cluster: Cluster, memory: int) -> Candidate | None:
    """The layout in the best legal named order, within the memory; None where none is legal."""
    steps = unsolved(model, layout, cluster, memory)
    return _best(step.solved(schedule) for step in steps for _, schedule in presets_of(step.problem, searched=False))


def _powers(problem: Problem) -> set[int]:
    return {problem.ranks << shift for shift in range(problem.microbatches.bit_length())} | {problem.microbatches}


def _best(orders: Iterable[Candidate]) -> Candidate | None:
    """The shortest candidate whose schedule is legal, also in memory."""
    for candidate in sorted(orders, key=lambda order: order.value):
        if not verify(candidate.schedule.problem, candidate.schedule):
            return replace(candidate, schedule=certified(candidate.schedule, GIVEN))
    return None


def grouped_orders(problem: Problem, only: Collection[int] = ()) -> Iterator[tuple[int | None, Schedule]]:
    """(g, order) of each group size g that Megatron allows. Where these are too many for `MAX_TRIED`: evenly spread ones,
    powers of two times p, and m. only: the sizes to try, empty: all. With one stage on each rank: (None, 1F1B)."""
    p, m = problem.ranks, problem.microbatches
    if problem.stages == p:
        yield None, preset("1f1b", problem)
        return
    alone = without_side_streams(problem)  # sums over replicas begin as soon as their gradients exist
    allowed = [g for g in range(p, m + 1) if takes_groups(problem, g) and (not only or g in only)]
    if len(allowed) * len(problem.passes) > MAX_TRIED:
        powers = _powers(problem)
        spread = -(-len(allowed) * len(problem.passes) // MAX_TRIED)
        allowed = [g for i, g in enumerate(allowed) if g in powers or i % spread == 0]
    for g in allowed:
        yield g, with_side_streams(problem, interleaved_in_groups(alone, g))
