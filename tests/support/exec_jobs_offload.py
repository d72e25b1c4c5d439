"""What the tests of offload run on two gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Problem, Schedule
from zbsolve.build import Host, with_offload
from zbsolve.exec import Pipeline, PostValidated, RunFailed
from zbsolve.exec.awaits import crossings
from zbsolve.exec.base.part import Hooks
from zbsolve.exec.check import reference
from zbsolve.exec.emulate import Times
from zbsolve.exec.handlers import Data
from zbsolve.exec.memory import Memory
from zbsolve.exec.offload import rank as offload_rank
from zbsolve.exec.offload.rank import Offload
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.greedy.syncs import with_syncs
from zbsolve.systems import preset

from .exec_tools import a_problem, metered, random_schedule, refusal, worst
from .systems_jobs import INNER, MESSAGE, bytes_of
from .systems_jobs import batch as wide_batch
from .systems_jobs import layers as wide_layers
from .trials import Batches, Trial, tried

LAYERS, MICROBATCHES, SEED, ROWS, WIDTH, HIDDEN = 4, 4, 3, 6, 4, 96
SMALL, LARGE = ROWS * WIDTH * 8, ROWS * HIDDEN * 8  # bytes of what a layer takes, and of what is inside


class Layer(nn.Module):
    """Keeps its input, three larger tensors of which two share a storage, and a mask; a buffer is a part of its work."""

    scale: Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.default_generator.manual_seed(number)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, HIDDEN))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        inside = torch.tanh(self.up(x)) * self.scale
        left, right = inside[:, ::2], inside[:, 1::2]
        y: Tensor = x + self.dropout(self.down(torch.cat([left * right, right], 1)))
        return y


def layers(numbers: list[int]) -> list[nn.Module]:
    return [Layer(i).double() for i in numbers]


def batch(step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS * MICROBATCHES, WIDTH, dtype=torch.float64, generator=numbers)
    return x, x.flip(0)


def pipeline_of(schedule: Schedule, **more: Any) -> Pipeline:
    return Pipeline(layers, schedule, loss=nn.functional.mse_loss, seed=SEED, **more)


def offloaded(fraction: Any = 1.0, which: Any = None, placement: tuple[int, ...] = (0, 1), **more: Any) -> Problem:
    how = {"layers": LAYERS, "held_until_B": 600, "held_until_W": 400, "held_input": 100, **more}
    problem = a_problem(placement, MICROBATCHES, **how)
    return with_offload(problem, 5, 6, fraction=fraction, which=which)


def in_parts_of_four(place: int, step: int) -> Batches:
    x, y = batch(step)
    return x.chunk(MICROBATCHES), y.chunk(MICROBATCHES)


CASES = {
    "full": offloaded(),
    "half": offloaded(0.5, placement=(0, 1, 1, 0)),
    "some": offloaded([1.0, 0.3], [[True, False, True, True], [False, True, True, False]]),
    "fused": offloaded(fused=True),
    "recomputed": offloaded(recompute=(1,)),
    "recomputed in part": offloaded(recompute="all:1"),
    "graph, half, recomputed": offloaded(0.5, recompute=(1,), placement=(0, 1, 1, 0)),
}
TRIALS = {
    name: Trial(
        problem=problem,
        layers=layers,
        batch=in_parts_of_four,
        order=number,
        steps=2,
        options={"seed": SEED, "split": "graph" if "graph" in name else "layers"},
    )
    for number, (name, problem) in enumerate(CASES.items())
}


def gradients(rank: int, _: None) -> dict[str, Any]:
    """Of each trial, and how many buffers in host memory are there for further steps."""

    def run(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
        found = trial.ran(pipe)
        return found | {"buffers": len(pipe._runner.interpreter.state.part(Offload).pool.free)}

    return tried(rank, f"{__name__}:TRIALS", run)


def sized(placement: tuple[int, ...], fraction: Any) -> Problem:
    """A step of `systems_jobs.Layer`, with the bytes that it keeps."""
    stages = len(placement)
    return with_offload(a_problem(placement, 8, layers=stages, **bytes_of(stages)), 4, 4, fraction=fraction)


def memories(rank: int, _: None) -> list[dict[str, Any]]:
    """What a rank holds on its device and in host memory, and what is predicted."""
    result = []
    for number, (placement, fraction) in enumerate([((0, 1), 1.0), ((0, 1), 0.5), ((0, 1, 1, 0), [1.0, 0.25, 0.0, 0.6])]):
        schedule = random_schedule(sized(placement, fraction), number)
        runner = Pipeline(wide_layers, schedule, loss=nn.functional.mse_loss, seed=SEED)
        memory = metered(runner, *wide_batch(8))
        result.append({name: getattr(memory, name) for name in ("held", "predicted", "host", "predicted_host")})
    return result


def limited(rank: int, _: None) -> dict[str, Any]:
    """1F1B, and offload in a third of what that needs at any moment."""
    kept = INNER + MESSAGE
    plain = a_problem((0, 1), 8, layers=8, fused=True, held_until_B=4 * kept)
    runner, memory = wide_run(preset("1f1b", plain), None)
    most = torch.tensor([memory.most, memory.peak])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    limit = int(most[0]) // 3
    other, small = wide_run(in_parts(4, kept), limit)
    whole = wide_layers(list(range(8)))
    inputs, targets = (dict(enumerate(part)) for part in wide_batch(8))
    for _step in range(2):
        reference(whole, Data(inputs, targets), nn.functional.mse_loss)
    return {
        "worst": max(worst(one, whole) for one in (runner, other)),
        "limit": limit,
        "most": small.most,
        "peaks": (int(most[1]), small.peak, small.predicted_peak),
    }


def cheats(rank: int, limit: int) -> str:
    """The same stages with slow copies, whose schedule minds no memory. Its process group is of no use afterwards."""
    return refusal(lambda: wide_run(in_parts(400, None), limit, group=dist.new_group()), RunFailed)


def in_parts(copy: int, capacity: int | None) -> Schedule:
    """Eight stages on two ranks, whose copies take `copy` µs."""
    problem = a_problem((0, 1) * 4, 8, layers=8, fused=True, held_until_B=INNER + MESSAGE)
    made = replace(with_offload(problem, copy, copy), capacity=None if capacity is None else (capacity,) * 2)
    return with_syncs(list_schedule(made, deepest_first(made)))


def wide_run(schedule: Schedule, limit: int | None, **more: Any) -> tuple[Pipeline, Memory]:
    """Two steps, and what the second one held."""
    how = {"loss": nn.functional.mse_loss, "hooks": Hooks(limit=limit)}
    runner = Pipeline(wide_layers, schedule, **how, **more)
    return runner, metered(runner, *wide_batch(8))


def shared(rank: int, _: None) -> list[dict[str, Any]]:
    """Two ranks on one bus, and two with little host memory; the second one's copies are slow. How often a copy began before
    one of the other rank had ended that it had to wait for, really and on emulated devices."""
    result, right = [], wide_layers([0, 1])
    reference(right, Data(*(dict(enumerate(part)) for part in wide_batch(8))), nn.functional.mse_loss)
    for host in (Host(shared_bus=2), Host(2 * (INNER + MESSAGE))):
        problem = a_problem((0, 1), 8, layers=2, fused=True, held_until_B=INNER + MESSAGE)
        made = replace(with_offload(problem, 20, 20, host=host), capacity=(2 * (INNER + MESSAGE),) * 2)
        schedule = with_syncs(list_schedule(made, deepest_first(made)))
        names = schedule.problem.names
        pairs = [(names[a], names[b]) for a, b in crossings(schedule)]
        for times in (None, Times.of(schedule, "schedule")):
            runner = Pipeline(wide_layers, schedule, loss=nn.functional.mse_loss, emulate=times)
            with noted(0.01 * rank) as here:
                timeline = runner.step(*wide_batch(8)).timeline
            everywhere: list[Any] = [None, None]
            dist.all_gather_object(everywhere, here)
            times_of = everywhere[0] | everywhere[1] if times is None else timeline
            early = sum(times_of[after][0] < times_of[before][1] for before, after in pairs)
            result.append({"worst": worst(runner, right), "early": early, "crossings": len(pairs)})
    return result


@contextmanager
def noted(pause: float) -> Iterator[dict[str, tuple[int, int]]]:
    """When the work of copies began and ended inside, by name, ns: ends before others hear of them. What comes back takes
    `pause` seconds more."""
    found: dict[str, tuple[int, int]] = {}

    def noting(copy: Any, kind: str) -> Any:
        def run(*given: Any) -> None:
            began = time.monotonic_ns()
            copy(*given)
            time.sleep(pause if kind == "R" else 0)
            found[given[1].name.replace("O", kind)] = began, time.monotonic_ns()

        return run

    out, back = noting(Offload._copy_out, "O"), noting(offload_rank._copy_back, "R")
    with mock.patch.object(Offload, "_copy_out", out), mock.patch.object(offload_rank, "_copy_back", back):
        yield found


def trained(rank: int, _: None) -> dict[str, Any]:
    """Steps whose optimizer is validated late and steps anew, with and without offload; and an evaluation."""
    found = []
    for problem in (offloaded(fraction=0.0), offloaded()):
        runner = pipeline_of(random_schedule(problem, 2))
        optimizer = PostValidated(runner, torch.optim.SGD(runner.parameters(), lr=0.1), max_norm=4.0)
        amended = 0
        for step in range(4):
            runner.step(*batch(step))
            amended += 0 if optimizer.last is None else optimizer.last.amended
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()
        found.append([p.detach() for p in runner.parameters()])
        loss = runner.evaluate(*batch(9))
    worst = max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))
    return {"worst": worst, "loss": loss, "amended": amended}
