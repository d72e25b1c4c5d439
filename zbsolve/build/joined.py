"""Passes that a rank runs as one: F of one microbatch beside the backward of another, with the time that was measured of
both together. To everybody else such a step is passes and edges like any other, so nothing can come between the two."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import networkx as nx
import numpy as np

from ..kinds import KINDS, Kind, register
from ..problem import Problem
from ..util.errors import BadInput

JOINED = Kind("FB", "forward beside a backward", "#5d8a1f", "&", adds_gradients=True)


def with_joined(problem: Problem, groups: Sequence[Sequence[str]], times: Sequence[int]) -> Problem:
    """`problem` with one pass FB in place of each group of passes, `("0F3", "2B1", "2W1")` for instance.

    groups: names of passes of one stream; the first gives FB its stage and microbatch. times: µs of each group, sends not
    included. What waits for one of a group waits for all of it, and all of it waits for what one of them needs; it takes
    its memory at its start and frees at its end. Raises BadInput for a pass that is not there, is in two groups, or on
    another stream, and for groups that would wait for each other.
    """
    register(JOINED)
    passes, stand_in = problem.passes, np.arange(len(problem.passes))
    duration, kind = passes.duration.copy(), passes.kind.copy()
    sending = problem.sending
    for group, time in zip(groups, times, strict=True):
        where = f"joined passes {' '.join(group)}"
        missing = [name for name in group if name not in problem.index]
        if missing:
            raise BadInput(f"{where}: there is no pass '{missing[0]}'")
        rows = np.array([problem.index[name] for name in group])
        if len(rows) < 2 or len(np.unique(rows)) < len(rows) or (stand_in[rows] != rows).any():
            raise BadInput(f"{where}: each group has several passes, and no pass is in two")
        if len(np.unique(passes.streams[rows])) > 1:
            raise BadInput(f"{where}: they run on different streams")
        if time <= 0:
            raise BadInput(f"{where}: {time} µs is not a positive time")
        stand_in[rows] = rows[0]
        duration[rows[0]], kind[rows[0]] = time + int(sending[rows].sum()), KINDS.index(JOINED.label)
    links = replace(problem.edges, before=stand_in[problem.edges.before], after=stand_in[problem.edges.after])
    outside = links.only(np.flatnonzero(links.before != links.after))
    joined = replace(problem, passes=replace(passes, duration=duration, kind=kind), edges=outside)
    found = joined.only(np.flatnonzero(stand_in == np.arange(len(passes))))
    waits = nx.DiGraph(zip(found.edges.before.tolist(), found.edges.after.tolist(), strict=True))
    with suppress(nx.NetworkXNoCycle):
        circle = " → ".join(found.names[before] for before, _ in nx.find_cycle(waits))
        raise BadInput(f"joined passes: they wait for each other: {circle}")
    return found
