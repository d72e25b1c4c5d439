"""Of layouts with several stages a rank: whether blocks can be laid on ranks so that a makespan is possible."""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import (
    CAPACITY,
    CHAIN,
    COPIED,
    EF,
    EW,
    EXCHANGE,
    GAP,
    GATHERED,
    HB,
    HEAD,
    HEAD_STAYS,
    HF,
    HW,
    KEPT,
    LAST_EXCHANGE,
    LEAST_EXCHANGE,
    LOOKUP,
    OUT,
    PART_B,
    PART_EF,
    PART_F,
    PART_SENT,
    SENT,
    SHARD,
    SHARD_HELD,
    SHARD_S,
    SLICES,
    SOME,
    START,
    STATES,
    STAYS,
    TABLE,
    TABLE_EXCHANGE,
    TIED,
    TRANSIENT,
    VEE,
    WAITING,
    B,
    F,
    L,
    M,
    P,
    V,
    W,
)
from .idle_kernels import gathered_fit, stages_behind, works_in_time
from .offload_kernels import in_time, turns_of_all
from .peak_kernels import ROUNDING, spread, staying
from .stage_kernels import at_most, turns_within


@inner_kernel
def possible_chunks(row, x, scratch):  # type: ignore[no-untyped-def]
    """Of several stages a rank: each rank by itself, with one block in each stage before its first."""
    p, m, blocks = row[P], row[M], row[L]
    way = x - row[LAST_EXCHANGE]  # when the first stage's last B ends, and with it all that is kept
    rest = way - row[CHAIN]
    if rest < 0:
        return False
    if m > 1 and row[SLICES] == 1 and p * row[V] * at_most(rest // (m - 1), max(row[F], row[B])) < blocks:
        return False
    # Memory over time: a block's bytes are held while the rest of the chain runs, each slice's while its own runs.
    turn = row[GAP] + (row[HF] + row[HB] if row[SLICES] == 1 else 0)  # from the last block's F to its B
    stay = staying(row, way)  # the last ones, at best
    below = float((row[PART_F] + row[PART_B]) * stay * (stay + 1) // 2 + stay * turn)
    below = max(below, turns_of_all(row, stay, turn) * (1 - ROUNDING)) if row[SOME] else below
    need = float(m) * (float(row[STAYS]) * below + float(row[HEAD_STAYS]) * float(turn))
    total = float(p * row[CAPACITY] - blocks * row[STATES] - (1 if row[TIED] and row[VEE] else 2) * row[TABLE])
    ends = 2 * (p * row[V] - 1)
    room = total - float(ends * row[WAITING] + (p - 1) * row[TRANSIENT])
    if room <= 0 or need > room * float(way) * (1 + ROUNDING):
        return False
    taken = 0
    for r in range(p):
        most = blocks_of_rank(row, x, r)
        if most < 0:
            return False
        taken += most
    if taken < blocks or row[SLICES] > 1 or row[STAYS] <= 0:
        return taken >= blocks
    # No rank can have fewer than the others leave it, and what its states leave holds whole blocks.
    fits = 0
    for r in range(p):
        fewest = max(0, blocks_of_rank(row, x, r) - (taken - blocks))
        each = row[STATES] + (0 if row[SOME] else row[GATHERED])  # at a peak all stages keep its microbatch
        fits += (room_of_rank(row, r) - fewest * each - (row[TRANSIENT] if fewest > 0 else 0)) // row[STAYS]
    if row[SOME]:
        return float(m) * below <= float(fits) * float(way)
    if way < row[CHAIN] + spread(row, float(blocks), float(fits), p):
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
            behind = row[START] + row[EF] + min(total, blocks) * (row[F] + row[B]) + 2 * sent * row[SENT] + 2 * row[LOOKUP]
            turns = turns_within(row, x - row[LAST_EXCHANGE] - behind, row[CHAIN] - behind)
            if turns >= 1:
                at_once = -(-m // turns)
                here = min(most, room // (at_once * row[STAYS]))
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
    head, drain = row[START] + row[LOOKUP], row[LOOKUP]
    if r > 0:
        head += row[PART_EF] + (r - 1) * row[PART_F] + r * row[PART_SENT]
        drain += (r - 1) * (row[PART_B] + row[PART_SENT])
    first, last = r == 0, r == (0 if vee else p - 1)
    edges = (1 if first else 0) + (1 if last else 0)
    sends = 2 * row[V] - edges - (2 if vee and r == p - 1 else 0)
    forward, backward, weight = 0, 0, 0
    if first:
        forward, weight = row[EF], row[EW]
    if last:
        forward, backward, weight = forward + row[HF], row[HB], weight + row[HW]
    passes = forward + backward + sends * row[SENT]
    work, way = x - row[LEAST_EXCHANGE], x - row[LAST_EXCHANGE]  # when passes end; when the first stage's last B ends
    most = at_most(work - head - m * (passes + weight + row[SHARD]), m * (row[F] + row[B] + row[W]))
    most = min(most, at_most(way - head - drain - m * (passes + row[SHARD_S]), m * (row[F] + row[B])))
    if not row[SOME]:
        most = min(most, at_most(way - head - drain, m * row[OUT]))  # copies follow one another
    if row[EXCHANGE] > 0:
        tables = edges - (1 if row[TIED] and edges == 2 else 0)
        beside = m * (passes + weight + row[SHARD_S])
        most = exchanged_in_time(row, x, min(most, row[L]), head, beside, tables * row[TABLE_EXCHANGE])
    room = room_of_rank(row, r)
    if room < row[SHARD_HELD] or most < 0:
        return -1
    # When the first microbatch's last F ends; with copies it may be away then.
    each = max(row[GATHERED], row[KEPT]) if row[COPIED] > 0 else row[GATHERED] + row[KEPT]
    most = min(most, max(0, at_most(room - row[SHARD_HELD] - row[TRANSIENT], row[STATES] + each)))
    free = room + (row[HEAD] if last else 0)  # at another moment than the head's
    while not gathered_fit(row, most, free):
        most -= 1
    most = in_time(row, x, free, most)
    most = works_in_time(row, x, r, most, head, free, max(0, stages_behind(row, r) - 1))  # all but the last have blocks
    if vee and r == 0 and row[SLICES] == 1 and row[STAYS] > 0 and not row[SOME]:
        while most >= 0 and not starts_in_time(row, work, most, room):
            most -= 1
    return most


@inner_kernel
def exchanged_in_time(row, x, most, head, beside, tables):  # type: ignore[no-untyped-def]
    """How many blocks a rank may have, of `most`, so that all its gradients are exchanged after x µs; −1: not even none.
    head, beside, tables: as for `exchanges_fit`."""
    low = -1
    while low < most:
        middle = (low + most + 1) // 2
        if exchanges_fit(row, x, middle, head, beside, tables):
            low = middle
        else:
            most = middle - 1
    return low


@inner_kernel
def exchanges_fit(row, x, blocks, head, beside, tables):  # type: ignore[no-untyped-def]
    """Whether the stages of a rank can have so many blocks in all. head: µs before its first pass; beside: of its passes
    beside those of blocks; tables: of exchanges beside those of blocks.

    Its stages come to their ends one after the other. When one does, the rank has done all work of the blocks of stages that
    ended so far, and their B and W since the first microbatch came to the last stage's B. The exchanges of all stages but
    those that ended before follow, one after the other. So the more blocks ended before, the more may have ended now: in
    each turn as many as possible, and in the last one all of them.
    """
    m, turns, ended = row[M], row[V], 0
    work, late = m * (row[F] + row[B] + row[W]), m * (row[B] + row[W])
    first = row[START] + row[LOOKUP] + row[PART_EF] + row[L] * row[PART_F] + row[GAP] + (row[HF] if row[SLICES] == 1 else 0)
    first += (row[P] * turns - 1 - row[VEE]) * row[PART_SENT]
    for turn in range(turns):
        left = x - row[EXCHANGE] * (blocks - ended) - (tables if turn == 0 else 0)
        ended = min(at_most(left - head - (beside if turn == turns - 1 else 0), work), at_most(left - first, late), blocks)
        if ended < 0:
            return False
    return ended >= blocks


@inner_kernel
def starts_in_time(row, x, most, room):  # type: ignore[no-untyped-def]
    """Of a V's first rank with so many blocks, whether some split of them between the first and the last stage leaves x µs
    enough. Until the first microbatch has come back to the last stage, the rank has nothing but Fs of the first stage, and
    none of their memory is free before. What they keep must leave the last stage its first microbatch. room: bytes for
    blocks and their states, beside one microbatch of the head."""
    m, stages = row[M], row[P] * row[V]
    beside = row[EF] + row[EW] + row[HF] + row[HB] + row[HW] + 2 * row[SENT] + row[SHARD]
    work = m * (beside + most * (row[F] + row[B] + row[W]))
    left = room - most * row[STATES] - (row[TRANSIENT] if most > 0 else 0)
    for first in range(most + 1):
        last = most - first
        free = left - last * row[KEPT]
        if free < first * row[KEPT]:
            continue
        each = row[EF] + first * row[F] + row[SENT]
        several = m if first == 0 else min(m, free // (first * row[KEPT]))
        comes = row[START] + row[LOOKUP] + row[EF] + (row[L] - last) * row[F] + (stages - 2) * row[SENT]
        if comes + work - min(several * each, comes) <= x:
            return True
    return False
