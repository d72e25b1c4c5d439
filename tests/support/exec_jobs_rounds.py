"""What the tests of rounds run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zbsolve import BadInput
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.check import difference
from zbsolve.long_steps.rank_part import CheckedRounds

from .exec_jobs import toy
from .repeated_steps import repeated


def own_loop(rank: int, placement: str) -> dict[str, Any]:
    """A step and an evaluation of a rank's part, and what is refused."""
    part = CheckedRounds.of(repeated(placement, 2)).part(rank)
    stages, count = part.one.stages, part.microbatches
    runner = Pipeline(toy, part, loss=nn.functional.mse_loss, timeout=20)
    x = torch.linspace(-1, 1, 8 * count).reshape(2 * count, 4)
    result = runner.step(x, x.flip(0))
    whole = nn.Sequential(*toy(list(range(stages))))
    nn.functional.mse_loss(whole(x), x.flip(0)).backward()
    worst = 0.0
    for number, layer in runner.layers.items():
        for mine, right in zip(layer.parameters(), whole[number].parameters(), strict=True):
            assert mine.grad is not None
            assert right.grad is not None
            worst = max(worst, difference(mine.grad, right.grad))
    refused = {}
    for name, asked in (
        ("timeline", lambda: result.timeline),
        ("PostValidated", lambda: PostValidated(runner, torch.optim.SGD(runner.parameters(), lr=0.1), max_norm=1.0)),
    ):
        try:
            asked()
        except BadInput as error:
            refused[name] = str(error)
    evaluated = runner.evaluate(x, x.flip(0))
    seen = list(result.seen.windows.shape)
    return {
        "difference": worst,
        "loss": result.loss,
        "evaluated": evaluated,
        "refused": refused,
        "seen": [runner.rank, seen[0]],
    }
