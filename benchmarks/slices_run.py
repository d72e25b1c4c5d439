"""`python -m benchmarks.slices_run`: one long sequence on four ranks, whole and in 16 slices, predicted and run.

The step is Llama 3 8B's with 128k tokens as estimated for an H100, one microbatch. Four emulated devices take its times,
with a small model of as many layers in place of the real one: the executor runs, message by message and slice by slice. One
layer of each stage has attention: where ranks exchange it, each layer that has some waits for an answer, and all waits of a
pass are to take less than the pass, on a busy machine too.

1f1b: the whole sequence. slimpipe: even slices in SlimPipe's order (arXiv 2504.14519). even-work: the same order of slices
that take as long (Seq1F1B, arXiv 2406.03488). exchange: slimpipe with attention that waiting ranks make for late slices.
search: what solve finds of even slices with a split backward, where every rank may hold what slimpipe's fullest one holds;
the others are fused.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from profiler import estimate
from zbsolve import Profile, Schedule, Trace, preset, solve
from zbsolve.exec import CrossEntropy
from zbsolve.exec.run.launch import run_local
from zbsolve.models.presets import Block, Embed, Head
from zbsolve.util.text import aligned, in_one_unit

from .harness import Benchmark

RANKS, SLICES, TOKENS, BLOCKS = 4, 16, 131_072, 32
STAND_IN, WORDS, WIDTH, LENGTH = "benchmarks.slices_run:stand_in", 24, 8, 64
SCHEDULES = ("1f1b", "slimpipe", "even-work", "exchange", "search")


def stand_in() -> tuple[list[nn.Module], Any, CrossEntropy]:
    """As many layers, and little work: four tokens a slice, and attention in one layer of a stage."""
    torch.manual_seed(0)
    tokens = torch.randint(0, WORDS, (1, LENGTH))
    blocks = [nn.Linear(WIDTH, WIDTH) if i % (BLOCKS // RANKS) else Block(WIDTH, 2) for i in range(BLOCKS)]
    return [Embed(LENGTH, WIDTH, WORDS), *blocks, Head(WIDTH, WORDS)], (tokens, tokens.roll(1, 1)), CrossEntropy()


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--steps", type=int, default=2, help="of each run")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the search")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    profile = replace(estimate(f"llama3-8b@length={TOKENS}", "h100"), capacity=None)
    rows: dict[str, Any] = {}
    for name in options.schedules:
        schedule = scheduled(profile, name, options.seconds)
        trace = run_local(schedule, STAND_IN, steps=options.steps, warmup=1, emulate="schedule", timeout=120)
        rows[name] = row(schedule, trace, next(iter(rows.values()), None))
        print(table({name: rows[name]}), flush=True)
    return {"model": "llama3-8b", "tokens": TOKENS, "ranks": RANKS, "slices": SLICES, "rows": rows}


def scheduled(profile: Profile, name: str, seconds: float) -> Schedule:
    """The schedule that is called so here."""
    slices: Any = {"1f1b": 1, "even-work": f"{SLICES}:even-work"}.get(name, SLICES)
    how = {"attention_exchange": name == "exchange"}
    problem = profile.problem(RANKS, 1, layers=profile_layers(profile), fused=True, slices=slices, **how)
    found = preset("1f1b" if name == "1f1b" else "slimpipe", problem)
    if name != "search":
        return found
    split = profile.problem(RANKS, 1, layers=profile_layers(profile), slices=slices)
    return solve(replace(split, capacity=(max(found.timeline().peak_bytes),) * RANKS), seconds=seconds)


def profile_layers(profile: Profile) -> tuple[int, ...]:
    """As many blocks on each stage; the embedding is with the first, the output with the last."""
    each = (len(profile.layers) - 2) // RANKS
    return each + 1, *(each,) * (RANKS - 2), each + 1


def row(schedule: Schedule, trace: Trace, base: dict[str, Any] | None) -> dict[str, Any]:
    """What the run shows beside the prediction, µs and bytes; the gain is over the first row's."""
    steps = sorted(float(one.makespan) for one in trace.steps)
    found = {
        "predicted": float(schedule.timeline().makespan),
        "bound": None if schedule.certificate is None else schedule.certificate.bound,
        "measured": steps[len(steps) // 2],
        "steps": steps,
        "bubble": schedule.timeline().bubble_rate,
        "predicted_bytes": [int(one) for one in schedule.timeline().peak_bytes],
        "waited": trace.facts["emulated"]["waited"],
        "load": os.getloadavg()[0],
    }
    for what in ("predicted", "measured"):
        found[f"gain_{what}"] = 1.0 if base is None else base[what] / found[what]
    return found


def table(rows: dict[str, Any]) -> str:
    """A line each schedule: its step, predicted and measured, how far apart they are, its gain over the whole sequence, its
    bubble, and bytes of activations on the fullest rank."""
    unit, sizes = in_one_unit([max(one["predicted_bytes"]) for one in rows.values()])
    lines = [("schedule", "predicted s", "measured s", "apart", "gain", "bubble", unit)]
    for (name, one), size in zip(rows.items(), sizes, strict=True):
        times = (f"{one[what] / 1e6:.3f}" for what in ("predicted", "measured"))
        apart = f"{one['measured'] / one['predicted'] - 1:+.2%}"
        rest = f"{one['gain_measured']:.2f}", f"{one['bubble']:.0%}", size
        lines.append((name, *times, apart, *rest))
    return "\n".join(aligned(lines, left=(0,))) + "\n"


BENCHMARK = Benchmark("slices_run", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
