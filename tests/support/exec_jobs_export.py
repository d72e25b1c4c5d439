"""What the tests of exports run on gloo ranks (see `exec_ranks`): our orders in torch's own runtime."""

from __future__ import annotations

from typing import Any

import torch

from zbsolve import BadInput, Schedule
from zbsolve.exec import torch_schedule
from zbsolve.exec.check import difference
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.models.model import Model
from zbsolve.models.presets import GptSizes, gpt, mlp


def model(name: str) -> Model:
    return mlp(0) if name == "mlp" else gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=False)


def double(x: torch.Tensor) -> torch.Tensor:
    return x.double() if x.is_floating_point() else x


def run(case: dict[str, Any], rank: int) -> float:
    schedule, spec = Schedule.load(case["schedule"]), model(case["model"])
    order, counts = torch_order(schedule), schedule.problem.layers
    firsts = [sum(counts[:s]) for s in range(len(counts))]
    layers = [layer.double() for layer in spec.build()]
    mine = {
        s: torch.nn.Sequential(*layers[firsts[s] : firsts[s] + counts[s]])
        for s, home in enumerate(order.placement)
        if home == rank
    }
    pairs = [spec.batch(m, 0) for m in order.microbatches]
    inputs, targets = (torch.cat([double(pair[i]) for pair in pairs]) for i in range(2))
    runtime = torch_schedule(schedule, mine, spec.loss, defer_recv=case.get("defer", False))
    losses: list[torch.Tensor] = []
    last = len(counts) - 1
    whole, expected = [layer.double() for layer in spec.build()], []
    for x, y in pairs:
        value = spec.loss(torch.nn.Sequential(*whole)(double(x)), double(y))
        (value / len(pairs)).backward()
        expected.append(value.detach())
    found = []
    for _ in range(2):  # before the first step torch finds out shapes; the second is only itself
        for module in mine.values():
            module.zero_grad()
        runtime.step(*((inputs,) if 0 in mine else ()), target=targets if last in mine else None, losses=losses)
        for s, module in mine.items():
            names = dict(torch.nn.Sequential(*whole[firsts[s] : firsts[s] + counts[s]]).named_parameters())
            found += [difference(p.grad, names[name].grad) for name, p in module.named_parameters()]
        if last in mine:
            found.append(difference(torch.stack(losses).detach(), torch.stack(expected)))
    return max(found)


def results(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, float | str]:
    """Case → the largest relative difference of loss and gradients from the unsplit model (or the line of a BadInput)."""
    found: dict[str, float | str] = {}
    for name, case in cases.items():
        try:
            found[name] = run(case, rank)
        except BadInput as error:
            found[name] = str(error)
    return found
