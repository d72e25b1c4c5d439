"""Checks a pipeline: its loss and gradients against those of the same model, unsplit, in one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ..models.losses import auxiliary_losses, without_metrics
from ..models.model import Place
from ..models.sides import batch_with, row_of
from ..problem import Problem
from ..util.errors import BadInput
from .backward.layer_split import run_layers
from .base.part import Data
from .base.values import each_tensor, full, joined, tensors_of
from .connecting import Update
from .transport.format import Format
from .updates import NamedParameters, groups_of, versions_of

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}
LIMITS |= {torch.complex128: LIMITS[torch.float64], torch.complex64: LIMITS[torch.float32]}
Values = dict[Place, Tensor | None]  # of parameters that are compared; None: it has no gradient
COUNT_ROUNDING = 1e-3  # relative difference of a row's gradients that is taken for rounding
SINGLE_ROWS = 8  # how many rows are tried alone
SHAKEN = 2.0**-22  # relative change of a weight: two roundings of float32, about what another order of a sum changes
NOT_A_NUMBER = 1e30  # the difference where a value is not finite
WRAPPING = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what torch's wrappers add to a parameter's name


def reference(layers: Sequence[nn.Module], data: Data, loss: Any, backward: bool = True) -> float:
    """Run every microbatch through the whole model with plain autograd; `backward` puts gradients into `.grad`. Returns the
    mean loss. Raises BadInput where no parameter is trained."""
    count, total = len(data.inputs), 0.0
    for m in sorted(data.inputs):
        value = _loss(layers, data, m, loss)
        if backward and not value.requires_grad:
            raise BadInput("check: none of the layers has a parameter that is trained")
        if backward:
            (value * data.share(m) / count).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach()) * data.share(m) / count
    return total


def _loss(layers: Sequence[nn.Module], data: Data, m: int, loss: Any) -> Tensor:
    """The loss of microbatch `m`, with the terms that layers add to it."""
    with auxiliary_losses() as extra:
        output = row_of(run_layers(layers, batch_with(layers, data.inputs[m], data.targets[m]), 0, data.seed + m))
        value: Tensor = without_metrics(loss(output, data.targets[m]))
    return value if extra.total is None else value + extra.total


def shake(layers: Sequence[nn.Module], seed: int) -> None:
    """Change every float32 parameter at random by a few roundings."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in {id(p): p for layer in layers for p in layer.parameters()}.values():
            if p.dtype == torch.float32:
                p.add_(p * (SHAKEN * (2 * torch.rand(p.shape, generator=generator) - 1)).to(p.device))


class RowCounts(NamedTuple):
    """How a loss weighs rows. add_up: the loss of several rows is the sum of their losses, not the mean. uneven: the largest
    ratio between a row's weights in different sets of rows (as in a mean that leaves out padding); 1 where the weight is
    always the same."""

    add_up: bool
    uneven: float


def row_counts(layers: Sequence[nn.Module], data: Data, loss: Any) -> RowCounts | None:
    """How the loss weighs the rows of two microbatches. It compares the gradients of the loss of some rows with those of the
    loss of all rows. None where that is impossible: the tensors of output and target have different numbers of rows, the
    output has no gradient, or the loss refuses another number of rows."""
    with torch.no_grad():
        both = [(m, batch_with(layers, data.inputs[m], data.targets[m])) for m in sorted(data.inputs)[:2]]
        pairs = [(row_of(run_layers(layers, x, 0, data.seed + m)), data.targets[m]) for m, x in both]
    tensors = [tensors_of(pair) for pair in pairs]
    if len({tensor.shape[:1] for row in tensors for tensor in row}) != 1 or not tensors[0][0].dim():
        return None
    if len(pairs) < 2 or Format.of(pairs[0]) != Format.of(pairs[1]):
        return None
    both = joined(pairs)
    count = len(tensors_of(both)[0])
    parts = [slice(0, None, 2), slice(1, None, 2), *(slice(i, i + 1) for i in range(min(count, SINGLE_ROWS)))]
    try:
        whole = _row_gradients(both, slice(None), loss)
        alone = [(count / len(range(count)[part]), _row_gradients(both, part, loss), part) for part in parts]
    except Exception:  # the user's loss may accept microbatches of one size only
        return None
    kind = next((tensor.dtype for tensor in tensors[0] if tensor.is_floating_point()), torch.float32)
    if not whole or not all(bool(tensor.isfinite().all()) for tensor in whole):
        return None
    rounding = max(COUNT_ROUNDING, LIMITS.get(kind, 0.0))
    factors = [f for share, rows, part in alone if (f := _factor(rows, [tensor[part] for tensor in whole], share))]
    as_mean, as_sum = [max(f / share, share / f) for f, share in factors], [max(f, 1 / f) for f, _ in factors]
    add_up = max(as_sum, default=1.0) < max(as_mean, default=1.0)
    worst = max(as_sum if add_up else as_mean, default=1.0)
    return RowCounts(add_up, min(worst, NOT_A_NUMBER) if worst > 1 + rounding else 1.0)


def _row_gradients(both: Any, part: slice, loss: Any) -> list[Tensor]:
    """The gradients, with respect to some rows of the output, of the loss of these rows alone."""
    output, target = each_tensor(both, lambda leaf: leaf[part].detach())
    leaves = [leaf.requires_grad_() for leaf in tensors_of(output) if leaf.is_floating_point()]
    with torch.enable_grad():
        value = without_metrics(loss(output, target))
    return [
        torch.zeros_like(leaf) if tensor is None else tensor.double()
        for leaf, tensor in zip(leaves, torch.autograd.grad(value, leaves, allow_unused=True), strict=True)
    ]


def _factor(alone: Sequence[Tensor], together: Sequence[Tensor], share: float) -> tuple[float, float] | None:
    """(norm of the gradients alone / norm of those together, `share`); None where both are 0."""
    a, b = (float(sum(row.square().sum() for row in rows)) ** 0.5 for rows in (alone, together))
    if not a > 0 and not b > 0 and not math.isnan(a):
        return None
    return (a / b if b and a > 0 and math.isfinite(a) else math.inf), share


def updated(problem: Problem, stages: Sequence[Sequence[nn.Module]], data: Data, loss: Any, update: Update) -> float:
    """Run a step with updates inside in one process, by the definition of PipeDream and 2BW (see `build.updates`). Returns
    the mean loss. Each microbatch goes through the whole model, each stage with the version of its weights that the
    graph says; an update is made when its group's gradients are complete. update: makes a torch optimizer of parameters. The
    layers of `stages` end with the newest weights."""
    firsts = accumulate((len(stage) for stage in stages), initial=0)
    rules = [_UpdatedStage(stage, first, update) for stage, first in zip(stages, firsts, strict=False)]
    version, group, size = versions_of(problem), groups_of(problem), problem.round
    layers, total = [layer for stage in stages for layer in stage], 0.0
    for m in sorted(data.inputs):
        for s, rule in enumerate(rules):
            rule.show(version.get((s, m), 0))
        value = _loss(layers, data, m, loss)
        (value / size).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach()) / len(data.inputs)
        if m + 1 not in data.inputs or group[0, m + 1] != group[0, m]:
            for rule in rules:
                rule.update()
    for rule in rules:
        rule.show(-1)
    return total


class _UpdatedStage:
    """A stage's weights in all their versions. first: the number of its first layer."""

    def __init__(self, layers: Sequence[nn.Module], first: int, update: Update) -> None:
        named = nn.ModuleDict({str(i): layer for i, layer in enumerate(layers, first)}).named_parameters()
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._weights = [p for _, p in trained]
        self._newest = NamedParameters((name, nn.Parameter(p.detach().clone())) for name, p in trained)
        self._optimizer = update(self._newest) if self._newest else None
        self._versions = [[p.detach().clone() for p in self._weights]]

    def show(self, version: int) -> None:
        """Put this version into the layers (−1: the newest)."""
        for p, value in zip(self._weights, self._versions[version], strict=True):
            p.data = value

    def update(self) -> None:
        """Make the next version from the newest one and the layers' gradients."""
        for p, newest in zip(self._weights, self._newest, strict=True):
            newest.grad, p.grad = p.grad, None
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._versions.append([p.detach().clone() for p in self._newest])


class SingleConstants(TorchFunctionMode):
    """A mode in which RMS norms without an eps use float32's, as a float64 reference must compute the same function. Such a
    norm takes the machine epsilon of the dtype that it computes in (float32 for 16-bit inputs); with that of float64 it
    would be another function of small inputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (torch.rms_norm, functional.rms_norm):
            return func(*args, **(kwargs or {}))

        def norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
            return func(input, normalized_shape, weight, torch.finfo(torch.float32).eps if eps is None else eps)

        return norm(*args, **(kwargs or {}))


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """The value that is compared after a plain step."""
    return parameter.grad


def weight(parameter: nn.Parameter) -> Tensor | None:
    """The value that is compared after a step with updates inside."""
    return parameter.detach()


def difference(tensor: Tensor | None, right: Tensor | None, scale: float = 0.0) -> float:
    """max |tensor − right| / max |right|, where None counts as zeros; max |tensor| where `right` is zero. scale: divides in
    place of max |right|, if not 0."""
    if tensor is None and right is None:
        return 0.0
    a = torch.zeros_like(right) if tensor is None else tensor  # type: ignore[arg-type]
    b = torch.zeros_like(a) if right is None else right.to(a.device)
    worst = magnitude(_exact(a) - _exact(b))
    scale = scale or magnitude(b)
    return worst / scale if scale else worst


def magnitude(tensor: Tensor | None) -> float:
    """max |tensor|; 0 for an empty tensor or None."""
    return float(_exact(tensor).abs().max()) if tensor is not None and tensor.numel() else 0.0


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def named(layers: Mapping[int, nn.Module]) -> dict[Place, nn.Parameter]:
    """(layer, name) → trained parameter; a tied parameter has several such places."""
    return {
        (i, name): p
        for i, layer in layers.items()
        for name, p in layer.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }


def values(layers: Mapping[int, nn.Module], what: Callable[[nn.Parameter], Tensor | None] = gradient) -> Values:
    """The whole values: all ranks of a DTensor's mesh call this together. Names are those of the model
    without torch's wrappers."""
    compared: Values = {}
    for (layer, name), p in named(layers).items():
        for wrapping in WRAPPING:
            name = name.replace(wrapping, "")
        value = what(p)
        compared[layer, name] = None if value is None else full(value.detach()).to_dense()
    return compared
