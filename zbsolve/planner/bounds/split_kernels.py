"""Of layouts with several stages a rank: whether some partition leaves every rank time and memory enough.

Ranks are looked at one after the other, the last one first, with all numbers of blocks that lie before a rank's first stage.
In a loop, blocks behind its last stage are those on the last stages of the ranks looked at. All conditions below hold with
fewer than there are, too, so the fewest that are possible are kept of each number before. In a V as many lie behind a rank's
second stage as ranks before it have on theirs. So blocks before a rank's first stage, on it, on its last stage, on those in
between together, and behind the last one are known, and with them

- when its first pass can begin, and when its last B has to end;
- how long it is idle at both ends (`idle_kernels`): before the first B and behind the last F of its first stage, of its last
  one, and of the one before that, whichever are longest;
- that the exchange of one of its stages follows all passes of its stages;
- how long it keeps each block of a microbatch: from the block's stage to the last stage and back. All that must fit into its
  memory, whole stages at a time (`held_kernels`).

Of stages between a rank's first and its last one only their number is known. Each has a block, and so have all stages of
other ranks, but the first and the last of all. Where ranks may have several blocks fewer than they can, nothing is said:
there are too many partitions.
"""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .chunk_kernels import blocks_of_rank, room_of_rank
from .held_kernels import both_ways, held_in_time, kept_for
from .idle_kernels import (
    ANY,
    before_backward,
    behind_forward,
    blocks_there,
    drains_in_time,
    idle_before,
    idle_behind,
    room_beside,
    stages_behind,
    work_of,
)

MAX_SLACK = 2  # blocks that ranks could take beyond those that there are


@inner_kernel
def possible_split(row, x, scratch):  # type: ignore[no-untyped-def]
    """Whether some partition may have the makespan x. scratch: whole numbers that are overwritten, as
    `bound_kernels.scratch_size` says: of each rank how many blocks it may have; then two tables, by how many fewer than that
    ranks have and how many blocks lie before their first stages: 1 more than the fewest on the last stages of all ranks
    looked at, 0 where nothing is possible."""
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
            scratch[following + fewer * width + before] = 1 if fewer == 0 else 0  # by how many later ranks have fewer
    for r in range(p - 1, -1, -1):
        taken -= scratch[r]
        for fewer in range(slack + 1):  # of this rank and later ones
            for before in range(width):
                found = 0
                for less in range(fewer + 1):
                    place = r, scratch[r] - less, before, taken - (slack - fewer)
                    found = fewest(found, split_rank(row, x, place, following + (fewer - less) * width, scratch))
                scratch[now + fewer * width + before] = found
        now, following = following, now
    return scratch[following + slack * width] > 0


@inner_kernel
def fewest(one, other):  # type: ignore[no-untyped-def]
    """The smaller of both that is above 0."""
    return max(one, other) if one == 0 or other == 0 else min(one, other)


@inner_kernel
def split_rank(row, x, place, later, scratch):  # type: ignore[no-untyped-def]
    """1 more than the fewest blocks that a rank and later ones may have on their last stages; 0: none of its splits is
    possible. place: the rank, its blocks, blocks before its first stage, and blocks of all ranks before. later: where the
    same of the next rank is, by blocks before its first stage."""
    r, blocks, before, taken = place
    found, between = 0, row.chunks - 2
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
                if fewest(found, total) != found and rank_fits(row, x, r, (first, last, blocks), before, after):
                    found = total
    return found


@inner_kernel
def rank_fits(row, x, r, split, before, after):  # type: ignore[no-untyped-def]
    """Whether rank r has time and memory for a split, where so many blocks lie before its first stage and behind its last
    one. split: blocks of its first stage, of its last one, and of all."""
    first, last, blocks = split
    between = blocks - first - last
    least = min(min(first, last), 1 if row.chunks > 2 else last)  # blocks on its stage with fewest
    way, all_work = x - row.last_exchange, x - row.least_exchange
    done = x - max(row.least_exchange, least * row.exchange)  # passes that an exchange of the rank waits for
    head, drain = row.first_gather + row.shard_lookup, row.shard_lookup  # before its first F; after its last B
    if r > 0:
        head += row.slice_embedding + before * row.slice_forward + r * row.slice_message
        drain += before * row.slice_backward + (r - 1) * row.slice_message
    left = room_beside(row, blocks, room_of_rank(row, r) + (row.head_bytes if stages_behind(row, r) == 0 else 0))
    there = blocks_there(row, left)
    if row.chunks == 2 and row.slices == 1:
        there = whole_stages(first, last, there)
    work = float(work_of(row, r, blocks))
    shards = float(row.microbatches * (row.shard_work - row.shard_S))  # T, which no exchange of a stage waits for
    for until, passes in ((all_work, work), (done, work - shards)):
        if passes + idle_at_ends(row, x, r, split, (before, after, head), (there, left), until) > float(until):
            return False
    if not drains_in_time(row, x, r, blocks, before, idle_at_start(row, r, split, (before, after, head), there), left):
        return False
    behind, large = stages_behind(row, r), max(max(first, last), between - (row.chunks - 3))
    (_, further, _), each = window_of(row, r, split, (before, after, head), 1), both_ways(row)
    from_first = kept_for(row, row.blocks - before, further) + float(0 if r == 0 else row.slice_message)
    from_last = kept_for(row, last + after, behind)
    held, squares = float(first) * from_first + float(last) * from_last, float(first * first + last * last)
    if between > 0:
        square = float(between * between) / float(row.chunks - 2)  # even stages have the least squares
        held += square * each + float(between) * kept_for(row, last + after + row.ranks - 1, behind + row.ranks)
        squares += square
    return held_in_time(row, (head, way - drain, done), (blocks, large), (held, squares), (there, left))


@inner_kernel
def idle_at_ends(row, x, r, split, place, room, until):  # type: ignore[no-untyped-def]
    """µs that rank r is idle up to `until`, before its first B and behind its last F together. place: blocks before its
    first stage and behind its last one, and µs before its first pass; room: blocks of microbatches, and bytes for them."""
    (before, _, head), (there, left), (first, _, _), found = place, room, split, 0.0
    for i in range(min(row.chunks, 3)):
        window, behind, after = window_of(row, r, split, place, i)
        begins = before_backward(row, (before, first), behind, after)
        idle = idle_before(row, r, window, there, head, begins)
        found = max(found, idle)
        for j in range(min(row.chunks, 3)):
            window, behind, after = window_of(row, r, split, place, j)
            ends = x - row.last_exchange - behind_forward(row, (before, first), behind, after)
            if begins <= ends:
                found = max(found, idle + idle_behind(row, r, window, there, left, until - ends))
    return found


@inner_kernel
def idle_at_start(row, r, split, place, there):  # type: ignore[no-untyped-def]
    """µs that rank r is idle before the first B of its stages. The others: as in `idle_at_ends`."""
    (before, _, head), (first, _, _), found = place, split, 0.0
    for i in range(min(row.chunks, 3)):
        window, behind, after = window_of(row, r, split, place, i)
        found = max(found, idle_before(row, r, window, there, head, before_backward(row, (before, first), behind, after)))
    return found


@inner_kernel
def window_of(row, r, split, place, i):  # type: ignore[no-untyped-def]
    """The window of a rank's last stage (0), its first one (1) or the one before the last (2); stages behind that, by
    messages; and blocks on those, at least. split, place: as in `idle_at_ends`.

    A window is: blocks on the rank's stages up to the window's; on the first; on those behind; how many are behind; and at
    most how many passes of those up to the window's there are for each block that such passes keep. A microbatch is kept on
    a stage only while it is on all earlier ones of the rank: so what passes keep is a sum of first stages, of the first two,
    of the first three …, and each of these has no more passes a block than the largest of them.
    """
    (first, last, blocks), (before, after, _) = split, place
    p, v = row.ranks, row.chunks
    behind, share = stages_behind(row, r), 1.0 / float(first) if first > 0 else 0.0
    if i == 1:
        further = 2 * p - 2 - r if row.vee else behind + (v - 1) * p
        return (first, first, blocks - first, v - 1, share), further, row.blocks - before - first
    if v > 2:  # each stage in between has a block
        share = max(share, float(v - 1) / float(first + v - 2))
    if i == 2:
        return (blocks - last, first, last, 1, share), behind + p, after + last + p - 1
    return (blocks, first, 0, 0, max(share, float(v) / float(max(1, blocks)))), behind, after


@inner_kernel
def whole_stages(first, second, there):  # type: ignore[no-untyped-def]
    """The most blocks, up to `there`, of microbatches on stages of so many blocks each."""
    large, small = max(first, second), min(first, second)
    if there >= ANY or large == 0:
        return there
    best = there // large * large
    if small > 0:
        for turn in range(min(int(there // large) + 1, small)):
            best = max(best, turn * large + (there - turn * large) // small * small)
    return best
