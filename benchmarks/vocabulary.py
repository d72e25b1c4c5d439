"""`python -m benchmarks.vocabulary`: what steps take with the output layer on the last stage, with layers redistributed, and
with vocabulary parallelism (arXiv 2411.05288), each with its proven bound.

Profiles are estimated for one device, and nothing was measured on it. Each rank has as much memory as 1F1B with layers
redistributed needs on its fullest rank, whatever the device has: parameters, optimizer states and activations. What each
choice needs of it is kept too. `solve` has counted effort, so that the numbers are deterministic.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbsolve import Profile, Step, solve, verify
from zbsolve.features.sharded_vocabulary import VOCABULARIES
from zbsolve.schedule import relative_gap
from zbsolve.search.solver import compiled
from zbsolve.systems.steps import usual_schedule

from .harness import Benchmark

PROFILES = Path(__file__).parent / "profiles"
MODELS = {  # name → as one writes it
    "gemma2-9b": "Gemma 2 9B",
    "gemma2-27b": "Gemma 2 27B",
    "qwen2-7b": "Qwen 2 7B",
    "qwen2-72b": "Qwen 2 72B",
    "deepseek-v3": "DeepSeek v3",
    "llama3-8b": "Llama 3 8B",
    "llama3-70b": "Llama 3 70B",
    "llama3-405b": "Llama 3 405B",
    "mixtral-8x7b": "Mixtral 8x7B",
    "mixtral-8x22b": "Mixtral 8x22B",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--models", default=",".join(MODELS), help="names of published models, with commas")
    parser.add_argument("--device", default="h100", help="that profiles are estimated for")
    parser.add_argument("--profiles", type=Path, default=PROFILES, help="folder of the profiles")
    parser.add_argument("--ranks", default="8,16", help="numbers of ranks, with commas")
    parser.add_argument("--placement", default="single", help="of all steps")
    parser.add_argument("--rounds", type=int, default=4, help="microbatches, as a multiple of the ranks")
    parser.add_argument("--effort", type=float, default=3.0, help="for each solve")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a model and number of ranks."""
    compiled()
    rows = {}
    for name in options.models.split(","):
        profile = replace(Profile.load(options.profiles / f"estimated-{name}-{options.device}.json"), capacity=None)
        for ranks in map(int, options.ranks.split(",")):
            rows[f"{name} p{ranks}"] = row = of_model(profile, ranks, options)
            print(f"{name} p{ranks}: {row}", flush=True)
    return {"source": f"estimated for {options.device}, not measured", "steps": rows}


def of_model(profile: Profile, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """What each choice reaches: value and bound, µs, the gap, bytes of the fullest rank, layers of each stage. saves: the
    share that the best sharded schedule takes less than the best whole one that was found; saves_proven: than any there is
    with these layers a stage."""
    step = Step(ranks, options.rounds * ranks, options.placement)
    usual = usual_schedule(profile, step, ())
    assert usual is not None
    today = replace(step, fused=True, placement="single", partition=usual.problem.layers)
    step = replace(step, memory=max(today.needs(profile, usual)))
    row: dict[str, Any] = {"ranks": ranks, "microbatches": step.microbatches, "layers": len(profile.layers)}
    row |= {"memory": step.memory, "1f1b": int(usual.timeline().value)}
    for choice in VOCABULARIES:
        one = replace(step, vocabulary=choice)
        schedule = solve(one.problem(profile), effort=options.effort, prefer=None)
        assert not verify(schedule.problem, schedule)
        certificate = schedule.certificate
        assert certificate is not None
        row[choice] = {
            "value": certificate.value,
            "bound": certificate.bound,
            "gap": round(relative_gap(certificate.value, certificate.bound), 5),
            "fullest_rank": max(one.needs(profile, schedule)),
            "layers": list(schedule.problem.layers),
        }
    best = min(VOCABULARIES, key=lambda choice: row[choice]["value"])
    value, bound = ({one: row[one][what] for one in VOCABULARIES} for what in ("value", "bound"))
    sharded, whole = VOCABULARIES[2:], VOCABULARIES[:2]
    shortest = min(value[one] for one in sharded)
    return {
        **row,
        "best": best,
        "saves": round(1 - shortest / min(value[one] for one in whole), 4),
        "saves_proven": round(1 - shortest / min(bound[one] for one in whole), 4),
    }


def table(steps: dict[str, Any]) -> str:
    """The rows as docs/notes/vocabulary.md shows them, ms."""
    lines = []
    for name, row in steps.items():
        both = [f"{row[one]['value'] / 1e3:,.0f} ({row[one]['bound'] / 1e3:,.0f})" for one in VOCABULARIES]
        gain = f"{abs(row['saves']):.1%} {'shorter' if row['saves'] > 0 else 'longer'}"
        cells = [MODELS[name.partition(" ")[0]], str(row["ranks"]), f"{row['1f1b'] / 1e3:,.0f}", *both, gain]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


BENCHMARK = Benchmark("vocabulary", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
