"""Idle time of a rank at both ends of a step, where its memory has room for little.

Until its first B a rank has had nothing but Fs, and S and T of a sharded vocabulary. No B is before the first microbatch has
been through all stages. Until then no byte of a block is free again (with offload: but what copies took away), so the rank
did no more F than fits. It is the same the other way round: behind its last F a rank has nothing but B and W of what it
keeps then, and S and T. The last F comes before a microbatch's way back through all stages. Between both ends the rank may
work all the time.

In slices the first B of a microbatch waits for all its slices, which follow one another on the stage with most blocks. Those
of a microbatch whose F is done and whose B is not are its first ones, of even length; they take no greater part of F and B
than of the bytes, as attention takes longest in the last ones.
"""

from __future__ import annotations

import numpy as np

from ...util.kernels import inner_kernel
from .bound_row import (
    BACK,
    COPIED,
    EF,
    EW,
    GAP,
    HB,
    HF,
    HW,
    LAST_EXCHANGE,
    LEAST_EXCHANGE,
    LOOKUP,
    OUT,
    PART_B,
    PART_EF,
    PART_F,
    PART_SENT,
    PENDING,
    SENT,
    SHARD,
    SHARD_S,
    SINGLE,
    SLICES,
    STATES,
    STAYS,
    TRANSIENT,
    VEE,
    B,
    F,
    L,
    M,
    P,
    V,
    W,
)
from .peak_kernels import ROUNDING

ANY = 1e18  # blocks


@inner_kernel
def works_in_time(row, x, r, most, head, room, behind):  # type: ignore[no-untyped-def]
    """The largest number of blocks, up to `most`, that rank r has time for where the makespan is x; −1: not even for none.
    More blocks are more work and leave less room.

    head: µs before its first pass; room: bytes for blocks and their states; behind: blocks on stages behind all of its own,
    at least (of one stage a rank: and its own).
    """
    low, high = -1, most
    while low < high:
        middle = (low + high + 1) // 2
        after = max(0, behind - middle) if row[SINGLE] else behind
        out, back = before_backward(row, r, after), behind_forward(row, r, after)
        left = room_beside(row, middle, room)
        there = blocks_there(row, left)
        idle = idle_before(row, r, middle, there, head, out)
        ends = x - row[LAST_EXCHANGE] - back  # its last F
        if out <= ends:
            idle += idle_behind(row, r, middle, there, left, x - row[LEAST_EXCHANGE] - ends)
        if idle + float(work_of(row, r, middle)) <= float(x - row[LEAST_EXCHANGE]):
            low = middle
        else:
            high = middle - 1
    return low


@inner_kernel
def stages_behind(row, r):  # type: ignore[no-untyped-def]
    """Stages behind the last one of rank r, each with a boundary between ranks before it."""
    return r if row[VEE] else row[P] - 1 - r


@inner_kernel
def work_of(row, r, blocks):  # type: ignore[no-untyped-def]
    """µs of all passes of rank r with so many blocks."""
    first, last = r == 0, stages_behind(row, r) == 0
    sends = 2 * row[V] - (1 if first else 0) - (1 if last else 0) - (2 if row[VEE] and r == row[P] - 1 else 0)
    ends = (row[EF] + row[EW] if first else 0) + (row[HF] + row[HB] + row[HW] if last else 0)
    return row[M] * (blocks * (row[F] + row[B] + row[W]) + row[SHARD] + sends * row[SENT] + ends)


@inner_kernel
def before_backward(row, r, after):  # type: ignore[no-untyped-def]
    """µs before the first B of rank r at least. after: blocks on stages behind all of its own, at least."""
    whole, most = row[SLICES] == 1, -(-row[L] // (row[P] * row[V]))  # blocks on some stage
    found = row[LOOKUP] + row[PART_EF] + (row[L] + (row[SLICES] - 1) * most) * row[PART_F] + row[GAP]
    found += (row[P] * row[V] - 1 - row[VEE] + stages_behind(row, r)) * row[PART_SENT] + after * row[PART_B]
    return found + (row[HF] + (row[HB] if stages_behind(row, r) else 0) if whole else 0)


@inner_kernel
def behind_forward(row, r, after):  # type: ignore[no-untyped-def]
    """µs from the last F of rank r to the end of the first stage's last B at least. Its own message is part of its F. after:
    as in `before_backward`."""
    whole, most = row[SLICES] == 1, -(-row[L] // (row[P] * row[V]))
    found = row[LOOKUP] + (row[L] + (row[SLICES] - 1) * most) * row[PART_B] + row[GAP]
    found += (row[P] * row[V] - 1 - row[VEE] + max(0, stages_behind(row, r) - 1)) * row[PART_SENT] + after * row[PART_F]
    return found + (row[HB] + (row[HF] if stages_behind(row, r) else 0) if whole else 0)


@inner_kernel
def idle_before(row, r, blocks, there, head, begins):  # type: ignore[no-untyped-def]
    """µs that rank r with so many blocks is idle before its first B, which begins after `begins` µs or later. there: blocks
    of microbatches that it keeps between F and B at a time, at most."""
    if blocks <= 0:
        return float(head)
    fits = there + copied_in(row, begins, row[OUT])
    done = fits * float(row[F] + row[SENT]) + fits / blocks * float(row[SHARD]) + roundings(row)
    first, last = row[EF] + row[SENT] if r == 0 else 0, 0 if stages_behind(row, r) else row[HF]
    done += float(row[M] * (first + last))  # on stages without blocks
    return max(float(head), float(begins) - done * (1 + ROUNDING))


@inner_kernel
def idle_behind(row, r, blocks, there, left, time):  # type: ignore[no-untyped-def]
    """µs that rank r with so many blocks is idle of the `time` behind its last F. What it works on then is a block that is
    kept from F to B, or from B to W, in `left` bytes. there: as in `idle_before`."""
    pending = float(row[PENDING] - (row[SLICES] if row[SLICES] > 1 else 0))
    if blocks <= 0 or pending <= 0.0:
        return 0.0
    copied, each, weight = copied_in(row, time, row[BACK]), float(row[B] + row[W] + row[SENT]), float(row[W]) / pending
    done = max(there * each + max(0.0, left - there * kept_of_block(row)) * weight, left * weight) + copied * each
    done += (there + copied) / blocks * float(row[SHARD_S]) + roundings(row)
    first, last = row[EW] if r == 0 else 0, 0 if stages_behind(row, r) else row[HB] + row[HW] + row[SENT]
    done += float(row[M] * (row[SHARD] - row[SHARD_S] + first + last))
    return max(0.0, float(time) - done * (1 + ROUNDING))


@inner_kernel
def room_beside(row, blocks, room):  # type: ignore[no-untyped-def]
    """Bytes for what passes of so many blocks keep. room: for blocks and their states."""
    return float(max(0, room - blocks * row[STATES] - row[TRANSIENT]))


@inner_kernel
def kept_of_block(row):  # type: ignore[no-untyped-def]
    """Bytes of a microbatch that a block keeps on the device from F to B, at least: with copies of all that a stage keeps,
    unless those took it away. A slice's part is rounded."""
    size = row[COPIED] if row[COPIED] > 0 else row[STAYS]
    return float(size - (row[SLICES] if row[SLICES] > 1 else 0))


@inner_kernel
def blocks_there(row, left):  # type: ignore[no-untyped-def]
    """Blocks of microbatches that a rank keeps between F and B at a time at most, in `left` bytes."""
    size = kept_of_block(row)
    if size <= 0.0:
        return ANY
    return np.floor(left / size) if row[SLICES] == 1 else left / size


@inner_kernel
def copied_in(row, time, each):  # type: ignore[no-untyped-def]
    """Blocks of microbatches whose copies of `each` µs there is time for, where stages copy all that they keep."""
    if row[COPIED] <= 0:
        return 0.0
    return float(max(0, time) // each) if each > 0 else ANY


@inner_kernel
def roundings(row):  # type: ignore[no-untyped-def]
    """µs that slices of a rank's passes take more than their parts, at most: less than one each."""
    return float(row[M] * row[V] * row[SLICES]) if row[SLICES] > 1 else 0.0
