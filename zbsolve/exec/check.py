"""Is the pipeline right? Its loss and gradients against the same model, whole and unsplit, in one process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..problem import Problem
from .groups import group_size, groups_of, versions
from .stage import run_layers
from .versions import Update
from .walk import Data
from .wires import Wires, receive_bytes, send_bytes

LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 2e-2, torch.bfloat16: 5e-2}
WRONG = 1e30  # the difference where something is not a finite number
Place = tuple[int, str]


def reference(layers: Sequence[nn.Module], data: Data, loss: Any) -> float:
    """Run every microbatch through the whole model with plain autograd; gradients go into `.grad`. The mean loss."""
    count, total = len(data.inputs), 0.0
    for m in sorted(data.inputs):
        value = loss(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m])
        (value / count).backward()
        total += float(value.detach()) / count
    return total


def updated(problem: Problem, stages: Sequence[Sequence[nn.Module]], data: Data, loss: Any, update: Update) -> float:
    """A step with updates inside, by its rule in one process: one microbatch after the other through the whole model, each
    stage with the version that the graph says; an update once its group's gradients are there (PipeDream, 2BW: see
    `versions.updates`). The layers of `stages` end with the newest weights. update: makes a torch optimizer of parameters.
    The mean loss."""
    weights = [[p for p in nn.ModuleList(stage).parameters() if p.requires_grad] for stage in stages]
    newest = [[nn.Parameter(p.detach().clone()) for p in stage] for stage in weights]
    optimizers = [update(stage) if stage else None for stage in newest]
    history = [[[p.detach().clone() for p in stage]] for stage in weights]
    version, group, size = versions(problem), groups_of(problem), group_size(problem)
    layers, total = [layer for stage in stages for layer in stage], 0.0
    for m in sorted(data.inputs):
        for s, stage in enumerate(weights):
            for p, value in zip(stage, history[s][version.get((s, m), 0)], strict=True):
                p.data = value
        value = loss(run_layers(layers, data.inputs[m], 0, data.seed + m), data.targets[m])
        (value / size).backward()
        total += float(value.detach()) / len(data.inputs)
        if m + 1 in data.inputs and group[0, m + 1] == group[0, m]:
            continue
        for stage, masters, optimizer, made in zip(weights, newest, optimizers, history, strict=True):
            for p, master in zip(stage, masters, strict=True):
                master.grad, p.grad = p.grad, None
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
            made.append([p.detach().clone() for p in masters])
    for stage, made in zip(weights, history, strict=True):
        for p, value in zip(stage, made[-1], strict=True):
            p.data = value
    return total


def gradient(parameter: nn.Parameter) -> Tensor | None:
    """What is compared after a step: its gradient."""
    return parameter.grad


def weight(parameter: nn.Parameter) -> Tensor | None:
    """What is compared after a step that updates by itself."""
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
    """Rank 0 (which holds `whole`, the reference with its gradients) sends each layer's right gradients to the ranks in
    `owners[layer]`, which compare (`what`: `gradient`, or `weight`). `losses`: (pipeline, reference), known on rank 0. The
    verdict, on rank 0.

    All ranks of `wires` call this (None: there is one rank). "worst": the largest difference over all tensors
    and the loss (see `difference`).
    """
    found: list[tuple[float, float, str]] = []
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
    gap = gap if math.isfinite(pipeline) and math.isfinite(single) else WRONG
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


def _judge(place: Place, kind: torch.dtype, found: Tensor | None, right: Tensor | None) -> tuple[float, float, str]:
    """(difference as a share of its type's limit, difference, where); what is no finite number is wrong."""
    value = difference(found, right)
    value = value if math.isfinite(value) else WRONG
    return value / LIMITS.get(kind, 1e-5), value, f"layer {place[0]} {place[1]}"


def _send(wires: Wires, right: Mapping[Place, Tensor | None], owner: int) -> None:
    """Which places have a gradient, then the gradients."""
    there = [place for place, gradient in right.items() if gradient is not None]
    send_bytes(wires, json.dumps(there).encode(), owner)
    for place in there:
        gradient = right[place]
        assert gradient is not None
        wires.wait(wires.send(gradient.contiguous(), owner), owner)


def _receive(wires: Wires, parameters: Mapping[Place, nn.Parameter]) -> dict[Place, Tensor | None]:
    right: dict[Place, Tensor | None] = dict.fromkeys(parameters)
    for layer, name in json.loads(receive_bytes(wires, 0)):
        buffer = torch.empty_like(parameters[layer, name], memory_format=torch.contiguous_format).detach()
        wires.wait(wires.receive(buffer, 0), 0)
        right[layer, name] = buffer
    return right
