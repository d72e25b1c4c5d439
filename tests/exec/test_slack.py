"""A rank that waits runs a later W: when it does, what that gives, that gradients keep their bits."""

from __future__ import annotations

import math
import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, pipeline
from zbsolve.exec import Pipeline
from zbsolve.exec.emulate import Times
from zbsolve.exec.lowering import lower
from zbsolve.exec.slack import PASSED, Slack, earliest
from zbsolve.exec.transport.mailbox import Mailbox

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import devices_alone, random_schedule, refusal, toy


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
        columns = result.columns
        found[name] = {
            "start": dict(zip(schedule.problem.names, columns[0].tolist(), strict=True)),
            "ends": result.windows[:, 1].tolist(),
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
                    start = runner.step(x, x.flip(0)).columns[0]
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


def test_the_first_place_of_each_w() -> None:
    """Behind its own B, and behind whatever it may not pass."""
    schedule = three_ranks()
    actions = lower(schedule)[2].actions  # F0 B0 F1 B1 W0 W1
    assert earliest(schedule.problem, (), actions, PASSED) == {4: 2, 5: 4}
    assert earliest(schedule.problem, (), actions, ("F", "W")) == {4: 4, 5: 4}
    assert earliest(schedule.problem, (("2F1", "2W0"),), actions, PASSED) == {4: 3, 5: 4}
    assert earliest(schedule.problem, (("0F1", "2W0"),), actions, PASSED) == {4: 4, 5: 4}


def test_a_w_runs_where_it_surely_fits() -> None:
    """2F1 waits for 1F1 (20 ms): W0 (20 ms) fits while rank 1 has not begun that pass, and not once it has."""
    programs, cells = lower(three_ranks()), np.zeros(3, np.int64)
    slack, message = Slack(three_ranks(), programs, 2, cells), programs[2].actions[2].messages[0]
    for _ in range(2):  # nothing runs early in the first step
        slack.begin(())
        slack.at = 2
        cells[1] = 6 * slack._step + 1  # 1F0
        found = slack.pull([message])
    assert found is not None
    assert found.name == "2W0"
    assert slack.pull([message]) is None  # W1's B has not run
    slack.begin(())
    slack.at, cells[1] = 2, 12 + 2  # 1F1 has begun: who knows how long it still takes
    assert slack.pull([message]) is None


@pytest.mark.slow
def test_a_rank_that_waits() -> None:
    """By hand, in passes of 20 ms, where 0F1 takes six: 1F1 runs from 7, 2F1 from 8, 2B1 from 9 to 10. As given rank 2 runs
    W0 and W1 then, to 12. It stood idle from 4, and with slack W0 runs there, so it ends at 11."""
    found = jobs_on(3, __name__, {"stalled": None, "alike": 4, "refused": None})
    for one in found["stalled"]:
        assert one["fixed"]["gradients"] == one["slack"]["gradients"]
        for name, w, end in (("fixed", 10, 12), ("slack", 4, 11), ("graph", 4, 11), ("both", 10, 12)):
            starts, ends = one[name]["start"], one[name]["ends"]
            assert (starts["2W0"], ends[2]) == (20_000 * w, 20_000 * end)
            assert one[name]["host"] == [0, 0]  # what ran early is no time of the host
    assert all(one["same"] for one in found["alike"])
    assert min(one["early"] for one in found["alike"]) > 3
    assert {line for one in found["refused"] for line in one} == {
        "split ':slack': not with a step without W",
        "split: 'auto:slack' is none of layers, graph, graph:least, inductor, inductor:least, auto, auto:inductor, "
        "layers:slack, graph:slack",
    }
