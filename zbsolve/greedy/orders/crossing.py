"""Schedules joined from parts of others, cut in time.

By a moment of a schedule each lane has begun some of its microbatches. Where another schedule has begun about as many, the
rest of that one may follow: the begin of one schedule and the end of another. In the same way one schedule may do without
rounds that take long and repeat as many short ones. Joined times are only targets, which decoding repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph
from ..decoding import SECONDS_PER_DECODED_PASS, Decoded, DecodeRule, decode

MOMENTS = 64  # at which a schedule is cut, at most
ROUNDS = 8  # of those that take longest, and of the shortest ones: how many are tried for each number of microbatches
# A pass that has begun on one side of a cut alone costs so many times its duration, over the ranks. Joins are chosen by the
# expected value and a random time, in mean durations.
DISTANCE, NOISE = 4.0, 2.0
RULE = DecodeRule(0, 0, 2)
SECONDS_PER_JOINING = 0.02  # the effort of choosing joins
JOINING_SHARE = 0.05  # of the time left: what joining once may take

# A part of a schedule: starts of its passes, µs, shape (lanes, microbatches); when it begins and ends, µs; what is added to
# its microbatches.
Part = tuple[Ints, int, int, int]
Join = tuple[float, list[Part]]  # the expected value, µs


class Cuts(NamedTuple):
    """Moments at which a schedule may be cut: starts of the first and the last lane, and the end. start: µs, shape (lanes,
    microbatches). when: µs. begun: passes of each lane begun by then, shape (moments, lanes)."""

    start: Ints
    when: Ints
    begun: Ints


def joined(g: MicrobatchGraph, starts: Sequence[Ints], random: np.random.Generator, count: int) -> list[Decoded]:
    """What decoding makes of `count` promising joins, the shortest first. starts: of schedules, µs, shape (lanes,
    microbatches) each."""
    cuts = [_cuts(g, start) for start in starts]
    joins = [join for pair in permutations(cuts, 2) for join in _crossed(g, *pair)]
    joins += [join for one in cuts for join in _exchanged(g, one)]
    noise = random.exponential(NOISE * float(g.duration.mean()), len(joins))
    chosen = np.argsort(np.array([expected for expected, _ in joins]) + noise)[:count]
    decodings = (decode(g, _targets(g, joins[k][1]), RULE) for k in chosen)
    return sorted((one for one in decodings if one is not None), key=lambda one: one.value)


def joining_seconds(g: MicrobatchGraph, count: int) -> float:
    """The effort of `joined`."""
    return SECONDS_PER_JOINING + count * g.passes.size * SECONDS_PER_DECODED_PASS


def _cuts(g: MicrobatchGraph, start: Ints) -> Cuts:
    when = np.unique(start[[0, -1]])
    when = when[np.linspace(0, len(when) - 1, min(len(when), MOMENTS)).astype(np.int64)]
    when = np.append(when, (start + g.duration[:, None]).max())
    return Cuts(start, when, np.stack([np.searchsorted(row, when) for row in start], axis=1))


def _crossed(g: MicrobatchGraph, one: Cuts, other: Cuts) -> Iterator[Join]:
    """The begin of one schedule and the end of another: for each moment of the first the best one of the second."""
    apart = np.abs(one.begun[:, None] - other.begun) @ g.duration * (DISTANCE / len(g.capacity))
    expected = one.when[:, None] + (other.when[-1] - other.when) + apart
    for x, y in enumerate(expected[:-1, :-1].argmin(axis=1)):
        begin, end = (one.start, 0, int(one.when[x]), 0), (other.start, int(other.when[y]), int(other.when[-1]), 0)
        yield float(expected[x, y]), [begin, end]


def _exchanged(g: MicrobatchGraph, one: Cuts) -> Iterator[Join]:
    """A schedule without some rounds, and with as many others twice."""
    more, took = one.begun - one.begun[:, None], one.when - one.when[:, None]
    count = np.rint(np.median(more, axis=2)).astype(np.int64)
    apart = np.abs(more - count[..., None]) @ g.duration * (DISTANCE / len(g.capacity))
    for q in range(1, g.microbatches // 2):
        rounds = np.argwhere((count == q) & (took > 0))
        gain, cost = ((took + sign * apart)[tuple(rounds.T)] for sign in (-1, 1))
        for gone in np.argsort(-gain)[:ROUNDS]:
            for twice in np.argsort(cost)[:ROUNDS]:
                (a, b), (c, d) = one.when[rounds[gone]].tolist(), one.when[rounds[twice]].tolist()
                start, end, expected = one.start, int(one.when[-1]), float(one.when[-1] + cost[twice] - gain[gone])
                if d <= a:
                    yield expected, [(start, 0, d, 0), (start, c, a, q), (start, b, end, 0)]
                elif b <= c:
                    yield expected, [(start, 0, a, 0), (start, b, d, -q), (start, c, end, 0)]


def _targets(g: MicrobatchGraph, parts: Sequence[Part]) -> Ints:
    """Target starts of joined parts, µs, shape (lanes, microbatches). The last part has what is left."""
    m, now, begun = g.microbatches, 0, np.zeros(len(g.rank), np.int64)
    j, target = np.arange(m), np.empty((len(g.rank), m), np.int64)
    for start, begin, end, shift in parts:
        mine = j >= begun[:, None]
        target[mine] = (start[:, np.clip(j - shift, 0, m - 1)] - begin + now)[mine]
        begun, now = np.maximum(begun, (start < end).sum(axis=1) + shift), now + end - begin
    return target
