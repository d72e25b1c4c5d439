"""Lower bounds on a rank's idle time at both ends of a step, where its memory has room for little.

*Before its first B* a rank can only run F, and S and T, which all ranks have. The first B starts when the first microbatch
has passed all stages. Until then the rank frees no bytes of a block, except those copied to host memory, one stage's
after the other, from the end of its first F on. So it has run no more F than fit, and S and T of no more microbatches than
fit on all its stages.

*After its last F* the same holds with time reversed. The rank can only run B and W of what it keeps then, S of microbatches
that are on all its stages, and T of those and of others whose S left bytes in memory. The last F's microbatch still has to
come back through all stages. What is copied back then is there before the rank's last B, which is of its first stage.

*After its last B* a rank can only run W and T, of what B and S have left in memory. This B is that of the rank's first stage
and the last microbatch, which still has to come back through all stages before it.

Between both ends the rank may work all the time. Where stages hold bytes from their first F on, all stages of the rank do at
both ends: its first B is of its last stage and a microbatch that all of its stages keep, and so is its last F.

*Windows.* The same holds for the first B and the last F of each stage of a rank. The window of a stage is that stage and the
rank's stages before it.

* Before the first B of a stage there is no B of the rank's earlier stages, as a microbatch's Bs run from the last stage to
  the first. So the rank still keeps all that the window's stages have done. Its later stages have run all passes of a
  microbatch at most, of microbatches that are kept on all stages of the window.
* Behind the last F of a stage there is no F of an earlier one. Later stages have passes only of microbatches that the window
  keeps on all its stages.

*Parts.* The first B of a microbatch waits for all its parts, which follow one another on every stage. The first part
comes to a stage after all stages before. From there on the last part, which takes longest, goes to the end. The way back is
the same, the last part first. The parts of a microbatch that are between F and B are its first ones. Parts are of even
length, and attention takes longest in the last ones. So their share of F and B is no greater than their share of the bytes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .memory_kernels import ANY, ROUNDING, blocks_there, kept_of_block, room_beside


class Window(NamedTuple):
    """A stage of a rank, and the stages of the rank before it. Numbers of blocks are those of one microbatch."""

    kept: int  # blocks on the window's stages
    first: int  # blocks on the rank's first stage
    later: int  # blocks on the rank's stages behind the window
    turns: int  # how many stages these are
    share: float  # passes of the window's stages for each block that such passes keep, at most


@inner_kernel
def works_in_time(row: BoundRow, x: int, r: int, most: int, head: int, room: int, behind: int) -> int:
    """The most blocks, up to `most`, for which rank r has time in x µs; −1 if it has none even without blocks. Fewer blocks
    are less work, but may leave more idle time at both ends. So fewer blocks may need longer, and each number is tried.

    head: µs before its first pass.
    room: bytes for blocks and their states.
    behind: the least blocks on stages behind all of its own; with one stage a rank, its own are included.
    """
    while most >= 0 and not has_time(row, x, r, most, head, room, behind):
        most -= 1
    return most


@inner_kernel
def has_time(row: BoundRow, x: int, r: int, blocks: int, head: int, room: int, behind: int) -> bool:
    """Whether rank r has time for this many blocks in x µs. head, room, behind: as in `works_in_time`."""
    after = max(0, behind - blocks) if row.single else behind
    first, stages = (row.blocks - behind, min(blocks, behind)) if row.single else (0, 0), stages_behind(row, r)
    begins, way_back = before_backward(row, first, stages, after), behind_forward(row, first, stages, after)
    left = max(0.0, room_beside(row, blocks, room) - float(blocks * row.from_F))
    there, window = blocks_there(row, left), all_stages(row, r, blocks)
    idle = idle_before(row, r, window, there, head, begins)
    before = row.blocks - behind if row.single else max(0, r - 1)
    if not drains_in_time(row, x, r, blocks, before, idle, room_beside(row, blocks, room)):
        return False
    ends = x - row.exchange.last - way_back  # when its last F must have ended
    if begins <= ends:
        left = max(0.0, left - gradients_there(row, blocks, room))
        there = blocks_there(row, left)
        last_B = way_back - drain_of(row, r, before)
        idle += idle_behind(row, r, window, there, left, x - row.exchange.least - ends, last_B)
    return idle + float(work_of(row, r, blocks)) <= float(x - row.exchange.least)


@inner_kernel
def drains_in_time(row: BoundRow, x: int, r: int, blocks: int, before: int, idle: float, left: float) -> bool:
    """Whether rank r, with so many blocks, ends its last B early enough for the stages before its first one.

    before: blocks on those stages.
    idle: µs that the rank is idle before its first B.
    left: bytes for what passes keep.
    """
    done = float(work_of(row, r, blocks)) - behind_backwards(row, r, blocks, left)
    return idle + done <= float(x - row.exchange.last - drain_of(row, r, before))


@inner_kernel
def head_of(row: BoundRow, r: int, before: int) -> int:
    """The least µs before the first F of rank r, with so many blocks on the stages before its first one."""
    head = row.exchange.table_before + row.common.lookup
    return int(head + (row.part.embedding + before * row.part.F + r * row.part.sent if r > 0 else 0))


@inner_kernel
def drain_of(row: BoundRow, r: int, before: int) -> int:
    """The least µs from the end of rank r's last B to that of the first stage's, with so many blocks on stages before."""
    return int(row.common.lookup + (before * row.part.B + (r - 1) * row.part.sent if r > 0 else 0))


@inner_kernel
def behind_backwards(row: BoundRow, r: int, blocks: int, left: float) -> float:
    """An upper bound, µs, on W and T that rank r runs behind its last B, from what `left` bytes can keep until then."""
    pending = float(row.kept.pending - (row.parts if row.parts > 1 else 0))
    weights, others, rate = (float(row.microbatches * blocks * row.block.W), float(row.microbatches * row.common.T), 0.0)
    behind = weights + others
    if pending > 0.0:
        rate = float(row.block.W) / pending
        behind = min(weights, left * rate) + others
        if row.common.pending > 0:
            behind = min(behind, left * max(rate, others / float(row.microbatches * row.common.pending)))
    behind += float(row.microbatches * row.embedding.W) if r == 0 else 0.0
    behind += float(row.microbatches * row.head.W) if stages_behind(row, r) == 0 else 0.0
    return behind * (1 + ROUNDING) + roundings(row)


@inner_kernel
def all_stages(row: BoundRow, r: int, blocks: int) -> Window:
    """The window of a rank's last stage, for any distribution of blocks over its stages. Each stage has at least one block,
    except the first and the last of the model."""
    if row.single:
        return Window(blocks, blocks, 0, 0, 1.0 / max(1, blocks))
    return Window(blocks, 0, 0, 0, 1.0 + (1.0 / max(1, blocks) if stages_behind(row, r) == 0 else 0.0))


@inner_kernel
def stages_behind(row: BoundRow, r: int) -> int:
    """The number of stages behind rank r's last one. There is a message between ranks before each of them."""
    return r if row.vee else row.ranks - 1 - r


@inner_kernel
def work_of(row: BoundRow, r: int, blocks: int) -> int:
    """µs of all passes of rank r where it has this many blocks."""
    first, last = r == 0, stages_behind(row, r) == 0
    sends = 2 * row.chunks - (1 if first else 0) - (1 if last else 0) - (2 if row.vee and r == row.ranks - 1 else 0)
    ends = (row.embedding.F + row.embedding.W if first else 0) + (row.head.F + row.head.B + row.head.W if last else 0)
    others = row.common.S + row.common.T
    return int(row.microbatches * (blocks * (row.block.F + row.block.B + row.block.W) + others + sends * row.sent + ends))


@inner_kernel
def before_backward(row: BoundRow, first: tuple[int, int], behind: int, after: int) -> int:
    """A lower bound, µs, on the time before the first B of a stage. behind: stages after it that a message goes to; after:
    the least blocks on those; first: as in `through_all`."""
    begins = (
        row.exchange.table_before
        + row.common.lookup
        + row.part.embedding
        + through_all(row, first, row.block.F, row.part.F, row.part.late_F)
        + row.common.gap
    )
    begins += (row.ranks * row.chunks - 1 - row.vee + behind) * row.part.sent + after * row.part.late_B
    return int(begins + (row.head.F + (row.head.B if behind else 0) if row.parts == 1 else 0))


@inner_kernel
def behind_forward(row: BoundRow, first: tuple[int, int], behind: int, after: int) -> int:
    """A lower bound, µs, on the time from the end of a stage's last F to the end of the first stage's last B. The stage's
    own message is part of its F. first, behind, after: as in `before_backward`."""
    left = row.common.lookup + through_all(row, first, row.block.B, row.part.B, row.part.late_B) + row.common.gap
    left += (row.ranks * row.chunks - 1 - row.vee + max(0, behind - 1)) * row.part.sent + after * row.part.late_F
    return int(left + (row.head.B + (row.head.F if behind else 0) if row.parts == 1 else 0))


@inner_kernel
def through_all(row: BoundRow, first: tuple[int, int], whole: int, part: int, late: int) -> int:
    """A lower bound, µs, on a microbatch's path through all blocks, in one direction.

    A whole microbatch takes the time of all blocks. Parts run beside each other on different stages, but one after the other
    on one stage. So all parts count on one stage: that with most blocks, a rank's first stage if its blocks are known, or
    the model's first stage with a block. In the last two, the last part goes on alone, or comes there alone on the way back.
    The longest path counts.

    first: blocks before the rank's first stage, and on it.
    whole: µs of a block, all parts together.
    part: the least µs of a part of a block.
    late: the least µs of the last part of a block.
    """
    before, here = first
    most = -(-row.blocks // (row.ranks * row.chunks))  # blocks on some stage
    if row.parts == 1:
        return row.blocks * whole
    at_rank = before * part + here * whole + (row.blocks - before - here) * late
    at_one = max(at_rank, whole + (row.blocks - 1) * late) - row.parts  # each part is rounded
    return max((row.blocks + (row.parts - 1) * most) * part, at_one)


@inner_kernel
def idle_before(row: BoundRow, r: int, window: Window, there: float, head: int, begins: int) -> float:
    """A lower bound, µs, on rank r's idle time before the first B of a window's stage.

    there: the most blocks of microbatches that it keeps between F and B at once.
    head: µs before its first pass.
    begins: the earliest start of that B, µs.
    """
    kept, first, share = window.kept, window.first, window.share
    if kept <= 0:
        return float(head)
    fits = there + copied_in(row, begins - head - first * row.part.F, row.copies.out)
    fits = min(fits, float(row.microbatches * kept))
    whole = microbatches(row, fits, kept)
    fits = whole * kept if kept == first else fits
    done = fits * (float(row.block.F) + share * float(row.sent)) + whole * behind_window(row, r, window)
    done += whole * float(row.common.S + row.common.T) + roundings(row)
    if r == 0:  # its first stage may have no block
        if first > 0:
            done += min(float(row.microbatches), fits / first) * float(row.embedding.F)
        else:
            done += float(row.microbatches * (row.embedding.F + row.sent))
    done += whole * float(row.head.F) if stages_behind(row, r) == 0 else 0.0
    return max(float(head), float(begins) - done * (1 + ROUNDING))


@inner_kernel
def idle_behind(row: BoundRow, r: int, window: Window, there: float, left: float, time: int, last_B: int) -> float:
    """A lower bound, µs, on rank r's idle time in the `time` µs behind the last F of a window's stage. What it works on then
    is kept from F to B, from B to W or from S to T, in `left` bytes. there: as in `idle_before`. last_B: the most µs from
    that F to the end of the rank's last B."""
    kept, share = window.kept, window.share
    pending = float(row.kept.pending - (row.parts if row.parts > 1 else 0))
    if kept <= 0 or pending <= 0.0:
        return 0.0
    copied = copied_in(row, min(time, last_B) - window.first * row.part.B, row.copies.back)
    weight = float(row.block.W) / pending
    here = min(there, float(row.microbatches * kept))
    whole = microbatches(row, min(there + copied, float(row.microbatches * kept)), kept)
    late = float(row.common.T)
    done = kept_work(row, here, left, weight) + float(row.microbatches) * late
    if row.common.pending > 0:
        done = min(done, kept_work(row, here, left, max(weight, late / float(row.common.pending))) + whole * late)
    done += copied * float(row.block.B + row.block.W) + (here + copied) * share * float(row.sent)
    done += whole * (behind_window(row, r, window) + float(row.common.S)) + roundings(row)
    done += float(row.microbatches * row.embedding.W) if r == 0 else 0.0
    done += whole * float(row.head.B) + float(row.microbatches * row.head.W) if stages_behind(row, r) == 0 else 0.0
    return max(0.0, float(time) - done * (1 + ROUNDING))


@inner_kernel
def kept_work(row: BoundRow, there: float, left: float, rate: float) -> float:
    """An upper bound, µs, on B and W for all that is kept in `left` bytes: up to `there` blocks from F to B, and in the
    other bytes what takes `rate` µs a byte."""
    each = float(row.block.B + row.block.W)
    return max(there * each + max(0.0, left - there * kept_of_block(row)) * rate, left * rate)


@inner_kernel
def microbatches(row: BoundRow, fits: float, kept: int) -> float:
    """The most microbatches kept on all stages of a window at once, each with `kept` blocks there, if `fits` blocks fit."""
    return float(np.floor(fits / float(kept))) if row.parts == 1 else fits / float(kept)


@inner_kernel
def behind_window(row: BoundRow, r: int, window: Window) -> float:
    """µs of a microbatch's passes on the stages of rank r after a window."""
    if window.turns == 0:
        return 0.0
    head = row.head.F + row.head.B + row.head.W if stages_behind(row, r) == 0 else 0
    return float(window.later * (row.block.F + row.block.B + row.block.W) + 2 * window.turns * row.sent + head)


@inner_kernel
def fits_at_first_B(row: BoundRow, blocks: int, room: int) -> bool:
    """Whether what so many blocks hold from their first F and B on fits on a rank when the first B of some stage begins.
    room: bytes for blocks and their states."""
    beside = float(blocks * (row.states + row.from_F) + row.transient)
    if blocks == 0 or beside + gradients_there(row, blocks, room) > float(room):
        return blocks == 0
    return row.from_B == 0 or blocks <= blocks_in_turn(row, room - blocks * row.states - row.transient)


@inner_kernel
def blocks_in_turn(row: BoundRow, left: int) -> int:
    """The most blocks of a rank whose stages hold bytes from their first F and B on, in `left` bytes beside their states.

    When the first B of a stage begins, memory holds both of these bytes of the stage, and a microbatch. The microbatch has
    passed the rank's stages before it and comes back to them later. So what these hold from F on is there too, and what they
    keep of the microbatch, if nothing is copied. More blocks on earlier stages leave room for fewer here, but not for fewer
    in all. So each stage in turn takes as many as fit.
    """
    here = row.from_F + row.from_B + max(row.kept.stays, row.kept.copied)
    earlier, blocks = row.from_F + (row.kept.stays if row.kept.copied == 0 else 0), 0
    for _ in range(row.chunks):
        blocks += max(0, (left - blocks * earlier) // here)
    return blocks


@inner_kernel
def gradients_there(row: BoundRow, blocks: int, room: int) -> float:
    """A lower bound on the bytes of gradients that a rank with so many blocks has when its last F ends.

    A stage without gradients has run no B by then. So it keeps all its microbatches, on the device or in host memory, and
    only so many blocks fit there. With several stages this also holds when the first B of some stage begins: either no stage
    behind the lowest such stage has reduced its gradients, or that stage and all before it keep all microbatches.

    room: bytes for blocks and their states.
    """
    if row.from_B == 0:
        return 0.0
    kept = max(row.kept.stays, row.kept.copied)
    empty = max(0, room - blocks * row.states + row.away) // (row.microbatches * kept + row.from_F) if kept > 0 else blocks
    return float(max(0, blocks - empty) * row.from_B)


@inner_kernel
def copied_in(row: BoundRow, time: int, each: int) -> float:
    """The most blocks of microbatches that stages which copy all they keep can copy in `time` µs, at `each` µs a block."""
    if row.kept.copied <= 0:
        return 0.0
    return float(max(0, time) // each) if each > 0 else ANY


@inner_kernel
def roundings(row: BoundRow) -> float:
    """An upper bound, µs, on what rounding adds to all parts of a rank: less than one µs for each."""
    return float(row.microbatches * row.chunks * row.parts) if row.parts > 1 else 0.0
