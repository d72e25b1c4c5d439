"""`Model`: a model as a sequence of layers; and `Setting`: what a model's name may change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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

    layers: builders; each makes one layer, with the same weights on every rank. A layer takes a pytree of tensors and
    returns one. layer_names: a name for each. batch(microbatch, step): (inputs, targets), pytrees of tensors. loss(output,
    target): a mean, one number. tied: groups of places that hold the same parameter; its initial values are those of the
    group's first place. parallelize(stage, mesh): spreads a stage over the dimensions of a mesh other than "pp" (see
    `exec.Pipeline`); None: not possible. work(rank, piece, pieces): runs a piece of the feature `work` beside the step.
    optimizer(parameters): makes one torch optimizer, or a list, for a rank's parameters, named `parameters.names`.
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
        """The layers with these numbers (None: all). Tied places among them share their parameter. A tied parameter has the
        initial values of its group's first place, also if that place is not among these layers."""
        numbers = list(range(len(self.layers))) if layers is None else list(layers)
        made = {i: self.layers[i]() for i in numbers}
        for group in self.tied:
            if any(i in made for i, _ in group):
                first, path = group[0]
                owner = made[first] if first in made else self.layers[first]()
                share(made, group, owner.get_parameter(path))
        return [made[i] for i in numbers]

    def in_steps_of(self, microbatches: int, sizes: Sequence[int] = ()) -> Model:
        """The same model for steps of `microbatches` microbatches (over all pipelines). A model whose batches come from an
        iterable needs the number to know which item a step begins with. sizes: rows of each microbatch, if they differ from
        the model's. Raises BadInput."""
        batch = self.batch.of(0 if sizes else microbatches) if isinstance(self.batch, Items) else self.batch
        return replace(self, batch=Sized.of(batch, sizes, self.name) if sizes else batch)


def ties(layers: Iterable[tuple[int, nn.Module]]) -> tuple[tuple[Place, ...], ...]:
    """Groups of places that hold the same parameter, for those with more than one place. layers: (number, layer)."""
    places: dict[int, list[Place]] = {}
    for i, layer in layers:
        for name, parameter in layer.named_parameters():
            places.setdefault(id(parameter), []).append((i, name))
    return tuple(tuple(group) for group in places.values() if len(group) > 1)


def share(layers: Mapping[int, nn.Module], group: Iterable[Place], parameter: nn.Parameter) -> None:
    """Set `parameter` at all places of `group` that are in `layers`."""
    for i, name in group:
        if i in layers:
            parent, _, last = name.rpartition(".")
            setattr(layers[i].get_submodule(parent), last, parameter)


@contextmanager
def in_eval_mode(*modules: nn.Module) -> Iterator[None]:
    """Inside, modules are in eval mode, but for those of bitsandbytes, which would pack their weights; then as before."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for part, _ in modes:
            part.training &= any(kind.__module__.startswith("bitsandbytes.") for kind in type(part).__mro__)
        yield
    finally:
        for part, mode in modes:
            part.training = mode


def seeded(seed: int, layer: int, build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """A builder whose random numbers (seed, layer) fix; torch's generator is left as it was."""

    def make() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed * 1_000_003 + layer)
            return build()

    return make


def language_model(
    name: str, seed: int, builders: Sequence[Callable[[], nn.Module]], batch: Callable[[int, int], Any], tied: Sequence[str]
) -> Model:
    """A model of an embedding, blocks and a head that predicts tokens. tied: the names of the shared weight in embedding and
    head; (): they share none."""
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
    """The settings `@key=value,…` after a name: sequences a microbatch, length, blocks, type. None: as published."""

    batch: int | None = None
    length: int | None = None
    layers: int | None = None
    dtype: str | None = None

    def named(self, name: str) -> str:
        """The name that gives this model again."""
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
