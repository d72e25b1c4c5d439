"""A model as a sequence of layers, and what a model's name may specify."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..util.errors import BadInput
from .losses import CrossEntropy
from .own_batches import Items, Sized

Place = tuple[int, str]  # (layer, name of the parameter inside it)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Model:
    """A model as a sequence of layers.

    layers: functions that each build one layer, with the same initial weights on every rank. A layer maps one value to one:
    any pytree of tensors. layer_names: one name per layer. batch(microbatch, step): inputs and targets, pytrees of tensors.
    loss(output, target): a mean, one number. tied: groups of places that share one parameter; the first place of a group
    provides the initial values. parallelize(stage, mesh): shards a stage over the mesh dimensions other than "pp" (see
    `exec.Pipeline`); None: not available. work(rank, piece, pieces): other work that ranks do during the step.
    optimizer(parameters): builds one torch optimizer, or a list, for a rank's parameters; `parameters.names` are their
    names.
    """

    name: str
    layers: tuple[Callable[[], nn.Module], ...]
    layer_names: tuple[str, ...]
    batch: Callable[[int, int], tuple[Any, Any]]
    loss: Callable[[Any, Any], Tensor]
    tied: tuple[tuple[Place, ...], ...] = ()
    parallelize: Callable[[nn.Module, Any], nn.Module | None] | None = None
    work: Callable[[int, int, int], Any] | None = None
    optimizer: Callable[[Any], Any] | None = None

    def build(self, layers: Sequence[int] | None = None) -> list[nn.Module]:
        """The layers with the numbers `layers` (None: all), tied to each other where several places of a group are included.
        A tied parameter whose first place is not included still starts from that place's initial values."""
        numbers = list(range(len(self.layers))) if layers is None else list(layers)
        made = {i: self.layers[i]() for i in numbers}
        for group in self.tied:
            if any(i in made for i, _ in group):
                first, path = group[0]
                owner = made[first] if first in made else self.layers[first]()
                share(made, group, owner.get_parameter(path))
        return [made[i] for i in numbers]

    def in_steps_of(self, microbatches: int, sizes: Sequence[int] = ()) -> Model:
        """The same model, trained with this many microbatches per step, over all pipelines: where batches come from an
        iterable, this says which item begins a step. sizes: rows of each microbatch, if they differ from the model's own.
        Raises BadInput."""
        batch = self.batch.of(0 if sizes else microbatches) if isinstance(self.batch, Items) else self.batch
        return replace(self, batch=Sized.of(batch, sizes, self.name) if sizes else batch)


def ties(layers: Iterable[tuple[int, nn.Module]]) -> tuple[tuple[Place, ...], ...]:
    """Groups of places that share one parameter, for those that occur in several layers. layers: (number, layer)."""
    places: dict[int, list[Place]] = {}
    for i, layer in layers:
        for name, parameter in layer.named_parameters():
            places.setdefault(id(parameter), []).append((i, name))
    return tuple(tuple(group) for group in places.values() if len(group) > 1)


def share(layers: Mapping[int, nn.Module], group: Iterable[Place], parameter: nn.Parameter) -> None:
    """Make all places of `group` that are in `layers` refer to `parameter`."""
    for i, name in group:
        if i in layers:
            parent, _, last = name.rpartition(".")
            setattr(layers[i].get_submodule(parent), last, parameter)


def seeded(seed: int, layer: int, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A build function whose random numbers depend on (seed, layer) only; torch's generator keeps its state."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed * 1_000_003 + layer)
            return build()

    return make


def language_model(
    name: str, seed: int, builders: Sequence[Callable[[], nn.Module]], batch: Callable[[int, int], Any], tied: Sequence[str]
) -> Model:
    """A model of an embedding, blocks and a head that predicts tokens. tied: the names of the weight that embedding and head
    share, in the first and in the second; () where they share none."""
    last = len(builders) - 1
    return Model(
        name,
        tuple(seeded(seed, i, build) for i, build in enumerate(builders)),
        ("embedding", *(f"block{i}" for i in range(last - 1)), "head"),
        batch,
        CrossEntropy(),
        (((0, tied[0]), (last, tied[1])),) if tied else (),
    )


@dataclass(frozen=True, slots=True)
class Setting:
    """What `@key=value,…` after a name changes: samples per microbatch, their length, blocks, type. None: as published."""

    batch: int | None = None
    length: int | None = None
    layers: int | None = None
    dtype: str | None = None

    def named(self, name: str) -> str:
        """The name that selects this model again."""
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) is not None]
        return f"{name}@{','.join(parts)}" if parts else name


def parse_setting(text: str, spec: str) -> Setting:
    """A Setting from `batch=1,length=512`. Raises BadInput, naming the model `spec`."""
    values: dict[str, Any] = {}
    for part in text.split(",") if text else []:
        key, _, value = part.strip().partition("=")
        if key not in Setting.__dataclass_fields__ or not value:
            raise BadInput(f"model '{spec}': '{part.strip()}' is none of batch=, length=, layers=, dtype=")
        if key == "dtype":
            if value not in DTYPES:
                raise BadInput(f"model '{spec}': dtype '{value}' is none of {', '.join(DTYPES)}")
            values[key] = value
        elif not value.isdecimal() or not 0 < int(value) < 10**9:
            raise BadInput(f"model '{spec}': {key} '{value}' is not a positive whole number")
        else:
            values[key] = int(value)
    return Setting(**values)
