"""`python -m benchmarks.vocabulary_search`: what the search reaches with little effort on steps with a sharded vocabulary.

Profiles are estimated for one device, and nothing was measured on it. Each rank has all the memory there is, or as much as
the order 1f1b-vocab (arXiv 2411.05288) needs on its fullest rank, parameters and optimizer states included. The gap is that
of the certificate; effort is counted, so that the numbers are deterministic but for the seconds.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zbsolve import Profile, Step, solve, verify
from zbsolve.schedule import relative_gap
from zbsolve.search.solver import compiled
from zbsolve.systems.table import preset

from .harness import Benchmark
from .vocabulary import PROFILES

PLACEMENTS = ("single", "vee", "loop")
AMPLE, TIGHT = "ample", "1f1b-vocab's"
BEYOND = (0.01, 0.03, 0.1)  # gaps that are counted


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--models", default="gemma2-9b,llama3-8b,qwen2-7b", help="names of published models, with commas")
    parser.add_argument("--device", default="h100", help="that profiles are estimated for")
    parser.add_argument("--ranks", default="4,8,16", help="numbers of ranks, with commas")
    parser.add_argument("--rounds", default="2,3", help="microbatches, as multiples of the ranks, with commas")
    parser.add_argument("--effort", type=float, default=1.0, help="for each solve")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a step; how many gaps are wide."""
    compiled()
    rows = {}
    for label, step, profile in steps(options):
        rows[label] = row = of_step(step, profile, options.effort)
        print(f"{label}: {row}", flush=True)
    gaps = sorted(row["gap"] for row in rows.values())
    counts = {f"beyond {limit:.0%}": sum(gap > limit for gap in gaps) for limit in BEYOND}
    seconds = round(sum(row["seconds"] for row in rows.values()), 1)
    summary = {
        "steps": len(gaps),
        "mean": round(sum(gaps) / len(gaps), 4),
        "median": gaps[len(gaps) // 2],
        "worst": gaps[-1],
    }
    print(summary, counts)
    return {"source": f"estimated for {options.device}, not measured", **summary, **counts, "seconds": seconds, "rows": rows}


def steps(options: argparse.Namespace) -> Iterator[tuple[str, Step, Profile]]:
    """The steps with their labels and profiles; none where layers do not make the stages."""
    for name in options.models.split(","):
        profile = replace(Profile.load(PROFILES / f"estimated-{name}-{options.device}.json"), capacity=None)
        for ranks in map(int, options.ranks.split(",")):
            for rounds in map(int, options.rounds.split(",")):
                plain = Step(ranks, rounds * ranks, vocabulary="sharded")
                tight = replace(plain, memory=_paper_needs(plain, profile))
                for placement in PLACEMENTS:
                    for memory, step in ((AMPLE, plain), (TIGHT, tight)):
                        one = replace(step, placement=placement)
                        if not one.too_few_layers(profile):
                            yield f"{name} p{ranks} m{one.microbatches} {placement} {memory}", one, profile


def _paper_needs(step: Step, profile: Profile) -> int:
    """What 1F1B-vocab needs on its fullest rank, bytes."""
    fused = replace(step, fused=True)
    return max(fused.needs(profile, preset("1f1b-vocab", fused.problem(profile))))


def of_step(step: Step, profile: Profile, effort: float) -> dict[str, Any]:
    """Value and bound, µs, the gap, who found it, and seconds."""
    problem = step.problem(profile)
    began = time.perf_counter()
    schedule = solve(problem, effort=effort, prefer=None)
    seconds = time.perf_counter() - began
    assert not verify(problem, schedule)
    certificate = schedule.certificate
    assert certificate is not None
    return {
        "value": certificate.value,
        "bound": certificate.bound,
        "gap": round(relative_gap(certificate.value, certificate.bound), 4),
        "solver": certificate.solver,
        "seconds": round(seconds, 2),
    }


BENCHMARK = Benchmark("vocabulary_search", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
