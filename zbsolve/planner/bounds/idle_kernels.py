"""Idle time of a rank at both ends of a step, where its memory has room for little.

Until its first B a rank has had nothing but Fs, and S and T of a sharded vocabulary. No B is before the first microbatch has
been through all stages. Until then no byte of a block is free again (with offload: but what copies took away), so the rank
did no more F than fits, and S and T of no more microbatches than fit on all its stages. It is the same the other way round:
behind its last F a rank has nothing but B and W of what it keeps then, S of the microbatches that are on all its stages, and
T of those and of others whose S left something for it in memory. The last F comes before a microbatch's way back through all
stages. Between both ends the rank may work all the time. Where stages gather their parameters, all stages of the rank have
theirs at both ends: its first B is its last stage's, of a microbatch that all of its stages keep, and so is its last F.

Behind its last B, that of the last microbatch on its first stage, a rank has nothing but W and T of what B and S have left
for them in memory, and that B comes before the way back through all stages before.

The same holds of the first B and the last F of each of a rank's stages (a window). B of a microbatch come in the order of
its stages, the last one first, so before the first B of a stage there was none of an earlier stage of the rank: it keeps all
that its stages up to that one did. On its later stages it has had all passes of a microbatch at most, of those that are kept
on all stages up to the window's. Behind the last F of a stage there is none of an earlier one, and later stages have passes
only of microbatches that are kept on the window's and on all before.

In slices the first B of a microbatch waits for all its slices, which follow one another on every stage, and the first one
comes to a stage when it has been through all before. From there on the last one, which takes longest, goes to the end. The
way back is the same, the last slice first. Slices of a microbatch whose F is done and whose B is not are its first ones, of
even length; they take no greater part of F and B than of the bytes, as attention takes longest in the last ones.
"""

from __future__ import annotations

import numpy as np

from ...util.kernels import inner_kernel
from .bound_row import (
    AWAY,
    BACK,
    COPIED,
    EF,
    EW,
    GAP,
    GATHERED,
    HB,
    HF,
    HW,
    LAST_EXCHANGE,
    LATE_B,
    LATE_F,
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
    SHARD_PENDING,
    SHARD_S,
    SINGLE,
    SLICES,
    START,
    STATES,
    STAYS,
    TRANSIENT,
    UNREDUCED,
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
    Fewer blocks are less work, but less of it may be done at both ends: with few microbatches, fewer may not do, so numbers
    are tried one by one.

    head: µs before its first pass; room: bytes for blocks and their states; behind: blocks on stages behind all of its own,
    at least (of one stage a rank: and its own).
    """
    while most >= 0 and not has_time(row, x, r, most, head, room, behind):
        most -= 1
    return most


@inner_kernel
def has_time(row, x, r, blocks, head, room, behind):  # type: ignore[no-untyped-def]
    """Whether rank r has time for so many blocks. The others: as in `works_in_time`."""
    after = max(0, behind - blocks) if row[SINGLE] else behind
    first, stages = (row[L] - behind, min(blocks, behind)) if row[SINGLE] else (0, 0), stages_behind(row, r)
    out, back = before_backward(row, first, stages, after), behind_forward(row, first, stages, after)
    left = max(0.0, room_beside(row, blocks, room) - float(blocks * row[GATHERED]))
    there, window = blocks_there(row, left), all_stages(row, r, blocks)
    idle = idle_before(row, r, window, there, head, out)
    before = row[L] - behind if row[SINGLE] else max(0, r - 1)
    if not drains_in_time(row, x, r, blocks, before, idle, room_beside(row, blocks, room)):
        return False
    ends = x - row[LAST_EXCHANGE] - back  # its last F
    if out <= ends:
        left = max(0.0, left - gradients_there(row, blocks, room))
        there = blocks_there(row, left)
        idle += idle_behind(row, r, window, there, left, x - row[LEAST_EXCHANGE] - ends)
    return idle + float(work_of(row, r, blocks)) <= float(x - row[LEAST_EXCHANGE])


@inner_kernel
def drains_in_time(row, x, r, blocks, before, idle, left):  # type: ignore[no-untyped-def]
    """Whether all that rank r does up to its last B is done so that the stages before its first one, with so many blocks,
    have time for theirs. idle: µs before its first B; left: bytes for what passes keep."""
    drain = row[LOOKUP] + (before * row[PART_B] + (r - 1) * row[PART_SENT] if r > 0 else 0)
    done = float(work_of(row, r, blocks)) - behind_backwards(row, r, blocks, left)
    return idle + done <= float(x - row[LAST_EXCHANGE] - drain)


@inner_kernel
def behind_backwards(row, r, blocks, left):  # type: ignore[no-untyped-def]
    """µs of W and T that rank r has behind its last B, at most, where what these need lies in `left` bytes until then."""
    pending = float(row[PENDING] - (row[SLICES] if row[SLICES] > 1 else 0))
    weights, shards, rate = float(row[M] * blocks * row[W]), float(row[M] * (row[SHARD] - row[SHARD_S])), 0.0
    found = weights + shards
    if pending > 0.0:
        rate = float(row[W]) / pending
        found = min(weights, left * rate) + shards
        if row[SHARD_PENDING] > 0:
            found = min(found, left * max(rate, shards / float(row[M] * row[SHARD_PENDING])))
    found += float(row[M] * row[EW]) if r == 0 else 0.0
    found += float(row[M] * row[HW]) if stages_behind(row, r) == 0 else 0.0
    return found * (1 + ROUNDING) + roundings(row)


@inner_kernel
def all_stages(row, r, blocks):  # type: ignore[no-untyped-def]
    """The window of the last of a rank's stages, where nobody knows how its blocks lie on them: but the first and the last
    stage, each has one at least."""
    if row[SINGLE]:
        return blocks, blocks, 0, 0, 1.0 / max(1, blocks)
    return blocks, 0, 0, 0, 1.0 + (1.0 / max(1, blocks) if stages_behind(row, r) == 0 else 0.0)


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
def before_backward(row, first, behind, after):  # type: ignore[no-untyped-def]
    """µs before the first B of a stage of a rank at least, with so many stages behind it that a message goes to, which have
    `after` blocks at least. first: as in `through_all`."""
    found = row[START] + row[LOOKUP] + row[PART_EF] + through_all(row, first, row[F], row[PART_F], row[LATE_F]) + row[GAP]
    found += (row[P] * row[V] - 1 - row[VEE] + behind) * row[PART_SENT] + after * row[LATE_B]
    return found + (row[HF] + (row[HB] if behind else 0) if row[SLICES] == 1 else 0)


@inner_kernel
def behind_forward(row, first, behind, after):  # type: ignore[no-untyped-def]
    """µs from the last F of a stage to the end of the first stage's last B at least. Its own message is part of its F.
    first, behind, after: as in `before_backward`."""
    found = row[LOOKUP] + through_all(row, first, row[B], row[PART_B], row[LATE_B]) + row[GAP]
    found += (row[P] * row[V] - 1 - row[VEE] + max(0, behind - 1)) * row[PART_SENT] + after * row[LATE_F]
    return found + (row[HB] + (row[HF] if behind else 0) if row[SLICES] == 1 else 0)


@inner_kernel
def through_all(row, first, whole, part, late):  # type: ignore[no-untyped-def]
    """µs that all slices of a microbatch take through all blocks, one way. whole, part, late: of a block, of all slices, of
    each at least, and of the last one. On one stage they follow one another: on one with most blocks, or on a rank's first,
    where that is known. first: blocks before that stage, and on it."""
    before, here = first
    most = -(-row[L] // (row[P] * row[V]))  # blocks on some stage
    if row[SLICES] == 1:
        return row[L] * whole
    there = before * part + here * whole - row[SLICES] + (row[L] - before - here) * late  # each slice is rounded
    return max((row[L] + (row[SLICES] - 1) * most) * part, there)


@inner_kernel
def idle_before(row, r, window, there, head, begins):  # type: ignore[no-untyped-def]
    """µs that rank r is idle before the first B of a window's stage, which begins after `begins` µs or later. there: blocks
    of microbatches that it keeps between F and B at a time, at most."""
    kept, first, _, _, share = window
    if kept <= 0:
        return float(head)
    fits = min(there + copied_in(row, begins, row[OUT]), float(row[M] * kept))
    whole = microbatches(row, fits, kept)
    fits = whole * kept if kept == first else fits
    done = fits * (float(row[F]) + share * float(row[SENT])) + whole * behind_window(row, r, window)
    done += whole * float(row[SHARD]) + roundings(row)
    if r == 0:  # its first stage may have no block
        done += min(float(row[M]), fits / first) * float(row[EF]) if first > 0 else float(row[M] * (row[EF] + row[SENT]))
    done += whole * float(row[HF]) if stages_behind(row, r) == 0 else 0.0
    return max(float(head), float(begins) - done * (1 + ROUNDING))


@inner_kernel
def idle_behind(row, r, window, there, left, time):  # type: ignore[no-untyped-def]
    """µs that rank r is idle of the `time` behind the last F of a window's stage. What it works on then is kept from F to B,
    from B to W or from S to T, in `left` bytes. there: as in `idle_before`."""
    kept, _, _, _, share = window
    pending = float(row[PENDING] - (row[SLICES] if row[SLICES] > 1 else 0))
    if kept <= 0 or pending <= 0.0:
        return 0.0
    copied, weight = copied_in(row, time, row[BACK]), float(row[W]) / pending
    here = min(there, float(row[M] * kept))
    whole = microbatches(row, min(there + copied, float(row[M] * kept)), kept)
    shards = float(row[SHARD] - row[SHARD_S])
    done = kept_work(row, here, left, weight) + float(row[M]) * shards
    if row[SHARD_PENDING] > 0:
        done = min(done, kept_work(row, here, left, max(weight, shards / float(row[SHARD_PENDING]))) + whole * shards)
    done += copied * float(row[B] + row[W]) + (here + copied) * share * float(row[SENT])
    done += whole * (behind_window(row, r, window) + float(row[SHARD_S])) + roundings(row)
    done += float(row[M] * row[EW]) if r == 0 else 0.0
    done += whole * float(row[HB]) + float(row[M] * row[HW]) if stages_behind(row, r) == 0 else 0.0
    return max(0.0, float(time) - done * (1 + ROUNDING))


@inner_kernel
def kept_work(row, there, left, rate):  # type: ignore[no-untyped-def]
    """µs of B and W of what is kept in `left` bytes: of up to `there` blocks from F to B, and `rate` µs of a byte beside."""
    each = float(row[B] + row[W])
    return max(there * each + max(0.0, left - there * kept_of_block(row)) * rate, left * rate)


@inner_kernel
def microbatches(row, fits, kept):  # type: ignore[no-untyped-def]
    """Microbatches that are kept on all stages of a window at a time, where `fits` blocks of them are, at most."""
    return np.floor(fits / float(kept)) if row[SLICES] == 1 else fits / float(kept)


@inner_kernel
def behind_window(row, r, window):  # type: ignore[no-untyped-def]
    """µs that a microbatch's passes take on those stages of rank r that come behind a window's."""
    _, _, later, turns, _ = window
    if turns == 0:
        return 0.0
    head = row[HF] + row[HB] + row[HW] if stages_behind(row, r) == 0 else 0
    return float(later * (row[F] + row[B] + row[W]) + 2 * turns * row[SENT] + head)


@inner_kernel
def room_beside(row, blocks, room):  # type: ignore[no-untyped-def]
    """Bytes for what passes of so many blocks keep. room: for blocks and their states."""
    return float(max(0, room - blocks * row[STATES] - row[TRANSIENT]))


@inner_kernel
def gathered_fit(row, blocks, room):  # type: ignore[no-untyped-def]
    """Whether so many blocks' gathered parameters and gradients fit on a rank when the first B of some stage begins. room:
    bytes for blocks and their states."""
    beside = float(blocks * (row[STATES] + row[GATHERED]) + row[TRANSIENT])
    return blocks == 0 or beside + gradients_there(row, blocks, room) <= float(room)


@inner_kernel
def gradients_there(row, blocks, room):  # type: ignore[no-untyped-def]
    """Bytes of gradients that a rank with so many blocks has when its last F ends, at least. A stage that has none then had
    no B, so it keeps all microbatches, on the device or in host memory: so many blocks as these hold. Of several stages also
    when the first B of some stage begins: before the lowest of them, either no stage behind it has reduced, or it and all
    before it keep all microbatches. room: bytes for blocks and their states."""
    if row[UNREDUCED] == 0:
        return 0.0
    kept = max(row[STAYS], row[COPIED])
    empty = max(0, room - blocks * row[STATES] + row[AWAY]) // (row[M] * kept + row[GATHERED]) if kept > 0 else blocks
    return float(max(0, blocks - empty) * row[UNREDUCED])


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
