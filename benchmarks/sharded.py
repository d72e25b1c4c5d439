"""`python -m benchmarks.sharded`: sharded parameters, torch's window of three stages against the search, on simulated times.

Estimated profiles, parameters over 8 ranks of a data-parallel group whose link is `LINK`. Torch's rule runs interleaved 1F1B
(fused backward) and gathers the stages of the next three that a rank computes; it knows no memory limit, so its peak is
what it needs. The search has the same passes, fused too, in a share of that peak: with torch's own gathers as passes that
may move (beginning from torch's schedule where that fits), and with parameters gathered 1, 2 or 4 times a step; the best of
all counts. Bytes are activations, gathered parameters and gradients of the fullest rank.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from zbsolve import Infeasible, Problem, Schedule, preset, solve, verify
from zbsolve.layer import Link
from zbsolve.search.solver import compiled
from zbsolve.step import Step
from zbsolve.systems.torch_gathers import torch_window
from zbsolve.util.errors import NotFound

from .harness import Benchmark
from .profiles import kept

LINK = Link(20.0, 40_000.0)  # 20 µs and 40 GB/s a rank: assumed, not measured
SHARDS = 8
CASES = (
    ("llama3-8b", 4, "loop"),
    ("llama3-8b", 4, "loop4"),
    ("llama3-8b", 8, "loop"),
    ("llama3-8b", 8, "loop4"),
    ("llama3-70b", 8, "loop4"),
)
SHARES = (1.0, 0.85, 0.7)  # of the peak of torch's rule
GATHERS = (1, 2, 4)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--effort", type=float, default=1.0, help="for each solve")
    parser.add_argument("--device", default="h100", help="of the estimated profiles")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a case and a limit."""
    compiled()
    rows = {}
    for model, ranks, place in CASES:
        profile = replace(kept(f"estimated-{model}-{options.device}"), capacity=None, shard_link=LINK)
        steps = {g: Step(ranks, 2 * ranks, place, fused=True, shards=SHARDS, gathers=g).problem(profile) for g in GATHERS}
        theirs = torch_window(preset("interleaved", steps[1]))
        assert not verify(theirs.problem, theirs)
        for share in SHARES:
            label = f"{model} p{ranks} m{2 * ranks} {place} {share:g}"
            rows[label] = row = _row(steps, theirs, share, options.effort)
            print(f"{label}: {row}", flush=True)
    return {"link": [LINK.latency, LINK.bytes_per_us], "shards": SHARDS, "rows": rows}


def _row(steps: dict[int, Problem], theirs: Schedule, share: float, effort: float) -> dict[str, Any]:
    peak = max(theirs.timeline().peak_bytes)
    room, found = int(share * peak), dict[str, Schedule]()
    for name, problem in {**{str(g): one for g, one in steps.items()}, "torch's": theirs.problem}.items():
        limited = replace(problem, capacity=(room,) * problem.ranks)
        begin = {"hint": theirs} if name == "torch's" and share >= 1 else {}
        try:
            found[name] = solve(limited, effort=effort, prefer=None, **begin)
        except (Infeasible, NotFound):
            continue
        assert not verify(limited, found[name])
    value = int(theirs.timeline().value)
    row: dict[str, Any] = {
        "torch_step": value,
        "torch_peak": peak,
        "torch_gathers": len(theirs.problem.rows("AG")),
        "room": room,
    }
    if not found:
        return {**row, "step": None}
    best = min(found, key=lambda name: float(found[name].timeline().value))
    ours, certificate = found[best].timeline(), found[best].certificate
    assert certificate is not None
    changed = round(float(ours.value) / value - 1, 4)
    return {
        **row,
        "step": int(ours.value),
        "bound": certificate.bound,
        "peak": max(ours.peak_bytes),
        "gathers": best,
        "step_against_torch": changed,
    }


BENCHMARK = Benchmark("sharded", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
