"""A tournament tree of moments, compiled: which of many ranks is next, and a rank's moment changed, in log₂(ranks) steps.

Its root is entry 1; entries 2 i and 2 i + 1 are below entry i, which has the smaller of them; its lower half are the ranks'.
"""

from __future__ import annotations

import numpy as np

from ..tables import Ints
from ..util.kernels import kernel
from .arrays.problem_arrays import NEVER


@kernel
def first_at_once(ranks: int) -> Ints:
    """The tree of so many ranks whose moment is 0."""
    width = 1
    while width < ranks:
        width *= 2
    tree = np.full(2 * width, NEVER, np.int64)
    for rank in range(ranks):
        put(tree, rank, 0)
    return tree


@kernel
def first_of(tree: Ints) -> int:
    """The rank whose moment, tree[1], is the first; of several the one of least number."""
    at, width = 1, len(tree) // 2
    while at < width:
        at *= 2
        if tree[at + 1] < tree[at]:
            at += 1
    return at - width


@kernel
def bring_forward(tree: Ints, rank: int, moment: int) -> None:
    """Give a rank another moment where that is earlier than its own."""
    if moment < tree[len(tree) // 2 + rank]:
        put(tree, rank, moment)


@kernel
def put(tree: Ints, rank: int, moment: int) -> None:
    """Give a rank another moment."""
    at = len(tree) // 2 + rank
    tree[at] = moment
    at //= 2
    while at > 0:
        first = min(tree[2 * at], tree[2 * at + 1])
        if tree[at] == first:
            break
        tree[at] = first
        at //= 2
