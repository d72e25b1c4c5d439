"""A problem as flat arrays for compiled schedulers and bounds: adjacency, lanes, streams, memory."""

from __future__ import annotations

from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule.timeline import Precedence, longest_path
from .accounts import Accounts, accounts_of, brings_back, compressed_rows, copies_out, serial_places

NEVER = 1 << 60  # µs: later than any time


class ProblemArrays(NamedTuple):
    """One problem as arrays of int64. Times are in µs, memory is in bytes.

    Adjacency is in compressed rows: the entries x_first[i]:x_first[i + 1] of the array beside it belong to i.

    One value a pass:
      duration, rank, lane (see `Problem.lanes`);
      account: the microbatch to which its memory counts: the last one that it depends on, which usually is its own;
      inputs: how many edges lead to it; taken and freed: bytes at its start and its end on its rank's device; takes: 1 if
        it takes memory anywhere, else 0;
      depth: the longest path from any source to its start; tail: the longest path from its start to the end of all;
      level: the most passes of duration 0 on a path of length `depth`, so that (depth, level) rises along every edge.
    One row a pass: out_pass, out_lag (its successors, from out_first); pass_streams (the streams that it occupies).
    One value a lane: partner, the next lane of the same stage and rank along the graph, which ends the flight of this one's
      passes (F → B → W); −1 for the last. On a side stream: the lane for which it brings memory back, or else the lane
      itself, which has no cap then.
    One row a lane: lane_passes, in the order in which they run.
    One row a stream: stream_lanes. One row a pool (see `Problem`): pool_streams, the streams with passes of the device's
      rank, or with passes that take memory there, for themselves or as a reservation for a copy out.
    One value a rank: capacity (`UNLIMITED`: none). One value a pool: room, the same for all pools.
    accounts: memory by pool and account (see `Accounts`).
    One value a pass: user, for a pass that brings memory back the first pass that waits for it, else −1; returns, how many
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
    """The problem's arrays, cached as long as the problem lives."""
    if problem not in _known:
        _known[problem] = _arrays(problem)
    return _known[problem]


def last_microbatch(problem: Problem) -> Ints:
    """The last microbatch among each pass and all that it depends on, shape (passes,). It never falls along an edge."""
    edges = problem.edges
    last = problem.passes.microbatch.copy()
    while len(late := np.flatnonzero(last[edges.before] > last[edges.after])):
        np.maximum.at(last, edges.after[late], last[edges.before[late]])
    return last


def _arrays(problem: Problem) -> ProblemArrays:
    """`arrays_of` without the cache."""
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
    """The numbers of the streams in each set; streams without a pass are left out."""
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
    if takers:  # room there may also be reserved, by the pass whose copy it is for
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
    """The account of each pass, shape (passes,): the last microbatch that it depends on. A pass of the step that depends on
    nothing counts with the first microbatch that waits for it. A pass of the step that takes memory for later
    microbatches counts with the next one, since the last one has freed everything by then."""
    edges, by_step = problem.edges, ~problem.in_microbatch
    has_inputs = np.bincount(edges.after, minlength=len(by_step)) > 0
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
    """The partner of each lane (see `ProblemArrays`)."""
    passes, edges, lanes = problem.passes, problem.edges, problem.lanes
    aside = ~problem.computing
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
    for e in back[np.argsort(-depth[edges.after[back]], kind="stable")].tolist():  # the first user is written last
        partner[lane_of[edges.before[e]]] = lane_of[edges.after[e]]
    return partner


def _returning(problem: Problem, depth: Ints) -> tuple[Ints, Ints]:
    """`user` and `returns` of each pass (see `ProblemArrays`)."""
    e, count = problem.edges, len(depth)
    back = np.flatnonzero(brings_back(problem)[e.before])  # also edges without bytes: a pass may wait and not free
    user = np.full(count, -1)
    back = back[np.argsort(-depth[e.after[back]], kind="stable")]
    user[e.before[back]] = e.after[back]  # the first user is written last
    return user, np.bincount(e.after[back], minlength=count).astype(np.int64)


def _levels(problem: Problem, depth: Ints) -> Ints:
    """`level` of each pass (see `ProblemArrays`)."""
    edges, duration = problem.edges, problem.passes.duration
    if duration.all():
        return np.zeros(len(duration), np.int64)
    tight = np.flatnonzero(depth[edges.before] + duration[edges.before] + edges.lag == depth[edges.after])
    before = edges.before[tight]
    # With this lag a pass counts 1 if its duration is 0, else 0.
    level, _ = longest_path(problem, Precedence(before, edges.after[tight], (duration[before] == 0) - duration[before]))
    return level


# --- How far ahead of its use memory is brought back to a device ---

# Late returns save memory on the device, early ones in the further pool. If the pool is too small for all that is in flight,
# bytes have to come back earlier, or fewer microbatches can be in flight.
FULL_SHARE = 0.875  # the largest share of a device's memory for bytes that came back early


def most_ahead(problem: Problem, a: ProblemArrays, share: float = 1.0) -> Ints:
    """For each lane that brings memory back, how many of its passes may run ahead of their use, shape (lanes,); no limit for
    others. All such lanes of a device together have this share of its memory."""
    first, back = a.first_pass, brings_back(problem)[a.first_pass]
    cap = np.full(len(first), len(a.duration), np.int64)
    rank = a.rank[first]
    together = np.bincount(rank[back], a.taken[first[back]], len(a.capacity))[rank[back]]
    room = a.capacity[rank[back]]
    cap[back] = np.where(room == UNLIMITED, len(a.duration), share * room / together)
    return cap


def usual_ahead(problem: Problem, a: ProblemArrays) -> Ints:
    """The usual limit for `most_ahead`, shape (lanes,): one if the pools can hold all that is in flight, else as many as
    fit.

    In flight of a lane: the time from the start of the pass that sends memory away to that of the first pass that uses it
    again, over the rank's work for one microbatch.
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
