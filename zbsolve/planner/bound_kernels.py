"""Least makespans over every partition of blocks into stages, one layout a row: compiled searches by halving.

A makespan X is possible only if blocks can be laid on ranks whole so that no rank has more than X leaves room for. Each
condition below says how many blocks a rank can have at most; if all ranks together cannot have all, no partition has X.
"""

from __future__ import annotations

import numpy as np

from ..util.kernels import inner_kernel, kernel

# Columns of a row: µs and bytes as in `Costs`; CAPACITY bytes a rank, and SINGLE whether each rank has one stage.
P, V, M, SINGLE, VEE, L, F, B, W, EF, HF, HB, HW, SENT = range(14)
STATES, TABLE, TIED, KEPT, HEAD, TRANSIENT, WAITING, CAPACITY = range(14, 22)
COLUMNS = 22
MAX_NEIGHBOURS = 6  # of a peak on each side, that are looked at
ROUNDING = 1e-9  # of sums of floating numbers
MANY = 1 << 31  # blocks: more than any model has
NEVER = -1  # no makespan is enough: one microbatch does not fit
NO_LIMIT = 1 << 50  # of bytes, a petabyte: sums over ranks are whole numbers of 64 bits


@kernel
def least_makespans(rows):  # type: ignore[no-untyped-def]
    """µs that no schedule of any partition of a row undercuts; `NEVER` where none fits. rows: shape (layouts, COLUMNS)."""
    found = np.zeros(len(rows), np.int64)
    scratch = np.zeros(1 + rows[:, P].max(), np.int64)
    for i in range(len(rows)):
        row = rows[i]
        low, high = chain(row) - 1, serial(row)
        if not possible(row, high, scratch):
            found[i] = NEVER
            continue
        while high - low > 1:
            middle = (low + high) // 2
            if possible(row, middle, scratch):
                high = middle
            else:
                low = middle
        found[i] = high
    return found


@inner_kernel
def chain(row):  # type: ignore[no-untyped-def]
    """µs of one microbatch from its first F to its last B, without W: the same for every partition."""
    boundaries = row[P] * row[V] - 1 - row[VEE]  # of a V one boundary lies on one rank
    return row[EF] + row[L] * (row[F] + row[B]) + row[HF] + row[HB] + 2 * boundaries * row[SENT]


@inner_kernel
def serial(row):  # type: ignore[no-untyped-def]
    """µs of all passes one after the other."""
    return row[M] * (chain(row) + row[L] * row[W] + row[HW])


@inner_kernel
def spread(row, fits):  # type: ignore[no-untyped-def]
    """µs from the first to the last peak of all microbatches at least, where `fits` blocks fit on all ranks together. A
    microbatch peaks when its last F ends.

    Then all its blocks are kept; t µs before, at least L − t / F, and t µs behind, at least L − t / B. So, for any a peaks
    before a peak and b behind it, (1 + a + b) L − Σ distances / (B or F) ≤ fits. Summed over all peaks that have so many
    neighbours, each distance between neighbours counts a (a + 1) / 2 times over B and b (b + 1) / 2 times over F at most.
    With one neighbour each, the first and the last distance count over one of both only, and no distance is below
    max(F, B) (2 L − fits).
    """
    forward, backward, blocks, count = float(row[F]), float(row[B]), float(row[L]), row[M]
    nearest = max(0.0, max(forward, backward) * (2 * blocks - fits))
    best = (count - 1) * nearest
    for a in range(MAX_NEIGHBOURS):
        for b in range(MAX_NEIGHBOURS):
            lack = (1 + a + b) * blocks - fits
            peaks = count - a - b
            timed = (backward > 0 or a == 0) and (forward > 0 or b == 0)  # passes that round to 0 µs keep no distance
            if lack > 0 and peaks > 0 and a + b > 0 and timed:
                total = peaks * lack / (a * (a + 1) / (2 * max(backward, 1.0)) + b * (b + 1) / (2 * max(forward, 1.0)))
                best = max(best, total + (nearest if a == 1 and b == 1 else 0.0))
    return best * (1 - ROUNDING)


@inner_kernel
def fitting(row):  # type: ignore[no-untyped-def]
    """Blocks of microbatches that fit on all ranks together while the head keeps one, at most."""
    tables = 1 if row[TIED] and (row[VEE] or row[P] == 1) else 2
    ends = 2 * (row[P] * row[V] - 1)
    room = row[P] * row[CAPACITY] - row[L] * row[STATES] - tables * row[TABLE] - ends * row[WAITING] - row[HEAD]
    return float(room) / float(row[KEPT])


@inner_kernel
def possible(row, x, scratch):  # type: ignore[no-untyped-def]
    """Whether no condition forbids a makespan of x µs. scratch: whole numbers, one a rank, that are overwritten."""
    if x < chain(row) + spread(row, fitting(row)):
        return False
    if row[SINGLE]:
        return possible_single(row, x)
    return possible_chunks(row, x, scratch)


@inner_kernel
def possible_single(row, x):  # type: ignore[no-untyped-def]
    """Of one stage a rank. Stage by stage: from how many blocks lie before, how many may lie before the next at most. More
    blocks before a rank delay it, and so leave it fewer: every number that may lie before is looked at."""
    p, blocks = row[P], row[L]
    low, high = 0, 0  # blocks before rank r, over all partitions that got so far
    for r in range(p):
        least = 0 if r == 0 or r == p - 1 else 1  # a stage has a layer: embedding, head or a block
        best = -1
        for before in range(low, high + 1):
            most = blocks_of_stage(row, x, r, before)
            if most >= least and before + most > best:
                best = before + most
        if best < 0:
            return False
        low += least
        high = min(best, blocks)
    return high >= blocks


@inner_kernel
def blocks_of_stage(row, x, r, before):  # type: ignore[no-untyped-def]
    """How many blocks stage r may have at most, with so many before it; −1: not even none."""
    p, m, last = row[P], row[M], r == row[P] - 1
    head, drain = 0, 0  # before its first F; after its last B
    if r > 0:
        head = row[EF] + row[F] * before + r * row[SENT]
        drain = row[B] * before + (r - 1) * row[SENT]
    forward, backward, weight = row[EF] if r == 0 else 0, 0, 0  # what it has beside blocks
    if last:
        forward, backward, weight = forward + row[HF], row[HB], row[HW]
    forward += 0 if last else row[SENT]
    backward += 0 if r == 0 else row[SENT]
    most = at_most(x - head - m * (forward + backward + weight), m * (row[F] + row[B] + row[W]))  # all its work behind head
    most = min(most, at_most(x - head - drain - m * (forward + backward), m * (row[F] + row[B])))  # F and B between both
    rest = x - chain(row)
    if rest < 0:
        return -1
    if m > 1:  # m − 1 further Fs before the last microbatch, or Bs behind the first one
        most = min(most, at_most(rest // (m - 1) - forward, row[F]), at_most(rest // (m - 1) - backward, row[B]))
    # From F to B a microbatch takes the rest of the chain; so few at a time need so many turns.
    turns = turns_within(row, x - head - drain, chain(row) - head - drain)
    if turns < 1:
        return -1
    at_once = -(-m // turns)
    tables = (1 if r == 0 else 0) + (1 if last and not (row[TIED] and p == 1) else 0)
    ends = (0 if r == 0 else 1) + (0 if last else 1)
    room = row[CAPACITY] - tables * row[TABLE] - ends * row[WAITING] - (at_once * row[HEAD] if last else 0)
    if room < 0:
        return -1
    return min(most, max(0, (room - row[TRANSIENT]) // (row[STATES] + at_once * row[KEPT])))


@inner_kernel
def turns_within(row, room, each):  # type: ignore[no-untyped-def]
    """How many times `each` µs fit one after the other into `room` µs, or all microbatches where they take no time."""
    return room // each if each > 0 else row[M]


@inner_kernel
def at_most(room, each):  # type: ignore[no-untyped-def]
    """How many blocks of `each` µs there is room for, fewer than none where `room` is below 0; any number where they take no
    time."""
    return room // each if each > 0 else (MANY if room >= 0 else -1)


@inner_kernel
def possible_chunks(row, x, scratch):  # type: ignore[no-untyped-def]
    """Of several stages a rank: each rank by itself, with one block in each stage before its first."""
    p, m, blocks = row[P], row[M], row[L]
    rest = x - chain(row)
    if rest < 0:
        return False
    if m > 1 and p * row[V] * at_most(rest // (m - 1), max(row[F], row[B])) < blocks:
        return False
    # Memory over time: a block's bytes are held while the rest of the chain runs.
    below = (row[F] + row[B]) * blocks * (blocks + 1) // 2 + blocks * (row[HF] + row[HB])
    need = float(m) * (float(row[KEPT]) * float(below) + float(row[HEAD]) * float(row[HF] + row[HB]))
    total = float(p * row[CAPACITY] - blocks * row[STATES] - (1 if row[TIED] and row[VEE] else 2) * row[TABLE])
    ends = 2 * (p * row[V] - 1)
    room = total - float(ends * row[WAITING] + (p - 1) * row[TRANSIENT])
    if room <= 0 or need > room * float(x) * (1 + ROUNDING):
        return False
    taken = 0
    for r in range(p):
        most = blocks_of_rank(row, x, r)
        if most < 0:
            return False
        taken += most
    if taken < blocks:
        return False
    # No rank can have fewer than the others leave it, and what its states leave holds whole blocks.
    fits = 0
    for r in range(p):
        fewest = max(0, blocks_of_rank(row, x, r) - (taken - blocks))
        fits += (room_of_rank(row, r) - fewest * row[STATES] - (row[TRANSIENT] if fewest > 0 else 0)) // row[KEPT]
    if x < chain(row) + spread(row, float(fits)):
        return False
    return rounds_fit(row, x, taken - blocks, scratch)


@inner_kernel
def rounds_fit(row, x, slack, cum):  # type: ignore[no-untyped-def]
    """Whether all blocks can lie on ranks when each round of stages keeps what fits. A microbatch on one stage keeps the
    rank's earlier stages too, from its F to its B. So few at a time need so many turns, each as long as the chain behind the
    stage. The more blocks lie before a stage, the shorter that is: so each round takes as many as it can. slack: how many
    blocks more ranks could take than there are; cum: blocks of each rank so far, at most."""
    p, m, blocks = row[P], row[M], row[L]
    cum[:p] = 0
    total = 0
    for turn in range(row[V]):
        for at in range(p):
            back = row[VEE] == 1 and turn == 1
            r = p - 1 - at if back else at
            most = blocks_of_rank(row, x, r)
            fewest = max(0, most - slack)
            room = room_of_rank(row, r) - fewest * row[STATES] - (row[TRANSIENT] if fewest > 0 else 0)
            if turn < row[V] - 1 and r == (0 if row[VEE] else p - 1):
                room += row[HEAD]  # not there yet
            sent = turn * p + at - (1 if back else 0)  # of a V the turn is on one rank
            behind = row[EF] + min(total, blocks) * (row[F] + row[B]) + 2 * sent * row[SENT]
            turns = turns_within(row, x - behind, chain(row) - behind)
            if turns >= 1:
                at_once = -(-m // turns)
                here = min(most, room // (at_once * row[KEPT]))
                if here > cum[r]:
                    total += here - cum[r]
                    cum[r] = here
    return total >= blocks


@inner_kernel
def room_of_rank(row, r):  # type: ignore[no-untyped-def]
    """Bytes of rank r, of several stages, for blocks and their states, beside one microbatch of the head."""
    last = r == (0 if row[VEE] else row[P] - 1)
    edges = (1 if r == 0 else 0) + (1 if last else 0)
    tables = edges - (1 if row[TIED] and edges == 2 else 0)
    return row[CAPACITY] - tables * row[TABLE] - (2 * row[V] - edges) * row[WAITING] - (row[HEAD] if last else 0)


@inner_kernel
def blocks_of_rank(row, x, r):  # type: ignore[no-untyped-def]
    """How many blocks rank r may have at most on all its stages; −1: not even none."""
    p, m, vee = row[P], row[M], row[VEE] == 1
    head, drain = 0, 0
    if r > 0:
        head = row[EF] + (r - 1) * row[F] + r * row[SENT]
        drain = (r - 1) * (row[B] + row[SENT])
    first, last = r == 0, r == (0 if vee else p - 1)
    edges = (1 if first else 0) + (1 if last else 0)
    sends = 2 * row[V] - edges - (2 if vee and r == p - 1 else 0)
    forward, backward, weight = row[EF] if first else 0, 0, 0
    if last:
        forward, backward, weight = forward + row[HF], row[HB], row[HW]
    passes = forward + backward + sends * row[SENT]
    most = at_most(x - head - m * (passes + weight), m * (row[F] + row[B] + row[W]))
    most = min(most, at_most(x - head - drain - m * passes, m * (row[F] + row[B])))
    room = room_of_rank(row, r)
    if room < 0 or most < 0:
        return -1
    most = min(most, max(0, (room - row[TRANSIENT]) // (row[STATES] + row[KEPT])))
    if vee and r == 0:
        while most >= 0 and not starts_in_time(row, x, most, room):
            most -= 1
    return most


@inner_kernel
def starts_in_time(row, x, most, room):  # type: ignore[no-untyped-def]
    """Of a V's first rank with so many blocks, whether some split of them between the first and the last stage leaves x µs
    enough. Until the first microbatch has come back to the last stage, the rank has nothing but Fs of the first stage, and
    none of their memory is free before. What they keep must leave the last stage its first microbatch. room: bytes for
    blocks and their states, beside one microbatch of the head."""
    m, stages = row[M], row[P] * row[V]
    work = m * (row[EF] + row[HF] + row[HB] + row[HW] + 2 * row[SENT] + most * (row[F] + row[B] + row[W]))
    left = room - most * row[STATES] - (row[TRANSIENT] if most > 0 else 0)
    for first in range(most + 1):
        last = most - first
        free = left - last * row[KEPT]
        if free < first * row[KEPT]:
            continue
        each = row[EF] + first * row[F] + row[SENT]
        several = m if first == 0 else min(m, free // (first * row[KEPT]))
        comes = row[EF] + (row[L] - last) * row[F] + (stages - 2) * row[SENT]
        if comes + work - min(several * each, comes) <= x:
            return True
    return False


@kernel
def refuted(rows, bounds):  # type: ignore[no-untyped-def]
    """Of each row whether no makespan below its bound is possible; of a negative bound, whether none is at all. One after
    the other takes `serial` µs: a bound above it holds where nothing fits only, and sums of larger numbers may overflow."""
    found = np.zeros(len(rows), np.bool_)
    scratch = np.zeros(1 + rows[:, P].max(), np.int64)
    for i in range(len(rows)):
        most = serial(rows[i])
        x = most if bounds[i] < 0 or bounds[i] > most else bounds[i] - 1
        found[i] = not possible(rows[i], x, scratch)
    return found
