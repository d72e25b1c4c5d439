"""Steady states: a schedule of few microbatches, its middle repeated, is one of many.

What a pipeline does between warm-up and cool-down repeats every few microbatches; searching it with few of them costs a
fraction, and the ramps are the same. Nothing here has to hold: times are only wishes, which `unroll` mends.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..problem import Ints
from .template import Template

LONGEST = 8  # microbatches of a repeated part at most
FLIGHTS = (4, 3, 2)  # times what is in flight at once: the numbers of microbatches that are solved
WORTH = 0.6  # of the microbatches at most, else the whole is searched as well


def few_microbatches(t: Template) -> tuple[int, ...]:
    """Numbers of microbatches that show warm-up, steady state and cool-down; none where the problem has hardly more."""
    flight = in_flight(t)
    found = {max(3, times * flight + 1) for times in FLIGHTS}
    return tuple(sorted((few for few in found if few <= WORTH * t.microbatches), reverse=True))


def in_flight(t: Template) -> int:
    """How many microbatches the ranks can have begun and not ended: by memory, and by depth over period."""
    need = np.bincount(t.rank, t.taken, len(t.room))
    memory = int(np.min(t.room / np.maximum(need, 1)))
    end = np.zeros(len(t.duration), np.int64)
    for lane in range(len(end)):
        into = slice(t.in_first[lane], t.in_first[lane + 1])
        end[lane] = t.duration[lane] + max([0, *(end[t.in_lane[into]] + t.in_lag[into]).tolist()])
    work = max(1, int(np.bincount(t.rank, t.duration).max()))
    return max(1, min(memory, -(-int(end.max()) // work)))


def extended(start: Ints, microbatches: int, tries: int) -> Iterator[Ints]:
    """Wished times, shape (lanes, microbatches), from those of fewer: a run of q microbatches from the c-th on is repeated
    until there are enough. The `tries` most periodic and shortest of such runs, best first."""
    few = start.shape[1]
    runs = []
    for q in range(1, min(LONGEST, few // 2) + 1):
        step = (start[:, q:] - start[:, :-q]) / q
        score = step.mean(axis=0) + 0.3 * step.std(axis=0)
        runs += [(float(score[c]), q, c) for c in range(1, few - q)]
    for _, q, c in sorted(runs)[:tries]:
        yield _repeated(start, microbatches, c, q)


def _repeated(start: Ints, m: int, c: int, q: int) -> Ints:
    """Microbatches c to c + q − 1 again and again, those before and after them as they were."""
    more = m - start.shape[1]
    period = float((start[:, c + q] - start[:, c]).mean())
    j = np.arange(m)
    middle = (j >= c) & (j < c + q + more)
    source = np.where(j < c, j, np.where(middle, c + (j - c) % q, j - more))
    shift = np.where(j < c, 0.0, np.where(middle, (j - c) // q * period, more / q * period))
    wish: Ints = (start[:, source] + shift).astype(np.int64)
    return wish


def shrunk(start: Ints, few: int, c: int) -> Ints:
    """Wished times of the first `c` microbatches and of as many of the last that there are `few` in all."""
    more = start.shape[1] - few
    shift = int((start[:, c + more] - start[:, c]).mean())
    wish: Ints = np.concatenate([start[:, :c], start[:, c + more :] - shift], axis=1)
    return wish
