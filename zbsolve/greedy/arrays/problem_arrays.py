"""A problem as flat arrays for compiled schedulers and bounds: adjacency, lanes, streams, memory."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...timeline import Precedence, longest_path
from .accounts import Accounts, accounts_of, brings_back, compressed_rows, copies_out, serial_places

NEVER = 1 << 60  # µs: later than any time


class ProblemArrays(NamedTuple):
    """One problem as arrays of int64. Times are in µs, memory is in bytes.

    Adjacency is in compressed rows: the entries x_first[i]:x_first[i + 1] of the array beside it belong to i.

    One value a pass:
      duration, rank, lane (see `Problem.lanes`);
      account: the microbatch on whose account the pass takes and frees memory, which is the last one it depends on (its own
        as a rule);
      inputs: how many edges lead to it; taken and freed: bytes at its start and at its end on its rank's device; takes: 1
        where it takes memory anywhere, else 0;
      depth: the longest path from any source to its start; tail: the longest path from its start to the end of all;
      level: the most passes without length on a path as long as `depth`, so (depth, level) rises along every edge.
    One row a pass: out_pass, out_lag (its successors, from out_first); pass_streams (the streams that it occupies).
    One value a lane: partner, the lane of the same stage and rank that comes next along the graph and ends the flight of
      this one's passes (F → B → W); −1 for the last; on a side stream the lane that what was brought back from a pool
        is for, and else the lane itself, which nothing holds back.
    One row a lane: lane_passes, in the order in which they run.
    One row a stream: stream_lanes. One row a pool (see `Problem`): pool_streams, those that run passes of the device's rank,
      or that take memory there, for themselves or ahead for a copy out.
    One value a rank: capacity (`UNLIMITED` where there is none). One value a pool: room, the same for all of them.
    accounts: memory by pool and account (see `Accounts`).
    One value a pass: user, the first pass that waits for one that brings memory back, else −1; returns, how many
      edges from passes that bring memory back lead to it.
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
    takes: Ints
    capacity: Ints
    room: Ints
    accounts: Accounts
    user: Ints
    returns: Ints
    lane: Ints
    lane_first: Ints
    lane_passes: Ints
    partner: Ints
    pass_stream_first: Ints
    pass_streams: Ints
    stream_lane_first: Ints
    stream_lanes: Ints
    pool_stream_first: Ints
    pool_streams: Ints
    depth: Ints
    tail: Ints
    level: Ints

    @property
    def first_pass(self) -> Ints:
        """The first pass of each lane, shape (lanes,)."""
        return self.lane_passes[self.lane_first[:-1]]


_known: WeakKeyDictionary[Problem, ProblemArrays] = WeakKeyDictionary()


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
    depth, _ = longest_path(problem, Precedence(edges.before, edges.after, edges.lag))
    # Along reversed edges the same function gives the time from a pass's end to the end of all.
    tail = longest_path(problem, Precedence(edges.after, edges.before, edges.lag))[0] + passes.duration
    level = _levels(problem, depth)
    lane = np.zeros(count, np.int64)
    for number, rows in enumerate(lanes):
        lane[rows] = number
    account = _accounts(problem)
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
        (np.bincount(edges.before, edges.bytes, count) > 0).astype(np.int64),
        problem.room[: problem.ranks],
        problem.room,
        accounts_of(problem, account, serial_places(problem, depth, tail, level)),
        *_returning(problem, depth),
        lane,
        np.concatenate([[0], np.cumsum([len(rows) for rows in lanes])]).astype(np.int64),
        np.concatenate(lanes),
        _partners(problem, lane, depth, level),
        *_streams_of_passes(problem),
        *_lanes_of_streams(problem),
        *_streams_of_pools(problem),
        depth,
        tail,
        level,
    )  # type: ignore[call-arg]


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


def _lanes_of_streams(problem: Problem) -> tuple[Ints, ...]:
    """The lanes of each stream, in compressed rows."""
    sets, of_pass = _stream_sets(problem), problem.passes.streams
    pairs = sorted((s, number) for number, rows in enumerate(problem.lanes) for s in sets[of_pass[rows[0]]])
    stream, lane = np.array(pairs, np.int64).T
    return compressed_rows(stream, len(problem.streams), lane)


def _streams_of_pools(problem: Problem) -> tuple[Ints, ...]:
    """The streams of each pool, in compressed rows."""
    pools, ranks = len(problem.room), problem.ranks
    takers = [problem.moved(pool)[0] > 0 for pool in range(ranks, pools)]
    if takers:  # room there may also be taken ahead, by the pass whose copy it is for
        out = copies_out(problem)
        sends = np.flatnonzero(out >= 0)
        for taker in takers:
            taker[sends] |= taker[out[sends]]
    pairs = []
    for number, rows in enumerate(problem.members.values()):
        pairs += [(rank, number) for rank in np.unique(problem.passes.rank[rows]).tolist()]
        pairs += [(pool, number) for pool, taking in enumerate(takers, ranks) if taking[rows].any()]
    owner, stream = np.array(pairs, np.int64).T
    return compressed_rows(owner, pools, stream)


def _accounts(problem: Problem) -> Ints:
    """The last microbatch that each pass depends on. What is counted by the step and depends on nothing (a gather) counts
    with the first microbatch that waits for it. What is counted by the step and takes memory for later microbatches (an
    update: the weights it makes) counts with the next one: it takes after its own microbatch has freed all."""
    edges, by_step = problem.edges, ~problem.in_microbatch
    has_inputs = np.zeros(len(by_step), bool)
    has_inputs[edges.after] = True
    account = last_microbatch(problem)
    for_others = np.flatnonzero(by_step & ~has_inputs)
    if len(for_others):
        first = np.full(len(account), len(account))
        np.minimum.at(first, edges.before, problem.passes.microbatch[edges.after])
        account[for_others] = np.minimum(first[for_others], problem.microbatches - 1)
    ahead = (edges.bytes > 0) & (account[edges.after] > account[edges.before])
    takes = np.unique(edges.before[ahead])
    account[takes[has_inputs[takes] & by_step[takes]]] += 1
    return account


def _partners(problem: Problem, lane_of: Ints, depth: Ints, level: Ints) -> Ints:
    """For each lane the next one by depth of its stage and rank; −1 for the last; on a side stream the one that it brings
    memory back for, or itself."""
    passes, edges, lanes = problem.passes, problem.edges, problem.lanes
    aside = np.zeros(len(passes), bool)
    aside[problem.side_stream] = True
    homes: dict[tuple[int, int], list[int]] = {}
    for number, rows in enumerate(lanes):
        if not aside[rows[0]]:
            homes.setdefault((int(passes.rank[rows[0]]), int(passes.stage[rows[0]])), []).append(number)
    partner = np.where([aside[rows[0]] for rows in lanes], np.arange(len(lanes)), -1)
    for numbers in homes.values():
        numbers.sort(key=lambda number: (int(depth[lanes[number][0]]), int(level[lanes[number][0]]), number))
        for a, b in zip(numbers, numbers[1:], strict=False):
            partner[a] = b
    back = np.flatnonzero((problem.device_bytes > 0) & brings_back(problem)[edges.before])
    for e in back[np.argsort(-depth[edges.after[back]], kind="stable")].tolist():  # the first to use it comes last
        partner[lane_of[edges.before[e]]] = lane_of[edges.after[e]]
    return partner


def _returning(problem: Problem, depth: Ints) -> tuple[Ints, Ints]:
    """Whom each pass brings memory back for, and how many edges of such passes lead to each."""
    e, count = problem.edges, len(depth)
    back = np.flatnonzero(brings_back(problem)[e.before])  # edges without bytes too: who waits need not be who frees
    user = np.full(count, -1)
    back = back[np.argsort(-depth[e.after[back]], kind="stable")]
    user[e.before[back]] = e.after[back]  # the first one comes last
    return user, np.bincount(e.after[back], minlength=count).astype(np.int64)


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


# --- How far ahead of its use memory comes back to a device from a further pool ---

# Late returns leave room on the device; early ones leave room in the pool. What is away for longer than the pool has room
# for has to come back sooner, or fewer microbatches are in flight.
FULL_SHARE = 0.875  # of a device's room is for what came back early, at most


def most_ahead(problem: Problem, a: ProblemArrays, share: float = 1.0) -> Ints:
    """For each lane that brings memory back how many of its passes may be ahead of their use, if all such lanes of a device
    together have a share of its room; else all passes. Shape (lanes,)."""
    first, back = a.first_pass, brings_back(problem)[a.first_pass]
    cap = np.full(len(first), len(a.duration), np.int64)
    rank = a.rank[first]
    together = np.bincount(rank[back], a.taken[first[back]], len(a.capacity))[rank[back]]
    room = a.capacity[rank[back]]
    cap[back] = np.where(room == UNLIMITED, len(a.duration), share * room / together)
    return cap


def usual_ahead(problem: Problem, a: ProblemArrays) -> Ints:
    """The same: at most one where pools have room for what is in flight, else as many as fit well. Shape (lanes,).

    What is in flight of a lane: from the start of the pass that sends memory away to that of the first that uses it again,
    over the work of the rank for a microbatch.
    """
    e, first = problem.edges, a.first_pass
    away = np.flatnonzero((e.pool > 0) & (e.bytes > 0) & np.isin(e.after, first) & brings_back(problem)[e.after])
    if not len(away):
        return np.full(len(first), len(a.duration), np.int64)
    work = np.bincount(a.rank, np.where(problem.computing, a.duration, 0), len(a.capacity)) / max(1, problem.microbatches)
    lane, pool = a.lane[e.after[away]], problem.ranks + e.pool[away] - 1
    flight = (a.depth[first[a.partner[lane]]] - a.depth[e.before[away]]) / np.maximum(1, work[a.rank[first[lane]]])
    in_flight = np.bincount(pool, e.bytes[away] * np.maximum(1, flight), len(a.room))
    most = most_ahead(problem, a, FULL_SHARE)
    return most if (in_flight > a.room).any() else np.where(brings_back(problem)[first], np.minimum(most, 1), most)
