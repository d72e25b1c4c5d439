"""`python -m benchmarks.runtime`: the executor beside torch's own pipeline runtime: same model, ranks and order of work.

Ranks are processes with one thread each, on gloo. Both runtimes take turns, round by round, in the same processes.
`step`: wall time of a step, ms. `host`: CPU time of the rank's own thread in `step()`, a pass (F, B, W or BW), µs; `cpu`: of
all threads of the process. `plain`: the same forwards and backwards in autograd alone, without any runtime; what a runtime
takes on top is `beyond`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from zbsolve import Problem, Schedule, pipeline
from zbsolve.exec import Pipeline
from zbsolve.placement import parse
from zbsolve.systems import preset
from zbsolve.util.text import aligned

from .children import found_by
from .harness import Benchmark

# name: torch's schedule, placement, fused backward
CASES: dict[str, tuple[Any, str, bool]] = {
    "1F1B": (Schedule1F1B, "single", True),
    "InterleavedZeroBubble": (ScheduleInterleavedZeroBubble, "loop", False),
    "ZBVZeroBubble": (ScheduleZBVZeroBubble, "vee", False),
}
MICROBATCHES, WARM, STEPS = 16, 3, 5  # STEPS in a round


class Tiny(nn.Module):
    """One small layer: the work is less than the cost of starting it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers(model: str, stages: int) -> list[nn.Module]:
    """One layer a stage (tiny), or 8 blocks of a small GPT shared out among them."""
    from zbsolve.models.presets import Block

    torch.manual_seed(0)
    if model == "tiny":
        return [Tiny() for _ in range(stages)]
    return [nn.Sequential(*(Block(192, 6) for _ in range(8 // stages))) for _ in range(stages)]


def batch(model: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step."""
    shape = (4 * MICROBATCHES, 64) if model == "tiny" else (2 * MICROBATCHES, 128, 192)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def order_of(runtime: Any, problem: Problem) -> Schedule:
    """torch's own order of work as a schedule: its I is a B here, its B a B and a W (or BW where all are fused)."""
    fused = "0BW0" in problem.index
    order = {}
    for rank, actions in runtime.pipeline_order.items():
        names: list[str] = []
        for one in actions:
            kind = {"F": ["F"], "I": ["B"], "W": ["W"], "B": ["BW"] if fused else ["B", "W"]}
            for k in kind[one.computation_type.value] if one is not None and one.computation_type.value in kind else ():
                names.append(f"{one.stage_index}{k}{one.microbatch_index}")
        order[f"compute:{rank}"] = tuple(names)
    return Schedule(problem, order)


def torch_step(case: str, model: str, rank: int, ranks: int) -> tuple[Any, Callable[[], None]]:
    """torch's schedule and one step of it."""
    kind, placement, _ = CASES[case]
    spot = parse(placement, ranks)
    all_layers = layers(model, len(spot))
    mine = [PipelineStage(all_layers[s], s, len(spot), torch.device("cpu")) for s, home in enumerate(spot) if home == rank]
    loss = nn.functional.mse_loss
    runtime = kind(mine[0] if kind is Schedule1F1B else mine, MICROBATCHES, loss_fn=loss)
    inputs, targets = batch(model)
    first, last = any(s.is_first for s in mine), any(s.is_last for s in mine)

    def step() -> None:
        runtime.step(*([inputs] if first else []), target=targets if last else None, losses=[] if last else None)

    return runtime, step


def our_step(case: str, model: str, runtime: Any, ranks: int) -> tuple[Schedule, Callable[[], None]]:
    """The same order in the executor."""
    _, placement, fused = CASES[case]
    spot = parse(placement, ranks)
    times: dict[str, Any] = {"BW": 20} if fused else {"B": 10, "W": 10}
    problem = pipeline(10, **times, placement=spot, microbatches=MICROBATCHES, layers=(1,) * len(spot))
    schedule = preset("1f1b", problem) if fused else order_of(runtime, problem)
    runner = Pipeline(layers(model, len(spot)), schedule, loss=nn.functional.mse_loss, timeout=60)
    inputs, targets = batch(model)

    def step() -> None:
        runner.step(inputs, targets)

    return schedule, step


def plain_step(case: str, model: str, rank: int, ranks: int) -> Callable[[], None]:
    """This rank's forwards and backwards, without a runtime."""
    spot = parse(CASES[case][1], ranks)
    mine = [layer for layer, home in zip(layers(model, len(spot)), spot, strict=True) if home == rank]
    x = batch(model)[0].chunk(MICROBATCHES)[0].requires_grad_()
    gradient = torch.ones_like(x)

    def step() -> None:
        for _ in range(MICROBATCHES):
            for layer in mine:
                layer(x).backward(gradient)
                x.grad = None

    return step


def in_turn(case: str, model: str, rank: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Both runtimes in turn; samples of one rank."""
    runtime, theirs = torch_step(case, model, rank, ranks)
    schedule, ours = our_step(case, model, runtime, ranks)
    passes = len(schedule.order[f"compute:{rank}"])
    plain = plain_step(case, model, rank, ranks)
    found: dict[str, Any] = {"passes": passes, "plain": [], "torch": [], "zbsolve": []}
    for i in range(rounds + 1):
        for name, step in (("plain", plain), ("torch", theirs), ("zbsolve", ours)):
            dist.barrier()
            for _ in range(WARM if i == 0 else STEPS):
                wall, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
                step()
                after = time.perf_counter() - wall, time.thread_time() - own, time.process_time() - cpu
                if i:
                    found[name].append([round(1e6 * x) for x in after])
    return found


def all_cases(rank: int, models: list[str], rounds: int) -> dict[str, Any]:
    """What each rank runs."""
    ranks = dist.get_world_size()
    return {model: {case: in_turn(case, model, rank, ranks, rounds) for case in CASES} for model in models}


def summary(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row a model and case: medians over steps, the mean over ranks."""
    rows = []
    for model, cases in found[0].items():
        for case in cases:
            row: dict[str, Any] = {"model": model, "schedule": case}
            ranks = [one[model][case] for one in found]
            for name in ("plain", "torch", "zbsolve"):
                row[name] = {
                    "step_ms": round(max(median(s[0] for s in r[name]) for r in ranks) / 1000, 3),
                    "host_us": round(sum(median(s[1] for s in r[name]) / r["passes"] for r in ranks) / len(ranks), 1),
                    "cpu_us": round(sum(median(s[2] for s in r[name]) / r["passes"] for r in ranks) / len(ranks), 1),
                }
                row[name]["beyond_us"] = round(row[name]["host_us"] - row["plain"]["host_us"], 1)
            rows.append(row)
    return rows


def lines(rows: list[dict[str, Any]]) -> list[str]:
    """The table as text."""
    cells = [("model", "schedule", "runtime", "step ms", "host µs a pass", "beyond", "cpu µs a pass")]
    for row in rows:
        for name in ("plain", "torch", "zbsolve"):
            costs = (f"{row[name][what]:.1f}" for what in ("host_us", "beyond_us", "cpu_us"))
            cells.append((row["model"], row["schedule"], name, f"{row[name]['step_ms']:.2f}", *costs))
    return aligned(cells, left=(0, 1, 2))


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--model", nargs="+", choices=("tiny", "gpt"), default=["tiny", "gpt"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=8)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Medians, printed at the end, and every sample of all ranks."""
    found = found_by(all_cases, options.ranks, 600, models=options.model, rounds=options.rounds)
    rows = summary(found)
    print("\n".join(lines(rows)))
    facts = {"ranks": options.ranks, "microbatches": MICROBATCHES, "steps": options.rounds * STEPS}
    return {**facts, "rows": rows, "samples": found}


BENCHMARK = Benchmark("runtime", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
