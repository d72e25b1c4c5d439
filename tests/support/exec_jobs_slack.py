"""What the tests of slack run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline
from zbsolve.exec.emulate import Times
from zbsolve.exec.slack import Slack
from zbsolve.exec.transport.mailbox import Mailbox

from .exec_jobs import toy
from .exec_tools import devices_alone, random_schedule, refusal


def three_ranks() -> Schedule:
    """Two microbatches on three ranks; every pass takes 20 ms. The last rank's W's come behind its last B."""
    times = [20_000] * 3
    problem = pipeline(times, B=times, W=times, microbatches=2, layers=[1] * 3)
    orders = ["F0 F1 B0 B1 W0 W1", "F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"]
    return Schedule(problem, {f"compute:{r}": tuple(f"{r}{one}" for one in o.split()) for r, o in enumerate(orders)})


class Both(nn.Module):
    """A weight whose gradient is made in B and in W."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(torch.tanh(x @ self.layer.weight))


def both(numbers: list[int]) -> list[nn.Module]:
    """Such layers."""
    torch.manual_seed(7)
    made: list[nn.Module] = [Both() for _ in range(3)]
    return [made[i] for i in numbers]


def stalled(rank: int, argument: None) -> dict[str, Any]:
    """The second step of `three_ranks` in which 0F1 stalls for six passes, fixed and with slack: starts, ends and gradients;
    and with weights whose gradients B and W both add to. Where rank 2 is to run a W early, 0F1 really waits for that."""
    schedule, x, sign = three_ranks(), torch.linspace(-1, 1, 16).reshape(4, 4), torch.zeros(1)
    found: dict[str, Any] = {}
    for name, layers, split in (
        ("fixed", toy, "layers"),
        ("slack", toy, "layers:slack"),
        ("graph", toy, "graph:slack"),
        ("both", both, "layers:slack"),
    ):
        times, pull, pulled = Times.of(schedule, "schedule"), Slack.pull, list[str]()
        runner = Pipeline(layers, schedule, loss=nn.functional.mse_loss, split=split, emulate=times)

        def told(slack: Slack, missing: Any, pull: Any = pull, pulled: Any = pulled) -> Any:
            if (action := pull(slack, missing)) is not None and rank == 2 and not pulled:
                pulled.append(action.name)
                dist.send(sign, 0)
            return action

        def heard(begun: str) -> None:
            if begun == "0F1":
                dist.recv(sign, 2)

        with devices_alone(), mock.patch.object(Slack, "pull", told):
            runner.step(x, x.flip(0))
            runner.hooks.emulated.length["0F1"] = 120_000_000
            runner.hooks.announce = heard if name in ("slack", "graph") else None
            result = runner.step(x, x.flip(0))
        columns = result.seen.columns
        found[name] = {
            "start": dict(zip(schedule.problem.names, columns[0].tolist(), strict=True)),
            "ends": result.seen.windows[:, 1].tolist(),
            "host": [float(columns[3][schedule.problem.index[name]]) for name in ("2F1", "2W1")],
            "gradients": [p.grad.tolist() for p in runner.parameters() if p.grad is not None],
        }
    return found


def alike(rank: int, count: int) -> dict[str, Any]:
    """`count` random orders on 3 ranks: three steps fixed and with slack, where each message seems far away; whether the
    gradients have the same bits, and how many W's ran before their turn."""
    rng, same, early = random.Random(1), True, 0
    for seed in range(count):
        stages = rng.randint(3, 6)
        spot = [0, 1, 2, *(rng.randrange(3) for _ in range(stages - 3))]
        rng.shuffle(spot)
        m = rng.randint(2, 5)
        F, B = ([rng.randint(5, 30) for _ in spot] for _ in range(2))
        problem = pipeline(F, B=B, W=[4] * stages, placement=tuple(spot), microbatches=m, layers=[1] * stages)
        schedule, x = random_schedule(problem, seed), torch.linspace(-1, 1, 8 * m).reshape(2 * m, 4)
        grads = []
        for split in ("layers", "layers:slack"):
            runner = Pipeline(toy, schedule, loss=nn.functional.mse_loss, split=split)
            far = mock.patch.object(Slack, "_left", return_value=math.inf)
            with mock.patch.object(Mailbox, "here", return_value=False), far:
                for _ in range(3):
                    start = runner.step(x, x.flip(0)).seen.columns[0]
            grads.append([p.grad for p in runner.parameters()])
            index = problem.index
            for names in schedule.order.values() if split == "layers:slack" else ():
                late = 0.0
                for name in names:
                    early += start[index[name]] < late
                    late = max(late, start[index[name]])
        same &= all(bool((a == b).all()) for a, b in zip(*grads, strict=True))
    return {"same": same, "early": int(early)}


def refused(rank: int, argument: None) -> list[str]:
    """What slack does not go with."""
    fused = pipeline([10] * 3, BW=[20] * 3, microbatches=2, layers=[1] * 3)
    given: dict[str, Any] = {"loss": nn.functional.mse_loss}
    return [
        refusal(lambda: Pipeline(toy, random_schedule(fused), split="layers:slack", **given)),
        refusal(lambda: Pipeline(toy, three_ranks(), split="auto:slack", **given)),
    ]
