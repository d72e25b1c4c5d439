"""Of layouts with two stages a rank: whether some partition leaves every rank time and memory enough.

Ranks are looked at one after the other, with all numbers of blocks that the stages before may have. In a V as many blocks
lie behind a rank's second stage as ranks before it have on theirs. In a loop blocks behind it follow from those of all first
stages together, each number of which is tried. So blocks before a rank's first stage, on it, on its second stage and behind
that are known, and with them

- when its first pass can begin, how long it is idle at both ends (`idle_kernels`), and that the exchange of one of its
  stages follows all passes of its stages;
- how long it keeps each block of a microbatch: on the first stage from there to the last stage and back, on the second from
  there. All that must fit into its memory, whole stages at a time. Behind its B a block keeps what its W needs while that
  runs.

Where ranks may have several blocks fewer than they can, nothing is said: there are too many partitions.
"""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import (
    COPIED,
    EXCHANGE,
    GAP,
    HB,
    HEAD,
    HF,
    LAST_EXCHANGE,
    LEAST_EXCHANGE,
    LOOKUP,
    PART_B,
    PART_EF,
    PART_F,
    PART_SENT,
    PENDING,
    SHARD,
    SHARD_S,
    SLICES,
    STAYS,
    VEE,
    L,
    M,
    P,
    W,
)
from .chunk_kernels import blocks_of_rank, room_of_rank
from .idle_kernels import (
    ANY,
    before_backward,
    behind_forward,
    blocks_there,
    idle_before,
    idle_behind,
    kept_of_block,
    room_beside,
    stages_behind,
    work_of,
)
from .peak_kernels import ROUNDING

MAX_SLACK = 2  # blocks that ranks could take beyond those that there are


@inner_kernel
def possible_pairs(row, x, scratch):  # type: ignore[no-untyped-def]
    """Whether some partition may have the makespan x. scratch: whole numbers that are overwritten, as
    `bound_kernels.scratch_size` says."""
    p, blocks = row[P], row[L]
    slack = -blocks
    for r in range(p):
        scratch[r] = blocks_of_rank(row, x, r)
        slack += scratch[r]
    if slack < 0:
        return False
    if slack > MAX_SLACK:
        return True
    if row[VEE]:
        return possible_split(row, x, -1, slack, scratch)
    first = p - 1  # all stages but the first and the last have blocks
    while first < blocks - p + 2 and not possible_split(row, x, first, slack, scratch):
        first += 1
    return first < blocks - p + 2


@inner_kernel
def possible_split(row, x, first, slack, scratch):  # type: ignore[no-untyped-def]
    """Whether some partition may have the makespan x, in a loop with `first` blocks on all first stages. slack: how many
    blocks ranks could take beyond all. scratch: of each rank how many blocks it may have; then two tables, by how many fewer
    than that ranks so far have, and how many blocks are on their first stages: 1 where that may be."""
    p, width, taken = row[P], row[L] + 1, 0
    now, following = p, p + (MAX_SLACK + 1) * width
    for i in range((slack + 1) * width):
        scratch[now + i] = 0
    scratch[now] = 1
    for r in range(p):
        for i in range((slack + 1) * width):
            scratch[following + i] = 0
        for fewer in range(slack + 1):
            for before in range(min(row[L], taken) + 1):
                if scratch[now + fewer * width + before]:
                    there = taken - fewer - before  # on second stages of the ranks so far
                    behind = there if row[VEE] else row[L] - first - there  # with those of this rank in a loop
                    for less in range(slack - fewer + 1):
                        to = following + (fewer + less) * width + before
                        split_rank(row, x, r, (scratch[r] - less, before, behind), to, scratch)
        taken += scratch[r]
        now, following = following, now
    last, found = now + slack * width, 0
    for on_first in range(width):
        if first < 0 or on_first == first:
            found += scratch[last + on_first]
    return found > 0


@inner_kernel
def split_rank(row, x, r, place, to, scratch):  # type: ignore[no-untyped-def]
    """Note at scratch[to + n] that rank r may have n blocks on its first stage. place: its blocks, those before its first
    stage, and those behind its second one, in a loop with its own there."""
    blocks, before, behind = place
    for first in range(0 if r == 0 else 1, blocks + (1 if stages_behind(row, r) == 0 else 0)):
        second = blocks - first
        after = behind if row[VEE] else behind - second
        if after >= 0 and not scratch[to + first] and rank_fits(row, x, r, first, second, before, after):
            scratch[to + first] = 1


@inner_kernel
def rank_fits(row, x, r, first, second, before, after):  # type: ignore[no-untyped-def]
    """Whether rank r has time and memory for so many blocks on its first and its second stage, where so many lie before the
    first and behind the second. The exchange of one of both follows all passes of both."""
    blocks, way, done = (
        first + second,
        x - row[LAST_EXCHANGE],
        x - max(row[LEAST_EXCHANGE], min(first, second) * row[EXCHANGE]),
    )
    head, drain = row[LOOKUP], row[LOOKUP]  # before its first F; after its last B
    if r > 0:
        head += row[PART_EF] + before * row[PART_F] + r * row[PART_SENT]
        drain += before * row[PART_B] + (r - 1) * row[PART_SENT]
    left = room_beside(row, blocks, room_of_rank(row, r) + (row[HEAD] if stages_behind(row, r) == 0 else 0))
    there = whole_stages(first, second, blocks_there(row, left)) if row[SLICES] == 1 else blocks_there(row, left)
    begins, ends = before_backward(row, r, after), way - behind_forward(row, r, after)
    idle, work = idle_before(row, r, blocks, there, head, begins), float(work_of(row, r, blocks))
    shards = float(row[M] * (row[SHARD] - row[SHARD_S]))  # T, which no exchange of a stage waits for
    late = idle_behind(row, r, blocks, there, left, x - row[LEAST_EXCHANGE] - ends) if begins <= ends else 0.0
    if idle + late + work > float(x - row[LEAST_EXCHANGE]):
        return False
    late = idle_behind(row, r, blocks, there, left, done - ends) if begins <= ends else 0.0
    if idle + late + work - shards > float(done):
        return False
    if row[COPIED] > 0 or row[STAYS] <= row[SLICES] or blocks == 0:
        return True
    turn = row[GAP] + (row[HF] + row[HB] if row[SLICES] == 1 else 0)
    sends = 2 * (2 * row[P] - 1 - row[VEE]) * row[PART_SENT]
    chain = 2 * row[LOOKUP] + row[PART_EF] + row[L] * (row[PART_F] + row[PART_B]) + turn + sends
    from_second = turn + (second + after) * (row[PART_F] + row[PART_B]) + 2 * stages_behind(row, r) * row[PART_SENT]
    held = float(row[M]) * (float(first) * float(chain - head - drain) + float(second) * float(from_second)) * (1 - ROUNDING)
    if held > there * float(way - head - drain):
        return False
    weights = float(row[M]) * float(first * first + second * second) * float(row[W]) if row[SLICES] == 1 else 0.0
    return (held + weights * min(1.0, row[PENDING] / row[STAYS])) * (1 - ROUNDING) <= left / kept_of_block(row) * float(
        done - head
    )


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
