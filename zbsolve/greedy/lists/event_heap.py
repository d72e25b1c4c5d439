"""A binary heap of whole numbers, compiled: the events of a simulation in order of time."""

from __future__ import annotations

import numpy as np

from ...tables import Ints
from ...util.kernels import kernel


@kernel
def push(heap: Ints, size: int, key: int) -> Ints:
    """Add `key` to the binary heap in heap[:size]. Returns the heap, which is a larger copy where it was full."""
    if size == len(heap):
        wider = np.empty(2 * size, np.int64)
        wider[:size] = heap
        heap = wider
    at = size
    while at > 0 and heap[(at - 1) // 2] > key:
        heap[at] = heap[(at - 1) // 2]
        at = (at - 1) // 2
    heap[at] = key
    return heap


@kernel
def pop(heap: Ints, size: int) -> int:
    """Take the least key out of the binary heap in heap[:size], and return it."""
    least, last = heap[0], heap[size - 1]
    at, child = 0, 1
    while child < size - 1:
        if child + 1 < size - 1 and heap[child + 1] < heap[child]:
            child += 1
        if heap[child] >= last:
            break
        heap[at] = heap[child]
        at, child = child, 2 * child + 1
    heap[at] = last
    return int(least)
