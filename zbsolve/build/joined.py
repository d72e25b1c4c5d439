"""Passes that a rank runs as one: the F of one microbatch overlapped with the backward of another, with the measured time of
both together; and B and W as one BW, as DualPipeV of torch.distributed.pipelining has them in some microbatches. For all
other code these are passes and edges like any other, so nothing can come between the two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..kinds import KINDS, OVERLAP, Kind, register
from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..schedule.timeline import Precedence, longest_path
from ..util.errors import BadInput, Deadlock
from .numbers import Numbers, check_apart, whole_numbers

JOINED = Kind("FB", "forward beside a backward", "#5d8a1f", "&", feature=OVERLAP, adds_gradients=True)


def with_joined(problem: Problem, groups: Sequence[Sequence[str]], times: Numbers) -> Problem:
    """`problem` with one pass FB in place of each group of passes, such as `("0F3", "2B1", "2W1")`.

    groups: names of passes of one stream; the first gives FB its stage and microbatch.
    times: µs, one number or one a group, sends not included.

    What waits for a pass of a group waits for the whole group, and the group waits for what any of its passes needs. FB
    takes its memory at its start and frees it at its end. No other feature can be added afterwards. Raises BadInput for
    times that make no sense, for a pass that does not exist, is in two groups or on another stream, and for groups that wait
    for each other.
    """
    register(JOINED)
    passes, sending, stand_in = problem.passes, problem.sending, np.arange(len(problem.passes))
    duration, kind = passes.duration.copy(), passes.kind.copy()
    for group, time in zip(groups, whole_numbers(times, "joined passes: times", len(groups)).tolist(), strict=True):
        rows = _rows(problem, group, stand_in)
        if not time:
            raise BadInput(f"joined passes {' '.join(group)}: 0 µs is not a positive time")
        stand_in[rows] = rows[0]
        duration[rows[0]], kind[rows[0]] = time + int(sending[rows].sum()), KINDS.index(JOINED.label)
    joined = merged(problem, stand_in, kind, duration)
    try:
        longest_path(joined, Precedence.of(joined))
    except Deadlock as error:
        raise BadInput(f"joined passes: they wait for each other: {error}") from None
    return joined


def merged(problem: Problem, stand_in: Ints, kind: Ints, duration: Ints) -> Problem:
    """`problem` with one pass in place of several. stand_in: for each pass the row of the one in its place, which remains;
    kind, duration: of these; shape (passes,) each. Edges within a group are removed."""
    edges = problem.edges
    links = replace(edges, before=stand_in[edges.before], after=stand_in[edges.after])
    whole = replace(
        problem,
        passes=replace(problem.passes, kind=kind, duration=duration),
        edges=links.only(np.flatnonzero(links.before != links.after)),
    )
    return whole.only(np.flatnonzero(stand_in == np.arange(len(stand_in))))


def _rows(problem: Problem, group: Sequence[str], stand_in: Ints) -> Ints:
    """The rows of a group's passes. Raises BadInput."""
    where = f"joined passes {' '.join(group)}"
    for name in group:
        if name not in problem.index:
            raise BadInput(f"{where}: there is no pass '{name}'")
    rows = np.array([problem.index[name] for name in group], np.int64)
    if len(rows) < 2 or len(np.unique(rows)) < len(rows) or (stand_in[rows] != rows).any():
        raise BadInput(f"{where}: each group has several passes, and no pass is in two")
    if len(np.unique(problem.passes.streams[rows])) > 1:
        raise BadInput(f"{where}: they run on different streams")
    return rows


def with_fused_backward(problem: Problem, fused: Bools, BW: Numbers | Ints) -> Problem:
    """`problem`, a step whose backward is split, with one pass BW in place of B and W where `fused` says so.

    fused: booleans, shape (stages, microbatches).
    BW: µs, one number, one a stage, or shape (stages, microbatches), to which comes what B sends.

    BW waits for what B and W waited for, and frees what both freed. Raises BadInput for a wrong shape, or without B and W.
    """
    check_apart(problem, "fused")
    passes, chosen, home = problem.passes, np.asarray(fused, bool), np.stack([problem.grid(letter) for letter in "BW"])
    if chosen.shape != home.shape[1:]:
        raise BadInput(f"fused: shape {chosen.shape}, not (stages, microbatches): {home.shape[1:]}")
    each = np.asarray(BW)
    times = each if each.shape == chosen.shape else np.tile(whole_numbers(BW, "BW", problem.stages), (len(chosen.T), 1)).T
    b, w = home[:, chosen]
    if min(b.min(initial=0), w.min(initial=0)) < 0:
        stage, microbatch = np.argwhere(chosen & (home < 0).any(axis=0))[0].tolist()
        raise BadInput(f"fused: stage {stage} of microbatch {microbatch} has no B and W that one pass could replace")
    kind, duration = passes.kind.copy(), passes.duration.copy()
    kind[b], duration[b] = KINDS.index("BW"), times[chosen] + problem.sending[b]
    stand_in = np.arange(len(passes))
    stand_in[w] = b
    return merged(problem, stand_in, kind, duration)
