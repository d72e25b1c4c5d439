"""Layouts with several stages on each rank: tests whether some partition leaves every rank enough time and memory.

A search takes the ranks in turn, the last one first, and for each rank every number of blocks before its first stage. In a
loop, the blocks after its last stage are those on the last stages of ranks already taken. All conditions below also hold
with fewer of these, so only the fewest are kept for each number before. In a V, the blocks after a rank's second stage are
those on the second stages of the ranks before it. So these numbers of blocks are known: before a rank's first stage, on it,
on the stages in between together, on its last stage, and after it. From them follow

- when its first pass can begin, and when its last B has to end;
- how long it is idle at both ends (`idle_kernels`): before the first B and behind the last F of its first stage, of its last
  one, and of the one before that, whichever are longest;
- that the exchange of one of its stages follows all passes of its stages;
- how long it keeps each block of a microbatch: from the block's stage to the last stage and back. All that must fit into its
  memory, whole stages at a time (`memory_kernels`).

Of the stages between a rank's first and last one only the number is known. Each has at least a block, as all stages have
except the first and the last of the model. Where ranks could take more than `MAX_SLACK` further blocks, there are too many
partitions, and every makespan counts as possible.
"""

from __future__ import annotations

from typing import NamedTuple

from ...problem.tables import Ints
from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .chunk_kernels import blocks_of_rank, room_of_rank
from .idle_kernels import (
    Window,
    before_backward,
    behind_forward,
    drain_of,
    drains_in_time,
    head_of,
    idle_before,
    idle_behind,
    stages_behind,
    work_of,
)
from .memory_kernels import ANY, Room, Span, blocks_there, held_in_time, kept_for, on_stage, room_beside

MAX_SLACK = 2  # how many more blocks than there are the ranks may be able to take


class Split(NamedTuple):
    """Blocks of a rank: on its first stage, on its last one, and on all."""

    first: int
    last: int
    blocks: int


class Place(NamedTuple):
    """Where a rank lies: blocks before its first stage and behind its last one, and µs before its first pass."""

    before: int
    after: int
    head: int


@inner_kernel
def possible_split(row: BoundRow, x: int, scratch: Ints) -> bool:
    """Whether some partition may have a makespan of x µs.

    scratch: whole numbers that are overwritten, as many as `layout_rules.scratch_size` returns. First come the most blocks
      of each rank, then two tables, for a rank and those after it. Row: how many blocks they are below their most.
      Column: blocks before the rank's first stage. Entry: 1 more than the fewest blocks on the last stages of these ranks; 0
      if no split is possible.
    """
    p, slack = row.ranks, -row.blocks
    for r in range(p):
        scratch[r] = blocks_of_rank(row, x, r)
        slack += scratch[r]
    if slack < 0:
        return False
    if slack > MAX_SLACK:
        return True
    width, taken = row.blocks + 1, row.blocks + slack
    following, now = p, p + (MAX_SLACK + 1) * width
    for fewer in range(slack + 1):
        for before in range(width):
            scratch[following + fewer * width + before] = 1 if fewer == 0 else 0  # no rank is left that could have fewer
    for r in range(p - 1, -1, -1):
        taken -= scratch[r]
        for fewer in range(slack + 1):  # blocks that this rank and later ones have below their most
            for before in range(width):
                entry = 0
                for less in range(fewer + 1):
                    place = r, scratch[r] - less, before, taken - (slack - fewer)
                    entry = fewest(entry, split_rank(row, x, place, following + (fewer - less) * width, scratch))
                scratch[now + fewer * width + before] = entry
        now, following = following, now
    return bool(scratch[following + slack * width] > 0)


@inner_kernel
def fewest(first: int, other: int) -> int:
    """The smaller of the numbers that are above 0; 0 where none is."""
    return max(first, other) if first == 0 or other == 0 else min(first, other)


@inner_kernel
def split_rank(row: BoundRow, x: int, place: tuple[int, int, int, int], later: int, scratch: Ints) -> int:
    """1 more than the fewest blocks that a rank and those after it may have on their last stages; 0 if no split is possible.

    place: the rank, its blocks, blocks before its first stage, and blocks of all ranks before.
    later: where `scratch` has the same for the next rank, by blocks before its first stage.
    """
    r, blocks, before, taken = place
    least, between = 0, row.chunks - 2
    if before > taken:
        return 0
    for first in range(0 if r == 0 else 1, min(blocks, row.blocks - before) + 1):
        behind = scratch[later + before + first] - 1
        if behind >= 0:
            after = taken - before if row.vee else behind
            for last in range(0 if stages_behind(row, r) == 0 else 1, blocks - first - between + 1):
                if between == 0 and first + last < blocks:
                    continue
                total = 1 if row.vee else 1 + behind + last
                if fewest(least, total) != least and rank_fits(row, x, r, Split(first, last, blocks), before, after):
                    least = total
    return least


@inner_kernel
def rank_fits(row: BoundRow, x: int, r: int, split: Split, before: int, after: int) -> bool:
    """Whether rank r has time and memory for a split, with so many blocks before its first stage and behind its last one."""
    first, last, blocks = split
    between = blocks - first - last
    least = min(min(first, last), 1 if row.chunks > 2 else last)  # every one of its stages has so many blocks, or more
    last_B, passes_end = x - row.exchange.last, x - row.exchange.least
    done = x - max(row.exchange.least, least * row.exchange.block)  # when passes must end that an exchange waits for
    head, drain = head_of(row, r, before), drain_of(row, r, before)
    left = room_beside(row, blocks, room_of_rank(row, r) + (row.kept.head_moment if stages_behind(row, r) == 0 else 0))
    there = blocks_there(row, left)
    if row.chunks == 2 and row.parts == 1:
        there = whole_stages(first, last, there)
    place, room, work = Place(before, after, head), Room(there, left), float(work_of(row, r, blocks))
    late = float(row.microbatches * row.common.T)  # T, which no exchange of a stage waits for
    for until, passes in ((passes_end, work), (done, work - late)):
        if passes + idle_at_ends(row, x, r, split, place, room, until) > float(until):
            return False
    if not drains_in_time(row, x, r, blocks, before, idle_at_ends(row, 0, r, split, place, room, 0), left):
        return False
    behind, large = stages_behind(row, r), max(max(first, last), between - (row.chunks - 3))
    _, further, _ = window_of(row, r, split, place, 1)
    from_first = kept_for(row, first, row.blocks - before - first, further) + float(0 if r == 0 else row.part.sent)
    from_last = kept_for(row, last, after, behind)
    held, squares = float(first) * from_first + float(last) * from_last, float(first * first + last * last)
    if between > 0:
        square = float(between * between) / float(row.chunks - 2)  # the sum of squares is least if stages are equal
        from_between = kept_for(row, 0, last + after + row.ranks - 1, behind + row.ranks)
        held += square * on_stage(row) + float(between) * from_between
        squares += square
    return held_in_time(row, Span(head, last_B - drain, done), (blocks, large), (held, squares), room)


@inner_kernel
def idle_at_ends(row: BoundRow, x: int, r: int, split: Split, place: Place, room: Room, until: int) -> float:
    """A lower bound, µs, on rank r's idle time before its first B, and after its last F up to `until` unless x is 0."""
    first, longest = (place.before, split.first), 0.0
    for i in range(min(row.chunks, 3)):
        window, behind, after = window_of(row, r, split, place, i)
        begins = before_backward(row, first, behind, after)
        idle = idle_before(row, r, window, room.blocks, place.head, begins)
        longest = max(longest, idle)
        for j in range(min(row.chunks, 3)):
            window, behind, after = window_of(row, r, split, place, j)
            way_back = behind_forward(row, first, behind, after)
            ends, last_B = x - row.exchange.last - way_back, way_back - drain_of(row, r, place.before)
            if begins <= ends:
                longest = max(longest, idle + idle_behind(row, r, window, room.blocks, room.size, until - ends, last_B))
    return longest


@inner_kernel
def window_of(row: BoundRow, r: int, split: Split, place: Place, i: int) -> tuple[Window, int, int]:
    """A window of a rank; how many stages behind it get a message; and the least number of blocks on those.

    i: which stage's window: 0 the rank's last one's, 1 its first one's, 2 that of the one before the last.

    While a microbatch is kept on a stage, it is also kept on the rank's earlier stages. So what is kept at a time is a sum
    of first stages, of the first two, of the first three … It has at most as many passes a block as the one with most.
    """
    (first, last, blocks), before, after = split, place.before, place.after
    p, v = row.ranks, row.chunks
    behind, share = stages_behind(row, r), 1.0 / float(first) if first > 0 else 0.0
    if i == 1:
        further = 2 * p - 2 - r if row.vee else behind + (v - 1) * p
        return Window(first, first, blocks - first, v - 1, share), further, row.blocks - before - first
    if v > 2:  # each stage in between has a block
        share = max(share, float(v - 1) / float(first + v - 2))
    if i == 2:
        return Window(blocks - last, first, last, 1, share), behind + p, after + last + p - 1
    return Window(blocks, first, 0, 0, max(share, float(v) / float(max(1, blocks)))), behind, after


@inner_kernel
def whole_stages(first: int, second: int, there: float) -> float:
    """The most blocks, up to `there`, of microbatches on stages of so many blocks each."""
    large, small = max(first, second), min(first, second)
    if there >= ANY or large == 0:
        return there
    best = there // large * large
    if small > 0:
        for turn in range(min(int(there // large) + 1, small)):
            best = max(best, turn * large + (there - turn * large) // small * small)
    return best
