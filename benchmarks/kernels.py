"""Times of the compiled kernels, alone or against another checkout of zbsolve (`--against PATH`).

Both checkouts do the same work on the same inputs, each in its own process. They take turns at every sample, and a sample is
the CPU time of the process, so other load of the machine affects both equally. The addresses of code and data change times
by some percent and stay for a process's life: so there are several pairs of processes. Every sample is kept.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from .harness import ROOT, Results, Served, in_turn, rows_of, table

Call = Callable[[], Any]
Samples = list[list[float]]  # µs a call, a list for each process of a checkout

SAMPLE_SECONDS = 0.06  # CPU time of a sample, about
SLOWER = 1.03  # a ratio that no kernel may be above, beyond the spread


def _part(case: tuple[str, ...], against: Path | None, **_: Any) -> str:
    """A few cases do not replace all of them."""
    return "kernels" if not case and against is not None else "kernels-part"


def _wrong(results: Results) -> bool:
    return any(row.get("verdict", "fine") != "fine" for row in results["cases"].values())


@table(_part, _wrong)
def kernels(
    against: Path | None = None, processes: int = 5, samples: int = 10, case: tuple[str, ...] = ()
) -> dict[str, Any]:
    """CPU time of each compiled kernel. A ratio is this checkout's median over the other's; spread: the range of the ratios
    of the pairs of processes."""
    folders = [ROOT] if against is None else [ROOT, against]
    cases = case or tuple(CASES)
    taken: dict[str, list[Samples]] = {name: [[] for _ in folders] for name in cases}
    digests: dict[str, set[str]] = {name: set() for name in cases}
    for _ in range(processes):
        checkouts = [Served(folder, "benchmarks.kernels:answers") for folder in folders]
        try:
            for name in cases:
                for own, new in zip(taken[name], _sampled(checkouts, name, samples, digests[name]), strict=True):
                    own.append(new)
        finally:
            for checkout in checkouts:
                checkout.end()
    rows = rows_of((name, _row(taken[name], digests[name])) for name in cases)
    return {"revisions": [_revision(folder) for folder in folders], "slower_than": SLOWER, "cases": rows}


def _sampled(checkouts: list[Served], case: str, samples: int, digests: set[str]) -> Samples:
    """Samples of one case, µs a call, for each of the checkouts, which take turns."""
    repeats = 1
    for checkout in checkouts:  # compiles where nothing is cached, and says how many calls make a sample
        for _ in range(2):
            checkout.ask(case, 1)
            seconds, _ = checkout.told()
        repeats = max(repeats, round(SAMPLE_SECONDS / max(1e-7, seconds)))
    taken: Samples = [[] for _ in checkouts]
    for turn in range(samples):
        for k in in_turn(len(checkouts), turn):
            checkouts[k].ask(case, repeats)
            seconds, digest = checkouts[k].told()
            taken[k].append(round(1e6 * seconds / repeats, 2))
            digests.add(digest)
    return taken


def _row(taken: list[Samples], digests: set[str]) -> Results:
    """The results of one case, with all samples."""
    medians = [median(us for process in samples for us in process) for samples in taken]
    if len(taken) == 1:
        return {"median": medians[0], "us": taken[0]}
    ratio, pairs = medians[0] / medians[1], [median(a) / median(b) for a, b in zip(*taken, strict=True)]
    spread = max(pairs) - min(pairs)
    verdict = "slower" if ratio > SLOWER + spread else "fine"
    return {
        "median": medians[0],
        "us": taken[0],
        "against_us": taken[1],
        "ratio": round(ratio, 4),
        "ratios": [round(one, 4) for one in pairs],
        "spread": round(spread, 4),
        "verdict": "returns something else" if len(digests) > 1 else verdict,
    }


def _revision(folder: Path) -> str:
    """The checkout's commit, with a + where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "zbsolve") else "") or "unknown"


# --- Cases: names that other checkouts have too ---


def answers() -> Callable[[str, int], tuple[float, str]]:
    """What a checkout's process runs: CPU seconds of so many calls of a case, and a digest of what they returned."""
    calls: dict[str, Call] = {}

    def answer(case: str, repeats: int) -> tuple[float, str]:
        if case not in calls:
            calls[case] = CASES[case]()
            calls[case]()  # compiled, and its inputs are in the caches
        began = time.process_time()
        results = [calls[case]() for _ in range(repeats)]
        return time.process_time() - began, digest(results[-1])

    return answer


def named(place: str) -> Any:
    """What the checkout has at "module:name", below zbsolve."""
    module, _, name = place.partition(":")
    return getattr(import_module(f"zbsolve.{module}"), name)


def step(placement: str, ranks: int, microbatches: int, capacity: int, **options: Any) -> Any:
    """Uneven stages, so that no two ranks are alike; `capacity` in half microbatches."""
    stages = ranks if placement == "single" else 2 * ranks
    times = ([base + (7 * s) % 5 for s in range(stages)] for base in (30, 33, 20))
    how = {
        "placement": placement,
        "microbatches": microbatches,
        "comm": 3,
        "held_until_W": 1,
        "capacity": [capacity] * ranks,
    }
    return named("build.plain:pipeline")(*times, **how, **options)


def graph_of(*of: Any) -> tuple[Any, Any]:
    """The graph of one microbatch of a step, and its building block, one pass after the other."""
    graph = named("greedy.arrays.microbatch:microbatch_graph")(step(*of))
    return graph, named("greedy.blocks.building_block:serial_block")(graph)


def serial_targets(graph: Any, block: Any) -> Any:
    """Target starts of one microbatch after the other, so close that gaps and memory matter."""
    return named("greedy.decoding:repeated_targets")(graph, block.offset, max(1, block.period // 6))


def list_scheduler() -> Call:
    """The list scheduler with one policy: V placement, tight memory."""
    problem = step("vee", 8, 64, 10)
    policy = named("greedy.lists.policy_annealing:starting_policies")(problem)[0]
    arrays, run = named("greedy.arrays.problem_arrays:arrays_of")(problem), named("greedy.lists.list_scheduler:start_times")
    return lambda: run(arrays, policy)


def annealed_policies() -> Call:
    """Annealing of policies by counted work."""
    problem, clock = step("vee", 6, 16, 8), named("util.clock:Clock")
    starts = named("greedy.lists.policy_annealing:starting_policies")(problem)
    improve = named("greedy.lists.policy_annealing:improve_policies")

    def call() -> list[Any]:
        found = [one for one in improve(problem, starts, clock(60.0, 0.1), 3, 0.1) if one is not None]
        return [list(map(list, found[-1]))] if found else []

    return call


def decoding() -> Call:
    """From target starts to a schedule, where most target starts do not fit the memory."""
    graph, block = graph_of("vee", 8, 64, 10)
    decode, rule = named("greedy.decoding:decode"), named("greedy.decoding:DecodeRule")
    targets, rules = serial_targets(graph, block), [rule(1, 0, 2), rule(2, 8, 1), rule(0, 0, 1)]
    return lambda: [decode(graph, targets, one)[0:3] for one in rules]


def annealed(name: str, begin: Callable[[Any, Any], tuple[Any, ...]]) -> Call:
    """`name` from what `begin` gives: 300 rounds of annealing at a target that is not reached."""
    graph, block = graph_of("loop", 6, 24, 7)
    lengths = named("greedy.blocks.building_block:shift_lengths")(graph)
    annealing = named("greedy.annealing:Annealing")(lengths, 0, 300, 9.0, 5)
    run, first = named(name), begin(graph, block)
    return lambda: _plain(run(graph, *first, annealing))


def _plain(found: Any) -> list[Any]:
    """The result of an annealing, flat."""
    parts = [found] if hasattr(found, "order") else list(found)
    return [list(part) for part in parts]


def _targets(graph: Any, block: Any) -> tuple[Any, ...]:
    return (named("greedy.decoding:decode")(graph, serial_targets(graph, block)),)


def _patterns(graph: Any, block: Any) -> tuple[Any, ...]:
    rule, pattern = named("greedy.decoding:DecodeRule"), named("greedy.annealing:Pattern")
    return pattern(np.repeat(block.offset[None], 2, axis=0), block.period, rule(2, 8, 1)), (rule(), rule(0, 0, 1))


def annealed_blocks() -> Call:
    """Annealing over building blocks: first fit and the memory of its result."""
    graph, _ = graph_of("vee", 8, 64, 5)
    settle, work = named("greedy.blocks.period_search:anneal_block"), int(np.bincount(graph.rank, graph.duration).max())
    return lambda: settle(graph, np.zeros(len(graph.duration), np.int64), work, 6000, 1)


def rank_search(ranks: tuple[int, ...], lean: bool, part: float, **options: Any) -> Call:
    """The search over orders of some ranks, in a window that is so much longer than their closed form."""
    problem = step("loop", 4, 12, 6, **options)
    lanes = named("ilp.ranks.lanes:lanes_of")(problem, ranks, lean)
    refute, window = named("ilp.ranks.end_losses:refute"), int(part * closed_form(problem).value)
    return lambda: [refute(lanes, window, breadth, 15_000)[1] for breadth in (8, 32)]


def induction() -> Call:
    """Induction over microbatches: states are compared with those of earlier waves too."""
    problem = step("single", 4, 48, 2)
    lanes, value = named("ilp.ranks.lanes:lanes_of")(problem, (0, 1, 2, 3), True), closed_form(problem).value + 60
    prove = named("ilp.ranks.induction:refute_by_induction")
    return lambda: prove(lanes, value, 15_000)[1]


def closed_form(problem: Any) -> Any:
    """The closed forms' bound."""
    return named("ilp.bounds.closed_forms:closed_form")(problem)


def closed_forms(objective: str, placement: str) -> Call:
    """Necessary arcs, longest paths and all closed forms; each call has a problem that no call had before."""
    problem, calls = step(placement, 8, 32, 10, objective=objective), [0]

    def call() -> int:
        calls[0] += 1
        return int(closed_form(replace(problem, source=f"call {calls[0]}")).value)

    return call


CASES: dict[str, Callable[[], Call]] = {
    "list scheduler": list_scheduler,
    "annealed policies": annealed_policies,
    "decoding": decoding,
    "annealed target starts": lambda: annealed("greedy.annealing:anneal_targets", _targets),
    "annealed patterns": lambda: annealed("greedy.annealing:anneal_pattern", _patterns),
    "annealed blocks": annealed_blocks,
    "rank search, one rank": lambda: rank_search((0,), False, 1.02, objective="span"),
    "rank search, two ranks": lambda: rank_search((0, 1), False, 1.02),
    "rank search, four ranks, lean": lambda: rank_search((0, 1, 2, 3), True, 1.03),
    "induction": induction,
    "closed forms, makespan": lambda: closed_forms("makespan", "vee"),
    "closed forms, span": lambda: closed_forms("span", "loop"),
}


def digest(value: Any) -> str:
    """Equal for equal results, in any kind of tuples."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return hashlib.sha256("".join(map(digest, value)).encode()).hexdigest()[:16]
    if value is None or isinstance(value, bool | int | float | str | np.number):
        return repr(float(value)) if isinstance(value, float | np.floating) else str(value)
    return digest(list(value))
