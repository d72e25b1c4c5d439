"""The layers of one rank: they are built, materialised and tied here. No other rank holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from ..build.vocabulary import model_stages
from ..models.model import Place, share, ties
from ..problem import Problem
from ..util.errors import BadInput
from .torch_private import children_of

Builder = Callable[[list[int]], Sequence[nn.Module]]
Layers = nn.Sequential | nn.ModuleList | Sequence[nn.Module] | Builder


def layer_counts(problem: Problem, layers: int | None = None) -> tuple[int, ...]:
    """How many of the model's layers each stage holds: one each where the problem says nothing and there are as many.
    layers: of the whole model, where that is known. Raises BadInput where the problem does not say, or says something else.
    """
    stages = model_stages(problem)
    if not problem.layers:
        if layers not in (None, stages):
            raise BadInput(
                f"schedule: it does not say which of {layers} layers make its {stages} stages: its problem names none"
            )
        return (1,) * stages
    if len(problem.layers) != stages or min(problem.layers) < 1:
        raise BadInput(f"schedule: layers {problem.layers} do not name {stages} stages of at least one layer")
    if layers is not None and sum(problem.layers) != layers:
        raise BadInput(f"schedule: it is for {sum(problem.layers)} layers, but the model has {layers}")
    return problem.layers


def listed(layers: Layers) -> dict[str, nn.Module] | None:
    """Name in the model's state dict → layer; None where `layers` is a builder. Raises BadInput."""
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        return {name: layer for name, layer in children_of(layers).items() if layer is not None}  # one may be there twice
    if isinstance(layers, nn.Module):
        raise BadInput(f"layers: a {type(layers).__name__} has no order: give an nn.Sequential, a list, or a builder")
    if isinstance(layers, Sequence):
        return {str(i): layer for i, layer in enumerate(layers)}
    return None


def build(builder: Builder, numbers: list[int], device: torch.device) -> dict[int, nn.Module]:
    """The layers that a builder makes when it is called with `numbers`, by number, on `device`. Raises BadInput."""
    made = list(builder(numbers))
    if len(made) != len(numbers):
        raise BadInput(f"layers: the builder made {len(made)} layers, not {len(numbers)}")
    return {i: layer.to(device) for i, layer in zip(numbers, made, strict=True)}


def materialise(
    layers: dict[int, nn.Module], device: torch.device, init: Callable[[int, nn.Module], None] | None, seed: int
) -> dict[int, nn.Module]:
    """The same layers on `device`. Layers on the meta device get memory, which `init(number, layer)` fills, or every
    module's own `reset_parameters`, with random numbers that (seed, number) fix. Raises BadInput."""
    shared = ties(layers.items())
    for i, layer in layers.items():
        if any(t.is_meta for t in (*layer.parameters(), *layer.buffers())):
            _materialise(i, layer, device, init, seed)
        else:
            layer.to(device)
    for group in shared:
        tie(layers, group)
    return layers


def _materialise(
    number: int, layer: nn.Module, device: torch.device, init: Callable[[int, nn.Module], None] | None, seed: int
) -> None:
    layer.to_empty(device=device)
    with torch.random.fork_rng():
        torch.manual_seed(seed * 1_000_003 + number)
        if init is not None:
            init(number, layer)
            return
        for name, module in layer.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
                where = f"layer {number}{'.' if name else ''}{name}"
                raise BadInput(f"{where}: {type(module).__name__} has no reset_parameters: give Pipeline an init function")


def tie(layers: dict[int, nn.Module], group: Iterable[Place]) -> nn.Parameter | None:
    """Let all places of `group` that are in `layers` hold the parameter of the first of them. That parameter; None where
    none of them is."""
    here = [(i, name) for i, name in group if i in layers]
    if not here:
        return None
    number, name = here[0]
    try:
        parameter = layers[number].get_parameter(name)
        share(layers, here[1:], parameter)
    except AttributeError:
        raise BadInput(f"layer {number}: it has no parameter '{name}', which is tied") from None
    return parameter
