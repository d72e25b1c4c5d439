"""One layer, whole and in slices: outputs, and gradients of inputs and parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.losses import auxiliary_losses
from ...util.errors import BadInput
from ..backward.replay import torch_generators, torch_random_kept
from ..base.torch_private import tree_leaves, tree_map
from .reach import each_token
from .sequence import cut_sequence, offsets
from .store import SliceStore
from .trial import LIMIT, alike, naming, noise, three_lengths
from .where import mixing_part

# Of the largest number. Layers are checked in float64, but some compute a part in float32, or run in nothing else.
LIMITS = {torch.float64: LIMIT, torch.float32: 1e-3}
ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-6}  # what is left where everything cancels
BY_THEMSELVES = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}  # of layers in their own type
SMALL = 1e-2  # of a layer's largest gradient: what rounding leaves of a parameter that has none is compared with that


class Drawn(Exception):
    """The layer draws random numbers, so its slices cannot be compared."""


class _Ran(NamedTuple):
    """A forward of microbatches, or of one's slices. inputs: leaves of autograd's graphs; outputs: with their graphs."""

    inputs: list[Any]
    outputs: list[Any]


def compared(tried: nn.Module, given: list[Any], lengths: Sequence[int], name: str) -> Any:
    """The output of the last of the microbatches `given`. Raises BadInput where it, or a gradient, is another in slices, and
    Drawn where the layer draws random numbers in training. Parameters of `tried` are left without meaning."""
    store = SliceStore(len(lengths))
    with torch.enable_grad(), torch_random_kept(), naming(name):
        drawn = _draws(tried, given, name)
        whole, parts = _whole(tried, given, name), [_Ran([], []) for _ in given]
        cuts = [cut_sequence(one, lengths, name) for one in given]
        for i, offset in enumerate(offsets(lengths)):  # microbatches take turns: what a layer keeps would be another's
            for m, ran in enumerate(parts):
                with store.forward(m, i, offset):
                    _forward(tried, cuts[m][i], ran)
    if drawn:
        raise Drawn
    for m, (y, ran) in enumerate(zip(whole.outputs, parts, strict=True)):
        for leaf, part in zip(cut_sequence(y, lengths, name), ran.outputs, strict=True):
            _compare("output", leaf, part, name, partial(_first_in, tried, given[m], cuts[m], lengths))
    output = _constant(whole.outputs[-1])
    _compare_gradients(tried, whole, parts, lengths, store, name)
    return output


def compare_far(tried: nn.Module, far: Any, name: str) -> Any:
    """The output for more tokens; None without. Raises BadInput where it is another in slices, also where all tokens are
    alike."""
    y = None
    with torch_random_kept(), naming(name):
        for one in () if far is None else (tree_map(alike, far), far):
            lengths = three_lengths(far, name)
            y, parts = each_token(tried, one, lengths, name)
            for leaf, part in zip(cut_sequence(y, lengths, name), parts, strict=True):
                _compare(f"output for {sum(lengths)} tokens", leaf, part, name)
    return y


def compare_new(layer: nn.Module, x: Any, lengths: Sequence[int], name: str) -> Any:
    """The output of a layer as it is, for tokens of which some are new. Raises BadInput where it is another in slices."""
    y, parts = each_token(layer, x, lengths, name)
    for leaf, part in zip(cut_sequence(y, lengths, name), parts, strict=True):
        _compare("output for tokens of a later slice", leaf, part, name, limits=LIMITS | BY_THEMSELVES)
    return y


def _draws(tried: nn.Module, given: list[Any], name: str) -> bool:
    """Whether it draws random numbers. Raises BadInput where it does so in evaluation, or keeps something."""
    with torch.no_grad():
        again = [_seeded(tried, given, name, seed) for seed in (0, 0, 1)]
    if not _alike_numbers(again[0].outputs, again[1].outputs):
        raise BadInput(f"slices: {name}: keeps something from call to call: the same input gives another output")
    drawn = not _same(again[0].outputs, again[2].outputs)
    if drawn and not any(one.training for one in tried.modules()):
        raise BadInput(f"slices: {name}: draws random numbers in evaluation too: nobody can see what its slices do")
    return drawn


def _compare_gradients(
    tried: nn.Module, whole: _Ran, parts: Sequence[_Ran], lengths: Sequence[int], store: SliceStore, name: str
) -> None:
    """Those of the slices are of the negative: they are taken from the whole's, so that there is one of each parameter."""
    seeds = [tree_map(lambda one: noise(one) if isinstance(one, Tensor) else one, y) for y in whole.outputs]
    cuts = [cut_sequence(one, lengths, name) for one in seeds]
    with naming(name):
        for y, seed in zip(whole.outputs, seeds, strict=True):
            _backward(y, seed)
        whole.outputs.clear()
        sizes = [_largest(_gradient(one)) for one in tried.parameters()]
        for i in reversed(range(len(lengths))):
            for m, ran in enumerate(parts):
                with store.backward(m, i):
                    _backward(ran.outputs[i], _negative(cuts[m][i]))
    for x, ran in zip(whole.inputs, parts, strict=True):
        for leaf, part in zip(cut_sequence(_gradients(x), lengths, name), ran.inputs, strict=True):
            _compare("input's gradient", leaf, _negative(_gradients(part)), name)
    gaps = [_largest(_gradient(one)) for one in tried.parameters()]
    kinds = [one.dtype for one in tried.parameters()]
    _check_gaps("parameters' gradient", list(zip(gaps, sizes, kinds, strict=True)), name)
    tried.zero_grad()


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
    for generator in torch_generators():
        generator.manual_seed(seed)
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


def _alike_numbers(a: Any, b: Any) -> bool:
    """But for rounding: some kernels of GPUs add up in any order."""
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(torch.allclose(one, other, LIMIT, LIMIT, equal_nan=True) for one, other in pairs if isinstance(one, Tensor))


def _same(a: Any, b: Any) -> bool:
    pairs = zip(tree_leaves(a), tree_leaves(b), strict=True)
    return all(one.equal(other) for one, other in pairs if isinstance(one, Tensor))


def _compare(
    what: str,
    whole: Any,
    part: Any,
    name: str,
    where: Callable[[], str] = lambda: "",
    limits: Mapping[torch.dtype, float] = LIMITS,
) -> None:
    pairs = [tree_leaves(one) for one in (whole, part)]
    if len(pairs[0]) != len(pairs[1]):
        raise BadInput(f"slices: {name}: makes another number of tensors in slices")
    rows = [(a, b) for a, b in zip(*pairs, strict=True) if isinstance(a, Tensor) and a.numel()]
    for a, b in rows:
        if a.shape != b.shape:
            raise BadInput(f"slices: {name}: makes {tuple(b.shape)} of a slice in place of {tuple(a.shape)}")
    _check_gaps(what, [(_gap(a, b), _largest(a), a.dtype) for a, b in rows], name, where, limits)


def _check_gaps(
    what: str,
    rows: Sequence[tuple[float, float, torch.dtype]],
    name: str,
    where: Callable[[], str] = lambda: "",
    limits: Mapping[torch.dtype, float] = LIMITS,
) -> None:
    """Raise BadInput for a row of difference, largest number and type where the difference is no rounding."""
    largest = max((most for _, most, _ in rows), default=0)
    for gap, size, kind in rows:
        most = max(size, SMALL * largest)
        kind = kind.to_real() if kind.is_complex else kind
        if not gap <= limits.get(kind, 0) * most + ROUNDING.get(kind, 0):
            raise BadInput(
                f"slices: {name}: its {what} differs by {gap:.2g} (of {most:.2g}) in slices: it mixes positions elsewhere "
                "than in sliced_attention, does not count them from slice_offset, or keeps something from call to call"
                f"{where()}"
            )


def _largest(one: Tensor) -> float:
    return float(_number(one).abs().max()) if one.numel() else 0.0


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference. Whole numbers and bools are compared as they are: no type of numbers holds them all."""
    if a.is_floating_point() or a.is_complex():
        return _largest(_number(b) - _number(a))
    return 0.0 if a.equal(b.to(a.dtype)) else max(_largest(_number(b) - _number(a)), 1.0)


def _number(one: Tensor) -> Tensor:
    return one.detach().to(torch.complex128 if one.is_complex() else torch.float64)


def _negative(value: Any) -> Any:
    return tree_map(lambda one: -one if isinstance(one, Tensor) and one.is_floating_point() else one, value)


def _constant(value: Any) -> Any:
    return tree_map(lambda one: one.detach() if isinstance(one, Tensor) else one, value)
