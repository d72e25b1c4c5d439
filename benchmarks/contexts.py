"""`python -m benchmarks.contexts`: Llama 3 70B with contexts of 32k to 2,048k tokens on 256 H100, whole and in slices.

All of it is estimated (`zbsolve profile --estimate h100 --mesh tp=8`): 16 pipeline ranks of 8 tensor ranks, two replicas,
4M tokens a step, 80 GB a device. Model and devices are SlimPipe's (arXiv 2504.14519); how it splits them is not known here.
What replicas exchange, and the optimizer's update, are not counted, nor that kernels of small slices are less efficient.

Each schedule takes what makes it shortest of what fits: how many slices, and what layers keep (see `kept_layers`); where
nothing fits, what needs the least. 1f1b, interleaved (5 chunks of one block), zb-h1: whole sequences. slimpipe: even slices.
seq1f1b: slices of equal work. exchange: slimpipe with attention that waiting ranks make for late slices. search: the
shortest step that solve finds in the devices' memory with the slices and layers of the shortest of these, from which it
begins, with a fused or a split backward.

MFU: three times a forward's FLOPs, of which causal attention counts half, of the peak in the time of a step.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from profiler import estimate
from profiler.devices import device
from zbsolve import Infeasible, NotFound, Problem, Profile, Schedule, Step, preset, solve, verify
from zbsolve.search.solver import compiled
from zbsolve.systems import step_for, system
from zbsolve.util.text import aligned

from .harness import Benchmark
from .kept_layers import WAYS, keeping

MODEL, DEVICE = "llama3-70b", "h100"
RANKS, TENSOR_RANKS, STEP_TOKENS = 16, 8, 2**21  # tokens of one of two replicas
GIB = 2**30
UNITS = 256  # slices of a step that are tried at most
COUNTS = (4, 16, 64, 128, 256)
EXCHANGE = "exchange"
NAMES = {EXCHANGE: "slimpipe"}  # what an order is called where it is not its row
NAMED = ("1f1b", "interleaved", "zb-h1", "slimpipe", "seq1f1b", EXCHANGE)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[32, 128, 512, 2048], help="tokens of a sequence, in 1024"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="for each search")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    compiled()
    rows: list[dict[str, Any]] = []
    for context in options.contexts:
        profile = estimate(f"{MODEL}@length={1024 * context}", DEVICE, tensor_ranks=TENSOR_RANKS)
        best: list[dict[str, Any]] = []
        for name in NAMED:
            best.append(
                min((_named(profile, name, kept, n, context) for kept in WAYS for n in _counts(name, context)), key=_rank_of)
            )
            print(best[-1], flush=True)
        best.append(
            _searched(profile, min((row for row in best if row["schedule"] != "interleaved"), key=_rank_of), options.seconds)
        )
        print(best[-1], flush=True)
        rows += best
    return {"rows": rows}


def _rank_of(row: dict[str, Any]) -> tuple[bool, float]:
    """What fits comes first, the shortest of it; of what does not, what needs the least."""
    return (not row["fits"], row["us"] if row["fits"] else row["GiB"])


def _counts(name: str, context: int) -> list[int]:
    """Numbers of slices that are tried."""
    sliced = system(NAMES.get(name, name)).slices
    return [n for n in COUNTS if n * STEP_TOKENS <= UNITS * 1024 * context] if sliced else [1]


def _named(profile: Profile, name: str, kept: str, slices: int, context: int) -> dict[str, Any]:
    """The row of a named schedule, or of `EXCHANGE`."""
    layers, named = keeping(profile, kept), system(NAMES.get(name, name))
    placement = "loop5" if named.placement == "loop" else named.placement
    step = Step(RANKS, STEP_TOKENS // (1024 * context), placement=placement, partition="balanced", slices=slices)
    step = replace(step_for(named.name, layers, step), attention_exchange=name == EXCHANGE)
    problem = step.problem(replace(layers, capacity=None))
    return _row(layers, step, name, kept, preset(named.name, problem), context)


def _row(profile: Profile, step: Step, name: str, kept: str, schedule: Schedule, context: int) -> dict[str, Any]:
    problem, makespan = schedule.problem, schedule.timeline().makespan
    assert not verify(problem, schedule)
    need = max(step.needs(replace(profile, capacity=None), schedule))
    return {
        "context": context,
        "schedule": name,
        "slices": step.slices,
        "kept": kept,
        "fused": "W" not in problem.passes.kinds,
        "us": int(makespan),
        "bubble": round(1 - problem.work / makespan, 4),
        "GiB": round(need / GIB, 1),
        "activations_GiB": round(max(schedule.timeline().peak_bytes) / GIB, 1),
        "fits": bool(need <= device(DEVICE).memory * 1e9),
        "mfu": round(_mfu(profile, step.microbatches, makespan), 4),
    }


def _mfu(profile: Profile, microbatches: int, us: float) -> float:
    """Model FLOPs' utilisation of the devices of one replica."""
    forward = [profile.facts["flops"][name]["F"] for name in ("embedding", "block0", "head")]
    flops = 3 * microbatches * (forward[0] + (len(profile.layers) - 2) * forward[1] + forward[2])
    return float(flops / (RANKS * TENSOR_RANKS * device(DEVICE).half * 1e12 * us / 1e6))


def _searched(profile: Profile, row: dict[str, Any], seconds: float) -> dict[str, Any]:
    """The shorter of what the search finds with the row's slices and layers, with a fused and a split backward."""
    layers, context = keeping(profile, row["kept"]), row["context"]
    found: list[dict[str, Any]] = []
    for fused in (True, False):
        microbatches = STEP_TOKENS // (1024 * context)
        step = Step(RANKS, microbatches, partition="balanced", slices=row["slices"], fused=fused)
        step = replace(step, attention_exchange=row["schedule"] == EXCHANGE)
        problem = _problem(layers, step)
        if problem is None:
            continue
        try:
            begin = preset(NAMES.get(row["schedule"], row["schedule"]), problem) if fused == row["fused"] else None
            schedule = solve(problem, seconds=seconds, prefer=None, hint=begin)
        except (Infeasible, NotFound):
            continue
        assert schedule.certificate is not None
        proven = {"bound_us": schedule.certificate.bound, "solver": schedule.certificate.solver}
        found.append({**_row(layers, step, "search", row["kept"], schedule, context), **proven})
    return min(found, key=_rank_of, default={**row, "schedule": "search"})


def _problem(profile: Profile, step: Step) -> Problem | None:
    try:
        return step.problem(profile)
    except Infeasible:
        return None


def table(rows: list[dict[str, Any]]) -> str:
    """A line each context and schedule: slices, what layers keep, seconds of a step, its bubble, MFU, and GiB of the fullest
    device, marked where they are more than it has."""
    lines = [("context", "schedule", "slices", "kept", "step s", "bubble", "MFU", "GiB")]
    for row in rows:
        named = (f"{row['context']}k", row["schedule"], str(row["slices"]), row["kept"], f"{row['us'] / 1e6:.1f}")
        lines.append((*named, f"{row['bubble']:.0%}", f"{row['mfu']:.1%}", f"{row['GiB']:.0f}{'' if row['fits'] else '!'}"))
    return "\n".join(aligned(lines, left=(0, 1, 2, 3))) + "\n"


BENCHMARK = Benchmark("contexts", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
