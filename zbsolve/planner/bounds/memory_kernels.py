"""Tests whether the memory of one rank, or of all ranks together, is enough: when it is fullest, and over time.

*Peaks.* All stages hold a microbatch at once when its last F ends. So the peaks of different microbatches are apart in time.

*Over time.* A rank keeps each block of a microbatch from its F on this stage to its B there, and after that what its W
needs. All this must fit into the rank's memory, bytes times time. Memory does not fill at once, as a rank runs one pass
after the other. When a rank keeps n blocks, it has done F of all of them but those of the last pass, and it still has to do
B of all but those of one pass. A part's B waits for those of all later parts. Together they keep what a microbatch keeps.

*With copies to host memory* (arXiv 2503.01328) a block is on the device during its F and its copy to the host, and again
during the copy back and its B, however far apart both are. A stage of n blocks keeps at least n `kept.moment` of a
microbatch, and only whole blocks fit. Its passes and copies take at least n times as long as a block's. So a rank whose
stages copy all that they keep needs m Σ n² (F + O + R + B) block-µs, where n are the blocks of its stages. It has the number
of blocks that fit, times the makespan. Σ n² is least if the stages are alike. Where only some stages copy, these are the
first ⌈v / 2⌉ of v stages of a rank. The others keep theirs from F to B: at least while both run and while the last stage's
logits are made. How a rank divides its blocks between both kinds is open, so the least need counts.

For blocks that stay, all ranks together give more. Each is kept while it and all such blocks behind it run, there and back.
So S of them need (F + B) S (S + 1) / 2 block-µs of a microbatch. The others, L − S on p ⌈v / 2⌉ stages, need theirs too. The
least over all S is taken, whole or not.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...util.kernels import inner_kernel
from .bound_row import BoundRow

MAX_FIRST = 8  # so many first peaks are tried as the one from which on gradients are there
MAX_NEIGHBOURS = 6  # a peak's neighbours on each side: fewer than this count
ANY = 1e18  # blocks
ROUNDING = 1e-9  # relative: sums of floats


class Span(NamedTuple):
    """µs between which a rank keeps something: its first pass begins at `head`, its last B ends at `end`, and W has freed
    the rest at `done`."""

    head: int
    end: int
    done: int


class Room(NamedTuple):
    """What fits on a rank: blocks of microbatches, and bytes for all that passes keep."""

    blocks: float
    size: float


# --- What fits ---


@inner_kernel
def room_beside(row: BoundRow, blocks: int, room: int) -> float:
    """Bytes left for what passes keep, beside this many blocks' states and a running pass. room: bytes for all of it."""
    return float(max(0, room - blocks * row.states - row.transient))


@inner_kernel
def kept_of_block(row: BoundRow) -> float:
    """A lower bound on the bytes of a microbatch that a block keeps on the device from F to B; where its stage copies all,
    until the copy has moved them. A part's share is rounded."""
    size = row.kept.copied if row.kept.copied > 0 else row.kept.stays
    return float(size - (row.parts if row.parts > 1 else 0))


@inner_kernel
def blocks_there(row: BoundRow, left: float) -> float:
    """An upper bound on blocks of microbatches that a rank keeps between F and B at once, in `left` bytes."""
    size = kept_of_block(row)
    if size <= 0.0:
        return ANY
    return float(np.floor(left / size)) if row.parts == 1 else left / size


# --- Peaks ---


@inner_kernel
def spread(row: BoundRow, blocks: float, fits: float, slack: int) -> float:
    """A lower bound, µs, on the time between the first and the last peak. A microbatch peaks when its last F ends.

    Gradients may take memory from a stage's first B on. A stage that runs no B before the k-th peak keeps k
    microbatches then, so such stages have at most `fits` / k blocks. Gradients of all others leave less room from then on.

    blocks: how many each microbatch keeps from F to B.
    fits: blocks of microbatches that fit on all ranks together.
    slack: how many more fit if ranks may keep parts of blocks.
    """
    count = row.microbatches
    best = _spread_of(row, count, blocks, fits)
    if row.from_B > 0 and row.kept.copied == 0 and row.kept.stays > 0:
        for k in range(1, min(count, MAX_FIRST) + 1):
            empty = min(float(row.blocks), np.floor((fits + slack) / k))
            less = fits + slack - (float(row.blocks) - empty) * float(row.from_B) / float(row.kept.stays)
            if less + ROUNDING * fits < blocks:
                return ANY
            best = max(best, _spread_of(row, k, blocks, fits) + _spread_of(row, count - k + 1, blocks, less))
    return best


@inner_kernel
def _spread_of(row: BoundRow, count: int, blocks: float, fits: float) -> float:
    """A lower bound, µs, on the time from the first to the last of `count` consecutive peaks. Each microbatch keeps L =
    `blocks` from F to B, and `fits` blocks of microbatches fit on all ranks together.

    At its peak a microbatch keeps all L blocks; t µs before, at least L − t / F; t µs after, at least L − t / B. For a peak
    with a peaks before it and b behind it this gives (1 + a + b) L − Σ distances / (B or F) ≤ fits. It is summed over all
    peaks that have so many neighbours. Each distance between neighbours then counts at most a (a + 1) / 2 times over B and
    b (b + 1) / 2 times over F. With one neighbour on each side, the first and the last distance count over one of both only,
    and no distance is below max(F, B) (2 L − fits).
    """
    forward, backward = float(row.block.F), float(row.block.B)
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
def staying(row: BoundRow, x: int) -> int:
    """A lower bound on the blocks of a microbatch that stay on devices from F to B, in a makespan of x µs. Where some stages
    of a rank copy, these are the blocks that copies have no time for."""
    if not row.copies.some:
        return row.blocks
    return max(0, row.blocks - row.ranks * (x // (row.microbatches * row.copies.out))) if row.copies.out > 0 else 0


@inner_kernel
def fitting(row: BoundRow) -> float:
    """The most blocks of microbatches that fit on all ranks together while the head keeps one; `ANY` if blocks need not
    stay."""
    if row.kept.stays <= 0:
        return ANY
    tables = 1 if row.tied and (row.vee or row.ranks == 1) else 2
    ends = 2 * (row.ranks * row.chunks - 1)
    # At a peak all stages keep its microbatch, and so what they hold from their first F on.
    states = row.blocks * (row.states + row.from_F) + tables * row.table_states
    room = row.ranks * row.capacity - states - ends * row.waiting - row.kept.head_stays
    return float(room) / float(row.kept.stays)


# --- Over time ---


@inner_kernel
def turnaround(row: BoundRow) -> int:
    """A lower bound, µs, on the time from a microbatch's F of the last block to its B."""
    return int(row.common.gap + (row.head.F + row.head.B if row.parts == 1 else 0))


@inner_kernel
def on_stage(row: BoundRow) -> float:
    """A lower bound, µs, on a block's F and B on its stage while an average part is kept: of this part and all later ones.
    Of P parts the j-th counts for the first j, and later ones take longer. So these are (P + 1) / 2P of the sum or more."""
    return float(row.block.F + row.block.B) * float(row.parts + 1) / float(2 * row.parts)


@inner_kernel
def kept_for(row: BoundRow, own: int, after: int, behind: int) -> float:
    """A lower bound, µs, on how long a stage keeps a microbatch, or an average part: until the last part has passed all
    blocks behind the stage and come back. own, after: blocks on the stage, and behind it; behind: how many of the stages
    behind it get a message."""
    rounded = 2 * row.parts if row.parts > 1 else 0  # the stage's parts, both ways
    late = float(row.part.late_F + row.part.late_B)
    return float(own) * on_stage(row) + float(after) * late + float(turnaround(row) + 2 * behind * row.part.sent - rounded)


@inner_kernel
def held_in_time(row: BoundRow, span: Span, sizes: tuple[int, int], held: tuple[float, float], room: Room) -> bool:
    """Whether a rank's memory is enough over time.

    sizes: its blocks, and those of its largest stage.
    held: block-µs of a microbatch from F to B, and the sum of squares of its stages' blocks.
    """
    (blocks, large), (turns, squares) = sizes, held
    if row.kept.copied > 0 or row.kept.stays <= row.parts or blocks == 0:
        return True
    at_once = float(large) / float(row.parts)  # blocks of the largest pass
    need, most = float(row.microbatches) * turns * (1 - ROUNDING), float(row.microbatches * blocks)
    some, time = min(room.blocks, most), float(span.end - span.head)
    if need > some * time - ramps(row, some - at_once, float(row.part.F + row.part.B), time):
        return False
    weights = float(row.microbatches) * squares * float(row.block.W) if row.parts == 1 else 0.0
    need += weights * min(1.0, row.kept.pending / row.kept.stays) * (1 - ROUNDING)
    some, time = min(room.size / kept_of_block(row), most), float(span.done - span.head)
    return bool(need <= some * time - ramps(row, some - at_once, float(row.part.F), time))


@inner_kernel
def ramps(row: BoundRow, blocks: float, each: float, time: float) -> float:
    """Block-µs of memory that stay empty while a rank fills up to so many blocks of microbatches and empties again.

    each: µs of a part of a block, filling and emptying.
    time: µs that both ends must fit into; else 0 is returned.
    """
    each = max(0.0, blocks) * each * float(row.parts)
    return each * blocks / 2.0 * (1 - ROUNDING) if 0.0 < each <= time else 0.0


# --- With copies to host memory ---


@inner_kernel
def in_time(row: BoundRow, x: int, room: int, most: int) -> int:
    """The most blocks, up to `most`, that a rank can have in x µs if its stages copy. room: bytes for blocks and states."""
    if row.kept.copied <= 0 or most < 0:
        return most
    low, high = 0, most  # fewer blocks need less time and leave more room
    while low < high:
        middle = (low + high + 1) // 2
        left = room - middle * row.states - row.transient
        fits = left // row.kept.copied if left > 0 else 0
        if float(row.microbatches) * turns_of(row, middle) * (1 - ROUNDING) <= float(fits) * float(x):
            low = middle
        else:
            high = middle - 1
    return low


@inner_kernel
def turns_of(row: BoundRow, blocks: int) -> float:
    """A lower bound on block-µs of one microbatch on a rank with this many blocks."""
    passes = row.block.F + row.block.B
    copied = float(passes + row.copies.out + row.copies.back)
    if not row.copies.some:
        each, more = blocks // row.chunks, blocks % row.chunks
        return copied * float(row.chunks * each * each + more * (2 * each + 1))
    first = (row.chunks + 1) // 2
    there, here = copied / float(first), float(passes) / float(row.chunks - first)
    beside = float(row.common.gap)
    if there + here <= 0.0:
        return 0.0
    stay = min(float(blocks), max(0.0, (2.0 * there * float(blocks) - beside) / (2.0 * (there + here))))
    return there * (float(blocks) - stay) ** 2 + here * stay * stay + beside * stay


@inner_kernel
def turns_of_all(row: BoundRow, least: int, turn: int) -> float:
    """A lower bound on block-µs of one microbatch on all ranks, where some stages of each rank copy.

    least: blocks on stages that do not copy, at least.
    turn: µs between F and B of the last of these blocks.
    """
    blocks, passes = float(row.blocks), float(row.block.F + row.block.B)
    there = (passes + float(row.copies.out + row.copies.back)) / float(row.ranks * ((row.chunks + 1) // 2))
    if there + passes <= 0.0:
        return 0.0
    stay = (2.0 * there * blocks - passes / 2.0 - float(turn)) / (2.0 * there + passes)
    stay = min(blocks, max(float(least), stay))
    return there * (blocks - stay) ** 2 + passes * stay * (stay + 1.0) / 2.0 + float(turn) * stay
