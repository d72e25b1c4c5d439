"""When the stream of a lane is free for it in a block that repeats every period, compiled."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ...tables import Ints
from ...util.kernels import kernel
from ..arrays.microbatch import MicrobatchGraph


@kernel
def free_from(g: MicrobatchGraph, placed: NDArray[np.bool_], lane: int, at: int, end: int, period: int, offset: Ints) -> int:
    """The first time from `at` on, before `end`, when no other placed lane of the stream runs; `end` where there is none.
    placed, offset: whether and when each lane has a place, shape (lanes,). All times in µs."""
    length, rank = g.duration[lane], g.rank[lane]
    moved = length > 0
    while moved and at < end:
        moved = False
        for k in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            other = g.rank_lanes[k]
            busy = g.duration[other]
            if other == lane or busy == 0 or not placed[other]:
                continue
            since = (at - offset[other]) % period
            if since < busy or since + length > period:
                at += busy - since if since < busy else period - since + busy
                moved = True
    return min(at, end)


@kernel
def free_before(
    g: MicrobatchGraph, placed: NDArray[np.bool_], lane: int, at: int, begin: int, period: int, offset: Ints
) -> int:
    """The last time until `at`, after `begin`, when no other placed lane of the stream runs; `begin` where there is none.
    The others as in `free_from`."""
    length, rank = g.duration[lane], g.rank[lane]
    moved = length > 0
    while moved and at > begin:
        moved = False
        for k in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            other = g.rank_lanes[k]
            busy = g.duration[other]
            if other == lane or busy == 0 or not placed[other]:
                continue
            since = (at - offset[other]) % period
            if since < busy or since + length > period:
                back = (at + length - offset[other]) % period
                at -= back if back > 0 else period
                moved = True
    return max(at, begin)
