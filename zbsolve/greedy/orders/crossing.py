"""Schedules joined from parts of others, cut in time.

At a moment of a schedule each lane has begun some of its microbatches. Where another schedule has begun about as many, the
rest of that one may follow. So the begin of one schedule goes with the end of another. Likewise, in one schedule, rounds
that take long may go, and as many that are short may be repeated. Joined times are only targets, which decoding repairs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import NamedTuple

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph
from ..decoding import Decoded, DecodeRule, decode

MOMENTS = 64  # at which a schedule is cut, at most
JOINS = 120  # joins of the schedules that are decoded, the most promising ones
DISTANCE = 4.0  # what a pass that one side of a cut has begun and the other has not costs, in its duration over the ranks
ROUNDS = 8  # of those that take longest, and of the shortest: how many are tried for each number of microbatches
NOISE = 2.0  # joins are chosen by expected values with random ones added, in mean durations
RULE = DecodeRule(0, 0, 2)


class Part(NamedTuple):
    """A part of a schedule. start: of its passes, µs, shape (lanes, microbatches). begin, end: moments of the schedule, µs.
    shift: its microbatch j is microbatch j + shift here."""

    start: Ints
    begin: int
    end: int
    shift: int


class _Cuts(NamedTuple):
    """Where a schedule may be cut. when: moments, µs. begun: passes of each lane begun by then, shape (moments, lanes)."""

    start: Ints
    when: Ints
    begun: Ints

    @property
    def end(self) -> int:
        return int(self.when[-1])


def _cuts(g: MicrobatchGraph, start: Ints) -> _Cuts:
    """Cuts at starts of the first and the last lane, and at the end."""
    when = np.unique(start[[0, -1]])
    when = when[np.linspace(0, len(when) - 1, min(len(when), MOMENTS)).astype(np.int64)]
    when = np.append(when, (start + g.duration[:, None]).max())
    return _Cuts(start, when, np.stack([np.searchsorted(row, when) for row in start], axis=1))


def joined(g: MicrobatchGraph, starts: Sequence[Ints], random: np.random.Generator, count: int = JOINS) -> list[Decoded]:
    """What decoding makes of some promising joins, the shortest first. starts: of schedules, µs, shape (lanes,
    microbatches) each."""
    cuts = [_cuts(g, start) for start in starts]
    joins = [join for one, other in permutations(cuts, 2) for join in _crossed(g, one, other)]
    joins += [join for one in cuts for join in _exchanged(g, one)]
    noise = random.exponential(NOISE * float(g.duration.mean()), len(joins))
    best = np.argsort(np.array([expected for expected, _ in joins]) + noise)[:count]
    decodings = (decode(g, _targets(g, joins[k][1]), RULE) for k in best)
    return sorted((one for one in decodings if one is not None), key=lambda one: one.value)


Join = tuple[float, tuple[Part, ...]]  # the expected value, µs, and the parts


def _distance(g: MicrobatchGraph) -> np.ndarray:
    return g.duration * (DISTANCE / len(g.capacity))


def _crossed(g: MicrobatchGraph, one: _Cuts, other: _Cuts) -> Iterator[Join]:
    """The begin of one schedule with the end of another: for each moment of the first the best one of the second."""
    apart = np.abs(one.begun[:, None] - other.begun[None]) @ _distance(g)
    expected = one.when[:, None] + (other.end - other.when)[None] + apart
    for x, y in enumerate(expected.argmin(axis=1)[:-1]):
        if x and y < len(other.when) - 1:
            yield (
                float(expected[x, y]),
                (Part(one.start, 0, one.when[x], 0), Part(other.start, other.when[y], other.end, 0)),
            )


def _exchanged(g: MicrobatchGraph, one: _Cuts) -> Iterator[Join]:
    """A schedule without some rounds, and with as many others twice."""
    more = one.begun[None] - one.begun[:, None]
    count = np.rint(np.median(more, axis=2)).astype(np.int64)
    apart, took = np.abs(more - count[..., None]) @ _distance(g), one.when[None] - one.when[:, None]
    for q in range(1, g.microbatches // 2):
        a, z = np.nonzero((count == q) & (took > 0))
        cost = took[a, z] + apart[a, z]
        loss = took[a, z] - apart[a, z]
        for gone in np.argsort(-loss)[:ROUNDS]:
            for twice in np.argsort(cost)[:ROUNDS]:
                out, again = (int(one.when[k]) for k in (a[gone], z[gone])), (int(one.when[k]) for k in (a[twice], z[twice]))
                parts = _parts(one, *out, *again, q)
                if parts:
                    yield float(one.end + cost[twice] - loss[gone]), parts


def _parts(one: _Cuts, gone: int, gone_end: int, twice: int, twice_end: int, q: int) -> tuple[Part, ...]:
    if twice_end <= gone:
        return (
            Part(one.start, 0, twice_end, 0),
            Part(one.start, twice, gone, q),
            Part(one.start, gone_end, one.end, 0),
        )
    if gone_end <= twice:
        return (
            Part(one.start, 0, gone, 0),
            Part(one.start, gone_end, twice_end, -q),
            Part(one.start, twice, one.end, 0),
        )
    return ()


def _targets(g: MicrobatchGraph, parts: Sequence[Part]) -> Ints:
    """Target starts of joined parts, µs, shape (lanes, microbatches)."""
    begun, now = np.zeros(len(g.rank), np.int64), 0
    target, j = np.zeros((len(g.rank), g.microbatches), np.int64), np.arange(g.microbatches)
    for k, part in enumerate(parts):
        last = k == len(parts) - 1
        ends = (part.start < part.end).sum(axis=1) + part.shift
        ends = np.full(len(begun), g.microbatches) if last else np.clip(ends, begun, g.microbatches)
        source = np.clip(j - part.shift, 0, g.microbatches - 1)
        mine = (j >= begun[:, None]) & (j < ends[:, None])
        target[mine] = (part.start[:, source] - part.begin + now)[mine]
        begun, now = ends, now + part.end - part.begin
    return target
