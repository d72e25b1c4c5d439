"""One checkout's compiled kernels, a case each, for `benchmarks.kernels`: it runs this file once a checkout.

The checkout is the first entry of PYTHONPATH. The program reads one case and a number of repeats a line, and answers with
the CPU seconds of that many calls and a digest of what they returned. A case names a kernel by where it is today and by
where it was before the packages had their names, so old and new checkouts both run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np

Call = Callable[[], Any]


def named(*places: str) -> Any:
    """The first of these ("module:name", below zbsolve) that the checkout has, there or a folder higher."""
    for place in places:
        module, _, name = place.partition(":")
        package, *_, leaf = module.split(".")
        for path in (module, f"{package}.{leaf}"):
            try:
                return getattr(import_module(f"zbsolve.{path}"), name)
            except (ImportError, AttributeError):
                continue
    raise LookupError(f"this checkout has none of {', '.join(places)}")


def step(placement: str, ranks: int, microbatches: int, capacity: int | None, **options: Any) -> Any:
    """Uneven stages, so that no two ranks are alike; `capacity` in half microbatches."""
    from zbsolve import pipeline

    stages = ranks if placement == "single" else 2 * ranks
    F, B, W = ([base + (7 * s) % 5 for s in range(stages)] for base in (30, 33, 20))
    room = None if capacity is None else [capacity] * ranks
    return pipeline(
        F, B, W, placement=placement, microbatches=microbatches, comm=3, held_until_W=1, capacity=room, **options
    )


def graph_of(problem: Any) -> Any:
    """The graph of one microbatch."""
    return named("greedy.arrays.microbatch:microbatch_graph", "greedy.template:template")(problem)


def serial_targets(g: Any) -> Any:
    """Target starts of one microbatch after the other, close enough for gaps and memory to be in the way."""
    serial = named("greedy.blocks.building_block:serial_block", "greedy.modulo:serial")(g)
    repeated = named("greedy.decoding:repeated_targets", "greedy.targets.decoding:repeated_targets", "greedy.unroll:repeat")
    return repeated(g, serial.offset, max(1, serial.period // 6))


def list_scheduler() -> Call:
    """The list scheduler with one policy: V placement, tight memory."""
    problem = step("vee", 8, 64, 10)
    policy = named("greedy.lists.policy_annealing:starting_policies", "greedy.anneal:starting_policies")(problem)[0]
    arrays = named("greedy.arrays.problem_arrays:arrays_of", "greedy.arrays:arrays")(problem)
    run = named("greedy.lists.list_scheduler:start_times", "greedy.lists.list_scheduler:run")
    return lambda: run(arrays, policy)


def annealed_policies() -> Call:
    """Annealing of policies by counted work."""
    problem, Clock = step("vee", 6, 16, 8), named("util.clock:Clock", "clock:Clock")
    starting_policies = named("greedy.lists.policy_annealing:starting_policies", "greedy.anneal:starting_policies")
    improve = named("greedy.lists.policy_annealing:improve_policies", "greedy.anneal:improve_policies")
    starts = starting_policies(problem)

    def call() -> list[Any]:
        found = [one for one in improve(problem, starts, Clock(60.0, 0.1), 3, 0.1) if one is not None]
        return [list(map(list, found[-1]))] if found else []

    return call


def decoding() -> Call:
    """Target starts to a schedule, where most of them do not fit the memory as they are."""
    g = graph_of(step("vee", 8, 64, 10))
    decode = named("greedy.decoding:decode", "greedy.targets.decoding:decode", "greedy.unroll:decode")
    rule = named("greedy.decoding:DecodeRule", "greedy.targets.decoding:DecodeRule", "greedy.unroll:Habit")
    targets, rules = serial_targets(g), [rule(1, 0, 2), rule(2, 8, 1), rule(0, 0, 1)]
    return lambda: [decode(g, targets, one)[0:3] for one in rules]


def annealed(name: str, before: str, begin: Callable[[Any], tuple[Any, ...]]) -> Call:
    """`name` (once `before`) from what `begin` gives: 300 rounds of annealing at a target that is not reached."""
    g = graph_of(step("loop", 6, 24, 7))
    lengths = named("greedy.blocks.building_block:shift_lengths", "greedy.modulo:strides")(g)
    run, budget = named(name, before), (lengths, 0, 300, 9.0, 5)
    first = begin(g)
    try:
        annealing = named("greedy.annealing:Annealing", "greedy.targets.target_annealing:Annealing")(*budget)
    except LookupError:
        return lambda: _plain(run(g, *first, *budget))
    return lambda: _plain(run(g, *first, annealing))


def _plain(found: Any) -> list[Any]:
    """What an annealing found, flat: whatever the checkout calls it."""
    parts = [found] if hasattr(found, "order") else list(found)
    return [list(part) for part in parts]


def annealed_targets() -> Call:
    """Annealing over single target starts."""

    def begin(g: Any) -> tuple[Any, ...]:
        try:
            return (named("greedy.decoding:decode", "greedy.targets.decoding:decode")(g, serial_targets(g)),)
        except LookupError:
            return (named("greedy.ramps:walk")(g, serial_targets(g)),)

    return annealed(
        "greedy.annealing:anneal_targets", "greedy.targets.target_annealing:anneal_targets", "greedy.ramps:improve", begin
    )


def annealed_patterns() -> Call:
    """Annealing over periodic patterns of target starts."""

    def begin(g: Any) -> tuple[Any, ...]:
        rule = named("greedy.decoding:DecodeRule", "greedy.targets.decoding:DecodeRule", "greedy.unroll:Habit")
        pattern = named("greedy.annealing:Pattern", "greedy.targets.pattern_annealing:Pattern", "greedy.shapes:Shape")
        block = named("greedy.blocks.building_block:serial_block", "greedy.modulo:serial")(g)
        return pattern(np.repeat(block.offset[None], 2, axis=0), block.period, rule(2, 8, 1)), (rule(), rule(0, 0, 1))

    return annealed(
        "greedy.annealing:anneal_pattern",
        "greedy.targets.pattern_annealing:anneal_pattern",
        "greedy.shapes:improve_shape",
        begin,
    )


def annealed_blocks() -> Call:
    """Annealing over building blocks: first fit and the memory of what it gives."""
    g = graph_of(step("vee", 8, 64, 5))
    settle = named("greedy.blocks.building_block:anneal_block", "greedy.modulo:settle_near")
    work = int(np.bincount(g.rank, g.duration).max())
    return lambda: settle(g, np.zeros(len(g.duration), np.int64), work, 6000, 1)


def rank_search(ranks: tuple[int, ...], lean: bool, part: float, **options: Any) -> Call:
    """The search over orders of some ranks, in a window of so much more than their closed form."""
    problem = step("loop", 4, 12, 6, **options)
    closed = named("ilp.bounds.closed_forms:closed_form", "ilp.bounds.lower:closed_form", "ilp.bounds:closed_form")
    lanes_of = named("ilp.ranks.lanes:lanes_of", "ilp.ranks.refute:lanes_of", "ilp.onerank:lanes_of")
    refute = named("ilp.ranks.refutation:refute", "ilp.ranks.refute:refute", "ilp.onerank:refute")
    lanes, window = lanes_of(problem, ranks, lean), int(part * closed(problem).value)
    return lambda: [refute(lanes, window, breadth, 15_000)[1] for breadth in (8, 32)]


def induction() -> Call:
    """Induction over microbatches: states are compared with those of earlier waves too."""
    problem = step("single", 4, 48, 2)
    closed = named("ilp.bounds.closed_forms:closed_form", "ilp.bounds.lower:closed_form", "ilp.bounds:closed_form")
    lanes_of = named("ilp.ranks.lanes:lanes_of", "ilp.ranks.refute:lanes_of", "ilp.onerank:lanes_of")
    prove = named(
        "ilp.ranks.induction:refute_by_induction", "ilp.ranks.induction:by_induction", "ilp.onerank_induct:by_induction"
    )
    lanes, value = lanes_of(problem, (0, 1, 2, 3), True), closed(problem).value + 60
    return lambda: prove(lanes, value, 15_000)[1]


def closed_forms(objective: str, placement: str) -> Call:
    """Necessary arcs, longest paths and all closed forms; each call has a problem that no call had before."""
    problem, calls = step(placement, 8, 32, 10, objective=objective), [0]
    closed = named("ilp.bounds.closed_forms:closed_form", "ilp.bounds.lower:closed_form", "ilp.bounds:closed_form")

    def call() -> int:
        calls[0] += 1
        return int(closed(replace(problem, source=f"call {calls[0]}")).value)

    return call


CASES: dict[str, Callable[[], Call]] = {
    "list scheduler": list_scheduler,
    "annealed policies": annealed_policies,
    "decoding": decoding,
    "annealed target starts": annealed_targets,
    "annealed patterns": annealed_patterns,
    "annealed blocks": annealed_blocks,
    "rank search, one rank": lambda: rank_search((0,), False, 1.02, objective="span"),
    "rank search, two ranks": lambda: rank_search((0, 1), False, 1.02),
    "rank search, four ranks, lean": lambda: rank_search((0, 1, 2, 3), True, 1.03),
    "induction": induction,
    "closed forms, makespan": lambda: closed_forms("makespan", "vee"),
    "closed forms, span": lambda: closed_forms("span", "loop"),
}


def digest(value: Any) -> str:
    """The same for equal results, in whatever tuples they come."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(map(digest, value)).encode()).hexdigest()[:16]
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return repr(float(value)) if isinstance(value, float | np.floating) else str(value)
    return digest(list(value))


def main() -> None:
    """Answer requests until there are none."""
    calls: dict[str, Call] = {}
    for line in sys.stdin:
        request = json.loads(line)
        name, repeats = request["case"], request["repeats"]
        if name not in calls:
            calls[name] = CASES[name]()
            calls[name]()  # compiled, and its inputs are in the caches
        began = time.process_time()
        results = [calls[name]() for _ in range(repeats)]
        took = time.process_time() - began
        print(json.dumps({"seconds": took, "digest": digest(results[-1])}), flush=True)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
