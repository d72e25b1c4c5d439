"""Layouts with several stages on each rank: tests whether ranks, each on its own, have time and memory for all blocks."""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .idle_kernels import drain_of, fits_at_first_B, head_of, stages_behind, works_in_time
from .memory_kernels import ROUNDING, in_time, spread, staying, turnaround, turns_of_all
from .stage_kernels import at_most


@inner_kernel
def possible_chunks(row: BoundRow, x: int) -> bool:
    """Whether blocks can be spread over ranks with several stages so that a makespan of x µs is possible. Each rank is
    tested on its own, with one block on each stage before its first."""
    p, m, blocks = row.ranks, row.microbatches, row.blocks
    last_B = x - row.exchange.last  # when the first stage's last B ends, and with it all that is kept
    slack = last_B - row.chain
    if slack < 0:
        return False
    if m > 1 and row.parts == 1 and p * row.chunks * at_most(slack // (m - 1), max(row.block.F, row.block.B)) < blocks:
        return False
    # Memory over time: a block's bytes are held while the rest of the chain runs, those of a part while its own chain runs.
    turn = turnaround(row)
    stay = staying(row, last_B)  # at best the last ones, which keep their bytes for the least time
    below = float((row.part.F + row.part.B) * stay * (stay + 1) // 2 + stay * turn)
    below = max(below, turns_of_all(row, stay, turn) * (1 - ROUNDING)) if row.copies.some else below
    need = float(m) * (float(row.kept.stays) * below + float(row.kept.head_stays) * float(turn))
    total = float(p * row.capacity - blocks * row.states - (1 if row.tied and row.vee else 2) * row.table_states)
    ends = 2 * (p * row.chunks - 1)
    room = total - float(ends * row.waiting + (p - 1) * row.transient)
    if room <= 0 or need > room * float(last_B) * (1 + ROUNDING):
        return False
    taken = 0
    for r in range(p):
        most = blocks_of_rank(row, x, r)
        if most < 0:
            return False
        taken += most
    if taken < blocks or row.parts > 1 or row.kept.stays <= 0:
        return taken >= blocks
    # No rank can have fewer blocks than the others leave it. What its states leave free holds whole blocks.
    fits = 0
    for r in range(p):
        fewest = max(0, blocks_of_rank(row, x, r) - (taken - blocks))
        each = row.states + (0 if row.copies.some else row.from_F)  # at a peak all stages keep the microbatch
        fits += (room_of_rank(row, r) - fewest * each - (row.transient if fewest > 0 else 0)) // row.kept.stays
    if row.copies.some:
        return float(m) * below <= float(fits) * float(last_B)
    return last_B >= row.chain + spread(row, float(blocks), float(fits), p)


@inner_kernel
def room_of_rank(row: BoundRow, r: int) -> int:
    """Bytes that rank r, with several stages, has for blocks and their states beside one microbatch of the head."""
    last = r == (0 if row.vee else row.ranks - 1)
    edges = (1 if r == 0 else 0) + (1 if last else 0)
    tables = edges - (1 if row.tied and edges == 2 else 0)
    return (
        row.capacity
        - tables * row.table_states
        - (2 * row.chunks - edges) * row.waiting
        - (row.kept.head_moment if last else 0)
    )


@inner_kernel
def blocks_of_rank(row: BoundRow, x: int, r: int) -> int:
    """The most blocks that rank r may have on all its stages; −1 if it has no time or memory even without blocks."""
    p, m, vee = row.ranks, row.microbatches, row.vee == 1
    head, drain = head_of(row, r, r - 1), drain_of(row, r, r - 1)  # the first stage may have no block
    first, last = r == 0, r == (0 if vee else p - 1)
    edges = (1 if first else 0) + (1 if last else 0)
    sends = 2 * row.chunks - edges - (2 if vee and r == p - 1 else 0)
    forward, backward, weight = 0, 0, 0
    if first:
        forward, weight = row.embedding.F, row.embedding.W
    if last:
        forward, backward, weight = forward + row.head.F, row.head.B, weight + row.head.W
    passes = forward + backward + sends * row.sent
    passes_end, last_B = x - row.exchange.least, x - row.exchange.last  # at the latest; last_B: the first stage's last
    most = at_most(
        passes_end - head - m * (passes + weight + (row.common.S + row.common.T)),
        m * (row.block.F + row.block.B + row.block.W),
    )
    most = min(most, at_most(last_B - head - drain - m * (passes + row.common.S), m * (row.block.F + row.block.B)))
    if not row.copies.some:
        most = min(most, at_most(last_B - head - drain, m * row.copies.out))  # copies follow one another
    if row.exchange.block > 0:
        tables = edges - (1 if row.tied and edges == 2 else 0)
        beside = m * (passes + weight + row.common.S)
        most = exchanged_in_time(row, x, min(most, row.blocks), head, beside, tables * row.exchange.table)
    room = room_of_rank(row, r)
    if room < row.common_bytes or most < 0:
        return -1
    # When the first microbatch's last F ends, it is there; with copies it may be away then.
    each = max(row.from_F, row.kept.moment) if row.kept.copied > 0 else row.from_F + row.kept.moment
    most = min(most, max(0, at_most(room - row.common_bytes - row.transient, row.states + each)))
    free = room + (row.kept.head_moment if last else 0)  # at another moment than the head's
    while not fits_at_first_B(row, most, free):
        most -= 1
    most = in_time(row, x, free, most)
    return works_in_time(row, x, r, most, head, free, max(0, stages_behind(row, r) - 1))  # all but the last have blocks


@inner_kernel
def exchanged_in_time(row: BoundRow, x: int, most: int, head: int, beside: int, tables: int) -> int:
    """The most blocks, up to `most`, that a rank may have so that all its gradients are exchanged in x µs; −1 if none may.
    Other parameters: as for `exchanges_fit`."""
    low = -1
    while low < most:
        middle = (low + most + 1) // 2
        if exchanges_fit(row, x, middle, head, beside, tables):
            low = middle
        else:
            most = middle - 1
    return low


@inner_kernel
def exchanges_fit(row: BoundRow, x: int, blocks: int, head: int, beside: int, tables: int) -> bool:
    """Whether a rank's stages can have so many blocks in all, with their gradients exchanged in x µs.

    The stages end one after the other. When one ends, the rank has done all work of the blocks of stages that have ended. It
    has also done their B and W since the first microbatch came to the last stage's B. The exchanges of this stage and of
    those that end later follow, one after the other. The more blocks have ended before, the more may have ended now. So each
    turn ends as many as possible, and the last one must end all.

    head: µs before the rank's first pass.
    beside: µs of its passes other than those of blocks.
    tables: µs of its exchanges other than those of blocks.
    """
    m, turns, ended = row.microbatches, row.chunks, 0
    work, late = m * (row.block.F + row.block.B + row.block.W), m * (row.block.B + row.block.W)
    first = (
        row.exchange.table_before
        + row.common.lookup
        + row.part.embedding
        + row.blocks * row.part.F
        + row.common.gap
        + (row.head.F if row.parts == 1 else 0)
    )
    first += (row.ranks * turns - 1 - row.vee) * row.part.sent
    for turn in range(turns):
        left = x - row.exchange.block * (blocks - ended) - (tables if turn == 0 else 0)
        ended = min(at_most(left - head - (beside if turn == turns - 1 else 0), work), at_most(left - first, late), blocks)
        if ended < 0:
            return False
    return ended >= blocks
