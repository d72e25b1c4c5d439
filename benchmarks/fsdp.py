"""`python -m benchmarks.fsdp`: sharded parameters with gathers and reductions in the schedule, beside torch's rule.

Two pipelines of two ranks, two stages a rank, each stage sharded over two ranks (FSDP2); 8 microbatches. Torch's runtime
gathers in the order of use, up to three stages ahead, and reduces behind a stage's last backward: so do the rows of its
schedules. The search places both by itself. Emulated devices have passes of 8 ms, gathers and reductions of 24 ms. The real
run has four processes on whatever cores are here, and no times are given to it: gloo's collectives take these cores too.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Problem, Schedule, pipeline, solve
from zbsolve.build import with_sharding
from zbsolve.exec import Pipeline
from zbsolve.exec.emulate import Times
from zbsolve.systems import preset

from .children import found_by
from .harness import Benchmark

PLACEMENT, MICROBATCHES, PASS_TIME, LINK_TIME, COLLECTIVE_TIME = (0, 1, 0, 1), 8, 8_000, 100, 24_000  # µs
STEPS, WARMUP, ROUNDS, SECONDS, LIMIT = 8, 2, 2, 10, 60
EMULATED_WIDTH, REAL_WIDTH, ROWS = 8, 512, 16


class Layer(nn.Module):
    """A stage: two matrices."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Rows → rows of the same width."""
        y: Tensor = x + self.down(torch.relu(self.up(x)))
        return y


def plain(fused: bool) -> Problem:
    """The step without collectives."""
    times = [PASS_TIME] * len(PLACEMENT)
    backward: dict[str, Any] = {"BW": [2 * PASS_TIME] * len(PLACEMENT)} if fused else {"B": times, "W": times}
    options = {"placement": PLACEMENT, "microbatches": MICROBATCHES, "comm": LINK_TIME, "layers": [1] * len(PLACEMENT)}
    return pipeline(times, **backward, **options)


def torch_rule(schedule: Schedule) -> Schedule:
    """The schedule with torch's rule: a rank has no more than three stages, so all are gathered as soon as may be."""
    problem = with_sharding(schedule.problem, COLLECTIVE_TIME, COLLECTIVE_TIME)
    order = dict(schedule.order)
    for rank in range(problem.ranks):
        place = {name: i for i, name in enumerate(order[f"compute:{rank}"])}
        edges, found = problem.edges, list[tuple[int, str]]()
        for i in problem.rows("AG", "RS", rank=rank).tolist():
            around = (*edges.after[edges.before == i].tolist(), *edges.before[edges.after == i].tolist())
            places = [place[problem.names[j]] for j in around]
            found.append((min(places) - len(place) if problem.passes[i].kind == "AG" else max(places), problem.names[i]))
        order[f"comm:{rank}"] = tuple(name for _, name in sorted(found))
    return Schedule(problem, order)


def schedules() -> dict[str, Schedule]:
    """Two of torch's with its rule, and what the search finds."""
    sharded = with_sharding(plain(fused=False), COLLECTIVE_TIME, COLLECTIVE_TIME)
    return {
        "interleaved 1F1B, torch's rule": torch_rule(preset("interleaved", plain(fused=True))),
        "interleaved zero bubble, torch's rule": torch_rule(preset("interleaved-zb", plain(fused=False))),
        "solved": solve(sharded, seconds=SECONDS),
    }


def steps(rank: int, forms: dict[str, Any], emulate: bool) -> dict[str, list[float]]:
    """What every rank runs: each schedule in turn, round by round; µs of every step, to the end of its optimizer."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    width, found = EMULATED_WIDTH if emulate else REAL_WIDTH, {name: list[float]() for name in forms}

    def build(numbers: list[int]) -> list[nn.Module]:
        made: list[nn.Module] = [Layer(width) for _ in numbers]
        for one in made:
            fully_shard(one, mesh=mesh["dp"])
        return made

    for _ in range(ROUNDS):
        for name, form in forms.items():
            one = Schedule.from_json(form)
            times = Times.of(one, "schedule") if emulate else None
            how: dict[str, Any] = {"group": mesh.get_group("pp"), "timeout": LIMIT, "emulate": times}
            runner = Pipeline(build, one, loss=nn.functional.mse_loss, **how)
            optimizer = torch.optim.SGD(runner.parameters(), lr=1e-4)
            x = torch.randn(ROWS * MICROBATCHES, width)
            for step in range(WARMUP + STEPS):
                dist.barrier()
                began = time.monotonic()
                result = runner.step(x, x)
                optimizer.step()
                optimizer.zero_grad()
                took = result.timeline.makespan if emulate else 1e6 * (time.monotonic() - began)
                if step >= WARMUP:
                    found[name].append(float(took))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each schedule's predicted, emulated and real time."""
    all_of_them = schedules()
    forms = {name: one.to_json() for name, one in all_of_them.items()}
    runs = {kind: found_by(steps, 4, 8 * LIMIT, forms=forms, emulate=kind == "emulated")[0] for kind in ("emulated", "real")}
    rows: dict[str, Any] = {"load": os.getloadavg()[0]}
    for name, one in all_of_them.items():
        predicted, certificate = int(one.timeline().makespan), one.certificate
        rows[name] = {"predicted_us": predicted, "bound_us": None if certificate is None else certificate.bound}
        for kind, samples in runs.items():
            rows[name] |= {f"{kind}_us": median(samples[name]), f"{kind}_samples_us": [round(one) for one in samples[name]]}
        error = rows[name]["emulated_us"] / predicted - 1
        emulated, real = rows[name]["emulated_us"] / 1000, rows[name]["real_us"] / 1000
        print(f"{name:38} predicted {predicted / 1000:7.2f} ms, emulated {emulated:7.2f} ({error:+.2%}), real {real:7.2f}")
    return rows


BENCHMARK = Benchmark("fsdp", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
