"""Can a model run slice by slice? Each layer runs a tiny input whole and in slices, forward and backward, and must say the
same."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.auxiliary import auxiliary_losses
from ...util.errors import BadInput
from ..backward.replay import torch_random_kept
from ..backward.values import cast
from ..torch_private import BatchNorm, tree_leaves, tree_map, without_modes
from .loss import check_loss, from_label, ignored_label
from .sequence import cut_sequence, offsets
from .store import SliceStore
from .trial import IGNORED, LAYERS, LIMIT, LOSS, MAX_TOKENS, naming, noise, three_lengths, tiny
from .where import mixing_part

# Of the largest number. Layers are checked in float64, but some compute a part in float32, or run in nothing else.
LIMITS = {torch.float64: LIMIT, torch.float32: 1e-3}
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}  # what is left where everything cancels
SMALL = 1e-2  # of a layer's largest gradient: what rounding leaves of a parameter that has none is compared with that


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
    loss, with labels that do not count. Nobody outside counts its bytes. Returns a few tokens' output without numbers, as
    `check_labels` takes it. Raises BadInput."""
    length = min(tokens, MAX_TOKENS)
    with without_modes():
        output = check_layers(layers, tree_map(partial(tiny, length), batch[0]), first)
        if loss is not None and {LOSS, IGNORED} & set(looks):
            targets = from_label(batch[1], ignored_label(loss))
            check_loss(loss, output, tree_map(partial(tiny, length), targets), IGNORED in looks)
    return tree_map(lambda one: one.to("meta") if isinstance(one, Tensor) else one, output)


def check_layers(layers: Sequence[nn.Module], sample: Any, first: int = 0) -> Any:
    """The layers' output for `sample`, in float64. Raises BadInput that names the first layer whose output or gradients in
    slices are not those of the whole sequence: it mixes positions elsewhere than in `sliced_attention`, takes them from
    elsewhere than `slice_offset`, or keeps something from one call to the next.

    sample: a pytree of tensors (batch, length, …), 4 tokens or more; long enough for whatever reaches from one token to
    another. first: the number of the first layer. Each layer is copied, with noise on parameters that are constant: a
    convolution that starts at 0 would not be seen. It is checked in evaluation, and in training too where it is there,
    with and without dropout; of one that draws random numbers there, only what it refuses.
    """
    x = cast(sample, torch.float64)
    for number, layer in enumerate(layers, first):
        x = cast(_check_layer(layer, x, f"layer {number} ({type(layer).__name__})"), torch.float64)
    return x


def _check_layer(layer: nn.Module, x: Any, name: str) -> Any:
    """The layer's output in evaluation."""
    if any(isinstance(one, BatchNorm) and one.training for one in layer.modules()):
        raise BadInput(f"slices: {name}: a batch norm mixes positions")
    lengths, kind = three_lengths(x, name), _kind_of(layer, x)
    given = [cast(one, kind) for one in (tree_map(_alike, x), x)]
    y = _compared(_copied(layer, kind).eval(), given, lengths, name)
    if any(one.training for one in layer.modules()):
        _compared(_copied(layer, kind), given, lengths, name)
        if any(isinstance(one, DROPOUTS) for one in layer.modules()):
            _compared(_without_dropout(_copied(layer, kind)), given, lengths, name)
    return y


def _without_dropout(layer: nn.Module) -> nn.Module:
    """The layer, whose dropouts drop nothing: what else it does in training can be compared then."""
    for one in layer.modules():
        if isinstance(one, DROPOUTS):
            one.p = 0.0
    return layer


def _kind_of(layer: nn.Module, x: Any) -> torch.dtype:
    """The type that a layer is checked in: some kernels know no float64."""
    try:
        with torch.no_grad(), torch_random_kept():
            _copied(layer, torch.float64).eval()(x)
    except Exception:  # what fails in both is told when it is checked
        return torch.float32
    return torch.float64


class _Ran(NamedTuple):
    """A forward of microbatches, or of one's slices. inputs: leaves of autograd's graphs; outputs: with their graphs."""

    inputs: list[Any]
    outputs: list[Any]


def _compared(tried: nn.Module, given: list[Any], lengths: Sequence[int], name: str) -> Any:
    """The output of the last of the microbatches `given`. Raises BadInput where it, or a gradient, is another in slices."""
    store, count = SliceStore(len(lengths)), range(len(lengths))
    with torch.enable_grad(), torch_random_kept(), naming(name):
        whole = _whole(tried, given, name)
        again = [_seeded(tried, given, name, seed) for seed in (0, 0, 1)]
        if not _alike_numbers(again[0].outputs, again[1].outputs):
            raise BadInput(f"slices: {name}: keeps something from call to call: the same input gives another output")
        drawn = not _same(again[0].outputs, again[2].outputs)
        if drawn and not any(one.training for one in tried.modules()):
            raise BadInput(f"slices: {name}: draws random numbers in evaluation too: nobody can see what its slices do")
        parts = [_Ran([], []) for _ in given]
        cuts = [cut_sequence(one, lengths, name) for one in given]
        for i, offset in enumerate(offsets(lengths)):  # microbatches take turns: what a layer keeps would be another's
            for m, ran in enumerate(parts):
                with store.forward(m, i, offset):
                    _forward(tried, cuts[m][i], ran)
    if drawn:
        return _constant(whole.outputs[-1])
    for m, (y, ran) in enumerate(zip(whole.outputs, parts, strict=True)):
        for leaf, part in zip(cut_sequence(y, lengths, name), ran.outputs, strict=True):
            _compare("output", leaf, part, name, partial(_first_in, tried, given[m], cuts[m], lengths))
    seeds = [tree_map(lambda one: noise(one) if isinstance(one, Tensor) else one, y) for y in whole.outputs]
    with naming(name):
        for y, seed in zip(whole.outputs, seeds, strict=True):
            _backward(y, seed)
        wanted = _taken(tried)
        for i in reversed(count):
            for m, ran in enumerate(parts):
                with store.backward(m, i):
                    _backward(ran.outputs[i], cut_sequence(seeds[m], lengths, name)[i])
    for x, ran in zip(whole.inputs, parts, strict=True):
        for leaf, part in zip(cut_sequence(_gradients(x), lengths, name), ran.inputs, strict=True):
            _compare("input's gradient", leaf, _gradients(part), name)
    _compare("parameters' gradient", wanted, _taken(tried), name)
    return _constant(whole.outputs[-1])


def _first_in(tried: nn.Module, x: Any, cuts: Sequence[Any], lengths: Sequence[int]) -> str:
    """The part of the layer that mixes positions, for a message."""
    store = SliceStore(len(lengths))

    def run(i: int, offset: int) -> None:
        with store.forward(0, i, offset):
            tried(_constant(cuts[i]))

    each = [partial(run, i, offset) for i, offset in enumerate(offsets(lengths))]
    limit = max(LIMITS.get(one.dtype, 0.0) for one in [*tried.parameters(), torch.zeros(0, dtype=torch.float64)])
    return mixing_part(tried, lengths, lambda: tried(_constant(x)), each, limit)


def _seeded(tried: nn.Module, given: list[Any], name: str, seed: int) -> _Ran:
    torch.manual_seed(seed)
    return _whole(tried, given, name)


def _whole(tried: nn.Module, given: list[Any], name: str) -> _Ran:
    ran = _Ran([], [])
    for x in given:
        with auxiliary_losses() as extra:
            _forward(tried, x, ran)
        if extra.total is not None:
            raise BadInput(f"slices: {name}: adds to the loss by auxiliary_loss, which is of a whole sequence")
    return ran


def _forward(tried: nn.Module, x: Any, ran: _Ran) -> None:
    leaves = tree_map(
        lambda one: one.detach().requires_grad_(one.is_floating_point()) if isinstance(one, Tensor) else one, x
    )
    ran.inputs.append(leaves)
    # Copies: a layer may write into what it is given.
    ran.outputs.append(tried(tree_map(lambda one: one.clone() if isinstance(one, Tensor) else one, leaves)))


def _backward(y: Any, seed: Any) -> None:
    pairs = zip(tree_leaves(y), tree_leaves(seed), strict=True)
    rows = [(one, by) for one, by in pairs if isinstance(one, Tensor) and one.requires_grad]
    if rows:
        torch.autograd.backward([one for one, _ in rows], [by for _, by in rows])


def _gradients(x: Any) -> Any:
    """Of the leaves x, 0 where there is none."""
    return tree_map(lambda one: _gradient(one) if isinstance(one, Tensor) else one, x)


def _gradient(one: Tensor) -> Tensor:
    return torch.zeros_like(one) if one.grad is None else one.grad


def _taken(tried: nn.Module) -> list[Tensor]:
    """The gradients of the parameters, which have none afterwards."""
    found = [_gradient(one) for one in tried.parameters()]
    tried.zero_grad()
    return found


def _alike(one: Any) -> Any:
    """The first token everywhere: experts of which each takes so many tokens of a sequence get too many."""
    return one[:1, :1].expand_as(one).clone() if isinstance(one, Tensor) else one


def _alike_numbers(a: Any, b: Any) -> bool:
    """But for rounding: some kernels of GPUs add up in any order."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.allclose(one, other, LIMIT, LIMIT, equal_nan=True) for one, other in pairs if isinstance(one, Tensor))


def _same(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(one.equal(other) for one, other in pairs if isinstance(one, Tensor))


def _compare(what: str, whole: Any, part: Any, name: str, where: Callable[[], str] = lambda: "") -> None:
    pairs = [tree_leaves(one) for one in (whole, part)]
    if len(pairs[0]) != len(pairs[1]):
        raise BadInput(f"slices: {name}: makes another number of tensors in slices")
    rows = [(a, b) for a, b in zip(*pairs, strict=True) if isinstance(a, Tensor) and a.numel()]
    largest = max((a.double().abs().max().item() for a, _ in rows), default=0)
    for a, b in rows:
        if a.shape != b.shape:
            raise BadInput(f"slices: {name}: makes {tuple(b.shape)} of a slice in place of {tuple(a.shape)}")
        gap, most = (b.double() - a.double()).abs().max().item(), max(a.double().abs().max().item(), SMALL * largest)
        if not gap <= LIMITS.get(a.dtype, 0) * most + ROUNDING.get(a.dtype, 0):
            raise BadInput(
                f"slices: {name}: its {what} differs by {gap:.2g} (of {most:.2g}) in slices: it mixes positions elsewhere "
                "than in sliced_attention, does not count them from slice_offset, or keeps something from call to call"
                f"{where()}"
            )


def _copied(layer: nn.Module, kind: torch.dtype) -> nn.Module:
    """The layer in this type. No parameter is constant, and none has a gradient."""
    found = copy.deepcopy(layer).to(kind)
    for one in found.parameters():
        if one.numel() and bool((one == one.flatten()[0]).all()):
            one.data.add_(noise(one), alpha=0.1)
    found.zero_grad()
    return found


def _constant(value: Any) -> Any:
    return tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, value)
