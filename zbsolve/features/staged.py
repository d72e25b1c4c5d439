"""`Staged`: a step's model on its stages, with their costs and memory; `plain_step`: the step without most features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from ..build.links import sites_of
from ..build.plain import pipeline
from ..build.recompute import ALL, recomputed_layers
from ..partition.by_name import balanced_or_equal
from ..partition.layer import Layer, Link, layer_cuts, layer_ranges
from ..partition.stage_costs import StageCosts
from ..problem import Problem
from ..util.errors import Infeasible
from ..util.text import bytes_of_ranks, exact_bytes, has_unit
from .cuts import SEQUENCE, WHOLE, Cuts, cuts_of
from .offload import is_none
from .slices import part_of_layer, slice_times, split_by, time_of, widest_slice, without_keys
from .table import Seen, check_together
from .vocabulary import on_stages


@dataclass(frozen=True)
class Staged:
    """What a feature's builder knows of a step.

    step: see `Step`. profile: with the step's links and submeshes. model: the part of the profile that is on stages: without
    a sharded vocabulary. part: the same for the widest slice of a sequence; its `vocabulary` is for that slice. cuts: where
    sequences are cut. costs: of the layers in `part`. counts: layers of each stage. left: bytes of each rank for
    activations, beside everything else; None: unlimited.
    """

    step: Any
    profile: Any
    model: Any
    part: Any
    cuts: Cuts
    costs: StageCosts
    counts: tuple[int, ...]
    left: tuple[int, ...] | None

    @classmethod
    def of(cls, step: Any, profile: Any, counts: Sequence[int] | None) -> Staged:
        """counts: layers of each stage; None: by `balanced_or_equal`. Raises BadInput, Infeasible."""
        cuts = cuts_of(step.slices, profile.layers, profile.facts.get(SEQUENCE))
        check_together(Seen(step, profile, cuts))
        part, costs = widest_slice(profile, cuts), costs_of(step, profile)
        model, _ = on_stages(profile, step.vocabulary, costs.ranks)
        if counts is None:  # a stage that recomputes runs F twice
            counts = balanced_or_equal(costs, [c.work + (step.recompute == ALL) * c.F for c in costs.layers])
        checked = costs.check(counts)
        return cls(step, profile, model, part, cuts, costs, checked, _left(costs, checked, step))

    @property
    def group(self) -> Any:
        """The link between the ranks of a data-parallel group; the pipeline's if it is not known."""
        return self.profile.shard_link or self.profile.link

    @property
    def room(self) -> tuple[int, ...] | None:
        """`left` where microbatches are alike; else None, as only the feature `uneven` knows how large each is."""
        return None if self.profile.microbatch_factors else self.left

    @property
    def source(self) -> str:
        """Where a problem's durations come from, and how the backward was split."""
        split = self.model.facts.get("split", "layers")
        return f"{self.model.source}{'' if split == 'layers' else f' with split {split}'}: {self.model.model}"

    def of_memory(self, error: Infeasible) -> Infeasible:
        """The error for a rank whose memory is too small, with its memory and what would need less."""
        if not str(error).startswith("capacity: rank"):
            return error
        what = "a rank has what parameters, optimizer states, messages and what a pass takes while it runs leave"
        keeps_all = is_none(self.step.offload) and not self.step.recompute
        less = "; recompute and offload keep less" if keeps_all else ""
        return Infeasible(f"{error}; {what}{_of(self.costs.limit, self.step.memory)}{less}")


def costs_of(step: Any, profile: Any, for_schedule: bool = True) -> StageCosts:
    """Costs and memory of stages made of the profile's layers, with a microbatch for each slice, as long as the widest one.
    for_schedule: with the memory limit; else offload and slices have none, since what is held then depends on the schedule.
    Raises BadInput."""
    cuts, routes = cuts_of(step.slices, profile.layers, profile.facts.get(SEQUENCE)), step.routes
    limit = profile.capacity if step.memory is None else bytes_of_ranks(step.memory, step.ranks)
    limit = limit if for_schedule or (is_none(step.offload) and cuts == WHOLE) else None
    model, shard = on_stages(widest_slice(profile, cuts), step.vocabulary, max(routes[0]) + 1)
    return StageCosts.of(model, routes, step.microbatches * (len(cuts) - 1), limit, step.fused, step.shards, shard)


def _left(costs: StageCosts, counts: tuple[int, ...], step: Any) -> tuple[int, ...] | None:
    """Bytes of each rank for activations, beside everything else; None: unlimited."""
    if costs.limit is None:
        return None
    left, memory = [], step.memory
    again = recomputed_layers(step.recompute, counts)
    parts = zip(costs.limit, *costs.memory.of_ranks(counts, costs.routes, again), strict=True)
    for rank, (limit, fixed, moving) in enumerate(parts):
        if fixed + moving > limit:
            own = memory.split(",")[rank] if isinstance(memory, str) and "," in memory else memory
            raise Infeasible(
                f"memory: rank {rank} needs {exact_bytes(fixed)} for parameters and optimizer states and "
                f"{exact_bytes(moving)} for messages and inside passes, more than its memory{_of((limit,), own)}"
            )
        left.append(int(limit - fixed - moving))
    return tuple(left)


def _of(limits: Sequence[int] | None, asked: str | int | None) -> str:
    """The memory that ranks were given, as the user wrote it; a bare number that is too small to be meant with its unit."""
    if limits is None:
        return ""
    if isinstance(asked, str) and all(map(has_unit, asked.split(","))):
        return f" of {asked.strip()}"
    small = min(limits) < 2**20 and asked is not None
    sizes = " or ".join(map(exact_bytes, dict.fromkeys(limits)))
    return f" of {sizes}{' (a number without a unit is bytes: write 40GiB, 512MB)' if small else ''}"


def plain_step(staged: Staged) -> Problem:
    """The step without features except recompute. With slices it has a microbatch for each slice, without keys and values.
    Raises BadInput, Infeasible."""
    step, profile, costs, cuts, counts = staged.step, staged.model, staged.costs, staged.cuts, staged.counts
    stages = [[profile.layers[i] for i in here] for here in layer_ranges(counts)]
    parts = [[costs.layers[i] for i in here] for here in layer_ranges(counts)]
    again = recomputed_layers(step.recompute, counts)
    # With slices, whole stages recompute, so nothing is kept by layers that do not.
    beside = [costs.memory.kept_beside(here, n) if n else 0 for here, n in zip(layer_ranges(counts), again, strict=True)]
    inputs = [0, *(0 if b[0].begins else a[-1].output_bytes for a, b in pairwise(stages))]
    turns = costs.microbatches // (len(cuts) - 1)  # a row has one number, or one for each slice of each microbatch

    def row(stage: Sequence[Layer], kind: str) -> Any:
        if cuts == WHOLE:
            return round(sum(time_of(layer, kind) for layer in stage))
        return slice_times(stage, kind, cuts) * turns

    def message(layer: Layer, link: Link) -> Any:
        parts = [] if cuts == WHOLE else [part_of_layer(layer, b - a, link) for a, b in pairwise(cuts)]
        return [round(link.message(part)) for part in parts] * turns or round(link.message(layer))

    def total(kind: str) -> Any:
        return [row([*stage, *costs.beside(s)], kind) for s, stage in enumerate(stages)]

    return pipeline(
        total("F"),
        placement=costs.routes,
        microbatches=costs.microbatches,
        comm=[message(stage[-1], link) for stage, link in zip(stages[:-1], _links(profile, costs.routes[0]), strict=True)],
        blocking=profile.link.blocking,
        **_held(profile, costs, cuts, counts, again),
        AF=[round(sum(each_layer.all_to_all for each_layer in part)) for part in parts],
        recompute=step.recompute,
        X=[row(stage[: n or None], "X") for stage, n in zip(stages, again, strict=True)],
        held_input=[a + b if cuts == WHOLE else split_by(cuts, a + b) * turns for a, b in zip(inputs, beside, strict=True)],
        capacity=staged.room if is_none(step.offload) else None,
        objective=step.objective,
        layers=counts,
        source=staged.source,
        B=None if costs.fused else total("B"),
        W=None if costs.fused else total("W"),
        BW=total("BW") if costs.fused else None,
        untrained=sum(end <= costs.untrained for end in layer_cuts(counts)[1:]),
    )


def _links(profile: Any, route: Sequence[int]) -> list[Link]:
    """The link at each boundary between stages: the pipeline's, or the one between two sites. Raises BadInput."""
    between, ranks = profile.site_link, max(route) + 1
    site = np.zeros(ranks) if between is None else sites_of(between.shared, ranks)
    return [profile.link if between is None or site[a] == site[b] else between for a, b in pairwise(route)]


def _held(profile: Any, costs: StageCosts, cuts: Cuts, counts: Sequence[int], again: Sequence[int]) -> dict[str, Any]:
    """Bytes that stages keep, as keyword arguments of `pipeline`."""
    if cuts == WHOLE:
        return dict(costs.memory.held(counts, again))
    bare, turns = replace(costs, layers=tuple(map(without_keys, profile.layers))), costs.microbatches // (len(cuts) - 1)
    return {name: [split_by(cuts, size) * turns for size in row] for name, row in bare.memory.held(counts).items()}
