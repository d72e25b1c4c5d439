"""What tests of exports share: schedules on the placements that engines have, and generated Python run with stand-ins."""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zbsolve import Problem, Schedule, pipeline
from zbsolve.problem.placement import loop, single, vee

from .exec_tools import split_layers

PLACES = {"single": single, "loop": loop, "vee": vee}


def a_step(place: str, ranks: int, microbatches: int, fused: bool = False, seed: int = 0, **options: Any) -> Problem:
    """Uneven stages: times from 5 to 20 µs that differ from stage to stage."""
    placement = PLACES[place](ranks)
    stages = len(placement)
    F, B, W = ([5 + (7 * s + 3 * k + seed) % 16 for s in range(stages)] for k in range(3))
    times = {"BW": [b + w for b, w in zip(B, W, strict=True)]} if fused else {"B": B, "W": W}
    layers = split_layers(3 * stages, stages)
    return pipeline(F, **times, placement=placement, microbatches=microbatches, comm=2, layers=layers, **options)


def in_order_schedule(problem: Problem, seed: int = 0) -> Schedule:
    """A random valid schedule in which every stage runs its microbatches in order."""
    rng, p = random.Random(seed), problem.passes
    before: dict[int, set[int]] = {i: set() for i in range(len(p))}
    for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True):
        before[b].add(a)
    for lane in problem.lanes:
        for a, b in zip(lane.tolist(), lane.tolist()[1:], strict=False):
            before[b].add(a)
    order: dict[str, list[int]] = {stream: [] for stream in problem.streams}
    ready = sorted(i for i, needed in before.items() if not needed)
    after: dict[int, list[int]] = {}
    for b, needed in before.items():
        for a in needed:
            after.setdefault(a, []).append(b)
    while ready:
        i = ready.pop(rng.randrange(len(ready)))
        order[p[i].streams[0]].append(i)
        for b in after.get(i, []):
            before[b].discard(i)
            if not before[b]:
                ready.append(b)
    return Schedule.of(problem, order)


@contextmanager
def modules(stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Modules of these names with these contents, and the packages above them, as long as the block lasts."""
    kept = {}
    for name, contents in stand_ins.items():
        parts = name.split(".")
        for i in range(1, len(parts) + 1):
            above = ".".join(parts[:i])
            if above not in kept:
                kept[above] = sys.modules.get(above)
                sys.modules[above] = types.ModuleType(above)
                if i > 1:
                    setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], sys.modules[above])
        vars(sys.modules[name]).update(contents)
    try:
        yield
    finally:
        for name, module in kept.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def run_python(text: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The names of a generated Python file, run with these modules."""
    names: dict[str, Any] = {"__name__": "generated"}
    with modules(stand_ins):
        exec(compile(text, "generated.py", "exec"), names)
    return names


def walk(rows: list[list[tuple[str, Any]]], blocking: bool) -> None:
    """Run programs of ("run", key), ("send", (to, key)) and ("receive", (from, key)) on all ranks; messages between two
    ranks arrive in the order in which they were sent. blocking: a send waits for its receive. Fails where ranks wait for
    ever, or where a receive meets another message than its own."""
    at = [0] * len(rows)
    sent: dict[tuple[int, int], list[Any]] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            if at[rank] == len(row):
                continue
            word, what = row[at[rank]]
            if word == "receive":
                source, key = what
                queue = sent.get((source, rank), [])
                if blocking:
                    partner = rows[source][at[source]] if at[source] < len(rows[source]) else None
                    if partner is None or partner[0] != "send" or partner[1][0] != rank:
                        continue
                    assert partner[1][1] == key, (partner, key)
                    at[source] += 1
                elif not queue:
                    continue
                else:
                    assert queue.pop(0) == key, (queue, key)
            elif word == "send":
                if blocking:
                    continue  # its receive moves both
                sent.setdefault((rank, what[0]), []).append(what[1])
            at[rank] += 1
            moved = True
    assert at == [len(row) for row in rows], [row[i : i + 1] for row, i in zip(rows, at, strict=True)]
