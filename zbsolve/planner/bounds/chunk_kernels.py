"""Layouts with several stages on each rank: tests whether ranks, each on its own, have time and memory for all blocks."""

from __future__ import annotations

from ...problem.tables import Ints
from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .idle_kernels import before_backward, drain_of, fits_at_first_B, head_of, stages_behind, works_in_time
from .memory_kernels import ROUNDING, in_time, kept_for, spread, staying, turnaround, turns_of_all
from .stage_kernels import at_most, turns_within


@inner_kernel
def possible_chunks(row: BoundRow, x: int, scratch: Ints) -> bool:
    """Whether blocks can be spread over ranks with several stages so that a makespan of x µs is possible. Each rank is
    tested on its own, with one block on each stage before its first."""
    p, m, blocks = row.ranks, row.microbatches, row.blocks
    last_B = x - row.exchange.last  # when the first stage's last B ends, and with it all that is kept
    slack = last_B - row.chain
    if slack < 0:
        return False
    if m > 1 and row.parts == 1 and p * row.chunks * at_most(slack // (m - 1), max(row.block.F, row.block.B)) < blocks:
        return False
    # Memory over time: a block's bytes are held while the rest of the chain runs, at best with no other block on its stage.
    turn = turnaround(row)
    stay = staying(row, last_B)  # at best the last ones, which keep their bytes for the least time
    below = float(stay) * (kept_for(row, 1, 0, 0) + float(row.part.late_F + row.part.late_B) * float(stay - 1) / 2.0)
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
    if last_B < row.chain + spread(row, float(blocks), float(fits), p):
        return False
    return rounds_fit(row, x, taken - blocks, scratch)


@inner_kernel
def rounds_fit(row: BoundRow, x: int, slack: int, cum: Ints) -> bool:
    """Whether the ranks can have all blocks if each round (the first stage of every rank, the second, …) keeps what fits.

    A microbatch on one stage also keeps the rank's earlier stages from its F to its B. The fewer microbatches fit at once,
    the more turns are needed, and a turn is as long as the chain behind the stage. That chain is shorter with more blocks
    before the stage. So each round takes as many blocks as it can.

    slack: how many more blocks than there are the ranks could take.
    cum: overwritten with the most blocks of each rank up to a round.
    """
    p, m, blocks = row.ranks, row.microbatches, row.blocks
    cum[:p] = 0
    total = 0
    for turn in range(row.chunks):
        for at in range(p):
            back = row.vee == 1 and turn == 1
            r = p - 1 - at if back else at
            most = blocks_of_rank(row, x, r)
            fewest = max(0, most - slack)
            room = room_of_rank(row, r) - fewest * row.states - (row.transient if fewest > 0 else 0)
            if turn < row.chunks - 1 and r == (0 if row.vee else p - 1):
                room += row.kept.head_moment  # the head's microbatch is not there yet
            sent = turn * p + at - (1 if back else 0)  # where a V turns, both stages are on one rank
            behind = (
                row.exchange.table_before
                + row.embedding.F
                + min(total, blocks) * (row.block.F + row.block.B)
                + 2 * sent * row.sent
                + 2 * row.common.lookup
            )
            turns = turns_within(row, x - row.exchange.last - behind, row.chain - behind)
            if turns >= 1:
                at_once = -(-m // turns)
                here = min(most, room // (at_once * row.kept.stays))
                if here > cum[r]:
                    total += here - cum[r]
                    cum[r] = here
    return total >= blocks


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
    most = works_in_time(row, x, r, most, head, free, max(0, stages_behind(row, r) - 1))  # all but the last have blocks
    if vee and r == 0 and row.parts == 1 and row.kept.stays > 0 and not row.copies.some:
        while most >= 0 and not starts_in_time(row, passes_end, most, room):
            most -= 1
    return most


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
    first = before_backward(row, (0, 0), 0, 0)
    for turn in range(turns):
        left = x - row.exchange.block * (blocks - ended) - (tables if turn == 0 else 0)
        ended = min(at_most(left - head - (beside if turn == turns - 1 else 0), work), at_most(left - first, late), blocks)
        if ended < 0:
            return False
    return ended >= blocks


@inner_kernel
def starts_in_time(row: BoundRow, x: int, most: int, room: int) -> bool:
    """Whether some split of `most` blocks between the first and the last stage of a V's first rank fits into x µs.

    Until the first microbatch has come back to the last stage, the rank can only run F of its first stage, and none of the
    bytes that these keep are freed. They must leave room for the first microbatch on the last stage.

    room: bytes for blocks and their states, beside one microbatch of the head.
    """
    m, stages = row.microbatches, row.ranks * row.chunks
    beside = (
        row.embedding.F + row.embedding.W + row.head.F + row.head.B + row.head.W + 2 * row.sent + row.common.S + row.common.T
    )
    work = m * (beside + most * (row.block.F + row.block.B + row.block.W))
    left = room - most * row.states - (row.transient if most > 0 else 0)
    for first in range(most + 1):
        last = most - first
        free = left - last * row.kept.moment
        if free < first * row.kept.moment:
            continue
        each = row.embedding.F + first * row.block.F + row.sent
        several = m if first == 0 else min(m, free // (first * row.kept.moment))
        comes = (
            row.exchange.table_before
            + row.common.lookup
            + row.embedding.F
            + (row.blocks - last) * row.block.F
            + (stages - 2) * row.sent
        )
        if comes + work - min(several * each, comes) <= x:
            return True
    return False
