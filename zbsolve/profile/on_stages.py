"""A profile's layers on stages as `pipeline` takes them, whole or in sequence slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from ..build.plain import pipeline
from ..build.recompute import Recompute
from ..layer import Layer, Link, layer_cuts, layer_ranges
from ..partition.stage_costs import Layered, StageCosts
from ..problem import Problem
from .cuts import WHOLE, Cuts
from .slices import part_of_layer, slice_times, split_by, time_of, without_keys


def plain_step(
    profile: Layered,
    costs: StageCosts,
    cuts: Cuts,
    counts: Sequence[int],
    left: Sequence[int] | None,
    objective: str,
    recompute: Recompute,
) -> Problem:
    """The step where stages have `counts` layers of the profile and ranks `left` bytes for activations; with a microbatch
    for each slice between `cuts`, without keys and values where there are several. costs: of the profile, or of its widest
    slice. Raises BadInput, Infeasible."""
    stages = [[profile.layers[i] for i in here] for here in layer_ranges(counts)]
    parts = [[costs.layers[i] for i in here] for here in layer_ranges(counts)]

    def total(kind: str) -> Any:
        return [_row(stage, kind, cuts, costs.microbatches) for stage in stages]

    return pipeline(
        total("F"),
        placement=costs.routes,
        microbatches=costs.microbatches,
        comm=[_messages(stage[-1], profile.link, cuts, costs.microbatches) for stage in stages[:-1]],
        blocking=profile.link.blocking,
        **_held(profile, costs, cuts, counts),
        AF=[round(sum(one.all_to_all for one in part)) for part in parts],
        recompute=recompute,
        X=total("X"),
        held_input=[0, *(_input(stage[-1].output_bytes, cuts, costs.microbatches) for stage in stages[:-1])],
        capacity=left,
        objective=objective,
        layers=counts,
        B=None if costs.fused else total("B"),
        W=None if costs.fused else total("W"),
        BW=total("BW") if costs.fused else None,
        untrained=sum(end <= costs.untrained for end in layer_cuts(counts)[1:]),
    )


def _row(stage: Sequence[Layer], kind: str, cuts: Cuts, microbatches: int) -> Any:
    """µs of a kind of a stage's passes: a number, or one a slice of each microbatch."""
    if cuts == WHOLE:
        return round(sum(time_of(one, kind) for one in stage))
    return _repeated(slice_times(stage, kind, cuts), microbatches)


def _messages(layer: Layer, link: Link, cuts: Cuts, microbatches: int) -> Any:
    """µs of the messages of a layer's output: a number, or one a slice of each microbatch."""
    if cuts == WHOLE:
        return round(link.message(layer))
    return _repeated([round(link.message(part_of_layer(layer, b - a, link))) for a, b in pairwise(cuts)], microbatches)


def _held(profile: Layered, costs: StageCosts, cuts: Cuts, counts: Sequence[int]) -> dict[str, Any]:
    """Bytes that stages keep, by the names that `pipeline` has for them."""
    if cuts == WHOLE:
        return dict(costs.memory.held(counts))
    bare = replace(costs, layers=tuple(map(without_keys, profile.layers))).memory.held(counts)
    return {name: [_repeated(split_by(cuts, one), costs.microbatches) for one in row] for name, row in bare.items()}


def _input(size: int, cuts: Cuts, microbatches: int) -> Any:
    """Bytes of a stage's input: a number, or one a slice of each microbatch."""
    return size if cuts == WHOLE else _repeated(split_by(cuts, size), microbatches)


def _repeated(row: list[int], microbatches: int) -> list[int]:
    """A row of one a slice, for each of so many slices of all microbatches."""
    return row * (microbatches // len(row))
