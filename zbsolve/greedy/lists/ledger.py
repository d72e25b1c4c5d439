"""The list scheduler's memory: what is held, and whether a pass may take more without a deadlock. Compiled.

The test is Dijkstra's banker's algorithm, with *accounts* (microbatches) as the banker's customers. A pass whose bytes a
copy moves to a further pool may start even if the banker refuses, if the copy's room there is reserved with it. Then nothing
prevents the copy from running, and the bytes that it will free on the device count as free."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...problem import UNLIMITED, Ints
from ...util.kernels import inner_kernel, subkernel
from ..arrays.problem_arrays import ProblemArrays

RESERVED = 3


class Ledger(NamedTuple):
    """The memory that is held, bytes, in pools that have a limit.

    One value a pool: used, bytes held; oldest, the first account that may still take or hold memory; credit, bytes held
      that copies with reserved room will free.
    Shape (pools, accounts): held, what an account gives back at its end beyond what it has yet to take; still, what it
      needs yet.
    One value a pass: phase, 0 before it starts, 1 while it runs, 2 when it has ended; `RESERVED` for a copy whose room was
      reserved, until it ends: its account counts it as ended.
    """

    used: Ints
    oldest: Ints
    held: Ints
    still: Ints
    phase: Ints
    credit: Ints


@subkernel
def new_ledger(a: ProblemArrays) -> Ledger:
    """The ledger before anything has started."""
    pools, phase = np.zeros((3, len(a.room)), np.int64), np.zeros(len(a.duration), np.int64)
    return Ledger(pools[0], pools[1], a.accounts.gain.copy(), a.accounts.need.copy(), phase, pools[2])


@inner_kernel
def may_take(a: ProblemArrays, ledger: Ledger, i: int) -> bool:
    """Whether pass i may take its memory: all accounts up to its own can then still finish, one after the other. It is
    enough to test each pool by itself, since accounts have the same order in all pools."""
    return _may_plainly(a, ledger, i) or _may_reserve(a, ledger, i)


@inner_kernel
def _may_plainly(a: ProblemArrays, ledger: Ledger, i: int) -> bool:
    """`may_take` without a reservation."""
    if ledger.phase[i] == RESERVED:
        return True
    moves = a.accounts
    if a.taken[i] > 0 and not _may_take_in(a, ledger, i, a.rank[i], a.taken[i]):
        return False
    for k in range(moves.first[i], moves.first[i + 1]):
        if moves.taken[k] > 0 and not _may_take_in(a, ledger, i, moves.pool[k], moves.taken[k]):
            return False
    return True


@inner_kernel
def _may_reserve(a: ProblemArrays, ledger: Ledger, i: int) -> bool:
    """Whether pass i may take its memory if the room of its copy to a further pool is reserved now. The copy before that one
    in its lane runs first, so it must have started or be reserved."""
    o, pool = a.accounts.copy_out[i], a.rank[i]
    if o < 0 or ledger.phase[o] != 0 or a.room[pool] == UNLIMITED:
        return False
    before = a.accounts.lane_before[o]
    if before >= 0 and ledger.phase[before] == 0:
        return False
    if a.room[pool] - ledger.used[pool] - a.taken[i] < 0:
        return False
    ledger.phase[o] = RESERVED
    ledger.credit[pool] += a.freed[o]
    fits = _may_take_in(a, ledger, i, pool, a.taken[i])
    ledger.credit[pool] -= a.freed[o]
    ledger.phase[o] = 0
    return fits and _may_plainly(a, ledger, o)


@inner_kernel
def take(a: ProblemArrays, ledger: Ledger, i: int) -> None:
    """Pass i starts and takes its memory. If needed, the room of its copy to a further pool is reserved."""
    moves = a.accounts
    if ledger.phase[i] == RESERVED:
        return
    if len(a.accounts.serial_first) and moves.copy_out[i] >= 0 and not _may_plainly(a, ledger, i):
        o, pool = moves.copy_out[i], a.rank[i]
        _take_plainly(a, ledger, o)
        ledger.phase[o] = RESERVED
        ledger.credit[pool] += a.freed[o]
        ledger.held[pool, a.account[i]] -= a.freed[o]
    _take_plainly(a, ledger, i)


@inner_kernel
def _take_plainly(a: ProblemArrays, ledger: Ledger, i: int) -> None:
    """`take` without a reservation."""
    moves = a.accounts
    if a.taken[i] > 0:
        _take_in(a, ledger, i, a.rank[i], a.taken[i])
    for k in range(moves.first[i], moves.first[i + 1]):
        if moves.taken[k] > 0:
            _take_in(a, ledger, i, moves.pool[k], moves.taken[k])
    ledger.phase[i] = 1


@inner_kernel
def free(a: ProblemArrays, ledger: Ledger, i: int) -> None:
    """Pass i ends and frees its memory. `oldest` moves past accounts that have ended."""
    moves = a.accounts
    reserved = ledger.phase[i] == RESERVED
    ledger.phase[i] = 2
    if reserved:
        ledger.used[a.rank[i]] -= a.freed[i]
        ledger.credit[a.rank[i]] -= a.freed[i]
        return
    if a.freed[i] > 0:
        _free_in(a, ledger, i, a.rank[i], a.freed[i])
    for k in range(moves.first[i], moves.first[i + 1]):
        if moves.freed[k] > 0:
            _free_in(a, ledger, i, moves.pool[k], moves.freed[k])


@inner_kernel
def _may_take_in(a: ProblemArrays, ledger: Ledger, i: int, pool: int, taken: int) -> bool:
    if a.room[pool] == UNLIMITED:
        return True
    left, account = a.room[pool] - ledger.used[pool] - taken, a.account[i]
    if left < 0:
        return False
    left += ledger.credit[pool]
    for g in range(ledger.oldest[pool], account):
        if ledger.still[pool, g] > left:
            return False
        left += ledger.held[pool, g]
    if len(a.accounts.serial_first):
        return bool(_peak(a, ledger, pool, account, i) <= left)
    return bool(ledger.still[pool, account] - taken <= left)


@inner_kernel
def _take_in(a: ProblemArrays, ledger: Ledger, i: int, pool: int, taken: int) -> None:
    if a.room[pool] == UNLIMITED:
        return
    account = a.account[i]
    ledger.used[pool] += taken
    ledger.held[pool, account] += taken
    if len(a.accounts.serial_first):
        ledger.still[pool, account] = _peak(a, ledger, pool, account, i)
    else:
        ledger.still[pool, account] -= taken


@inner_kernel
def _free_in(a: ProblemArrays, ledger: Ledger, i: int, pool: int, freed: int) -> None:
    if a.room[pool] == UNLIMITED:
        return
    account = a.account[i]
    ledger.used[pool] -= freed
    ledger.held[pool, account] -= freed
    if len(a.accounts.serial_first):
        ledger.still[pool, account] = _peak(a, ledger, pool, account, -1)
    at = ledger.oldest[pool]
    while at < ledger.held.shape[1] and ledger.still[pool, at] == 0 and ledger.held[pool, at] == 0:
        at += 1
    ledger.oldest[pool] = at


@inner_kernel
def _peak(a: ProblemArrays, ledger: Ledger, pool: int, account: int, starting: int) -> int:
    """What an account still needs in a pool, in its serial order, once pass `starting` (−1: none) has taken its memory."""
    serial, at = a.accounts, pool * ledger.still.shape[1] + account
    held, most = 0, 0
    for k in range(serial.serial_first[at], serial.serial_first[at + 1]):
        j = serial.serial_pass[k]
        if ledger.phase[j] == 0 and j != starting:
            held += serial.serial_taken[k]
            most = max(most, held)
        if ledger.phase[j] < 2:
            held -= serial.serial_freed[k]
    return most
