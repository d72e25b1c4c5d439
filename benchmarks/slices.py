"""Long sequences in slices: times and memory of schedules, and whether the search is ever worse than a paper's order.

`slices` and `contexts` are of Llama 3 70B, and all of it is estimated (`zbsolve profile --estimate h100`): a slice takes its
share of a sequence's times and bytes, so the lower efficiency of small kernels is not counted. 1f1b, interleaved, zb-h1:
whole sequences. slimpipe: SlimPipe's order of even slices (arXiv 2504.14519). exchange: the same, and waiting ranks compute
attention for late slices. seq1f1b: slices of equal times (arXiv 2406.03488).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from profiler import estimate
from profiler.devices import device
from tests.support.exchange_bound import bound_over_exchanges
from tests.support.slice_problems import paper_order
from zbsolve import Infeasible, NotFound, Problem, Profile, Schedule, Step, preset, solve, verify
from zbsolve.features.attention_exchange import exchange_costs
from zbsolve.features.cuts import said_of
from zbsolve.partition.layer import Layer
from zbsolve.profile.named_steps import step_for
from zbsolve.search.solver import compiled
from zbsolve.systems import PRESETS, system
from zbsolve.util.text import aligned

from .harness import Results, listed, solved, table

MODEL, DEVICE, GIB = "llama3-70b", "h100", 2**30
EXCHANGE = "exchange"


def _needs(profile: Profile, step: Step, schedule: Schedule, context: int, name: str) -> tuple[Results, Results]:
    """The fields that identify a schedule's row; its time, and the memory of its fullest rank."""
    problem, timeline = schedule.problem, schedule.timeline()
    assert not verify(problem, schedule)
    need = max(step.needs(replace(profile, capacity=None), schedule))
    numbers = {"GiB": round(need / GIB, 1), "activations_GiB": round(max(timeline.peak_bytes) / GIB, 1)}
    named = {"context": context, "schedule": name, "slices": said_of(step.slices).number}
    return named, {"us": int(timeline.makespan), **numbers, "need": need}


# --- On 16 ranks ---


@table()
def slices(
    contexts: tuple[int, ...] = (32, 128, 512),
    slices: tuple[int, ...] = (4, 16, 32),
    searched: tuple[int, ...] = (16,),
    ranks: int = 16,
    microbatches: int = 4,
    seconds: float = 10.0,
) -> Results:
    """Llama 3 70B with long contexts (in 1024 tokens) on 16 ranks of one device, without tensor parallelism, recompute,
    offload or a limit of memory; equal layers on all stages but the last; four sequences a step. search: the shortest step
    that solve finds of so many slices (`searched`), with a split backward, if every rank may hold what slimpipe's fullest
    rank holds; the others have a fused backward. exchange also has a bound over all exchanges. A bubble is the share of the
    makespan that ranks do not compute, in the mean."""
    compiled()

    def rows() -> Iterator[Results]:
        for context in contexts:
            profile = replace(estimate(f"{MODEL}@length={1024 * context}", DEVICE), capacity=None)
            whole = Step(ranks, microbatches, partition="balanced", fused=True)
            row = partial(_sliced, profile, context)
            yield row(whole, "1f1b")
            for count in slices:
                step = replace(whole, slices=count)
                yield row(step, "slimpipe")
                yield row(replace(step, slices=f"{count}:even-work"), "seq1f1b")
                yield row(replace(step, attention_exchange=True), EXCHANGE)
                if count in searched:
                    yield row(step, "search", seconds)

    return {"rows": listed(rows())}


def _sliced(profile: Profile, context: int, step: Step, name: str, seconds: float = 0.0) -> Results:
    """A named schedule, or with `seconds` the search's result in SlimPipe's memory."""
    problem = step.problem(profile)
    schedule, more = preset(name if name in PRESETS else "slimpipe", problem), dict[str, Any]()
    if seconds:
        step = replace(step, fused=False)
        room = (max(schedule.timeline().peak_bytes),) * problem.ranks
        schedule = solve(replace(step.problem(profile), capacity=room), seconds=seconds, prefer=None)
        more = {"bound_us": schedule.certificate.bound, "solver": schedule.certificate.solver}
    elif step.attention_exchange:
        plain = replace(step, attention_exchange=False).problem(profile)
        costs = exchange_costs(profile.layers, problem.layers, said_of(step.slices).number, profile.link, plain.stages)
        more = {"bound_us": bound_over_exchanges(plain, costs)}
    named, numbers = _needs(profile, step, schedule, context, name)
    del numbers["need"]
    work = int(schedule.problem.passes.duration.sum()) / problem.ranks
    return {**named, **numbers, "bubble": round(1 - work / numbers["us"], 4), **more}


def slices_table(rows: list[Results]) -> str:
    """A line for each schedule and context: its slices, seconds of a step and a bound if there is one, its bubble, and GiB
    of the fullest rank, in all and of activations."""
    lines = [("context", "schedule", "slices", "step s", "bound", "bubble", "GiB", "activations")]
    for row in rows:
        bound = f"{row['bound_us'] / 1e6:.1f}" if "bound_us" in row else ""
        named = (f"{row['context']}k", row["schedule"], str(row["slices"]), f"{row['us'] / 1e6:.1f}", bound)
        lines.append((*named, f"{row['bubble']:.0%}", f"{row['GiB']:.0f}", f"{row['activations_GiB']:.0f}"))
    return "\n".join(aligned(lines, left=(0, 1))) + "\n"


# --- On 256 devices ---

RANKS, TENSOR_RANKS, STEP_TOKENS = 16, 8, 2**21  # tokens of one of two replicas
UNITS, COUNTS = 256, (4, 16, 64, 128, 256)  # slices of a step that are tried at most, and of a sequence
NAMES = {EXCHANGE: "slimpipe"}  # what an order is called where it is not its row
NAMED = ("1f1b", "interleaved", "zb-h1", "slimpipe", "seq1f1b", EXCHANGE)


@table()
def contexts(contexts: tuple[int, ...] = (32, 128, 512, 2048), seconds: float = 10.0) -> Results:
    """Llama 3 70B with contexts of 32k to 2,048k tokens on 256 H100: 16 pipeline ranks of 8 tensor ranks, two replicas, 4M
    tokens a step, 80 GB a device. Model and devices are SlimPipe's; how it splits them is not known here. The exchanges of
    replicas and the optimizer's update are not counted.

    Each schedule has the number of slices, and what layers keep (see `KEEP`), that make its step shortest among those that
    fit; if none fits, those that need the least memory. interleaved has 5 chunks of one block. search: the shortest step
    that solve finds in the devices' memory with the slices and layers of the shortest of the others, from which it begins,
    with a fused or a split backward. MFU: three times a forward's FLOPs, with half of causal attention's, over the peak's
    FLOPs in the time of a step."""
    compiled()

    def rows() -> Iterator[Results]:
        for context in contexts:
            profile = estimate(f"{MODEL}@length={1024 * context}", DEVICE, tensor_ranks=TENSOR_RANKS)
            best = []
            for name in NAMED:
                tried = [(kept, count) for kept in KEEP for count in _counts(name, context)]
                best.append(min((_named(profile, name, kept, count, context) for kept, count in tried), key=_rank_of))
                yield best[-1]
            begin = min((row for row in best if row["schedule"] != "interleaved"), key=_rank_of)
            yield min(_searched(profile, begin, seconds), key=_rank_of, default={**begin, "schedule": "search"})

    return {"rows": listed(rows())}


def _rank_of(row: Results) -> tuple[bool, float]:
    """A sort key: rows that fit come first, by time; then those that do not fit, by memory."""
    return (not row["fits"], row["us"] if row["fits"] else row["GiB"])


def _counts(name: str, context: int) -> list[int]:
    """The numbers of slices to try."""
    sliced = system(NAMES.get(name, name)).feature == "slices"
    return [n for n in COUNTS if n * STEP_TOKENS <= UNITS * 1024 * context] if sliced else [1]


def _named(profile: Profile, name: str, kept: str, count: int, context: int) -> Results:
    """The row of a named schedule, or of `EXCHANGE`."""
    layers, named = keeping(profile, kept), system(NAMES.get(name, name))
    placement = "loop5" if named.placement == "loop" else named.placement
    step = Step(RANKS, STEP_TOKENS // (1024 * context), placement=placement, partition="balanced", slices=count)
    step = replace(step_for(named.name, layers, step), attention_exchange=name == EXCHANGE)
    problem = step.problem(replace(layers, capacity=None))
    return _row(layers, step, name, kept, preset(named.name, problem), context)


def _row(profile: Profile, step: Step, name: str, kept: str, schedule: Schedule, context: int) -> Results:
    named, numbers = _needs(profile, step, schedule, context, name)
    need, us = numbers.pop("need"), numbers["us"]
    forward = [profile.facts["flops"][layer]["F"] for layer in ("embedding", "block0", "head")]
    flops = 3 * step.microbatches * (forward[0] + (len(profile.layers) - 2) * forward[1] + forward[2])
    return {
        **named,
        "slices": step.slices,
        "kept": kept,
        "fused": "W" not in schedule.problem.passes.kinds,
        "bubble": round(1 - schedule.problem.work / us, 4),
        **numbers,
        "fits": bool(need <= device(DEVICE).memory * 1e9),
        "mfu": round(float(flops / (RANKS * TENSOR_RANKS * device(DEVICE).half * 1e12 * us / 1e6)), 4),
    }


def _searched(profile: Profile, row: Results, seconds: float) -> Iterator[Results]:
    """The search's results with the row's slices and layers, with a fused and with a split backward."""
    layers, context, named = keeping(profile, row["kept"]), row["context"], row["schedule"]
    for fused in (True, False):
        step = Step(RANKS, STEP_TOKENS // (1024 * context), partition="balanced", slices=row["slices"], fused=fused)
        step = replace(step, attention_exchange=named == EXCHANGE)
        try:
            problem: Problem = step.problem(layers)
            begin = preset(NAMES.get(named, named), problem) if fused == row["fused"] else None
            schedule = solve(problem, seconds=seconds, prefer=None, hint=begin)
        except (Infeasible, NotFound):
            continue
        proven = {"bound_us": schedule.certificate.bound, "solver": schedule.certificate.solver}
        yield {**_row(layers, step, "search", row["kept"], schedule, context), **proven}


def contexts_table(rows: list[Results]) -> str:
    """A line for each context and schedule: slices, what layers keep, seconds of a step, its bubble, MFU, and GiB of the
    fullest device, marked if they exceed its memory."""
    lines = [("context", "schedule", "slices", "kept", "step s", "bubble", "MFU", "GiB")]
    for row in rows:
        named = (f"{row['context']}k", row["schedule"], str(row["slices"]), row["kept"], f"{row['us'] / 1e6:.1f}")
        lines.append((*named, f"{row['bubble']:.0%}", f"{row['mfu']:.1%}", f"{row['GiB']:.0f}{'' if row['fits'] else '!'}"))
    return "\n".join(aligned(lines, left=(0, 1, 2, 3))) + "\n"


# --- What layers keep for their backward ---
#
# As people who train long contexts have it: all, all that is dear to make again (selective), or their inputs (full). What is
# made again is part of the backward, layer by layer, as Megatron runs it (Korthikanti et al., 2205.05198); a stage's pass X
# in zbsolve's own steps makes a whole stage again. The head keeps its input but for "all": logits of a long sequence are
# larger than all else.


def _selective(layer: Layer, given: int) -> Layer:
    """A block keeps its input, attention's output (equally large), and keys and values; attention is not recomputed."""
    return _again(layer, 2 * given, layer.X - layer.attention_F) if layer.attention_F else _full(layer, given)


def _full(layer: Layer, given: int) -> Layer:
    """A block keeps its input, and keys and values for later slices."""
    again = replace(layer, attention_B=layer.attention_B + layer.attention_F)
    return _again(again, given, layer.X) if layer.held_until_B else layer


def _again(layer: Layer, kept: int, time: float) -> Layer:
    """A layer that keeps `kept` bytes, and keys and values, and takes `time` µs to recompute the rest."""
    held = layer.held_until_B + layer.held_until_W
    sizes = {"held_until_B": kept + layer.kv_bytes, "held_until_W": 0, "transient": layer.transient + held}
    sizes |= {"held_from_B": layer.held_from_B + layer.held_until_W, "output_kept": 0, "input_unneeded": 0}
    return replace(layer, B=layer.B + time, BW=layer.BW + time, **sizes)


KEEP: dict[str, Callable[[Layer, int], Layer]] = {
    "all": lambda layer, given: layer,
    "selective": _selective,
    "full": _full,
}


def keeping(profile: Profile, way: str) -> Profile:
    """The profile with layers that keep what this way says."""
    inputs = [0, *(layer.output_bytes for layer in profile.layers[:-1])]
    layers = tuple(KEEP[way](layer, given) for layer, given in zip(profile.layers, inputs, strict=True))
    return replace(profile, layers=layers)


# --- Random steps ---


@table(ending=lambda results: results["worse"])
def slices_search(count: int = 400, first: int = 0, effort: float = 0.1, passes: int = 1200) -> Results:
    """Is `solve` ever worse than a paper's order of slices, in that order's own memory? Seeded random steps of 2 to 8 ranks
    (`tests.support.slice_problems.paper_order`). Each rank has what the order takes, or all have what it takes on its
    fullest rank. Effort is counted. If one solve is worse, or a bound is above a value, the exit code is 1."""
    compiled()
    rows = listed(_against_paper(seed, passes, effort) for seed in range(first, first + count))
    values = [row["value"] / row["named"] for row in rows]
    return {
        "steps": len(rows),
        "worse": sum(row["worse"] for row in rows),
        "shorter": sum(row["value"] < row["named"] for row in rows),
        "optimal": sum(row["value"] == row["bound"] for row in rows),
        "mean_of_values": round(sum(values) / len(values), 4),
        "of_each": dict(Counter(row["step"].split(": ")[1].split(" ")[0] for row in rows)),
        "rows": rows,
    }


def _against_paper(seed: int, passes: int, effort: float) -> Results:
    step, named = paper_order(seed, passes)
    value = int(named.timeline().makespan)
    assert not verify(named.problem, named)
    began = time.perf_counter()
    found = solved(named.problem, effort=effort)
    row = {"step": step, "named": value, **{what: found[what] for what in ("value", "bound", "solver")}}
    worse = row["value"] > value or row["bound"] > row["value"]
    return row | {"worse": worse, "seconds": round(time.perf_counter() - began, 2)}
