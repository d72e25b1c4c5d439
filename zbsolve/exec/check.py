"""Is the pipeline right? Its loss and gradients are compared with those of the same model, unsplit, in one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..models.auxiliary import auxiliary_losses
from ..models.model import Place
from ..problem import Problem
from .backward.layer_split import run_layers
from .backward.values import joined, tensors_of
from .dtensors import full
from .handlers.handler import Data
from .torch_private import tree_map
from .transport.format import Format
from .update_groups import groups_of, versions_of
from .weight_versions import Update

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}
LOSS_ROUNDING = 1e-4  # two orders of summation differ by less
NOT_A_NUMBER = 1e30  # the difference where something is not finite
WRAPPING = ("_checkpoint_wrapped_module.", "_orig_mod.")  # what torch's wrappers put into a parameter's name


class Value(NamedTuple):
    """What is compared of a parameter (None: it has no gradient), and the parameter's shape, type and device."""

    found: Tensor | None
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def reference(layers: Sequence[nn.Module], data: Data, loss: Any) -> float:
    """Run every microbatch through the whole model with plain autograd. Gradients go into `.grad`. Returns the mean loss."""
    count, total = len(data.inputs), 0.0
    for m in sorted(data.inputs):
        value = _loss(layers, data, m, loss)
        (value / count).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach()) / count
    return total


def _loss(layers: Sequence[nn.Module], data: Data, m: int, loss: Any) -> Tensor:
    """A microbatch's loss, with what layers add to it."""
    with auxiliary_losses() as extra:
        value: Tensor = loss(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m])
    return value if extra.total is None else value + extra.total


def uneven_loss(layers: Sequence[nn.Module], data: Data, loss: Any) -> tuple[float, float] | None:
    """Is the loss a mean in which every row counts alike? The loss of two microbatches joined, and the mean of the losses of
    every other row of them, where these differ by more than rounding (a sum; a mean that leaves out padding).

    None where they do not differ, and where nothing can be said: not all tensors of output and target have as many rows, or
    the loss takes no other number of rows.
    """
    with torch.no_grad():
        pairs = [(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m]) for m in sorted(data.inputs)[:2]]
        tensors = [tensors_of(pair) for pair in pairs]
        if len({one.shape[:1] for row in tensors for one in row}) != 1 or not tensors[0][0].dim():
            return None
        if len(pairs) < 2 or Format.of(pairs[0]) != Format.of(pairs[1]):
            return None
        output, target = joined(pairs)
        try:
            whole = float(loss(output, target))
            mean = sum(float(loss(*_every_other((output, target), half))) for half in range(2)) / 2
        except Exception:  # somebody's loss may take microbatches of one size alone
            return None
        kind = next((one.dtype for one in tensors_of(output) if one.is_floating_point()), torch.float32)
    differ = abs(whole - mean) > max(LOSS_ROUNDING, LIMITS.get(kind, 0.0)) * abs(whole)
    return (whole, mean) if differ else None


def _every_other(value: Any, first: int) -> Any:
    return tree_map(lambda leaf: leaf[first::2] if isinstance(leaf, Tensor) else leaf, value)


def updated(problem: Problem, stages: Sequence[Sequence[nn.Module]], data: Data, loss: Any, update: Update) -> float:
    """Run a step with updates inside, by its rule, in one process. Returns the mean loss.

    One microbatch after the other goes through the whole model, each stage with the version that the graph says (PipeDream,
    2BW: see `build.updates`). An update is made once its group's gradients are there. update: makes a torch optimizer of
    parameters. The layers of `stages` end with the newest weights.
    """
    rules = [_UpdatedStage(stage, update) for stage in stages]
    version, group, size = versions_of(problem), groups_of(problem), problem.round
    layers, total = [layer for stage in stages for layer in stage], 0.0
    for m in sorted(data.inputs):
        for s, one in enumerate(rules):
            one.show(version.get((s, m), 0))
        value = _loss(layers, data, m, loss)
        (value / size).backward()  # type: ignore[no-untyped-call]
        total += float(value.detach()) / len(data.inputs)
        if m + 1 not in data.inputs or group[0, m + 1] != group[0, m]:
            for one in rules:
                one.update()
    for one in rules:
        one.show(-1)
    return total


class _UpdatedStage:
    """A stage's weights and all their versions."""

    def __init__(self, layers: Sequence[nn.Module], update: Update) -> None:
        self._weights = [p for p in nn.ModuleList(layers).parameters() if p.requires_grad]
        self._newest = [nn.Parameter(p.detach().clone()) for p in self._weights]
        self._optimizer = update(self._newest) if self._newest else None
        self._versions = [[p.detach().clone() for p in self._weights]]

    def show(self, version: int) -> None:
        """Let the layers have this version (−1: the newest)."""
        for p, value in zip(self._weights, self._versions[version], strict=True):
            p.data = value

    def update(self) -> None:
        """Make the next version of the newest one and the layers' gradients."""
        for p, newest in zip(self._weights, self._newest, strict=True):
            newest.grad, p.grad = p.grad, None
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()
        self._versions.append([p.detach().clone() for p in self._newest])


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """What is compared after a plain step: the gradient."""
    return parameter.grad


def weight(parameter: nn.Parameter) -> Tensor | None:
    """What is compared after a step that updates by itself: the value."""
    return parameter.detach()


def difference(found: Tensor | None, right: Tensor | None, scale: float = 0.0) -> float:
    """max |found − right| / max |right| over one tensor; None counts as zeros; against a zero tensor: max |found|. scale:
    what it is divided by in place of max |right|, where that is not 0."""
    if found is None and right is None:
        return 0.0
    a = torch.zeros_like(right) if found is None else found  # type: ignore[arg-type]
    b = torch.zeros_like(a) if right is None else right
    worst = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    scale = scale or magnitude(b)
    return worst / scale if scale else worst


def magnitude(tensor: Tensor | None) -> float:
    """max |tensor|; 0 where there are no numbers."""
    return float(tensor.double().abs().max()) if tensor is not None and tensor.numel() else 0.0


def named(layers: Mapping[int, nn.Module]) -> dict[Place, nn.Parameter]:
    """(layer, name) → trained parameter; a tied one has several places."""
    return {
        (i, name): p
        for i, layer in layers.items()
        for name, p in layer.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }


def values(layers: Mapping[int, nn.Module], what: Callable[[nn.Parameter], Tensor | None] = gradient) -> dict[Place, Value]:
    """Place → its value, whole: all ranks of the mesh that a DTensor is on call this together. Names are those of the model
    before torch's wrappers."""
    found = {}
    for (layer, name), p in named(layers).items():
        for wrapping in WRAPPING:
            name = name.replace(wrapping, "")
        value = what(p)
        found[layer, name] = Value(None if value is None else full(value.detach()), p.shape, p.dtype, p.device)
    return found
