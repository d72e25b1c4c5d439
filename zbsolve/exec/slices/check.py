"""Can a model run slice by slice? Each layer runs a tiny input whole and in slices, and must say the same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...models.auxiliary import auxiliary_losses
from ...util.errors import BadInput
from ...util.own_code import raised
from ..backward.replay import torch_random_kept
from ..torch_private import BatchNorm, tree_leaves, tree_map, without_modes
from .sequence import counted, cut_sequence, offsets, share_of_loss, slice_shares
from .store import SliceStore

MAX_TOKENS = 32  # of the tiny input that a stage's layers are tried with
LIMIT = 1e-5  # of the largest output: layers are checked in float64, but some compute a part in float32


def check_stage(
    layers: Sequence[nn.Module], first: int, loss: Callable[[Any, Any], Tensor] | None, batch: tuple[Any, Any], tokens: int
) -> None:
    """`check_layers` of a stage's layers, and `check_loss` of its loss where it has one, on a tiny input made of `batch`:
    activations and targets of a sequence's first slice. tokens: of the whole sequence. Nobody outside counts its bytes.
    Raises BadInput."""
    with without_modes():
        x, targets = (tree_map(partial(_tiny, min(tokens, MAX_TOKENS)), one) for one in batch)
        output = check_layers(layers, x, first)
        if loss is not None:
            check_loss(loss, output, targets, ignored_label(loss))


def ignored_label(loss: Any) -> int:
    """The label that a loss leaves out: what it says, or torch's own."""
    return int(getattr(loss, "ignore_index", -100))


def _tiny(tokens: int, one: Any) -> Any:
    """The first sample of a tensor (batch, length, …), cut or repeated to a length."""
    if not isinstance(one, Tensor) or one.dim() < 2:
        return one
    times = -(-tokens // max(one.shape[1], 1))
    return torch.cat([one[:1].detach()] * times, 1)[:, :tokens]


def check_layers(layers: Sequence[nn.Module], sample: Any, first: int = 0) -> Any:
    """The layers' output for `sample`, in float64. Raises BadInput that names the first layer whose output in slices is not
    its output for the whole sequence: it mixes positions elsewhere than in `sliced_attention`, or takes them from elsewhere
    than `slice_offset`.

    sample: a pytree of tensors (batch, length, …), 4 tokens or more; long enough for whatever reaches from one token to
    another. first: the number of the first layer. Each layer is copied, in evaluation (random layers draw other numbers for
    slices), with noise on parameters that are constant: a convolution that starts at 0 would not be seen.
    """
    x = _exact(sample)
    for number, layer in enumerate(layers, first):
        x = _check_layer(layer, x, f"layer {number} ({type(layer).__name__})")
    return x


def check_loss(loss: Callable[[Any, Any], Tensor], output: Any, targets: Any, ignore_index: int = -100) -> None:
    """Raises BadInput where the loss of a sequence is not the mean over its labels, so that its slices' losses would not sum
    up to it. output: as `check_layers` gives it; noise is added, because a model that has learned nothing may give every
    label one loss. targets: a pytree of tensors (batch, length, …)."""
    lengths = _lengths(targets, "loss")
    output = tree_map(lambda one: one + _noise(one) if isinstance(one, Tensor) else one, output)
    parts = list(zip(cut_sequence(output, lengths, "loss"), cut_sequence(targets, lengths, "loss"), strict=True))
    shares = slice_shares([counted(target, ignore_index) for _, target in parts])
    with torch.no_grad():
        whole = loss(output, targets)
        found = sum(share_of_loss(loss(*part), share) for part, share in zip(parts, shares, strict=True))
    if not torch.allclose(torch.as_tensor(found), whole, rtol=LIMIT, atol=LIMIT):
        raise BadInput(
            f"slices: the loss is {float(whole):.6g} whole and {float(found):.6g} in slices: it is no mean of labels"
        )


def _check_layer(layer: nn.Module, x: Any, name: str) -> Any:
    if any(isinstance(one, BatchNorm) and one.training for one in layer.modules()):
        raise BadInput(f"slices: {name}: a batch norm mixes positions")
    lengths = _lengths(x, name)
    tried = _copied(layer)
    with torch.no_grad(), torch_random_kept():
        for given in (tree_map(_alike, x), x):
            with auxiliary_losses() as extra:
                whole = tried(given)
            if extra.total is not None:
                raise BadInput(f"slices: {name}: adds to the loss by auxiliary_loss, which is of a whole sequence")
            found = _in_slices(tried, given, lengths, name)
            for leaf, part in zip(cut_sequence(whole, lengths, name), found, strict=True):
                _compare(leaf, part, name)
    return whole


def _alike(one: Any) -> Any:
    """The first token everywhere: experts of which each takes so many tokens of a sequence get too many."""
    return one[:1, :1].expand_as(one).clone() if isinstance(one, Tensor) else one


def _in_slices(layer: nn.Module, x: Any, lengths: Sequence[int], name: str) -> list[Any]:
    store, found = SliceStore(len(lengths)), []
    try:
        for i, (part, offset) in enumerate(zip(cut_sequence(x, lengths, name), offsets(lengths), strict=True)):
            with store.forward(0, i, offset):
                found.append(layer(part))
    except Exception as error:
        raise BadInput(f"slices: {name}: {raised(error)}") from error
    return found


def _compare(whole: Any, part: Any, name: str) -> None:
    pairs = [tree_leaves(one) for one in (whole, part)]
    if len(pairs[0]) != len(pairs[1]):
        raise BadInput(f"slices: {name}: makes another number of tensors in slices")
    for a, b in zip(*pairs, strict=True):
        if not isinstance(a, Tensor):
            continue
        if a.shape != b.shape:
            raise BadInput(f"slices: {name}: makes {tuple(b.shape)} of a slice in place of {tuple(a.shape)}")
        gap, most = ((b - a).abs().max().item(), a.abs().max().item()) if a.numel() else (0, 0)
        if not gap <= LIMIT * most:
            raise BadInput(
                f"slices: {name}: its output differs by {gap:.2g} (of {most:.2g}) in slices: it mixes positions elsewhere "
                "than in sliced_attention, or does not count them from slice_offset"
            )


def _lengths(x: Any, name: str) -> list[int]:
    """Three slices that differ in length."""
    found = {leaf.shape[1] if leaf.dim() > 1 else 0 for leaf in tree_leaves(x) if isinstance(leaf, Tensor)}
    if len(found) != 1 or min(found) < 4:
        raise BadInput(
            f"slices: {name}: tensors (batch, length, …) of one length, 4 or more, are needed, got {sorted(found)}"
        )
    length = min(found)
    return [length // 2, length - length // 2 - length // 4, length // 4]


def _copied(layer: nn.Module) -> nn.Module:
    """The layer in float64 and in evaluation; no parameter is constant."""
    found = copy.deepcopy(layer).double().eval()
    for one in found.parameters():
        if one.numel() and bool((one == one.flatten()[0]).all()):
            one.data.add_(_noise(one), alpha=0.1)
    return found


def _noise(one: Tensor) -> Tensor:
    return torch.randn(one.shape, generator=torch.Generator().manual_seed(0), dtype=one.dtype).to(one.device)


def _exact(value: Any) -> Any:
    return tree_map(lambda one: one.double() if isinstance(one, Tensor) and one.is_floating_point() else one, value)
