"""From a model's layers to one rank's shard of its vocabulary: rows of the output layer and of the embedding are cut out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from ...models.model import Place
from ...problem import Problem
from ...util.errors import BadInput
from ..handlers.table import model_stages, passes_where
from .cut import without_output
from .loss import recognised
from .lookup import EmbeddingShard
from .rank import Homes
from .shard import OutputShard, shard_rows

NAME = "vocabulary"  # of a shard among a rank's modules


class Sharded(NamedTuple):
    """What a problem says of its vocabulary. barriers: 1 or 2; embedding: the input embedding is sharded too."""

    barriers: int
    embedding: bool

    @classmethod
    def of(cls, problem: Problem) -> Sharded | None:
        """None where the vocabulary is whole."""
        kinds = problem.passes.kinds
        return cls(2 if "VG" in kinds else 1, "VE" in kinds) if passes_where(problem, "joins").any() else None

    def layers(self, count: int) -> list[int]:
        """The numbers of the layers, of `count`, that every rank has a shard of."""
        return sorted({count - 1, *([0] if self.embedding else [])})


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's shard as it comes out of a model. module: its parameters under names of their own; places: such a name →
    where the model has it; shape: of all rows."""

    homes: Homes
    output: OutputShard
    embedding: EmbeddingShard | None
    module: nn.Module
    places: Mapping[str, Sequence[Place]]
    shapes: Mapping[str, torch.Size]

    def has(self, group: Sequence[Place]) -> bool:
        """Are these places, which hold one parameter, of the shard?"""
        return any(tuple(place) in own for own in self.places.values() for place in group)


def cut(
    problem: Problem,
    rank: int,
    layers: dict[int, nn.Module],
    count: int,
    loss: object,
    tied: Sequence[Sequence[Place]],
    device: torch.device,
) -> Shard:
    """Cut this rank's shard out of `layers`, in which the layers of `Sharded.layers` are; what is left of these is there
    afterwards. count: of the model's layers. tied: groups of places that hold one parameter. Raises BadInput."""
    how = Sharded.of(problem)
    assert how is not None
    homes = Homes(rank, problem.ranks, model_stages(problem), problem.routes, how.barriers)
    last = count - 1
    path, entropy = recognised(layers[last], loss, last)
    linear = layers[last].get_submodule(path)
    assert isinstance(linear, nn.Linear)
    rows = shard_rows(linear.out_features, problem.ranks, rank)
    module = nn.Module()
    places: dict[str, list[Place]] = {"weight": [(last, _inside(path, "weight"))]}
    shapes = {"weight": linear.weight.shape}
    module.weight = _cut(linear.weight, rows, device)
    if linear.bias is not None:
        module.bias, shapes["bias"] = _cut(linear.bias, rows, device), linear.bias.shape
        places["bias"] = [(last, _inside(path, "bias"))]
    if how.embedding:
        raise BadInput("run does not know a sharded input embedding yet")
    own = {place for group in places.values() for place in group}
    for group in tied:
        both = own & {(i, name) for i, name in group}
        if both:
            (i, name), other = min(both), next((one for one in group if tuple(one) not in own), None)
            if other is not None:
                raise BadInput(
                    f"layer {i}: its {name} is sharded over the vocabulary and tied to layer {other[0]}'s {other[1]}, which is "
                    "not: shard the input embedding too (passes VE and VS)"
                )
    output = OutputShard(module.weight, module.bias if linear.bias is not None else None, rows.start, linear.out_features, entropy)
    layers[last] = without_output(layers[last], path)
    return Shard(homes, output, None, module, places, shapes)


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _cut(parameter: nn.Parameter, rows: range, device: torch.device) -> nn.Parameter:
    part = parameter.detach()[rows.start : rows.stop].to(device).clone()
    return nn.Parameter(part, requires_grad=parameter.requires_grad)
