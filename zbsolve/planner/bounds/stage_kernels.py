"""Of layouts with one stage a rank: whether blocks can be laid on stages so that a makespan is possible."""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import (
    BACK,
    CAPACITY,
    CHAIN,
    EF,
    EW,
    EXCHANGE,
    GATHER,
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
    START,
    STATES,
    STAYS,
    TABLE,
    TABLE_EXCHANGE,
    TIED,
    TRANSIENT,
    WAITING,
    B,
    F,
    L,
    M,
    P,
    W,
)
from .held_kernels import held_in_time, kept_for
from .idle_kernels import ANY, blocks_there, gathered_fit, room_beside, works_in_time
from .offload_kernels import in_time

MANY = 1 << 31  # blocks: more than any model has


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
    head, drain = row[START] + row[LOOKUP], row[LOOKUP]  # before its first F; after its last B
    if r > 0:
        head += row[PART_EF] + row[PART_F] * before + r * row[PART_SENT]
        drain += row[PART_B] * before + (r - 1) * row[PART_SENT]
    forward, backward, weight = 0, 0, 0  # what it has beside blocks
    if r == 0:
        forward, weight = row[EF], row[EW]
    if last:
        forward, backward, weight = forward + row[HF], row[HB], weight + row[HW]
    forward += 0 if last else row[SENT]
    backward += 0 if r == 0 else row[SENT]
    beside = forward + backward + row[SHARD]
    work, way = x - row[LEAST_EXCHANGE], x - row[LAST_EXCHANGE]  # when passes end; when the first stage's last B ends
    most = at_most(work - head - m * (beside + weight), m * (row[F] + row[B] + row[W]))  # all its work behind head
    beside = forward + backward + row[SHARD_S]  # a microbatch's B waits for the shards' S, so S comes before the last B
    most = min(most, at_most(way - head - drain - m * beside, m * (row[F] + row[B])))  # F and B between both
    # Copies of all microbatches follow one another: behind the first F before the last R and B, and the other way round.
    most = min(most, at_most(way - head - drain, row[F] + m * row[OUT] + row[BACK] + row[B]))
    most = min(most, at_most(way - head - drain, row[F] + row[OUT] + m * row[BACK] + row[B]))
    rest = way - row[CHAIN]
    if rest < 0:
        return -1
    if m > 1 and row[SLICES] == 1:  # m − 1 further Fs before the last microbatch, or Bs behind the first one
        most = min(most, at_most(rest // (m - 1) - forward, row[F]), at_most(rest // (m - 1) - backward, row[B]))
    most = min(most, exchanged_in_time(row, x, r, before, head, drain))
    # From F to B a microbatch takes the rest of the chain; so few at a time need so many turns. Slices share their turns.
    turns = turns_within(row, way - head - drain, row[CHAIN] - head - drain) if row[SLICES] == 1 else m
    if turns < 1:
        return -1
    at_once = -(-m // turns)
    tables = (1 if r == 0 else 0) + (1 if last and not (row[TIED] and p == 1) else 0)
    ends = (0 if r == 0 else 1) + (0 if last else 1)
    room = row[CAPACITY] - tables * row[TABLE] - ends * row[WAITING]
    beside = row[SHARD_HELD] + (row[HEAD] if last else 0)  # with the first microbatch, while its S runs
    some = at_once * row[HEAD_STAYS] if last else 0
    if room < max(beside, some):
        return -1
    most = min(most, max(0, at_most(room - beside - row[TRANSIENT], row[STATES] + row[KEPT])))
    while not gathered_fit(row, most, room):
        most -= 1
    most = in_time(row, x, room, most)
    most = works_in_time(row, x, r, most, head, room, row[L] - before)
    span = head, way - drain, work
    while most > 0 and not stage_holds(row, r, most, before, room, span):
        most -= 1
    return min(most, max(0, at_most(room - some - row[TRANSIENT], row[STATES] + at_once * row[STAYS])))


@inner_kernel
def stage_holds(row, r, blocks, before, room, span):  # type: ignore[no-untyped-def]
    """Whether stage r of so many blocks, with so many before it, has memory for what it keeps over time. room: bytes for
    blocks and their states; span: as in `held_in_time`."""
    left = room_beside(row, blocks, room)
    there = blocks_there(row, left)
    there = there // blocks * blocks if row[SLICES] == 1 and there < ANY else there
    held = float(blocks) * (kept_for(row, row[L] - before, row[P] - 1 - r) + float(0 if r == 0 else row[PART_SENT]))
    return held_in_time(row, span, (blocks, blocks), (held, float(blocks * blocks)), (there, left))


@inner_kernel
def exchanged_in_time(row, x, r, before, head, drain):  # type: ignore[no-untyped-def]
    """How many blocks stage r may have at most so that its gradients are exchanged after x µs; fewer than none where not
    even none. The exchange waits for all its W, and so for its F and B, and for S of its shard of the vocabulary: they
    follow the head. All its B and W follow the chain of one microbatch up to the first B. A shard's exchange follows that
    chain too, and takes the same stream. head, drain: as in `blocks_of_stage`."""
    m, last = row[M], r == row[P] - 1
    forward, backward, weight, room = 0 if last else row[SENT], 0 if r == 0 else row[SENT], 0, x
    if r == 0:
        forward, weight, room = forward + row[EF], row[EW], room - row[TABLE_EXCHANGE]
    if last:
        forward, backward, weight = forward + row[HF], backward + row[HB], weight + row[HW]
        room -= 0 if r == 0 and row[TIED] else row[TABLE_EXCHANGE]
    work = m * (forward + backward + weight + row[SHARD_S])
    each, shard = m * (row[F] + row[B] + row[W]) + row[EXCHANGE], row[LAST_EXCHANGE] - row[TABLE_EXCHANGE]
    most = at_most(room - head - work, each)
    gathers = row[START] if r == 0 or last else 0  # its own gather comes before all its passes
    most = min(most, at_most(room - gathers - work, each + row[GATHER]))
    if shard > 0:  # behind the stage's, or before
        most = min(most, max(at_most(room - shard - head - work, each), at_most(x - shard - row[CHAIN], row[EXCHANGE])))
    if row[SLICES] > 1:
        return most
    first = row[CHAIN] - drain - backward  # ends its first B, but for its blocks'
    return min(most, at_most(room - first - m * (backward + weight), (m - 1) * row[B] + m * row[W] + row[EXCHANGE]))
