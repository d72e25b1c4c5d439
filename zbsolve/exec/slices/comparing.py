"""Compares the results of a stage in slices with those of whole sequences, on the input of a step.

It compares layer by layer. Each layer runs its whole input in slices, then as one, forward and backward, in its own dtype,
with artificial gradients of its output. So only one layer's activations are in memory, and rounding does not accumulate.
Random numbers are fixed meanwhile. Between two slices of the first sequence, one of the second runs: if a layer keeps
something from call to call, that is then another sequence's. Where a layer differs at few tokens, a copy in a longer dtype
decides. In the end gradients, buffers and random numbers are as before.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...models.losses import exact
from ...util.errors import BadInput, is_out_of_memory, raised
from ..backward.replay import as_written, undisturbed
from ..base.torch_private import PlainDispatchMode
from ..base.values import cast, constant, each_tensor, local, tensors_of
from .cutting import Counting, Cutting, SliceLoss, cut_sequence, join_sequence, labels_of, offsets
from .store import SliceStore

# How much a row (one token of a sample) may differ, relative to its norm: more than rounding (docs/notes/slices.md).
LIMITS = {torch.float64: 1e-6, torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}
SMALL = 1e-3  # of the largest row: smaller rows are compared relative to this
SMALL_GRADIENT = 0.3  # of a layer's largest gradient of a parameter: smaller ones are compared relative to this
SUMS = 4  # factor for gradients of parameters: some kernels sum them in 16 bits


class Apart(NamedTuple):
    """A difference. tokens: the share of tokens that have it; 0 of a parameter's gradient."""

    text: str
    tokens: float = 0.0


def limit_of(tensors: Iterable[Tensor]) -> float:
    """The limit for results computed from these tensors: that of the shortest dtype among them and of their products."""
    limits = [LIMITS[torch.float64]]
    for tensor in tensors:
        kind, device = tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype, tensor.device.type
        limits.append(LIMITS.get(kind, 0.0))
        if kind == torch.float32 and torch.get_float32_matmul_precision() != "highest":
            limits.append(LIMITS[torch.bfloat16])
        if kind != torch.float64 and torch.is_autocast_enabled(device):
            limits.append(LIMITS[torch.get_autocast_dtype(device)])
    return max(limits)


def rows_apart(what: str, whole: Any, parts: Any, lengths: Sequence[int], limit: float) -> Apart | None:
    """How the outputs of joined slices differ from those of a whole sequence, from which token on; None where they do not.
    Both are pytrees of tensors (batch, length, …). what: their name. limit: relative to a row's norm (see `limit_of`)."""
    pairs = [tensors_of(tree) for tree in (whole, parts)]
    shapes = [[tuple(tensor.shape) for tensor in row] for row in pairs]
    if shapes[0] != shapes[1]:
        return Apart(f"{what} has shapes {shapes[1]} in slices in place of {shapes[0]}", 1.0)
    if wrong := [shape for shape in shapes[0] if shape[1:2] != (sum(lengths),)]:
        return Apart(f"{what} has shape {wrong[0]}, where (batch, length, …) is needed", 1.0)
    for a, b in zip(*pairs, strict=True):
        if not a.numel():
            continue
        gap, size = _norms(local(a.detach()), local(b.detach()))
        scale = size.clamp(min=max(float(size.median()), SMALL * float(size.max())))
        apart = ~(gap <= limit * scale).all(0)
        if bool(apart.any()):
            token = int(apart.nonzero()[0])
            number = sum(start <= token for start in offsets(lengths)) - 1
            share = float((gap / scale).nan_to_num(torch.inf).max())
            return Apart(
                f"{what} in slices differs from the whole sequence's at {int(apart.sum())} of {len(apart)} tokens, first "
                f"at token {token} (slice {number}), by up to {share:.2g} of its norm",
                float(apart.double().mean()),
            )
    return None


def parameters_apart(
    layer: nn.Module, whole: Sequence[Tensor | None], parts: Sequence[Tensor | None], limit: float
) -> Apart | None:
    """The same for the gradients of the layer's trained parameters."""
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    sizes = [0.0 if tensor is None else _norm(tensor) for tensor in whole]
    for name, a, b, size in zip(names, whole, parts, sizes, strict=True):
        if (tensor := b if a is None else a if b is None else a - b) is None:
            continue
        gap, most = _norm(tensor), max(size, SMALL_GRADIENT * max(sizes))
        if gap > SUMS * limit * most:  # false for NaN, which the outputs show
            share = f"{gap / most:.2g} of its norm" if most else "all of it"
            return Apart(f"the gradient of its {name} in slices differs from the whole sequence's by {share}")
    return None


def _norms(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """The norms of the rows of a − b, and of those of a: (batch, length) each."""
    a, b = (torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in (a, b))
    a, b = (tensor.flatten(2) if tensor.dim() > 2 else tensor.unsqueeze(-1) for tensor in (a, b))
    if not a.is_floating_point():
        gap = (a != b).any(-1).double()
        return gap, torch.zeros_like(gap)
    same = (a == b) | (a.isnan() & b.isnan())
    gap, size = (
        torch.linalg.vector_norm(x, dim=-1, dtype=exact(a.dtype)) for x in ((a - b).masked_fill(same, 0), a.detach())
    )
    return gap, size.nan_to_num(0.0, posinf=0.0)


def _norm(tensor: Tensor) -> float:
    row = local(tensor.detach()).flatten()
    row = torch.view_as_real(row).flatten() if row.is_complex() else row
    return float(torch.linalg.vector_norm(row, dtype=exact(row.dtype)))


FEW = 0.05  # of the tokens: if no more differ, rounding may have decided between two experts
MOST_SLOPE = 2**14  # the largest gradient of a sequence's loss, for 16 bits
HEAD = "slices: "
MEND = (
    "it mixes tokens elsewhere than in zbsolve.exec.sliced_attention, does not count them from slice_offset(), or keeps "
    "something from call to call. Mend that, cut elsewhere, or cut batches into more microbatches and no sequences"
)
SAY = (
    "What does not count needs that label, or the loss an attribute ignore_index; weights are known of CrossEntropyLoss("
    "weight=), NLLLoss(weight=) and functools.partial(…, weight=); labels are shifted before the step, for a loss sees one "
    "slice"
)


class Sequences(NamedTuple):
    """What some microbatches give a stage: activations, and targets for a loss; pytrees of tensors (batch, length, …)."""

    inputs: list[Any]
    targets: list[Any]

    def first(self, tokens: Sequence[int]) -> Sequences:
        """The first tokens of each microbatch."""
        return Sequences(*([_first(x, n) for x, n in zip(row, tokens, strict=True)] for row in self))


class Held(PlainDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which random numbers are constant, and dropouts drop nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # its operations on local tensors come here
        made, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if torch.Tag.nondeterministic_seeded not in func.tags or name.startswith("_"):  # attention has that tag too
            return made
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(made[1])
        return made.fill_(0.5 if made.is_floating_point() and not name.startswith("bernoulli") else 1)


def compare(
    layers: Sequence[nn.Module],
    first: int,
    loss: Callable[[Any, Any], Tensor] | None,
    given: Sequences,
    cutting: Cutting,
    backward: bool = True,
) -> None:
    """Compare layers `first` …, and the loss if given, in slices with whole sequences. given: of two microbatches, or of one
    twice; of the second only the forward is compared. backward: also compare gradients. Where memory does not suffice for a
    layer, it and all later ones are compared on the first half of the tokens (and so on), with a warning. Raises
    BadInput naming the first layer that differs, what differs and from which token on."""
    differences, tokens = list[str](), [tensors_of(x)[0].shape[1] for x in given.inputs]
    whole = tokens[0]
    for number, layer in enumerate([*layers, None], first):
        while True:
            lengths = [cutting.tokens(n, "slices") for n in tokens]
            try:
                if layer is not None:
                    name = f"layer {number} ({type(layer).__name__})"
                    outputs, apart = _compare_layer(layer, given.inputs, lengths, backward, name)
                    rounded = apart and max(part.tokens for part in apart) <= FEW
                    if not rounded or _apart_in_more_bits(layer, given.inputs, lengths, backward, name):
                        differences += [f"{name}: {part.text}: {MEND}" for part in apart]
                    given = Sequences(outputs, given.targets)
                elif loss is not None:
                    differences += filter(None, [_compare_loss(loss, given, lengths[0], backward)])
                break
            except Exception as error:
                if not is_out_of_memory(error) or min(tokens) < 2 * cutting.count:
                    raise
            tokens = [n // 2 for n in tokens]
            given = given.first(tokens)
    if differences:  # not earlier: ranks that share the layers must all run them
        raise BadInput(HEAD + differences[0])
    if tokens[0] < whole:
        text = f"slices: layers from {first} on were compared with whole sequences on {tokens[0]} of {whole} tokens"
        warnings.warn(f"{text}: memory does not suffice for more", stacklevel=2)


class _Ran(NamedTuple):
    """What a layer computed: its outputs, and for the first sequence the given gradients of its output, and those of its
    input and of the parameters."""

    outputs: list[Any]
    slopes: Any
    gradient: Any
    parameters: list[Tensor | None]


def _compare_layer(
    layer: nn.Module, inputs: Sequence[Any], lengths: Sequence[Sequence[int]], backward: bool, name: str
) -> tuple[list[Any], list[Apart]]:
    """The layer's outputs, and its differences."""
    with _naming(name), _trying(layer, backward):
        parts = _in_slices(layer, inputs, lengths, backward)
        whole = _whole(layer, inputs, parts.slopes, backward)
        limit = limit_of([*layer.parameters(), *tensors_of((inputs, whole.outputs))])
        pairs = [("its output", *pair) for pair in zip(whole.outputs, parts.outputs, lengths, strict=True)]
        pairs.append(("the gradient of its input", whole.gradient, parts.gradient, lengths[0]))
        differences = [rows_apart(*pair, limit) for pair in pairs]
        differences.append(parameters_apart(layer, whole.parameters, parts.parameters, limit))
    return whole.outputs, [difference for difference in differences if difference is not None]


def _apart_in_more_bits(
    layer: nn.Module, inputs: Sequence[Any], lengths: Sequence[Sequence[int]], backward: bool, name: str
) -> bool:
    """Does the layer differ in a copy with a longer dtype, too? If not, rounding has decided which expert a token gets. A
    layer that takes only its own dtype counts as different."""
    device = tensors_of(inputs)[0].device.type
    for kind in (torch.float64, torch.float32):
        try:
            tried = deepcopy(layer)
            for tensor in (*tried.parameters(), *tried.buffers()):
                if tensor.is_floating_point():
                    tensor.data = tensor.data.to(kind)
            with torch.autocast(device, enabled=False):
                return bool(_compare_layer(tried, cast(list(inputs), kind), lengths, backward, name)[1])
        except Exception as error:
            if is_out_of_memory(error):
                raise
    return True


def _in_slices(layer: nn.Module, inputs: Sequence[Any], lengths: Sequence[Sequence[int]], backward: bool) -> _Ran:
    count = len(lengths[0])
    store, outputs = SliceStore(count), [list[Any]() for _ in inputs]
    rows = [[_leaf(part) for part in cut_sequence(x, row, "input")] for x, row in zip(inputs, lengths, strict=True)]
    for i in range(count):
        for m, row in enumerate(rows):
            with torch.set_grad_enabled(backward and not m), store.forward(m, i, offsets(lengths[m])[i]):
                outputs[m].append(layer(each_tensor(row[i], Tensor.clone)))
    slopes = [each_tensor(y, _slope) for y in outputs[0]]
    for i in reversed(range(count if backward else 0)):
        with store.backward(0, i):
            _backward(outputs[0][i], slopes[i])
    gradient = join_sequence([each_tensor(x, _gradient) for x in rows[0]])
    return _Ran([join_sequence(row) for row in outputs], join_sequence(slopes), gradient, _taken(layer))


def _whole(layer: nn.Module, inputs: Sequence[Any], slopes: Any, backward: bool) -> _Ran:
    x = _leaf(inputs[0])
    y = layer(each_tensor(x, Tensor.clone))
    if backward:
        _backward(y, slopes)
    with torch.no_grad():
        others = [layer(each_tensor(value, Tensor.clone)) for value in inputs[1:]]
    return _Ran([constant(y), *others], slopes, each_tensor(x, _gradient), _taken(layer))


def _compare_loss(loss: Callable[[Any, Any], Tensor], given: Sequences, lengths: Sequence[int], backward: bool) -> str:
    """How the loss of the first sequence differs, and advice; "" where it does not, or no label counts. It is computed in at
    least 32 bits: a label that wrongly counts may change little."""
    y, targets = given.inputs[0], given.targets[0]
    try:
        return _loss_apart(loss, each_tensor(y, _exact), targets, lengths, backward)
    except BadInput:  # it may take only its own dtype
        return _loss_apart(loss, y, targets, lengths, backward)


def _loss_apart(loss: Callable[[Any, Any], Tensor], y: Any, targets: Any, lengths: Sequence[int], backward: bool) -> str:
    own = loss.loss if isinstance(loss, SliceLoss) else loss
    loss, counting, labels = SliceLoss(own), Counting.of(own), cut_sequence(targets, lengths, "targets")
    counts = [counting.counted(part) for part in labels]
    if not (total := sum(counts)):
        return ""
    unit = min(1.0, MOST_SLOPE / total)  # weight of a label in the gradients
    module, weight, limit = own if isinstance(own, nn.Module) else nn.Identity(), total * unit, limit_of(tensors_of(y))
    with _naming("the loss"), _trying(module, backward):
        x, parts = _leaf(y), [_leaf(part) for part in cut_sequence(y, lengths, "output")]
        each = zip(parts, labels, counts, strict=True)
        in_slices = sum(_weighed(loss, part, t, n * unit) for part, t, n in each if n) / weight
        value, slopes = _weighed(loss, x, targets, weight) / weight, each_tensor(x, _gradient)
        joined = join_sequence([each_tensor(part, _gradient) for part in parts])
        apart = rows_apart("its gradient", slopes, joined, lengths, limit)
    alike = abs(value - in_slices) <= limit * max(abs(value), 1.0) or not isfinite(value)  # (reported elsewhere)
    if apart is None and alike:
        return ""
    text = f"the loss is {value:.6g} of the whole sequence and {in_slices:.6g} in slices"
    text += "" if apart is None else f", and {apart.text}"
    label = counting.ignored
    return f"{text}: slices take it for a mean over all labels but {label}. {_advice(slopes, targets, label)}"


def _advice(slopes: Any, targets: Any, ignored: int) -> str:
    """Advice for a loss that is not such a mean. slopes: the gradient of the whole sequence's output."""
    labels = labels_of(targets)
    rows = [slope.abs().flatten(2).sum(-1) for slope in tensors_of(slopes) if slope.dim() > 2 and slope.is_floating_point()]
    if labels is None or not rows or labels.shape != rows[0].shape:
        return SAY
    counts = sum(rows) > 0
    silent = labels[(labels != ignored) & ~counts & ~torch.isin(labels, labels[counts])]
    if not len(silent):
        return SAY
    label = int(silent[0])
    return (
        f"Label {label} does not count in it: say so by functools.partial(…, ignore_index={label}), by an attribute "
        f"ignore_index = {label} of the loss, or give these tokens the label {ignored}"
    )


def _weighed(loss: Callable[[Any, Any], Tensor], x: Any, targets: Any, weight: float) -> float:
    """The loss times its weight; the leaves x get its gradient."""
    value = loss(each_tensor(x, Tensor.clone), targets)
    if value.requires_grad:
        value.backward(torch.full_like(value, weight))  # type: ignore[no-untyped-call]
    return float(value.detach()) * weight


@contextmanager
def _trying(layer: nn.Module, backward: bool) -> Iterator[None]:
    """Run the layer inside without any lasting effect."""
    with torch.set_grad_enabled(backward), undisturbed(layer), as_written(), Held():  # type: ignore[no-untyped-call]
        yield


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Raise any error inside as a BadInput with this name, except a lack of memory."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = str(error).removeprefix(HEAD) if isinstance(error, BadInput) else raised(error)
        raise BadInput(f"{HEAD}{name}: {text}") from error


def _first(value: Any, tokens: int) -> Any:
    return each_tensor(value, lambda tensor: tensor[:, :tokens])


def _leaf(value: Any) -> Any:
    """The same values as leaves of new graphs."""
    return each_tensor(value, lambda t: t.detach().requires_grad_(t.is_floating_point() or t.is_complex()))


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(exact(tensor.dtype)) if tensor.is_floating_point() else tensor


def _slope(tensor: Tensor) -> Tensor:
    """An artificial gradient for an output: irregular numbers between -1 and 1, without a random generator."""
    return (1000 * _exact(tensor.detach())).cos().to(tensor.dtype) if tensor.is_floating_point() else tensor.detach()


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _backward(y: Any, slopes: Any) -> None:
    rows = [(tensor, by) for tensor, by in zip(tensors_of(y), tensors_of(slopes), strict=True) if tensor.requires_grad]
    if rows:
        torch.autograd.backward([tensor for tensor, _ in rows], [by for _, by in rows])


def _taken(layer: nn.Module) -> list[Tensor | None]:
    """Remove and return the gradients of the layer's trained parameters."""
    trained = [p for p in layer.parameters() if p.requires_grad]
    gradients = [p.grad for p in trained]
    for p in trained:
        p.grad = None
    return gradients
