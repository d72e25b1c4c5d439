"""`python -m benchmarks.one_device`: the solved schedule against 1F1B on the parts of one GPU; p = 4.

Passes are timed with the neighbours busy: a first schedule runs on all parts at once, and each stage's median F, B and W
(and BW) become the problem that is solved and that predictions are for. Traces and the table go to benchmarks/results/.
On an H100 steps took 1.42 and 1.53 times the prediction: one thread launches all. `--device cpu` shows that it works, not
how fast: there, streams take turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

from zbsolve import Problem, Schedule, Trace, pipeline, solve
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.models.by_name import load
from zbsolve.partition.cuts import balanced
from zbsolve.problem import KINDS
from zbsolve.show.comparison import compare
from zbsolve.systems import preset

from .harness import Benchmark

MODEL = "gpt-1.5b@layers=14,batch=2,length=1024,dtype=bfloat16"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="for solving")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Time, solve, run, compare; schedules and traces lie beside the result."""
    run_options = Options(steps=options.steps)
    counts = balanced([1.0] * len(load(options.model).layers), options.ranks)
    guesses = {fused: step(counts, options.microbatches, {}, fused) for fused in (True, False)}
    times: dict[str, list[int]] = {}
    for fused, guess in guesses.items():
        first = preset("1f1b" if fused else "zb-h1", guess)
        times |= stage_times(run_on_one_device(first, options.model, run_options, options.device))
    schedules = {
        "1f1b": preset("1f1b", step(counts, options.microbatches, times, fused=True)),
        "solved": solve(step(counts, options.microbatches, times, fused=False), seconds=options.seconds),
    }
    runs = {
        name: (one, run_on_one_device(one, options.model, run_options, options.device)) for name, one in schedules.items()
    }
    for name, (one, trace) in runs.items():
        trace.save(options.output.with_name(f"one_device-{name}.trace.json"))
        one.save(options.output.with_name(f"one_device-{name}.json"))
    rows = {name: row(one, trace, runs["1f1b"]) for name, (one, trace) in runs.items()}
    print("\n".join(line(*one) for one in rows.items()))
    size = {what: getattr(options, what) for what in ("model", "ranks", "microbatches", "device")}
    return {**size, "times": times, "rows": rows}


def step(counts: tuple[int, ...], microbatches: int, times: dict[str, list[int]], fused: bool) -> Problem:
    """One training step of these stages, in 1F1B's memory; `times`: kind → µs a stage, one each where not known yet."""
    ranks = len(counts)
    kinds = ("BW",) if fused else ("B", "W")
    costs = {kind: times.get(kind, [1] * ranks) for kind in ("F", *kinds)}
    return pipeline(
        **costs,
        microbatches=microbatches,
        layers=counts,
        held_until_B=[1] * ranks,
        held_until_W=[1] * ranks,
        capacity=2 * ranks,
    )


def stage_times(trace: Trace) -> dict[str, list[int]]:
    """Kind → each stage's median µs over all passes and steps; at least one."""
    p = trace.problem.passes
    length = np.stack([one.end - one.start for one in trace.steps])
    return {
        KINDS[kind]: [
            max(1, round(float(np.median(length[:, (p.kind == kind) & (p.stage == stage)])))) for stage in np.unique(p.stage)
        ]
        for kind in np.unique(p.kind)
    }


def row(schedule: Schedule, trace: Trace, base: tuple[Schedule, Trace]) -> dict[str, Any]:
    """What the run shows beside the prediction, µs."""
    found = compare(schedule, trace, base)
    assert found.speedup is not None
    return {
        "predicted": found.predicted,
        "measured": found.measured,
        "steps": list(found.steps),
        "speedup_predicted": found.speedup.predicted,
        "speedup_measured": found.speedup.measured,
        "host_us": trace.facts["host_us"],
        "streams": trace.facts["streams"],
        "sms": trace.facts.get("sms"),
    }


def line(name: str, row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{name:8} predicted {row['predicted'] / 1000:9.2f} ms, measured {row['measured'] / 1000:9.2f} ms; speed-up "
        f"predicted {row['speedup_predicted']:.3f}, measured {row['speedup_measured']:.3f} ({row['streams']})"
    )


BENCHMARK = Benchmark("one_device", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
