"""`python -m benchmarks.one_device`: the solved schedule against 1F1B on the parts of one GPU; p = 4.

Passes are timed with the neighbours busy: a first schedule runs on all parts at once, and each stage's median F, B and W
(and BW) become the problem that is solved and that predictions are for. Traces and the table go to benchmarks/results/.
Not run on a GPU yet. `--device cpu` shows that it works, not how fast: there, streams take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from profiler.models import load
from zbsolve import Problem, Schedule, Trace, pipeline, solve
from zbsolve.compare import compare
from zbsolve.exec.job import Options, run_on_one_device
from zbsolve.greedy.presets import preset
from zbsolve.partition import balanced
from zbsolve.problem import KINDS

from .__main__ import RESULTS, write

MODEL = "gpt-1.5b@layers=14,batch=2,length=1024,dtype=bfloat16"


def main(arguments: list[str] | None = None) -> None:
    """Time, solve, run, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=30.0, help="for solving")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder")
    o = parser.parse_args(arguments)
    options = Options(steps=o.steps)
    counts = balanced([1.0] * len(load(o.model).layers), o.ranks)
    guesses = {fused: step(counts, o.microbatches, {}, fused) for fused in (True, False)}
    times: dict[str, list[int]] = {}
    for fused, guess in guesses.items():
        first = preset("1f1b" if fused else "zb-h1", guess)
        times |= stage_times(run_on_one_device(first, o.model, options, o.device))
    schedules = {
        "1f1b": preset("1f1b", step(counts, o.microbatches, times, fused=True)),
        "solved": solve(step(counts, o.microbatches, times, fused=False), seconds=o.seconds),
    }
    runs = {name: (one, run_on_one_device(one, o.model, options, o.device)) for name, one in schedules.items()}
    for name, (one, trace) in runs.items():
        trace.save(o.output / f"one_device-{name}.trace.json")
        one.save(o.output / f"one_device-{name}.json")
    size = {"model": o.model, "ranks": o.ranks, "microbatches": o.microbatches, "device": o.device, "times": times}
    rows = {name: row(one, trace, runs["1f1b"]) for name, (one, trace) in runs.items()}
    show(rows)
    write("one_device", {**size, "rows": rows}, o.output)


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


def show(rows: dict[str, dict[str, Any]]) -> None:
    """The table as text."""
    for name, one in rows.items():
        print(
            f"{name:8} predicted {one['predicted'] / 1000:9.2f} ms, measured {one['measured'] / 1000:9.2f} ms; speed-up "
            f"predicted {one['speedup_predicted']:.3f}, measured {one['speedup_measured']:.3f} ({one['streams']})"
        )


if __name__ == "__main__":
    main()
