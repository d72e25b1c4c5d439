"""`python -m benchmarks.slices`: Llama 3 70B with long contexts on 16 ranks, whole and in slices; all estimated.

Times and bytes are `zbsolve profile --estimate`'s, H100, one device a rank, without tensor parallelism. A slice takes its
share of them: how much less efficient small kernels are is not counted, nor is recompute or offload. Ranks have no limit of
memory: GiB are what the fullest one needs for activations, parameters, optimizer states and messages. Equal layers a stage,
but for the last, as `balanced`; four sequences a step.

1f1b: whole sequences. slimpipe: SlimPipe's order of n even slices (arXiv 2504.14519), exchange: the same where ranks that
would wait make attention for others, beside it a bound that holds whatever they hand over. seq1f1b: slices that take as long
as each other (arXiv 2406.03488). search: the shortest step that solve finds
of n slices, with a split backward, where every rank may hold what slimpipe's fullest one holds; the others are fused. A
bubble is the share of the makespan that ranks do not compute, in the mean.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from profiler import estimate
from zbsolve import Infeasible, Problem, Profile, Schedule, Step, preset, solve, verify
from zbsolve.features.attention_exchange import exchange_costs
from zbsolve.features.cuts import said_of
from zbsolve.ilp.bounds import bound_over_exchanges
from zbsolve.search.solver import compiled
from zbsolve.systems import PRESETS
from zbsolve.util.text import aligned

from .harness import Benchmark

MODEL, DEVICE = "llama3-70b", "h100"
GIB = 2**30


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--contexts", type=int, nargs="+", default=[32, 128, 512], help="tokens of a sequence, in 1024")
    parser.add_argument("--slices", type=int, nargs="+", default=[4, 16, 32])
    parser.add_argument("--searched", type=int, nargs="*", default=[16], help="of these, those that are searched, too")
    parser.add_argument("--ranks", type=int, default=16)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    compiled()
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        profile = replace(estimate(f"{MODEL}@length={1024 * context}", DEVICE), capacity=None)
        whole = Step(options.ranks, options.microbatches, partition="balanced", fused=True)
        rows.append(_row(profile, whole, "1f1b", context))
        for slices in options.slices:
            step = replace(whole, slices=slices)
            rows.append(_row(profile, step, "slimpipe", context))
            rows.append(_row(profile, replace(step, slices=f"{slices}:even-work"), "seq1f1b", context))
            rows.append(_row(profile, replace(step, attention_exchange=True), "exchange", context))
            if slices in options.searched:
                rows.append(_row(profile, step, "search", context, options.seconds))
    return {"rows": rows}


def table(rows: list[dict[str, Any]]) -> str:
    """A line each schedule and context: its slices, seconds of a step and a bound where there is one, its bubble, and GiB
    that the fullest rank needs, in all and for activations."""
    lines = [("context", "schedule", "slices", "step s", "bound", "bubble", "GiB", "activations")]
    for row in rows:
        bound = f"{row['bound_us'] / 1e6:.1f}" if "bound_us" in row else ""
        named = (f"{row['context']}k", row["schedule"], str(row["slices"]), f"{row['us'] / 1e6:.1f}", bound)
        lines.append((*named, f"{row['bubble']:.0%}", f"{row['GiB']:.0f}", f"{row['activations_GiB']:.0f}"))
    return "\n".join(aligned(lines, left=(0, 1))) + "\n"


def _row(profile: Profile, step: Step, name: str, context: int, seconds: float = 0.0) -> dict[str, Any]:
    """What a schedule takes and needs: a named one, or with seconds that of the search in SlimPipe's memory."""
    problem = step.problem(profile)
    schedule = preset(name if name in PRESETS else "slimpipe", problem)
    bound: dict[str, Any] = {}
    if seconds:
        step = replace(step, fused=False)
        schedule, bound = _found(schedule, step.problem(profile), seconds)
    elif step.attention_exchange:
        bound = {"bound_us": _least(profile, step, problem)}
    assert not verify(schedule.problem, schedule)
    timeline, p = schedule.timeline(), schedule.problem.passes
    row = {
        "context": context,
        "slices": said_of(step.slices).number,
        "schedule": name,
        "us": int(timeline.makespan),
        "bubble": round(1 - int(p.duration.sum()) / problem.ranks / timeline.makespan, 4),
        "GiB": round(max(step.needs(profile, schedule)) / GIB, 1),
        "activations_GiB": round(max(timeline.peak_bytes) / GIB, 1),
        **bound,
    }
    print(row, flush=True)
    return row


def _least(profile: Profile, step: Step, exchanged: Problem) -> int:
    """A bound over all exchanges, µs."""
    plain, slices = replace(step, attention_exchange=False).problem(profile), said_of(step.slices).number
    costs = exchange_costs(profile.layers, exchanged.layers, slices, profile.link, plain.stages)
    return bound_over_exchanges(plain, costs)


def _found(named: Schedule, problem: Problem, seconds: float) -> tuple[Schedule, dict[str, Any]]:
    """What the search finds where each rank has what the named order's fullest rank holds, and its bound."""
    room = max(named.timeline().peak_bytes)
    try:
        schedule = solve(replace(problem, capacity=(room,) * problem.ranks), seconds=seconds, prefer=None)
    except Infeasible as error:
        raise AssertionError(f"{problem.source}: an order with a fused backward fits") from error
    assert schedule.certificate is not None
    return schedule, {"bound_us": schedule.certificate.bound, "solver": schedule.certificate.solver}


BENCHMARK = Benchmark("slices", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
