"""A problem as flat arrays for compiled schedulers and bounds: adjacency, lanes, streams, memory."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ..problem import Ints, Problem
from ..timeline import Precedence, longest_path

UNLIMITED = np.int64(1) << 60  # bytes: the capacity of a rank without a limit
NEVER = np.int64(1) << 60  # µs: later than any time


class ProblemArrays(NamedTuple):
    """One problem as arrays of int64. Times are in µs, memory is in bytes.

    Adjacency is in compressed rows: the entries x_first[i]:x_first[i + 1] of the array beside it belong to i.

    One value a pass:
      duration, rank, lane (see `Problem.lanes`);
      account: the microbatch on whose account the pass takes and frees memory, which is the last one it depends on (its own
        as a rule);
      inputs: how many edges lead to it; taken and freed: bytes at its start and at its end;
      depth: the longest path from any source to its start; tail: the longest path from its start to the end of all;
      level: the most passes without length on a path as long as `depth`, so (depth, level) rises along every edge.
    One row a pass: out_pass, out_lag (its successors, from out_first); pass_streams (the streams that it occupies).
    One value a lane: partner, the lane of the same stage and rank that comes next along the graph and ends the flight of
      this one's passes (F → B → W); −1 for the last; the lane itself on a side stream, which nothing holds back.
    One row a lane: lane_passes, in the order in which they run.
    One row a stream: stream_lanes. One row a rank: rank_streams.
    One value a rank: capacity (`UNLIMITED` where there is none).
    Shape (ranks, accounts): account_need, the bytes that an account takes on a rank in all; account_gain, what it frees
      beyond that (0 as a rule).
    """

    duration: Ints
    rank: Ints
    account: Ints
    inputs: Ints
    out_first: Ints
    out_pass: Ints
    out_lag: Ints
    taken: Ints
    freed: Ints
    capacity: Ints
    account_need: Ints
    account_gain: Ints
    lane: Ints
    lane_first: Ints
    lane_passes: Ints
    partner: Ints
    pass_stream_first: Ints
    pass_streams: Ints
    stream_lane_first: Ints
    stream_lanes: Ints
    rank_stream_first: Ints
    rank_streams: Ints
    depth: Ints
    tail: Ints
    level: Ints

    @property
    def first_pass(self) -> Ints:
        """The first pass of each lane, shape (lanes,)."""
        return self.lane_passes[self.lane_first[:-1]]


_known: WeakKeyDictionary[Problem, ProblemArrays] = WeakKeyDictionary()


def compressed_rows(keys: Ints, count: int, *columns: Ints) -> tuple[Ints, ...]:
    """Columns grouped by key: (first, columns sorted by key); key k has the entries first[k]:first[k + 1]."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64)
    return (first, *(column[order] for column in columns))


def arrays_of(problem: Problem) -> ProblemArrays:
    """The problem's arrays, remembered while the problem lives."""
    if problem not in _known:
        _known[problem] = _arrays(problem)
    return _known[problem]


def last_microbatch(problem: Problem) -> Ints:
    """The last microbatch among each pass and what it depends on, shape (passes,). It falls along no edge."""
    edges = problem.edges
    last = problem.passes.microbatch.copy()
    while len(late := np.flatnonzero(last[edges.before] > last[edges.after])):
        np.maximum.at(last, edges.after[late], last[edges.before[late]])
    return last


def _arrays(problem: Problem) -> ProblemArrays:
    """The arrays, made anew."""
    passes, edges, lanes = problem.passes, problem.edges, problem.lanes
    count = len(passes)
    out_first, out_pass, out_lag = compressed_rows(edges.before, count, edges.after, edges.lag)
    depth, tail = _depth_and_tail(problem)
    level = _levels(problem, depth)
    lane = np.zeros(count, np.int64)
    for number, rows in enumerate(lanes):
        lane[rows] = number
    account = _accounts(problem)
    needs, frees = (np.zeros((problem.ranks, int(account.max()) + 1), np.int64) for _ in range(2))
    np.add.at(needs, (passes.rank, account), problem.taken)
    np.add.at(frees, (passes.rank, account), problem.freed)
    unlimited = np.full(problem.ranks, UNLIMITED)
    return ProblemArrays(
        passes.duration,
        passes.rank,
        account,
        np.bincount(edges.after, minlength=count).astype(np.int64),
        out_first,
        out_pass,
        out_lag,
        problem.taken,
        problem.freed,
        unlimited if problem.capacity is None else np.array(problem.capacity, np.int64),
        needs,
        frees - needs,
        lane,
        np.concatenate([[0], np.cumsum([len(rows) for rows in lanes])]).astype(np.int64),
        np.concatenate(lanes),
        _partners(problem, lanes, depth, level),
        *_streams_of_passes(problem),
        *_lanes_of_streams(problem),
        *_streams_of_ranks(problem),
        depth,
        tail,
        level,
    )


def _stream_sets(problem: Problem) -> list[list[int]]:
    """The streams of each set of streams, as numbers; a set that no pass has may lack some."""
    number = {stream: i for i, stream in enumerate(problem.streams)}
    return [[number[stream] for stream in streams if stream in number] for streams in problem.passes.stream_sets]


def _streams_of_passes(problem: Problem) -> tuple[Ints, Ints]:
    """The streams of each pass, in compressed rows."""
    sets, of_pass = _stream_sets(problem), problem.passes.streams
    width = np.array([len(s) for s in sets], np.int64)
    first = np.concatenate([[0], np.cumsum(width[of_pass])]).astype(np.int64)
    flat = np.concatenate([np.array(s, np.int64) for s in sets])
    set_first = np.concatenate([[0], np.cumsum(width)])
    offset = np.arange(first[-1]) - np.repeat(first[:-1], width[of_pass])
    return first, flat[np.repeat(set_first[of_pass], width[of_pass]) + offset]


def _lanes_of_streams(problem: Problem) -> tuple[Ints, Ints]:
    """The lanes of each stream, in compressed rows."""
    sets, of_pass = _stream_sets(problem), problem.passes.streams
    pairs = sorted((s, number) for number, rows in enumerate(problem.lanes) for s in sets[of_pass[rows[0]]])
    stream, lane = np.array(pairs, np.int64).T
    first, lanes = compressed_rows(stream, len(problem.streams), lane)
    return first, lanes


def _streams_of_ranks(problem: Problem) -> tuple[Ints, Ints]:
    """The streams of each rank, in compressed rows."""
    owner = problem.passes.rank[[rows[0] for rows in problem.members.values()]]
    first, streams = compressed_rows(owner, problem.ranks, np.arange(len(problem.streams)))
    return first, streams


def _accounts(problem: Problem) -> Ints:
    """The last microbatch that each pass depends on. A pass at a microbatch's end that takes memory for later ones (an
    update: the weights it makes) counts with the next one: it takes after its own microbatch has freed all."""
    edges, account = problem.edges, last_microbatch(problem)
    ahead = np.flatnonzero((edges.bytes > 0) & (account[edges.after] > account[edges.before]))
    takes = edges.before[ahead]
    has_inputs = np.isin(takes, edges.after)
    account[np.unique(takes[has_inputs])] += 1
    return account


def _partners(problem: Problem, lanes: list[Ints], depth: Ints, level: Ints) -> Ints:
    """For each lane the next one by depth of its stage and rank; −1 for the last; itself on a side stream."""
    passes = problem.passes
    aside = np.zeros(len(passes), bool)
    aside[problem.side_stream] = True
    homes: dict[tuple[int, int], list[int]] = {}
    for number, rows in enumerate(lanes):
        if not aside[rows[0]]:
            homes.setdefault((int(passes.rank[rows[0]]), int(passes.stage[rows[0]])), []).append(number)
    partner = np.where([aside[rows[0]] for rows in lanes], np.arange(len(lanes)), -1)
    for mine in homes.values():
        mine.sort(key=lambda number: (int(depth[lanes[number][0]]), int(level[lanes[number][0]]), number))
        for a, b in zip(mine, mine[1:], strict=False):
            partner[a] = b
    return partner


def _depth_and_tail(problem: Problem) -> tuple[Ints, Ints]:
    """The longest path to each pass's start, and from its start to the end of all, µs, along the graph's edges alone."""
    edges, duration = problem.edges, problem.passes.duration
    depth, _ = longest_path(problem, Precedence(edges.before, edges.after, edges.lag))
    # Along reversed edges the same function gives the time from a pass's end to the end of all.
    tail, _ = longest_path(problem, Precedence(edges.after, edges.before, edges.lag))
    return depth, tail + duration


def _levels(problem: Problem, depth: Ints) -> Ints:
    """The most passes without length on a path of length `depth` to each pass."""
    edges, duration = problem.edges, problem.passes.duration
    if duration.all():
        return np.zeros(len(duration), np.int64)
    tight = np.flatnonzero(depth[edges.before] + duration[edges.before] + edges.lag == depth[edges.after])
    before = edges.before[tight]
    # With this lag a pass counts 1 where it has no length, and 0 where it has one.
    level, _ = longest_path(problem, Precedence(before, edges.after[tight], (duration[before] == 0) - duration[before]))
    return level
