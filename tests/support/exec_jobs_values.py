"""What tests/exec/test_many_tensors.py runs on gloo ranks: models that hand on pytrees of tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec import Pipeline
from zbsolve.exec.check import reference
from zbsolve.exec.handlers import Data
from zbsolve.models.by_name import load

from .exec_tools import a_problem, random_schedule, worst

Values = dict[str, Any]


class Enter(nn.Module):
    """Ids and a padding mask in; hidden states, skips and what is constant out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Values:
        ids, mask = batch
        x = self.table(ids)
        return {"x": x, "mask": mask, "skips": (x,), "ids": ids, "none": None, "depth": 0, "aux": x.square().mean()}


class Middle(nn.Module):
    """Adds to the skips and to an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, v: Values) -> Values:
        x = torch.tanh(self.norm(self.layer(v["x"]))) * v["mask"].unsqueeze(-1)
        aux = v["aux"] + 0.1 * x.square().mean()
        return v | {"x": x, "skips": (*v["skips"], x), "depth": v["depth"] + 1, "aux": aux}


class Leave(nn.Module):
    """Uses the skips, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 20)

    def forward(self, v: Values) -> tuple[Tensor, Tensor]:
        x = v["x"]
        for skip in reversed(v["skips"]):
            x = x + skip
        assert v["none"] is None
        assert v["depth"] == len(v["skips"]) - 1
        return self.layer(x), v["aux"]


def layers(numbers: list[int]) -> list[nn.Module]:
    """Six layers, the same wherever they are built."""
    made: list[nn.Module] = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(Enter() if i == 0 else Leave() if i == 5 else Middle())
    return made


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy and the auxiliary losses of all layers."""
    logits, aux = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.5 * aux


def batch(rows: int, length: int = 5) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Ids and mask; targets."""
    generator = torch.Generator().manual_seed(rows + length)
    ids = torch.randint(20, (rows, length), generator=generator)
    mask = torch.ones(rows, length)
    mask[:, -1] = 0
    return (ids, mask), ids.roll(-1, 1)


def trained(rank: int, case: dict[str, Any]) -> list[float]:
    """Two steps of different lengths: the largest relative difference of this rank's gradients from the whole model's."""
    problem = a_problem(tuple(case["placement"]), 4, layers=6)
    runner = Pipeline(layers, random_schedule(problem, case["seed"]), loss=loss, timeout=60, split=case["split"])
    found = []
    for length in (5, 7):
        (ids, mask), targets = batch(8, length)
        parts = [(i, m) for i, m in zip(ids.chunk(4), mask.chunk(4), strict=True)]
        for parameter in runner.parameters():
            parameter.grad = None
        runner.step((ids, mask), targets)
        whole = layers(list(range(6)))
        reference(whole, Data(dict(enumerate(parts)), dict(enumerate(targets.chunk(4)))), loss)
        found.append(worst(runner, whole))
    return found


def evaluated(rank: int, split: str) -> list[float]:
    """Differences of an evaluation, and of the outputs on all ranks, from the whole model's."""
    runner = Pipeline(layers, random_schedule(a_problem((0, 1, 1, 0), 4, layers=6), 3), loss=loss, timeout=60, split=split)
    (ids, mask), targets = batch(10)
    found, outputs = runner.evaluate((ids, mask), targets), runner.forward((ids, mask), everywhere=True)
    value: Any = (ids, mask)
    with torch.no_grad():
        for layer in layers(list(range(6))):
            value = layer(value)
    expected = nn.functional.cross_entropy(value[0].flatten(0, 1), targets.flatten())
    runner.step((ids[:8], mask[:8]), targets[:8])  # training goes on with messages that carry gradients
    rows = (3, 3, 2, 2)  # of each microbatch, whose auxiliary loss counts as often
    right = float(expected) + sum(0.5 * float(aux) * n for aux, n in zip(outputs[1], rows, strict=True)) / 10
    return [float((outputs[0] - value[0]).abs().max()), abs(found - right)]


def message_bytes(rank: int, spec: str) -> list[int]:
    """Bytes of this rank's messages in one step of a model by name on two ranks: of an activation that came, and of a
    gradient."""
    model = load(spec)
    schedule = random_schedule(a_problem((0, 1), 2, layers=len(model.layers)))
    runner = Pipeline(model.build, schedule, loss=model.loss, timeout=60)
    batches = [model.batch(m, 0) for m in range(2)]
    runner.step([x for x, _ in batches], [y for _, y in batches])
    came = [message for messages in runner.program.incoming.values() for message in messages]
    assert len(came) == 2
    found = [{runner.mailbox.size(one) for one in came if one.gradient == gradient} for gradient in (False, True)]
    return [max(sizes, default=0) for sizes in found]
