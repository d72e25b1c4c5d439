"""Can a model run slice by slice? Each layer runs a tiny input whole and in slices, forward and backward, and must say the
same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...util.errors import BadInput
from ..backward.replay import torch_random_kept
from ..base.torch_private import BatchNorm, tree_map
from ..base.values import cast
from .comparing import Drawn, compare_far, compared
from .loss import check_loss, counting_of, from_label
from .reach import longer
from .still import Still
from .trial import IGNORED, LAYERS, LOSS, MAX_NUMBERS, MAX_TOKENS, alike, noise, numbers_of, three_lengths, tiny, undisturbed


def check_stage(
    layers: Sequence[nn.Module],
    first: int,
    loss: Callable[[Any, Any], Tensor] | None,
    batch: tuple[Any, Any],
    tokens: int,
    looks: Collection[str] = (LAYERS, LOSS),
) -> Any:
    """`check_layers` of a stage's layers, and `check_loss` of its loss where that is looked at, on a tiny input made of
    `batch`: activations and targets of a slice. tokens: of the whole sequence. looks: `LAYERS`, `LOSS` and `IGNORED`: the
    loss, with labels that do not count. Nobody outside counts its bytes, and autocast is off. Returns a few tokens' output
    without numbers, as `SeenTargets` takes it. Raises BadInput."""
    length = min(tokens, MAX_TOKENS)
    with undisturbed(batch[0]):
        output = check_layers(layers, tree_map(partial(tiny, length), batch[0]), first, longer(layers, batch[0], tokens))
        if loss is not None and {LOSS, IGNORED} & set(looks):
            targets = from_label(batch[1], counting_of(loss).ignored)
            more = partial(tiny, min(tokens, max(length, MAX_NUMBERS // numbers_of(output))))
            check_loss(loss, tree_map(more, output), tree_map(more, targets), IGNORED in looks)
    return tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, output)


def check_layers(layers: Sequence[nn.Module], sample: Any, first: int = 0, far: Any = None) -> Any:
    """The layers' output for `sample`, in float64. Raises BadInput that names the first layer whose output or gradients in
    slices are not those of the whole sequence: it mixes positions elsewhere than in `sliced_attention`, takes them from
    elsewhere than `slice_offset`, or keeps something from one call to the next.

    sample: a pytree of tensors (batch, length, …), 4 tokens or more. far: with more tokens, for what reaches further (see
    `reach`), or None. first: the number of the first layer. Each layer is copied, one after the other, in float64, with
    noise on parameters that are constant: a convolution that starts at 0 would not be seen. The copy and its gradient
    take 16 bytes a parameter. It is checked in evaluation, and in training too where it is there; where it draws
    random numbers in training, as it is for what it refuses, and with all of them alike for what it computes.
    """
    x = cast(sample, torch.float64)
    for number, layer in enumerate(layers, first):
        x, far = (
            cast(one, torch.float64) for one in _check_layer(layer, x, far, f"layer {number} ({type(layer).__name__})")
        )
    return x


def _check_layer(layer: nn.Module, x: Any, far: Any, name: str) -> tuple[Any, Any]:
    """The layer's outputs in evaluation."""
    lengths, kind = three_lengths(x, name), _kind_of(layer, x)
    given = [cast(one, kind) for one in (tree_map(alike, x), x)]
    tried = _copied(layer, kind, name).eval()
    y, beyond = compared(tried, given, lengths, name), compare_far(tried, cast(far, kind), name)
    if any(one.training for one in layer.modules()):
        tried = _copied(layer, kind, name)
        try:
            compared(tried, given, lengths, name)
        except Drawn:
            tried.zero_grad()
            _compare_held(tried, given, lengths, name)
        with Still():
            compare_far(tried, cast(far, kind), name)
    return y, beyond


def _compare_held(tried: nn.Module, given: list[Any], lengths: Sequence[int], name: str) -> None:
    """`compared`, while random numbers are held. Raises BadInput where some are not."""
    try:
        with Still():
            compared(tried, given, lengths, name)
    except Drawn:
        raise BadInput(
            f"slices: {name}: draws random numbers in training that cannot be held: nobody can see what its slices do"
        ) from None


def _kind_of(layer: nn.Module, x: Any) -> torch.dtype:
    """The type that a layer is checked in: some kernels know no float64."""
    try:
        with torch.no_grad(), torch_random_kept():
            _copied(layer, torch.float64, "").eval()(x)
    except Exception:  # what fails in both is told when it is checked
        return torch.float32
    return torch.float64


def _copied(layer: nn.Module, kind: torch.dtype, name: str) -> nn.Module:
    """The layer in this type. No parameter is constant, and none has a gradient. A batch norm that runs in training raises
    BadInput, whatever else is drawn there."""
    found = copy.deepcopy(layer)
    for one in (*found.parameters(), *found.buffers()):
        if one.is_floating_point():  # `Module.to` would take complex ones for real
            one.data = one.data.to(kind)
    for one in found.parameters():
        if one.numel() and bool((one == one.flatten()[0]).all()):
            one.data.add_(noise(one), alpha=0.1)
    found.zero_grad()
    for path, part in found.named_modules():
        if isinstance(part, BatchNorm):
            part.register_forward_pre_hook(partial(_refuse_batches, f"slices: {name}: a batch norm mixes positions", path))
    return found


def _refuse_batches(line: str, path: str, module: nn.Module, args: Any) -> None:
    if module.training:
        raise BadInput(f"{line}: '{path}'" if path else line)
