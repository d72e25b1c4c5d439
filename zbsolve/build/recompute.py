"""Recompute: stages that drop their activations after F and make them again in a pass X before B (arXiv 1604.06174).

Here is written what X waits for and what it holds; to everybody else it is one more pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kinds import RECOMPUTE, SHARDING, UPDATES
from ..problem import Problem
from ..tables import Edges, Ints
from ..util.errors import BadInput
from ..util.text import numbers_in
from .numbers import Table, check_before, whole_table

Recompute = Sequence[int] | str


def recomputed_stages(recompute: Recompute, stages: int) -> Ints:
    """The stages named by "all", by "0,2" or "0,4-7", or by their numbers; sorted, each once. Raises BadInput."""
    if isinstance(recompute, str):
        if recompute == "all":
            return np.arange(stages)
        parts: Sequence[int | str] = [part.strip() for part in recompute.split(",")] if recompute.strip() else []
    else:
        parts = list(recompute)
    found: set[int] = set()
    for part in parts:
        try:
            numbers = numbers_in(part) if isinstance(part, str) else [int(part)]
        except (TypeError, ValueError):
            raise BadInput(f"recompute: '{part}' is neither 'all' nor a stage") from None
        for number in numbers:
            if not 0 <= number < stages:
                raise BadInput(f"recompute: there is no stage {number} (they are 0 to {stages - 1})")
        found.update(numbers)
    return np.array(sorted(found), np.int64)


def with_recompute(problem: Problem, stages: Recompute = "all", *, X: Table | None = None, held_input: Table = 0) -> Problem:
    """`problem`, a step that keeps everything (F, B, W or F, BW), with these stages recomputing.

    stages: "all", "0,2", or numbers.
    X: µs a stage, one number, or rows of one a microbatch; None: each as long as its F computes.
    held_input: bytes a stage that F keeps for X, its input, in the forms of X. They are part of what B and W free.

    After F only the input is held; from X's start what B and W free, in all as much as without recompute. What of the input
    is more than that goes when X ends. X may run as soon as F has ended, and must before B.

    Raises BadInput, also for a stage with an all-to-all AF.
    """
    passes, edges = problem.passes, problem.edges
    check_before(problem, RECOMPUTE, UPDATES, SHARDING)
    chosen = recomputed_stages(stages, problem.stages)
    inputs = whole_table(held_input, "held_input", problem.stages, problem.microbatches)
    for stage in chosen[np.isin(chosen, passes.stage[problem.rows("AF")])].tolist():
        raise BadInput(f"recompute: stage {stage} has an all-to-all AF, which its X would have to repeat: not modelled")
    fs = np.flatnonzero(passes.are("F") & np.isin(passes.stage, chosen))
    if not len(fs):
        return problem
    columns = {name: getattr(passes, name)[fs] for name in ("stage", "microbatch", "rank", "duration")}
    columns["duration"] = columns["duration"] - problem.sending[fs]
    if X is not None:
        times = whole_table(X, "X", problem.stages, problem.microbatches)
        columns["duration"] = times[columns["stage"], columns["microbatch"]]
    table = passes.more("X", "compute", **columns)
    place = np.full(len(passes), -1, np.int64)  # F → its X
    place[fs] = len(passes) + np.arange(len(fs))
    own = np.flatnonzero((place[edges.before] >= 0) & (passes.stage[edges.before] == passes.stage[edges.after]))
    before, after, held = edges.before[own], edges.after[own], edges.bytes[own]
    left = np.zeros(len(passes), np.int64)
    left[fs] = inputs[passes.stage[fs], passes.microbatch[fs]]
    kept = np.zeros(len(own), np.int64)
    late = passes.are("W")[after]
    for rows in (np.flatnonzero(~late), np.flatnonzero(late)):  # of B's bytes first, what is more of W's
        kept[rows] = np.minimum(left[before[rows]], held[rows])
        left[before[rows]] -= kept[rows]
    rest = edges.bytes.copy()
    rest[own] = kept
    waits = Edges.of(fs, place[fs], bytes=left[fs]) + Edges.of(place[before], after, bytes=held - kept)
    return replace(problem, passes=table, edges=replace(edges, bytes=rest) + waits)


def without_recompute(problem: Problem) -> tuple[Problem, dict[str, str]]:
    """The step without its passes X, whose B and BW take their time too; and pass → the X that it waits for, by name. The
    problem itself where nothing is recomputed, or an exchange of attention has parts of backwards wait for X."""
    edges, passes, names = problem.edges, problem.passes, problem.names
    own = np.flatnonzero(passes.are("X")[edges.before])
    if not len(own) or "BQ" in passes.kinds:
        return problem, {}
    again, after = edges.before[own], edges.after[own]
    backward = passes.are("B", "BW")[after]
    duration = passes.duration.copy()
    duration[after[backward]] += passes.duration[again[backward]]
    longer = replace(problem, passes=replace(passes, duration=duration))
    waits = {names[b]: names[x] for x, b in zip(again.tolist(), after.tolist(), strict=True)}
    return longer.only(np.flatnonzero(~passes.are("X"))), waits


def least_room(route: Sequence[int], held: Ints, from_b: Ints, stages: Ints, inputs: Ints) -> Ints:
    """Bytes a rank that one microbatch needs on this route: its first B waits for all F; the B of a rank's stages run one
    after the other, and only that of the moment needs what it takes and, where the others recompute, activations.

    held, from_b, inputs: bytes a stage that F takes, that B takes, that F keeps where the stage is one of `stages`, which
    recompute. Shape (stages,); returns shape (ranks,).
    """
    need, below = np.zeros(max(route) + 1, np.int64), np.zeros(max(route) + 1, np.int64)
    base = held.copy()
    base[stages] = inputs[stages]
    for stage, rank in enumerate(route):
        need[rank] = max(need[rank], below[rank] + max(base[stage], held[stage] + from_b[stage]))
        below[rank] += base[stage]
    return need
