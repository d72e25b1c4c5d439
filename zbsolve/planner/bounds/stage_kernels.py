"""Layouts with one stage on each rank: tests whether blocks can be spread over stages so that a makespan is possible."""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .idle_kernels import drain_of, fits_at_first_B, head_of, works_in_time
from .memory_kernels import ANY, Room, Span, blocks_there, held_in_time, in_time, kept_for, room_beside

MANY = 1 << 31  # blocks: more than any model has


@inner_kernel
def turns_within(row: BoundRow, room: int, each: int) -> int:
    """How many times `each` µs fit into `room` µs, one after the other; all microbatches where `each` is 0."""
    return room // each if each > 0 else row.microbatches


@inner_kernel
def at_most(room: int, each: int) -> int:
    """The most blocks of `each` µs that fit into `room` µs; below 0 if `room` is; `MANY` if blocks take no time."""
    return room // each if each > 0 else (MANY if room >= 0 else -1)


@inner_kernel
def possible_single(row: BoundRow, x: int) -> bool:
    """Whether blocks can be spread over ranks with one stage so that a makespan of x µs is possible.

    Ranks are taken in turn. From the possible numbers of blocks before a rank follow those before the next one. More blocks
    before a rank delay it but leave fewer for the rest, so every number is tried.
    """
    p, blocks = row.ranks, row.blocks
    low, high = 0, 0  # blocks before rank r, in partitions that are possible so far
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
def blocks_of_stage(row: BoundRow, x: int, r: int, before: int) -> int:
    """The most blocks that stage r may have, with this many before it; −1 if it may not even have none."""
    p, m, last = row.ranks, row.microbatches, r == row.ranks - 1
    head, drain = head_of(row, r, before), drain_of(row, r, before)  # before its first F; after its last B
    forward, backward, weight = 0, 0, 0  # what it has beside blocks
    if r == 0:
        forward, weight = row.embedding.F, row.embedding.W
    if last:
        forward, backward, weight = forward + row.head.F, row.head.B, weight + row.head.W
    forward += 0 if last else row.sent
    backward += 0 if r == 0 else row.sent
    beside = forward + backward + (row.common.S + row.common.T)
    passes_end, last_B = x - row.exchange.least, x - row.exchange.last  # at the latest; last_B: the first stage's last
    # All its passes come after `head`; F and B end `drain` before the first stage's last B.
    most = at_most(passes_end - head - m * (beside + weight), m * (row.block.F + row.block.B + row.block.W))
    beside = forward + backward + row.common.S  # a microbatch's B waits for the S of all ranks, so S comes before the last B
    most = min(most, at_most(last_B - head - drain - m * beside, m * (row.block.F + row.block.B)))
    # All copies out follow one another, between the first F and the last R and B; all copies back after the first F and O.
    most = min(most, at_most(last_B - head - drain, row.block.F + m * row.copies.out + row.copies.back + row.block.B))
    most = min(most, at_most(last_B - head - drain, row.block.F + row.copies.out + m * row.copies.back + row.block.B))
    slack = last_B - row.chain
    if slack < 0:
        return -1
    if m > 1 and row.parts == 1:  # one chain, and m − 1 further F before it or B behind it
        most = min(most, at_most(slack // (m - 1) - forward, row.block.F), at_most(slack // (m - 1) - backward, row.block.B))
    most = min(most, exchanged_in_time(row, x, r, before, head, drain))
    # A microbatch is kept for a turn: F to B, the rest of the chain. Few turns mean many at once; in parts, one is sure.
    turns = turns_within(row, last_B - head - drain, row.chain - head - drain) if row.parts == 1 else m
    if turns < 1:
        return -1
    at_once = -(-m // turns)
    tables = (1 if r == 0 else 0) + (1 if last and not (row.tied and p == 1) else 0)
    ends = (0 if r == 0 else 1) + (0 if last else 1)
    room = row.capacity - tables * row.table_states - ends * row.waiting
    first_kept = row.common_bytes + (row.kept.head_moment if last else 0)  # with the first microbatch, while its S runs
    head_kept = at_once * row.kept.head_stays if last else 0
    if room < max(first_kept, head_kept):
        return -1
    most = min(most, max(0, at_most(room - first_kept - row.transient, row.states + row.kept.moment)))
    while not fits_at_first_B(row, most, room):
        most -= 1
    most = in_time(row, x, room, most)
    most = works_in_time(row, x, r, most, head, room, row.blocks - before)
    span = Span(head, last_B - drain, passes_end)
    while most > 0 and not stage_holds(row, r, most, before, room, span):
        most -= 1
    return min(most, max(0, at_most(room - head_kept - row.transient, row.states + at_once * row.kept.stays)))


@inner_kernel
def stage_holds(row: BoundRow, r: int, blocks: int, before: int, room: int, span: Span) -> bool:
    """Whether stage r of so many blocks, with so many before it, has memory for what it keeps over time. room: bytes for
    blocks and their states; span: as in `held_in_time`."""
    left = room_beside(row, blocks, room)
    there = blocks_there(row, left)
    there = there // blocks * blocks if row.parts == 1 and there < ANY else there
    each = kept_for(row, blocks, row.blocks - before - blocks, row.ranks - 1 - r) + float(0 if r == 0 else row.part.sent)
    return held_in_time(row, span, (blocks, blocks), (float(blocks) * each, float(blocks * blocks)), Room(there, left))


@inner_kernel
def exchanged_in_time(row: BoundRow, x: int, r: int, before: int, head: int, drain: int) -> int:
    """The most blocks that stage r may have so that its gradients are exchanged within x µs; below 0 if even none may.

    The exchange waits for all W of the stage, and so for all its F and B, and for the rank's S. All these come after `head`.
    All its B and W follow the chain of one microbatch up to the first B. The exchange of what all ranks have follows that
    chain too, on the same stream.

    head: µs before the stage's first F.
    drain: µs after its last B.
    """
    m, last = row.microbatches, r == row.ranks - 1
    forward, backward, weight, room = 0 if last else row.sent, 0 if r == 0 else row.sent, 0, x
    if r == 0:
        forward, weight, room = forward + row.embedding.F, row.embedding.W, room - row.exchange.table
    if last:
        forward, backward, weight = forward + row.head.F, backward + row.head.B, weight + row.head.W
        room -= 0 if r == 0 and row.tied else row.exchange.table
    work = m * (forward + backward + weight + row.common.S)
    each, rest = m * (row.block.F + row.block.B + row.block.W) + row.exchange.block, row.exchange.last - row.exchange.table
    most = at_most(room - head - work, each)
    before_it = row.exchange.table_before if r == 0 or last else 0  # its own comes before all its passes
    most = min(most, at_most(room - before_it - work, each + row.exchange.before))
    if rest > 0:  # the exchange of what all ranks have is behind the stage's, or before it
        most = min(most, max(at_most(room - rest - head - work, each), at_most(x - rest - row.chain, row.exchange.block)))
    if row.parts > 1:
        return most
    first = row.chain - drain - backward  # its first B ends, without `backward`, which counts m times below
    return min(
        most, at_most(room - first - m * (backward + weight), (m - 1) * row.block.B + m * row.block.W + row.exchange.block)
    )
