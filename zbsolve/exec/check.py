"""Is the pipeline right? Its loss and gradients are compared with those of the same model, unsplit, in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..models.model import Place
from ..problem import Problem
from .backward.layer_split import run_layers
from .handlers.handler import Data
from .transport.wires import Wires, receive_bytes, send_bytes
from .update_groups import groups_of, versions_of
from .weight_versions import Update

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}
LOSS_ROUNDING = 1e-4  # two orders of summation differ by less
NOT_A_NUMBER = 1e30  # the difference where something is not finite
Row = tuple[float, float, str]  # a difference as a share of its limit, the difference, where


def reference(layers: Sequence[nn.Module], data: Data, loss: Any) -> float:
    """Run every microbatch through the whole model with plain autograd. Gradients go into `.grad`. Returns the mean loss."""
    count, total = len(data.inputs), 0.0
    for m in sorted(data.inputs):
        value = loss(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m])
        (value / count).backward()
        total += float(value.detach()) / count
    return total


def uneven_loss(layers: Sequence[nn.Module], data: Data, loss: Any) -> tuple[float, float] | None:
    """Is the loss a mean in which every row counts alike? The loss of two microbatches joined, and the mean of the losses of
    every other row of them, where these differ by more than rounding (a sum; a mean that leaves out padding).

    None where they do not differ, and where nothing can be said: output and target are not tensors of as many rows, or the
    loss takes no other number of rows.
    """
    with torch.no_grad():
        pairs = [(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m]) for m in sorted(data.inputs)[:2]]
        if not all(
            isinstance(y, Tensor) and y.dim() and y.shape[:1] == pairs[0][0].shape[:1] for pair in pairs for y in pair
        ):
            return None
        if len(pairs) < 2 or any(a.shape != b.shape for a, b in zip(*pairs, strict=True)):
            return None
        output, target = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        try:
            whole = float(loss(output, target))
            mean = sum(float(loss(output[half::2], target[half::2])) for half in range(2)) / 2
        except Exception:  # somebody's loss may take microbatches of one size alone
            return None
    differ = abs(whole - mean) > max(LOSS_ROUNDING, LIMITS.get(output.dtype, 0.0)) * abs(whole)
    return (whole, mean) if differ else None


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
        value = loss(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m])
        (value / size).backward()
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


def difference(found: Tensor | None, right: Tensor | None) -> float:
    """max |found − right| / max |right| over one tensor; None counts as zeros; against a zero tensor: max |found|."""
    if found is None and right is None:
        return 0.0
    a = torch.zeros_like(right) if found is None else found  # type: ignore[arg-type]
    b = torch.zeros_like(a) if right is None else right
    worst = float((a.double() - b.double()).abs().max()) if a.numel() else 0.0
    scale = float(b.double().abs().max()) if b.numel() else 0.0
    return worst / scale if scale else worst


def named(layers: Mapping[int, nn.Module]) -> dict[Place, nn.Parameter]:
    """(layer, name) → trained parameter; a tied one has several places."""
    return {
        (i, name): p
        for i, layer in layers.items()
        for name, p in layer.named_parameters(remove_duplicate=False)
        if p.requires_grad
    }


def compare(
    wires: Wires | None,
    owners: Sequence[Sequence[int]],
    mine: Mapping[int, nn.Module],
    whole: Sequence[nn.Module] | None,
    losses: tuple[float, float],
    what: Callable[[nn.Parameter], Tensor | None] = gradient,
) -> dict[str, Any] | None:
    """The verdict, on rank 0; None on the others. All ranks of `wires` call this (None: there is one rank).

    Rank 0 holds `whole`, the reference with its gradients. It sends those of each layer to the ranks in `owners[layer]`,
    which compare them with their own layers `mine`. losses: (pipeline, reference), known on rank 0. what: `gradient` or
    `weight`. "worst" in the verdict is the largest difference over all tensors and the loss (see `difference`).
    """
    found: list[Row] = []
    rank = 0 if wires is None else wires.rank
    for layer, owner in [(layer, owner) for layer, here in enumerate(owners) for owner in here]:
        right: dict[Place, Tensor | None] | None = None
        if rank == 0:
            assert whole is not None
            right = {place: what(p) for place, p in named({layer: whole[layer]}).items()}
            if owner and wires is not None:
                _send(wires, right, owner)
        elif owner == rank and wires is not None:
            right = _receive(wires, named({layer: mine[layer]}))
        if owner == rank and right is not None:
            found += [_judge(place, p.dtype, what(p), right[place]) for place, p in named({layer: mine[layer]}).items()]
    if wires is not None and rank:
        send_bytes(wires, json.dumps(found).encode(), 0)
        return None
    for other in range(1, 1 if wires is None else wires.size):
        assert wires is not None
        found += [tuple(row) for row in json.loads(receive_bytes(wires, other))]
    pipeline, single = losses
    gap = abs(pipeline - single) / abs(single) if single else abs(pipeline)
    gap = gap if math.isfinite(pipeline) and math.isfinite(single) else NOT_A_NUMBER
    share, worst, where = max([*found, (gap / LIMITS[torch.float32], gap, "loss")])
    return {
        "passed": bool(share <= 1),
        "worst": worst,
        "limit": worst / share if share else LIMITS[torch.float32],
        "where": where,
        "tensors": len(found),
        "loss": pipeline,
        "reference_loss": single,
        "measure": f"max |{what.__name__} - reference| / max |reference| of a tensor; "
        "reference: the unsplit model in one process",
        "compared": what.__name__,
    }


def _judge(place: Place, kind: torch.dtype, found: Tensor | None, right: Tensor | None) -> Row:
    """What is not finite is wrong."""
    value = difference(found, right)
    value = value if math.isfinite(value) else NOT_A_NUMBER
    return value / LIMITS.get(kind, 1e-5), value, f"layer {place[0]} {place[1]}"


def _send(wires: Wires, right: Mapping[Place, Tensor | None], owner: int) -> None:
    """Send which places have a gradient, then the gradients."""
    there = [place for place, gradient in right.items() if gradient is not None]
    send_bytes(wires, json.dumps(there).encode(), owner)
    for place in there:
        gradient = right[place]
        assert gradient is not None
        wires.wait(wires.send(gradient.contiguous(), owner), owner)


def _receive(wires: Wires, parameters: Mapping[Place, nn.Parameter]) -> dict[Place, Tensor | None]:
    """What `_send` sent."""
    right: dict[Place, Tensor | None] = dict.fromkeys(parameters)
    for layer, name in json.loads(receive_bytes(wires, 0)):
        buffer = torch.empty_like(parameters[layer, name], memory_format=torch.contiguous_format).detach()
        wires.wait(wires.receive(buffer, 0), 0)
        right[layer, name] = buffer
    return right
