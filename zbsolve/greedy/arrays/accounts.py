"""For the list scheduler: what passes take and free in each pool, and what each account (microbatch) needs at most.

If all memory is on devices, an account needs the sum of all that it takes. That is quick, and exact if it takes nothing
after it freed something. With copies to further pools it does, and then an account needs the peak of its passes in a serial
order, which frees as early and takes as late as the graph allows. Records and compressed rows are tables for kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...problem import UNLIMITED, Ints, Problem
from ...problem.tables import Bools
from ...util.columns import looped

Records = NDArray[Any]  # a table of records
Row = Any  # one of them; its fields are attributes


def record(fields: str) -> np.dtype[Any]:
    """A record type with these fields, separated by blanks, all whole numbers."""
    return np.dtype([(name, np.int64) for name in fields.split()])


def compressed_rows(keys: Ints, count: int, *columns: Ints) -> tuple[Ints, ...]:
    """Columns grouped by key: (first, columns sorted by key); key k has the entries first[k]:first[k + 1]."""
    order = np.argsort(keys, kind="stable")
    first = np.searchsorted(keys[order], np.arange(count + 1)).astype(np.int64)
    return (first, *(column[order] for column in columns))


class Accounts(NamedTuple):
    """Memory by pass, and by pool and account, as arrays of int64, bytes.

    One row a pass: pool, taken, freed: the further pools with a limit in which it takes or frees memory, and how much.
    Shape (pools, accounts): need, what an account needs in a pool; gain, what it frees beyond what it takes (usually 0).
    One row a pool and account (pool · accounts + account): serial_pass, serial_taken, serial_freed: the account's passes
      that take or free memory in the pool, in the serial order; no rows if all memory is on devices.
    One value a pass: copy_out, see `copies_out`; lane_before, the pass before it in its lane, or −1.
    """

    first: Ints
    pool: Ints
    taken: Ints
    freed: Ints
    need: Ints
    gain: Ints
    serial_first: Ints
    serial_pass: Ints
    serial_taken: Ints
    serial_freed: Ints
    copy_out: Ints
    lane_before: Ints


def serial_places(problem: Problem, depth: Ints, tail: Ints, level: Ints) -> Ints:
    """The place of each pass in the serial order, shape (passes,): as late as the graph allows; but passes that free device
    memory and take none come right behind the last pass that they wait for."""
    count = len(depth)
    if not problem.pools:
        return np.arange(count)
    # With levels the late order respects edges between passes of duration 0.
    late = np.lexsort((level, depth, -tail))
    place = np.empty(count, np.int64)
    place[late] = (count + 1) * np.arange(count)
    early = (problem.freed > 0) & (problem.taken == 0)
    edges = problem.edges
    order = np.lexsort((level[edges.after], depth[edges.after]))
    order = order[early[edges.after[order]]]
    key = np.asarray(looped(_behind, edges.before[order], edges.after[order], np.where(early, -1, place)), np.int64)
    result = np.empty(count, np.int64)
    result[np.lexsort((level, depth, key))] = np.arange(count)
    return result


def _behind(before, after, key):  # type: ignore[no-untyped-def]
    """Raise each pass's key above those of what it waits for, one arc after the other."""
    for k in range(len(before)):
        if key[before[k]] >= key[after[k]]:
            key[after[k]] = key[before[k]] + 1
    return key


def brings_back(problem: Problem) -> Bools:
    """Which passes bring memory back: on a side stream, take on a device and free in a further pool. Shape (passes,)."""
    e, freed = problem.edges, np.zeros(len(problem.passes), np.int64)
    off = e.pool > 0
    np.add.at(freed, e.after[off], e.bytes[off])
    return (freed > 0) & (problem.taken > 0) & ~problem.computing


def copies_out(problem: Problem) -> Ints:
    """For each pass the copy that moves its bytes to a further pool, shape (passes,); −1: none. The copy is a pass on a side
    stream that frees, on the device, bytes of this pass and of no other."""
    e = problem.edges
    out = ~problem.computing & (problem.freed > 0) & (problem.taken == 0)
    into = np.flatnonzero((problem.device_bytes > 0) & out[e.after])
    alone = np.bincount(e.after[into], minlength=len(out)) == 1
    into = into[alone[e.after[into]]]
    copy = np.full(len(out), -1, np.int64)
    copy[e.before[into]] = e.after[into]
    return copy


def accounts_of(problem: Problem, account: Ints, places: Ints) -> Accounts:
    """The `Accounts` of a problem. account: of each pass. places: see `serial_places`."""
    pools, accounts, count = len(problem.room), int(account.max()) + 1, len(account)
    parts = [_of_pool(problem, pool) for pool in range(problem.ranks - 1, pools)]
    rows, pool, taken, freed = (np.concatenate(column).astype(np.int64) for column in zip(*parts, strict=True))
    row = pool * accounts + account[rows]
    need, gain = (np.bincount(row, size, pools * accounts).astype(np.int64) for size in (taken, freed - taken))
    away = np.flatnonzero((pool >= problem.ranks) & (problem.room[pool] < UNLIMITED))
    moves = compressed_rows(rows[away], count, pool[away], taken[away], freed[away])
    shape, nothing = (pools, accounts), np.zeros(0, np.int64)
    if not problem.pools:
        none = np.full(count, -1)
        return Accounts(*moves, need.reshape(shape), gain.reshape(shape), *[nothing] * 4, none, none)  # type: ignore[call-arg]
    order = np.argsort(places[rows], kind="stable")
    serial = compressed_rows(row[order], pools * accounts, rows[order], taken[order], freed[order])
    need, before = _peaks(*serial), np.full(count, -1)
    for lane in problem.lanes:
        before[lane[1:]] = lane[:-1]
    return Accounts(*moves, need.reshape(shape), gain.reshape(shape), *serial, copies_out(problem), before)  # type: ignore[call-arg]


def _peaks(first: Ints, passes: Ints, taken: Ints, freed: Ints) -> Ints:
    """The peak of the passes of each row, run one after the other, bytes."""
    held = np.cumsum(taken) - np.cumsum(freed) + freed  # while the pass runs
    before = np.concatenate([[0], np.cumsum(taken - freed)])[first[:-1]]
    most, filled = np.zeros(len(first) - 1, np.int64), np.flatnonzero(np.diff(first))
    if len(filled):
        most[filled] = np.maximum(0, np.maximum.reduceat(held, first[:-1][filled]) - before[filled])
    return most


def _of_pool(problem: Problem, pool: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Columns of passes, pool, bytes taken and bytes freed, for one further pool; for all devices if `pool` is one."""
    device = pool < problem.ranks
    taken, freed = (problem.taken, problem.freed) if device else problem.moved(pool)
    rows = np.flatnonzero((taken > 0) | (freed > 0))
    return rows, problem.passes.rank[rows] if device else np.full(len(rows), pool), taken[rows], freed[rows]
