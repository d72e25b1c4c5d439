"""A problem as flat arrays for the compiled schedulers: adjacency, lanes, streams, memory. Made once a problem."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..problem import Ints, Problem


class Arrays(NamedTuple):
    """Columns of one problem. Adjacency is in compressed rows: entries first[i]:first[i + 1] belong to i.

    lane[i] is the pass's lane (see `Problem.lanes`), lane_rows the lanes' passes one after the other, partner[l] the
    lane of the same stage and rank that comes next along the graph (F → B → W), or −1: what ends l's passes' flight (a
    lane that runs beside compute, which nothing need hold back, is its own).
    room is the capacity a rank (very large where unlimited). group is the last microbatch that a pass depends on, its own
    as a rule; needs[r, g] is what group g takes on rank r in all, gains[r, g] what it frees beyond that (0 as a rule).
    depth and tail are longest paths, µs: from any source to a pass's start, and from its start to the end of all; level is
    how many passes without length lie on a path as long as the depth, so (depth, level) rises along every edge.
    """

    duration: Ints
    rank: Ints
    group: Ints
    waiting: Ints
    out_first: Ints
    out_pass: Ints
    out_lag: Ints
    taken: Ints
    freed: Ints
    room: Ints
    needs: Ints
    gains: Ints
    lane: Ints
    lane_first: Ints
    lane_rows: Ints
    partner: Ints
    stream_first: Ints
    stream_rows: Ints
    home_first: Ints
    home_lanes: Ints
    rank_first: Ints
    rank_streams: Ints
    depth: Ints
    tail: Ints
    level: Ints


UNLIMITED = np.int64(1) << 60
_made: WeakKeyDictionary[Problem, Arrays] = WeakKeyDictionary()


def compressed(keys: Ints, count: int, *columns: Ints) -> tuple[Ints, ...]:
    """Rows grouped by key: (first, columns sorted by key)."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64)
    return (first, *(column[order] for column in columns))


def arrays(problem: Problem) -> Arrays:
    """The problem's arrays, remembered while the problem lives."""
    if problem not in _made:
        _made[problem] = _make(problem)
    return _made[problem]


def _make(problem: Problem) -> Arrays:
    passes, edges = problem.passes, problem.edges
    count, ranks = len(passes), problem.ranks
    out_first, out_pass, out_lag = compressed(edges.before, count, edges.after, edges.lag)
    depth, tail = _longest(problem)
    level = _levels(problem, depth)
    lanes = problem.lanes
    lane = np.zeros(count, np.int64)
    for number, rows in enumerate(lanes):
        lane[rows] = number
    group = _groups(problem)
    needs, frees = (np.zeros((ranks, int(group.max()) + 1), np.int64) for _ in range(2))
    np.add.at(needs, (passes.rank, group), problem.taken)
    np.add.at(frees, (passes.rank, group), problem.freed)
    place = {stream: i for i, stream in enumerate(problem.streams)}
    sets = [[place[s] for s in streams if s in place] for streams in passes.stream_sets]  # a set may have no pass
    width = np.array([len(s) for s in sets], np.int64)
    stream_first = np.concatenate([[0], np.cumsum(width[passes.streams])]).astype(np.int64)
    flat = np.concatenate([np.array(s, np.int64) for s in sets])
    set_first = np.concatenate([[0], np.cumsum(width)])
    offset = np.arange(stream_first[-1]) - np.repeat(stream_first[:-1], width[passes.streams])
    stream_rows = flat[np.repeat(set_first[passes.streams], width[passes.streams]) + offset]
    lane_of_stream = [(s, number) for number, rows in enumerate(lanes) for s in sets[passes.streams[rows[0]]]]
    home = np.array(sorted(lane_of_stream), np.int64)
    home_first, home_lanes = compressed(home[:, 0], len(place), home[:, 1])
    owner = problem.passes.rank[[rows[0] for rows in problem.members.values()]]
    rank_first, rank_streams = compressed(owner, ranks, np.arange(len(place)))
    room = np.full(ranks, UNLIMITED) if problem.capacity is None else np.array(problem.capacity, np.int64)
    return Arrays(
        passes.duration,
        passes.rank,
        group,
        np.bincount(edges.after, minlength=count).astype(np.int64),
        out_first,
        out_pass,
        out_lag,
        problem.taken,
        problem.freed,
        room,
        needs,
        frees - needs,
        lane,
        np.concatenate([[0], np.cumsum([len(rows) for rows in lanes])]).astype(np.int64),
        np.concatenate(lanes),
        _partners(problem, lanes, depth, level),
        stream_first,
        stream_rows,
        home_first,
        home_lanes,
        rank_first,
        rank_streams,
        depth,
        tail,
        level,
    )


def last_microbatch(problem: Problem) -> Ints:
    """The last microbatch among each pass and what it depends on: it falls along no edge."""
    edges = problem.edges
    last = problem.passes.microbatch.copy()
    while len(late := np.flatnonzero(last[edges.before] > last[edges.after])):
        np.maximum.at(last, edges.after[late], last[edges.before[late]])
    return last


def _groups(problem: Problem) -> Ints:
    """The last microbatch that a pass depends on. A pass at a microbatch's end that takes memory for later ones (an update:
    the weights it makes) counts with the next: it takes after that microbatch has freed its own."""
    edges, group = problem.edges, last_microbatch(problem)
    ahead = np.flatnonzero((edges.bytes > 0) & (group[edges.after] > group[edges.before]))
    takes = edges.before[ahead]
    waits = np.isin(takes, edges.after)
    group[np.unique(takes[waits])] += 1
    return group


def _partners(problem: Problem, lanes: list[Ints], depth: Ints, level: Ints) -> Ints:
    """For each lane the next one, by depth, of the same stage and rank; −1 for the last; itself where it runs beside."""
    passes = problem.passes
    beside = np.zeros(len(passes), bool)
    beside[problem.beside] = True
    homes: dict[tuple[int, int], list[int]] = {}
    for number, rows in enumerate(lanes):
        if not beside[rows[0]]:
            homes.setdefault((int(passes.rank[rows[0]]), int(passes.stage[rows[0]])), []).append(number)
    partner = np.where([beside[rows[0]] for rows in lanes], np.arange(len(lanes)), -1)
    for mine in homes.values():
        mine.sort(key=lambda number: (int(depth[lanes[number][0]]), int(level[lanes[number][0]]), number))
        for a, b in zip(mine, mine[1:], strict=False):
            partner[a] = b
    return partner


def _longest(problem: Problem) -> tuple[Ints, Ints]:
    """Longest path to each pass's start and from its start to the end, µs, along the graph's edges alone."""
    from ..timeline import Precedence, longest_path

    edges, duration = problem.edges, problem.passes.duration
    depth, _ = longest_path(problem, Precedence(edges.before, edges.after, edges.lag))
    # Backwards the same walk gives the time from a pass's end to the end of all.
    tail, _ = longest_path(problem, Precedence(edges.after, edges.before, edges.lag))
    return depth, tail + duration


def _levels(problem: Problem, depth: Ints) -> Ints:
    """The most passes without length on a path of length `depth` to each pass."""
    from ..timeline import Precedence, longest_path

    edges, duration = problem.edges, problem.passes.duration
    if duration.all():
        return np.zeros(len(duration), np.int64)
    tight = np.flatnonzero(depth[edges.before] + duration[edges.before] + edges.lag == depth[edges.after])
    before = edges.before[tight]
    # A lag that turns each pass's length into 1 where it has none and 0 where it has one.
    level, _ = longest_path(problem, Precedence(before, edges.after[tight], (duration[before] == 0) - duration[before]))
    return level
