"""What the tests of watching run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, Trace, pipeline, preset
from zbsolve.build import Work, with_work
from zbsolve.exec import Pipeline, Watch
from zbsolve.exec.emulate import Times
from zbsolve.exec.loop import watching
from zbsolve.exec.run.job import Options, run_rank
from zbsolve.show.comparison import compare, switch_lines
from zbsolve.util.errors import RunFailed

from .exec_jobs import toy
from .exec_tools import devices_alone, refusal, worst
from .trials import Trial


def orders(ranks: int, us: int = 3000, microbatches: int = 4) -> tuple[Schedule, Schedule]:
    """All forwards first; and ZB-H1."""
    times = {"B": [us] * ranks, "W": [us] * ranks}
    problem = pipeline([us] * ranks, **times, microbatches=microbatches, layers=[1] * ranks)
    first = {f"compute:{r}": tuple(f"{r}{kind}{m}" for kind in "FBW" for m in range(microbatches)) for r in range(ranks)}
    return Schedule(problem, first), preset("zb-h1", problem)


class Found:
    """A search that is over at once, with ZB-H1."""

    def __init__(self, given: Schedule, seconds: float) -> None:
        self.given, self.ended = given, True

    def found(self) -> Schedule:
        return Schedule(self.given.problem, preset("zb-h1", self.given.problem).order)

    def close(self) -> None:
        """Nothing runs."""


def watched(rank: int, argument: None) -> dict[str, Any]:
    """Four ranks of which rank 1 takes three times as long; looks after 3 and 6 steps; what was seen, and the gradients."""
    given, _ = orders(4)
    times = Times.of(given, "schedule")
    slow = {name: us * (1 + 2 * (name[0] == "1")) for name, us in times.passes.items()}
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    trial = Trial(problem=given, layers=toy, batch=lambda place, step: (x.chunk(4), x.flip(0).chunk(4)))
    runner = trial.pipeline(emulate=times)
    runner.hooks.emulated.length = {name: us * 1000 for name, us in slow.items()}
    said, off, steps = [], [], []
    with mock.patch.object(watching, "Search", Found), devices_alone():
        watch = Watch(runner, every=3, steps=2)
        for _ in range(9):
            runner.module.zero_grad()
            result = runner.step(x, x.flip(0))
            steps.append(result.timeline.makespan)
            trial.add_gradients(whole := trial.unsplit(4), 0, runner)
            off.append(worst(runner, whole))
            said.append(watch(result))
    told = [None if one is None else [[s.what for s in one.slow], one.before, one.after, str(one)] for one in said]
    return {"said": told, "off": max(off), "steps": steps, "order": list(runner.schedule.order["compute:1"])}


def any_gain(watch: Watch) -> Watch:
    """It switches, whatever real passes take."""
    watch.gain = -math.inf
    return watch


def one_of_two(rank: int) -> Pipeline:
    """Pipelines of two ranks, all forwards first."""
    groups = [[dist.new_group([2 * i, 2 * i + 1]) for i in range(2)], [dist.new_group([i, 2 + i]) for i in range(2)]]
    group, beside = groups[0][rank // 2], groups[1][rank % 2]
    return Pipeline(toy, orders(2, 30)[0], loss=nn.functional.mse_loss, group=group, replicas=beside)


def replicas(rank: int, argument: None) -> dict[str, Any]:
    """Two pipelines of two ranks switch together; gradients before and after, and the orders."""
    runner = one_of_two(rank)
    x, found = torch.linspace(-1, 1, 32).reshape(8, 4) + rank // 2, []
    with mock.patch.object(watching, "Search", Found):
        watch = any_gain(Watch(runner, every=1, steps=1))
        for _ in range(3):
            runner.module.zero_grad()
            watch(runner.step(x, x.flip(0)))
            runner.wait_gradients()
            found.append([p.grad.clone() for p in runner.parameters()])
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0], found[-1], strict=True))
    return {"same": same, "order": list(runner.schedule.order["compute:0"])}


def refused(rank: int, argument: None) -> list[str]:
    """Other passes, another order on one rank, numbers that make no sense."""
    given, other = orders(4, 30)
    runner = Pipeline(toy, given, loss=nn.functional.mse_loss)
    more = preset("zb-h1", pipeline([30] * 4, B=[30] * 4, W=[30] * 4, microbatches=5, layers=[1] * 4))
    lines = [
        refusal(lambda: runner.switch(more)),
        refusal(lambda: runner.switch(replace(other, problem=replace(other.problem, sizes=(1, 2, 3, 2))))),
        refusal(lambda: runner.switch(other if rank == 2 else given)),
        refusal(lambda: Watch(runner, every=2, steps=3)),
    ]
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    before = runner.step(x, x.flip(0))  # still runs
    runner.switch(other)
    steps = [before, runner.step(x, x.flip(0), memory=True)]
    trace = runner.trace(steps, steps[-1].memory, {})
    kept = trace is None or (trace.ran(0), trace.ran(1)) == (given.order, other.order)
    return [*lines, str(kept and [one.step for one in getattr(trace, "switches", ())])]


def whole_job(rank: int, argument: None) -> dict[str, Any] | None:
    """`run --watch 3` of four ranks: what rank 0's trace says."""
    given, _ = orders(4)
    with mock.patch.object(watching, "Search", Found), devices_alone():
        trace = run_rank(given, "mlp-4", Options(steps=8, warmup=1, emulate="schedule", look=3), lambda name: None)
    if not isinstance(trace, Trace):
        return None
    makespans = [step.makespan for step in trace.steps]
    found = {"before": makespans[:6], "later": makespans[6:], "looks": trace.facts["looks"], "told": switch_lines(trace)}
    kept = Trace.from_json(json.loads(json.dumps(trace.to_json()))).planned(6).order == trace.ran(7)
    return found | {"said": compare(given, trace).later, "file": kept}


def some_ranks(rank: int, argument: None) -> str:
    """Only rank 1 has work beside the step, so only there the order may not change: what is said of it."""
    given, _ = orders(2, 30)
    problem = with_work(given.problem, Work(1, 10, after=1))
    alone = {"compute:1": (*given.order["compute:1"], "1J0")}
    schedule = Schedule(problem, {**given.order, **alone})
    runner = Pipeline(toy, schedule, loss=nn.functional.mse_loss, work=lambda *piece: None)
    watch, x = any_gain(Watch(runner, every=1, steps=1)), torch.linspace(-1, 1, 32).reshape(8, 4)
    said = [watch(runner.step(x, x.flip(0))) for _ in range(2)]
    return "" if rank else said[-1].why


def fails(rank: int, argument: None) -> str:
    """Rank 0 cannot say what is slow: what all ranks say."""
    given, _ = orders(2, 30)
    group, x = dist.new_group([0, 1]), torch.linspace(-1, 1, 32).reshape(8, 4)
    runner = Pipeline(toy, given, loss=nn.functional.mse_loss, group=group)
    watch = Watch(runner, every=1, steps=1)
    with mock.patch.object(watching, "slow_parts", side_effect=OSError("no room")):
        return refusal(lambda: watch(runner.step(x, x.flip(0))), RunFailed)


def one_pipeline(rank: int, argument: None) -> str:
    """One of two pipelines switches to another order than the other."""
    runner = one_of_two(rank)
    return refusal(lambda: runner.switch(orders(2, 30)[int(rank < 2)]))
