"""What the tests of rounds run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from zbsolve.exec import Pipeline, PostValidated
from zbsolve.long_steps.check import CheckedRounds

from .exec_jobs import toy
from .exec_tools import refusal, worst
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
    apart, sgd = worst(runner, whole), torch.optim.SGD(runner.parameters(), lr=0.1)
    evaluated = runner.evaluate(x, x.flip(0))
    seen = list(result.seen.windows.shape)
    return {
        "difference": apart,
        "loss": result.loss,
        "evaluated": evaluated,
        "refused": {
            "timeline": refusal(lambda: result.timeline),
            "PostValidated": refusal(lambda: PostValidated(runner, sgd, max_norm=1.0)),
        },
        "seen": [runner.rank, seen[0]],
    }
