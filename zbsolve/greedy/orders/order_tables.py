"""The tables that a search over orders works on: passes, their links, streams. Records, see `arrays.records`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ..arrays.compressed import compressed_rows
from ..arrays.problem_arrays import arrays_of
from ..arrays.records import record
from ..side_streams.syncs import pools_with_syncs

# A pass: stream and lane, numbered; taken and freed, bytes; in_first:in_last and out_first:out_last, its rows of `links`;
#   place, where it stands in `order`; level, where in `sorted`; head, the earliest start, µs; tail, µs from its end to the
#   end of what counts; waiting, scratch.
PASS = record("duration stream lane taken freed in_first in_last out_first out_last place level head tail waiting")
LINK = record("other lag")
# A stream: its rank; first:last, its places in `order`; capacity, bytes; origin, µs: what its ends are counted from.
STREAM = record("rank first last capacity origin")


class OrderTables(NamedTuple):
    """An order of all passes and its times.

    passes, links, streams: records. order: passes, stream after stream, each as it runs; held: bytes held on the stream
    before the pass at a place starts; sorted: passes, each behind all that it waits for. span: whether it is the objective.
    marks, of places in `sorted`, and scratch, shape (passes,): for mending times.
    """

    passes: NDArray[Any]
    links: NDArray[Any]
    streams: NDArray[Any]
    order: Ints
    held: Ints
    sorted: Ints
    span: bool
    marks: NDArray[np.uint8]
    scratch: Ints


def decided_by_orders(problem: Problem) -> bool:
    """Whether the order of each stream alone decides its memory, and streams share nothing else: one stream a pass, one rank
    a stream, each collective one pass, no further pools, and on each rank one stream that takes memory or room for all."""
    p = problem.passes
    single = all(len(streams) == 1 for streams in p.stream_sets)
    own = len(np.unique(p.streams * problem.ranks + p.rank)) == len(np.unique(p.streams))
    alone = bool((np.bincount(problem.collective[problem.collective >= 0]) <= 1).all())
    return single and own and alone and not problem.pools and not pools_with_syncs(problem)


def tables_of(schedule: Schedule) -> OrderTables:
    """The tables of a schedule's order, without times."""
    problem = schedule.problem
    a, n = arrays_of(problem), len(problem.passes)
    before = np.repeat(np.arange(n), np.diff(a.out_first))
    in_first, in_pass, in_lag = compressed_rows(a.out_pass, n, before, a.out_lag)
    links = np.empty(2 * len(before), LINK)
    links["other"], links["lag"] = np.concatenate([in_pass, a.out_pass]), np.concatenate([in_lag, a.out_lag])
    sequences = [rows for rows in schedule.sequences.values() if len(rows)]
    passes, streams = np.zeros(n, PASS), np.zeros(len(sequences), STREAM)
    for name, column in (("duration", a.duration), ("lane", a.lane), ("taken", a.taken), ("freed", a.freed)):
        passes[name] = column
    passes["in_first"], passes["in_last"] = in_first[:-1], in_first[1:]
    passes["out_first"], passes["out_last"] = len(before) + a.out_first[:-1], len(before) + a.out_first[1:]
    order = np.concatenate(sequences).astype(np.int64)
    passes["place"][order] = np.arange(n)
    passes["stream"][order] = np.repeat(np.arange(len(sequences)), [len(rows) for rows in sequences])
    ends = np.cumsum([len(rows) for rows in sequences])
    streams["first"], streams["last"] = ends - [len(rows) for rows in sequences], ends
    streams["rank"] = [a.rank[rows[0]] for rows in sequences]
    streams["capacity"] = a.capacity[streams["rank"]] if problem.capacity is not None else UNLIMITED
    held, line, span = np.zeros(n, np.int64), np.arange(n), problem.objective == "span"
    return OrderTables(passes, links, streams, order, held, line, span, np.zeros(n, np.uint8), np.empty(n, np.int64))


def schedule_of(problem: Problem, tables: OrderTables, order: Ints) -> Schedule:
    """The schedule of an order, as in `OrderTables.order`."""
    parts = [order[one["first"] : one["last"]] for one in tables.streams]
    return Schedule.of(problem, {problem.passes.stream_sets[problem.passes.streams[rows[0]]][0]: rows for rows in parts})
