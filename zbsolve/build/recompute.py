"""Recompute: stages that free their activations after F and compute them again in a pass X before B (arXiv 1604.06174).
This module has the edges and bytes of X; for all other code X is one more kind of pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from math import inf, nan

import numpy as np

from ..kinds import ATTENTION, RECOMPUTE
from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..util.errors import BadInput
from ..util.text import numbers_in, rows_of_numbers
from .numbers import Table, check_before, whole_table
from .untrained import untrained_stages

# Stages that recompute: their numbers, or as in `recomputed_stages`, also with the number of layers for each.
Recompute = Sequence[int] | Mapping[int, float] | str
ALL = "all"


def recomputed_stages(recompute: Recompute, stages: int) -> dict[int, float]:
    """Stage → how many of its first layers are recomputed (infinite: all), stages ascending. Text: "all", "all:2" (two
    layers of each stage), "0,2", "0:3,4-7:1". A stage with fewer layers recomputes all. Raises BadInput."""
    if isinstance(recompute, Mapping):
        parts = [(n, str(count)) for stage, count in recompute.items() for n in _numbers(stage, stages)]
    elif isinstance(recompute, str):
        words = [part.strip().partition(":") for part in recompute.split(",")] if recompute.strip() else []
        parts = [(n, count) for name, _, count in words for n in _numbers(name, stages)]
    elif not isinstance(recompute, Iterable):
        raise BadInput(f"recompute: {recompute!r}: stages such as (0, 2) or 'all' are needed")
    else:
        parts = [(n, "") for part in recompute for n in _numbers(part, stages)]
    counts: dict[int, float] = {}
    for stage, count in parts:
        if not 0 <= stage < stages:
            raise BadInput(f"recompute: there is no stage {stage} (they are 0 to {stages - 1})")
        try:
            number = float(count or inf)
        except ValueError:
            number = nan
        if not number >= 1 or not (number.is_integer() or number == inf):
            raise BadInput(f"recompute: stage {stage}: '{count}' is no number of layers, at least 1 and whole")
        if counts.setdefault(stage, number) != number:
            raise BadInput(f"recompute: stage {stage} is named twice, with other numbers of layers")
    return dict(sorted(counts.items()))


def _numbers(part: int | str, stages: int) -> Sequence[int]:
    try:
        if not isinstance(part, str):
            return [int(part)]
        return range(stages) if part.strip() == ALL else numbers_in(part)
    except (TypeError, ValueError):
        raise BadInput(f"recompute: '{part}' is neither 'all' nor a stage") from None


def recomputed_layers(recompute: Recompute, layers: Sequence[int]) -> tuple[int, ...]:
    """How many of each stage's layers, the first ones, are recomputed. layers: of each stage. Raises BadInput."""
    counts = recomputed_stages(recompute, len(layers))
    return tuple(int(min(counts.get(stage, 0), count)) for stage, count in enumerate(layers))


def recompute_in_words(again: Sequence[int], layers: Sequence[int]) -> str:
    """Such counts as text that `recomputed_stages` reads: "all", "0-3:2,4", "" for none."""
    whole = [count == of for count, of in zip(again, layers, strict=True)]
    if all(whole):
        return ALL
    rows = groupby(range(len(again)), key=lambda stage: ALL if whole[stage] else again[stage])
    return ",".join(
        part if count == ALL else f"{part}:{count}"
        for count, stages in rows
        if count
        for part in rows_of_numbers(list(stages))
    )


def with_recompute(problem: Problem, stages: Recompute = "all", *, X: Table | None = None, held_input: Table = 0) -> Problem:
    """`problem`, a step that keeps everything (F, B, W or F, BW), with these stages recomputing.

    stages: "all", "0,2", or numbers; for part of their layers "0:3,2:1" or {0: 3, 2: 1} (see `recomputed_stages`).
    X: µs a stage, one number, or rows of one a microbatch; None: as long as the stage's F computes. Required, for that part,
        if only part of a stage's layers recompute.
    held_input: bytes a stage of the input that F keeps for X, in the forms of X. They are part of what B and W free. If only
        part of its layers recompute, they include the bytes that the others keep.

    After F only the input is held. From X's start the stage holds what B and W free, in total as much as without recompute.
    If the input is larger than that, X's end frees the rest. X may run as soon as F has ended, and must run before B. Stages
    in front without a backward have no X.

    Raises BadInput, also for a stage with an all-to-all AF.
    """
    passes, edges = problem.passes, problem.edges
    check_before(problem, RECOMPUTE)
    front, counts = untrained_stages(problem), recomputed_stages(stages, problem.stages)
    counts = {stage: count for stage, count in counts.items() if stage >= front}
    again = recomputed_layers(counts, problem.layers) if problem.layers else ()
    part = [stage for stage, count in counts.items() if count < (problem.layers[stage] if problem.layers else inf)]
    if part and (X is None or not again):
        raise BadInput(f"recompute: part of stage {part[0]} needs its time X, and layers: how many each stage has")
    chosen = np.array(list(counts), np.int64)
    inputs = whole_table(held_input, "held_input", problem.stages, problem.microbatches)
    for stage in chosen[np.isin(chosen, passes.stage[problem.rows("AF")])].tolist():
        raise BadInput(f"recompute: stage {stage} has an all-to-all AF, which its X would have to repeat: not modelled")
    fs = np.flatnonzero(passes.are("F") & np.isin(passes.stage, chosen))
    if not len(fs):
        return problem
    times = (passes.duration - problem.sending)[fs]
    if X is not None:
        times = whole_table(X, "X", problem.stages, problem.microbatches)[passes.stage[fs], passes.microbatch[fs]]
    table = passes.like(fs, "X", "compute", times)
    place = np.full(len(passes), -1, np.int64)  # F → its X
    place[fs] = len(passes) + np.arange(len(fs))
    own = np.flatnonzero((place[edges.before] >= 0) & (passes.stage[edges.before] == passes.stage[edges.after]))
    before, after, held = edges.before[own], edges.after[own], edges.bytes[own]
    left = np.zeros(len(passes), np.int64)
    left[fs] = inputs[passes.stage[fs], passes.microbatch[fs]]
    kept = np.zeros(len(own), np.int64)
    late = passes.are("W")[after]
    for rows in (np.flatnonzero(~late), np.flatnonzero(late)):  # first part of B's bytes, then of W's
        kept[rows] = np.minimum(left[before[rows]], held[rows])
        left[before[rows]] -= kept[rows]
    stays = edges.bytes.copy()
    stays[own] = kept
    waits = Edges.of(fs, place[fs], bytes=left[fs]) + Edges.of(place[before], after, bytes=held - kept)
    return replace(problem, passes=table, edges=replace(edges, bytes=stays) + waits, recomputed=again if part else ())


def without_recompute(problem: Problem) -> tuple[Problem, dict[str, str]]:
    """The step without its passes X, whose times are added to B and BW; and pass → the X that it waits for, by name. The
    problem itself if nothing is recomputed, or attention is exchanged: backwards and helpers may then wait for X."""
    edges, passes, names = problem.edges, problem.passes, problem.names
    own = np.flatnonzero(passes.are("X")[edges.before])
    if not len(own) or passes.that(feature=ATTENTION).any():
        return problem, {}
    again, after = edges.before[own], edges.after[own]
    backward = passes.are("B", "BW")[after]
    duration = passes.duration.copy()
    duration[after[backward]] += passes.duration[again[backward]]
    longer = replace(problem, passes=replace(passes, duration=duration))
    waits = {names[b]: names[x] for x, b in zip(again.tolist(), after.tolist(), strict=True)}
    return longer.only(np.flatnonzero(~passes.are("X"))), waits


def least_room(route: Sequence[int], held: Ints, from_b: Ints, stages: Ints, inputs: Ints) -> Ints:
    """Bytes a rank that one microbatch needs on this route. Its first B waits for all F. Then a rank's B run from its last
    stage to its first. During one of them the rank holds what this stage's F and B take, and what earlier stages keep.

    held, from_b, inputs: bytes a stage that F takes, that B takes, and that F keeps if the stage is one of `stages`, which
    recompute. Shape (stages,); returns shape (ranks,).
    """
    need, below = np.zeros(max(route) + 1, np.int64), np.zeros(max(route) + 1, np.int64)
    base = held.copy()
    base[stages] = inputs[stages]
    for stage, rank in enumerate(route):
        need[rank] = max(need[rank], below[rank] + max(base[stage], held[stage] + from_b[stage]))
        below[rank] += base[stage]
    return need
