"""`python -m benchmarks.vocabulary_run`: what a sharded vocabulary gains, predicted and measured: 32k words, a tiny model.

The model is profiled here. The same step is solved with output layer and loss on the last stage (layers redistributed as
well as may be) and sharded over all ranks. Two ranks run both with their real passes, gradients checked. Four emulated
devices take the profile's times, with a small model of as many layers in place of the real one.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zbsolve import Schedule, Trace, solve
from zbsolve.exec import CrossEntropy
from zbsolve.exec.run.launch import run_local
from zbsolve.models.presets import Block, Embed, Head
from zbsolve.profile.profile import Profile
from zbsolve.util.text import aligned

from .harness import Benchmark

WORDS, WIDTH, BLOCKS, LENGTH, BATCH = 32_768, 128, 8, 64, 8
MICROBATCHES, SECONDS, STEPS = 8, 5, 5
MODEL, STAND_IN = "benchmarks.vocabulary_run:model", "benchmarks.vocabulary_run:stand_in"


def model() -> tuple[list[nn.Module], Any, CrossEntropy]:
    """A GPT over 32k words, a sample and its loss."""
    return _made(WORDS, WIDTH, LENGTH)


def stand_in() -> tuple[list[nn.Module], Any, CrossEntropy]:
    """As many layers, and little work."""
    return _made(24, 12, 8)


def _made(words: int, width: int, length: int) -> tuple[list[nn.Module], Any, CrossEntropy]:
    torch.manual_seed(0)
    blocks = [Block(width, 4) for _ in range(BLOCKS)]
    tokens = torch.randint(0, words, (BATCH, length))
    return [Embed(length, width, words), *blocks, Head(width, words)], (tokens, tokens.roll(1, 1)), CrossEntropy()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every run's row; the table is printed at the end."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-vocabulary-") as folder:
        path = str(Path(folder) / "profile.json")
        subprocess.run([sys.executable, "-m", "zbsolve.cli", "profile", MODEL, "-o", path], check=True)
        costs = Profile.load(path)
    rows = {**compared(costs, 2, None), **compared(costs, 4, "schedule")}
    print("\n".join(lines(rows)))
    return {"words": WORDS, "width": WIDTH, "blocks": BLOCKS, "microbatches": MICROBATCHES, "rows": rows}


def compared(costs: Profile, ranks: int, emulate: str | None) -> dict[str, Any]:
    """Rows of the step on so many ranks; the gain is over the first."""
    rows: dict[str, Any] = {}
    for where in ("redistribute", "sharded", "two-barriers"):
        schedule = solve(costs.problem(ranks, MICROBATCHES, "single", vocabulary=where), seconds=SECONDS)
        spec = MODEL if emulate is None else STAND_IN
        trace = run_local(schedule, spec, steps=STEPS, emulate=emulate, check=emulate is None, timeout=120)
        name = f"{ranks} ranks, {'their passes' if emulate is None else 'emulated'}: {where}"
        rows[name] = row(schedule, trace, next(iter(rows.values()), None))
    return rows


def row(schedule: Schedule, trace: Trace, base: dict[str, Any] | None) -> dict[str, Any]:
    """What the run shows beside the prediction, µs and bytes."""
    steps = sorted(float(one.makespan) for one in trace.steps)
    found = {
        "predicted": float(schedule.timeline().makespan),
        "bound": float(schedule.certificate.bound or 0),
        "measured": steps[len(steps) // 2],
        "steps": steps,
        "peaks": [int(one) for one in trace.peaks[0]],
        "predicted_peaks": [int(one) for one in trace.facts["predicted_peaks"]],
        "gradients": trace.facts.get("check", {}).get("worst"),
        "load": os.getloadavg()[0],
    }
    for what in ("predicted", "measured"):
        found[f"gain_{what}"] = 1.0 if base is None else base[what] / found[what]
    return found


def lines(rows: dict[str, Any]) -> list[str]:
    """The table as text."""
    cells = [("", "predicted", "measured", "gain", "measured", "peaks, MiB", "predicted", "load")]
    for name, one in rows.items():
        times = (f"{one[what] / 1000:.1f} ms" for what in ("predicted", "measured"))
        gains = (f"{one[what]:.2f}" for what in ("gain_predicted", "gain_measured"))
        peaks = (" ".join(f"{size / 2**20:.2f}" for size in one[what]) for what in ("peaks", "predicted_peaks"))
        cells.append((name, *times, *gains, *peaks, f"{one['load']:.0f}"))
    return aligned(cells, left=(0,))


BENCHMARK = Benchmark("vocabulary_run", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
