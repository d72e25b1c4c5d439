"""The layers of one rank: building them, filling them with values, and tying parameters. No other rank holds them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..build.untrained import untrained_stages
from ..models.model import Place, share, ties
from ..problem import Problem
from ..util.errors import BadInput
from .base.torch_private import children_of
from .base.values import PLAIN_TYPES, local

Builder = Callable[[list[int]], Sequence[nn.Module]]
Init = Callable[[int, nn.Module], None]
Layers = nn.Sequential | nn.ModuleList | Sequence[nn.Module] | Builder
BYTE = 0xA5  # every byte of whole numbers and booleans


def layer_counts(problem: Problem, layers: int | None = None) -> tuple[int, ...]:
    """How many of the model's layers each stage holds; one each if the problem does not say and there are as many layers as
    stages. layers: of the whole model, if known. Raises BadInput where the problem does not say, or does not fit."""
    stages = problem.model_stages
    if not problem.layers:
        if layers not in (None, stages):
            raise BadInput(f"schedule: its problem does not say which of {layers} layers make its {stages} stages")
        return (1,) * stages
    if len(problem.layers) != stages or min(problem.layers) < 1:
        raise BadInput(f"schedule: layers {problem.layers} do not name {stages} stages of at least one layer")
    if layers is not None and sum(problem.layers) != layers:
        raise BadInput(f"schedule: it is for {sum(problem.layers)} layers, but the model has {layers}")
    return problem.layers


def listed(layers: Layers) -> dict[str, nn.Module] | None:
    """Name in the model's state dict → layer; None if `layers` is a builder. Raises BadInput."""
    if isinstance(layers, nn.Sequential | nn.ModuleList):
        # also one that occurs twice
        return {name: layer for name, layer in children_of(layers).items() if layer is not None}
    if isinstance(layers, nn.Module):
        raise BadInput(f"layers: a {type(layers).__name__} has no order; give nn.Sequential, list, builder or layers_of it")
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
    layers: dict[int, nn.Module], device: torch.device, init: Init | None, seed: int, tied: Iterable[Sequence[Place]] = ()
) -> dict[int, nn.Module]:
    """Move the layers to `device`. Tensors on the meta device get memory, filled by `init(number, layer)` or by every
    module's `reset_parameters`, with random numbers that depend on (seed, number); all others keep their values. Buffers
    that `init` leaves are filled by their module's `reset_parameters`. tied: groups of places (layer, name) in the whole
    model with the same parameter; the first place gives its value. Raises BadInput naming a parameter or buffer that nothing
    fills."""
    shared = ties(layers.items())
    empty = []
    for i, layer in layers.items():
        if any(t.is_meta for t in _tensors(layer).values()):
            empty.append(i)
            _materialise(i, layer, device, init, seed)
        else:
            layer.to(device)
    for group in shared:
        tie(layers, group)
    given = [(number, name) for group in (*tied, *shared) for number, name in group[1:]]
    for i in empty:
        _check_filled(i, layers[i], {name for number, name in given if number == i}, init is None)
    return layers


def _tensors(module: nn.Module, recurse: bool = True) -> dict[str, Tensor]:
    """Name → parameter or buffer, persistent or not."""
    return {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}


def _materialise(number: int, layer: nn.Module, device: torch.device, init: Init | None, seed: int) -> None:
    kept = {name: tensor.detach() for name, tensor in _tensors(layer).items() if not tensor.is_meta}
    _to_empty(layer, device)
    for name, tensor in _tensors(layer).items():
        if name in kept:
            tensor.detach().copy_(kept[name])
        else:
            mark_unset(tensor)
    with torch.random.fork_rng():
        torch.manual_seed(seed * 1_000_003 + number)
        if init is None:
            _reset_all(number, layer, kept)
            return
        init(number, layer)
        for module in layer.modules():
            unset = [name for name, buffer in module.named_buffers(recurse=False) if is_unset(buffer)]
            reset = getattr(module, "reset_parameters", None)
            if unset and callable(reset):
                here = _tensors(module).items()
                with _as_they_are({name: tensor for name, tensor in here if name not in unset}):
                    reset()


def _to_empty(layer: nn.Module, device: torch.device) -> None:
    """torch's `to_empty`, after which places of the layer that shared a tensor still share one."""
    names: dict[int, list[str]] = {}
    for tensors in (layer.named_parameters(remove_duplicate=False), layer.named_buffers(remove_duplicate=False)):
        for name, tensor in tensors:
            names.setdefault(id(tensor), []).append(name)
    layer.to_empty(device=device)
    for first, *further in names.values():
        owner, _, last = first.rpartition(".")
        share({0: layer}, ((0, name) for name in further), getattr(layer.get_submodule(owner), last))


def _reset_all(number: int, layer: nn.Module, kept: Collection[str]) -> None:
    """Let every module fill its tensors, except those in `kept`. Raises BadInput for a module that cannot."""
    with _as_they_are({name: tensor for name, tensor in _tensors(layer).items() if name in kept}):
        for name, module in layer.named_modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
            elif any(map(is_unset, _tensors(module, recurse=False).values())):
                where = f"layer {number}{'.' if name else ''}{name}"
                raise BadInput(f"{where}: {type(module).__name__} has no reset_parameters: give Pipeline an init function")


@contextmanager
def _as_they_are(tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """At the end, these tensors have their values from the start."""
    before = [tensor.detach().clone() for tensor in tensors.values()]
    yield
    for tensor, value in zip(tensors.values(), before, strict=True):
        tensor.detach().copy_(value)


def _check_filled(number: int, layer: nn.Module, given: Collection[str], by_modules: bool) -> None:
    """Raise BadInput naming a parameter or buffer of the layer that nothing has filled. given: names of parameters that get
    their values from another place."""
    buffers = dict(layer.named_buffers())
    for name, tensor in _tensors(layer).items():
        if name in given or not is_unset(tensor):
            continue
        what, how = "buffer" if name in buffers else "parameter", "fill it there"
        owner = layer.get_submodule(name.rpartition(".")[0])
        left = f"{type(owner).__name__}.reset_parameters leaves" if by_modules else "init leaves"
        if by_modules:
            how = "fill it there, or give Pipeline an init function"
        if what == "buffer":
            how += ", or make it with device='cpu', then it keeps its values"
        raise BadInput(f"layer {number}.{name}: {left} this {what} of the meta device without values: {how}")


def tie(layers: dict[int, nn.Module], group: Iterable[Place]) -> nn.Parameter | None:
    """Give all places of `group` that are in `layers` the parameter of the first of them. Returns it; None where none of
    them is there."""
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


def layer_numbers(counts: Sequence[int], stages: Sequence[int]) -> list[int]:
    """The numbers of the layers of `stages`. counts: how many each stage has."""
    return [i for s in stages for i in range(sum(counts[:s]), sum(counts[: s + 1]))]


def mark_unset(tensor: Tensor) -> None:
    """Fill a tensor with a value that `is_unset` recognizes. Tensor subclasses (except DTensors) are left out."""
    here = local(tensor.detach())
    if type(here) not in PLAIN_TYPES:
        return
    if here.dtype is torch.bool:
        here.view(torch.uint8).fill_(BYTE)
    elif here.is_floating_point() or here.is_complex():
        here.fill_(float("nan"))
    else:
        here.fill_(_whole(here.dtype))


def is_unset(tensor: Tensor) -> bool:
    """Does the tensor still have a number that `mark_unset` wrote? One-byte integers may have it by chance, so of these all
    numbers must."""
    here = local(tensor.detach())
    if type(here) not in PLAIN_TYPES or here.is_meta or not here.numel():
        return False
    if here.dtype is torch.bool:
        return bool((here.view(torch.uint8) == BYTE).any())
    if here.is_floating_point() or here.is_complex():
        here = here.to(torch.float32) if here.dtype.itemsize == 1 else here
        return bool(here.isnan().any())
    same = here == _whole(here.dtype)
    return bool(same.all() if here.dtype.itemsize == 1 else same.any())


def _whole(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([BYTE] * dtype.itemsize), "little", signed=torch.iinfo(dtype).min < 0)


def forwards_alone(problem: Problem) -> bool:
    """Has the step no backward at all? Then it trains nothing, whatever the model."""
    return untrained_stages(problem) == problem.stages


def check_untrained(problem: Problem, counts: Sequence[int], stages: Sequence[int], layers: Mapping[int, nn.Module]) -> None:
    """Raise BadInput naming a trained parameter on one of these stages where the schedule has no backward. counts: layers of
    every stage; layers: those of these stages, by number."""
    front = untrained_stages(problem) % problem.stages  # 0 also where no stage trains
    for i in layer_numbers(counts, [s for s in stages if s < front]):
        for name, parameter in layers[i].named_parameters():
            if parameter.requires_grad:
                raise BadInput(
                    f"layer {i}.{name}: is trained, but the schedule has no backward of its stage: it was made for layers "
                    f"that train nothing there (requires_grad_(False), or solve again)"
                )
