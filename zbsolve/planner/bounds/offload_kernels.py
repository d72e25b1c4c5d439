"""Memory over time of layouts with offload: what a stage keeps is on the device while its F and its copy to the host run,
and again while the copy back and its backward do (2503.01328), however far apart both are.

A stage of n blocks keeps at least n KEPT bytes of a microbatch, whole blocks of them fit beside each other, and its passes
and copies take n times a block's at least. So a rank whose stages copy all that they keep needs m Σ n² (F + O + R + B)
block-µs, of which it has as many as blocks fit times the makespan; Σ n² is least where its stages are alike. Of "half" on
several stages, the first ⌈v / 2⌉ of a rank copy and the others keep theirs from F to B: at least while both run and while
the last stage's logits are made. How the rank's blocks lie on both is open: the least of a square of each is taken.

All ranks together know more of blocks that stay: each is kept while it and all such blocks behind it run, there and back. So
S of them take (F + B) S (S + 1) / 2 block-µs of a microbatch beside those of the others, L − S on p ⌈v / 2⌉ stages. Every S
is looked at, whole or not.
"""

from __future__ import annotations

from ...util.kernels import inner_kernel
from .bound_row import BoundRow
from .peak_kernels import ROUNDING


@inner_kernel
def in_time(row, x, room, most):  # type: ignore[no-untyped-def]
    """The largest number of blocks, up to `most`, that a rank with offload can have where the makespan is x. room: its bytes
    for blocks and their states."""
    if row.copied_bytes <= 0 or most < 0:
        return most
    low, high = 0, most  # fewer blocks need less and leave more
    while low < high:
        middle = (low + high + 1) // 2
        left = room - middle * row.state_bytes - row.transient_bytes
        fits = left // row.copied_bytes if left > 0 else 0
        if float(row.microbatches) * turns_of(row, middle) * (1 - ROUNDING) <= float(fits) * float(x):
            low = middle
        else:
            high = middle - 1
    return low


@inner_kernel
def turns_of(row, blocks):  # type: ignore[no-untyped-def]
    """Block-µs of one microbatch on a rank with so many blocks, at least."""
    passes = row.forward + row.backward
    copied = float(passes + row.copy_out + row.copy_back)
    if not row.some_copy:
        each, more = blocks // row.chunks, blocks % row.chunks
        return copied * float(row.chunks * each * each + more * (2 * each + 1))
    first = (row.chunks + 1) // 2
    there, here = copied / float(first), float(passes) / float(row.chunks - first)
    beside = float(row.shard_gap)
    if there + here <= 0.0:
        return 0.0
    stay = min(float(blocks), max(0.0, (2.0 * there * float(blocks) - beside) / (2.0 * (there + here))))
    return there * (float(blocks) - stay) ** 2 + here * stay * stay + beside * stay


@inner_kernel
def turns_of_all(row, least, turn):  # type: ignore[no-untyped-def]
    """Block-µs of one microbatch on all ranks, at least, where some stages of each copy and `least` blocks or more lie on
    others. turn: µs between F and B of the last one of those."""
    blocks, passes = float(row.blocks), float(row.forward + row.backward)
    there = (passes + float(row.copy_out + row.copy_back)) / float(row.ranks * ((row.chunks + 1) // 2))
    if there + passes <= 0.0:
        return 0.0
    stay = (2.0 * there * blocks - passes / 2.0 - float(turn)) / (2.0 * there + passes)
    stay = min(blocks, max(float(least), stay))
    return there * (blocks - stay) ** 2 + passes * stay * (stay + 1.0) / 2.0 + float(turn) * stay
