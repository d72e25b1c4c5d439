"""Memory over time of one rank: how long it keeps each block of a microbatch, from its stage to the last stage and back.

All that must fit into its memory while it has passes. Behind its B a block keeps what its W needs while that runs. Nothing
is kept at once: a rank has its passes one after the other, so before it keeps so many blocks it has done F of all but those
of one pass, and behind that it has B of all but those of one pass to do. Of each slice its part is kept while the slice
itself is on its way; slices together take what the microbatch takes.
"""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .idle_kernels import kept_of_block
from .peak_kernels import ROUNDING


@inner_kernel
def both_ways(row):  # type: ignore[no-untyped-def]
    """µs of a block's F and B, of slices in the mean."""
    return float(row.forward + row.backward) / float(row.slices)


@inner_kernel
def kept_for(row, blocks, behind):  # type: ignore[no-untyped-def]
    """µs that a stage keeps a microbatch, or a slice in the mean, at least: so many blocks on it and on stages behind it,
    of which `behind` get a message. Each stage's slices are rounded."""
    turn = row.shard_gap + (row.head_forward + row.head_backward if row.slices == 1 else 0)  # from the last block's F to its B
    rounded = 2 * row.ranks * row.chunks if row.slices > 1 else 0
    return float(blocks) * both_ways(row) + float(turn + 2 * behind * row.slice_message - rounded)


@inner_kernel
def held_in_time(row, span, sizes, held, room):  # type: ignore[no-untyped-def]
    """Whether a rank's memory is enough. span: µs from when to when it keeps what F leave for B, and until when what is left
    for W. sizes: its blocks, and those of its largest stage; held: block-µs of a microbatch from F to B, and the sum of
    squares of its stages' blocks; room: blocks of microbatches that fit, and bytes for them."""
    (head, end, done), (blocks, large), (turns, squares), (there, left) = span, sizes, held, room
    if row.copied_bytes > 0 or row.stay_bytes <= row.slices or blocks == 0:
        return True
    at_once = float(large) / float(row.slices)  # blocks of the largest pass
    need, most = float(row.microbatches) * turns * (1 - ROUNDING), float(row.microbatches * blocks)
    some, time = min(there, most), float(end - head)
    if need > some * time - ramps(row, some - at_once, float(row.slice_forward + row.slice_backward), time):
        return False
    weights = float(row.microbatches) * squares * float(row.weight) if row.slices == 1 else 0.0
    need += weights * min(1.0, row.pending_bytes / row.stay_bytes) * (1 - ROUNDING)
    some, time = min(left / kept_of_block(row), most), float(done - head)
    return need <= some * time - ramps(row, some - at_once, float(row.slice_forward), time)


@inner_kernel
def ramps(row, blocks, each, time):  # type: ignore[no-untyped-def]
    """Block-µs of memory that nobody uses before so many blocks of microbatches are there, and behind them, at least. each:
    µs of a slice of a block before and behind. None where both ends meet in the `time` that there is."""
    each = max(0.0, blocks) * each * float(row.slices)
    return each * blocks / 2.0 * (1 - ROUNDING) if 0.0 < each <= time else 0.0
