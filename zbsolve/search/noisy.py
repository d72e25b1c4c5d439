"""The order that is best where times vary, by the mean or a quantile of its steps: sample average approximation.

A sample of steps is drawn once, and all orders see it (common random numbers). Annealing starts from several of the solver's
orders and moves passes along critical paths of steps that count: of all steps for the mean, of long ones for p95. Moves that
worsen the sample's aim are accepted less and less often. To avoid overfitting to the sample, the best orders are compared on
a second one, and the reported numbers come from a third.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from ..greedy.orders.critical_moves import OrderTables, decided_by_orders, move, possible, schedule_of, tables_of
from ..greedy.orders.order_times import CIRCLE, hold, retime, time_all
from ..greedy.syncs import with_syncs
from ..problem import Ints
from ..problem.tables import Bools
from ..profile.noise import AIMS, Aim, Noise, Spread, UnderNoise, under_noise
from ..schedule import Schedule
from ..schedule.handover import lacking
from ..schedule.timeline import Floats
from ..util.clock import Clock
from ..util.errors import interruption
from ..util.kernels import kernel, subkernel
from ..verifier import verify
from .certify import certified_as

NOISE_SOLVER = "search where times vary"
FOUND, SHORTEST = "this order", "the shortest by the given times"  # names of the two orders that are reported
SAMPLE, SAMPLED_PASSES, LEAST_SAMPLE = 1024, 2**21, 64  # steps of annealing's sample; passes of all its steps; least steps
# Steps by which starts are ranked, the best orders are compared, and the result is reported; passes of all of them.
FIRST, COMPARED, TOLD, MOST_PASSES = 500, 4_000, 10_000, 20_000_000
SEEDS = 1 << 40  # between the seeds of the three samples
LONGER, STARTS = 0.1, 24  # starts are at most so much longer than the shortest order by the given times; their number
SEARCHES, FIRST_SHARE = 4, 0.5  # annealed starts; their share of the time: the best of them has the rest
HOT, COLD = 2e-4, 1e-5  # annealing temperature at first and in the end, as a share of the aim
TURN_SECONDS, SECONDS_PER_DRAWN_PASS, MIN_TURNS = 0.2, 4e-10, 20  # of one round of turns; of a turn, per pass and step
REACH, FARTHER = 16, 0.6  # places that a pass moves at most; the chance of each further place

# --- Compiled ---


class Drawn(NamedTuple):
    """The sample and its times. took: µs of each pass; ends: when it ends under the current order; new: under the order that
    is tried, if `changed`; shape (passes, steps) each, `changed` (passes,). values: µs of each step. best: the best order.
    aims: the aim of the best and of the current order, µs."""

    took: Floats
    ends: Floats
    new: Floats
    changed: Bools
    values: Floats
    best: Ints
    aims: Floats


@kernel
def _anneal(t: OrderTables, s: Drawn, share: float, turns: int, heat: float, seed: int) -> None:
    """Take so many turns. heat: the temperature, as a share of the aim. share: the quantile that is the aim; 0: the mean."""
    np.random.seed(seed)
    time_all(t)
    s.changed[:] = True
    _run(t, s, 0, s.ends)
    s.changed[:] = False
    _values(t, s)
    s.aims[1] = _aim(s.values, share)
    if s.aims[1] < s.aims[0]:
        s.aims[0] = s.aims[1]
        s.best[:] = t.order
    longest, counted = np.argsort(-s.values), max(1, int(min(1.0, 2 * (1 - share)) * len(s.values)))
    for _ in range(turns):
        a, b, forward = _choice(t, s, longest[np.random.randint(counted)])
        if a < 0 or not possible(t, a, b, forward):
            continue
        move(t, a, b, forward)
        if retime(t, a, b, 1 if forward else b - a) == CIRCLE:
            move(t, a, b, not forward)
            continue
        low = len(t.order)
        for k in range(a, min(b + 2, t.streams[t.passes[t.order[a]].stream].last)):
            s.changed[t.order[k]] = True
            low = min(low, t.passes[t.order[k]].level)
        _run(t, s, low, s.new)
        _values(t, s)
        value = _aim(s.values, share)
        taken = value <= s.aims[1] * (1 - heat * np.log(np.random.random()))
        for at in range(low, len(t.order)):
            i = t.sorted[at]
            if taken and s.changed[i]:
                s.ends[i, :] = s.new[i]
            s.changed[i] = False
        if not taken:
            move(t, a, b, not forward)
            retime(t, a, b, b - a if forward else 1)
            continue
        hold(t, a, b + 1)
        longest = np.argsort(-s.values)
        s.aims[1] = value
        if value < s.aims[0]:
            s.aims[0] = value
            s.best[:] = t.order


@subkernel
def _run(t: OrderTables, s: Drawn, low: int, into: Floats) -> None:
    """Compute the ends of changed passes and of those that depend on them, from place `low` of `sorted` on. A pass whose
    ends stay the same is no longer changed."""
    passes, links = t.passes, t.links
    for at in range(low, len(t.order)):
        i = t.sorted[at]
        row, changed = passes[i], s.changed[i]
        before = t.order[row.place - 1] if row.place > t.streams[row.stream].first else -1
        for x in range(row.in_first, row.in_last):
            changed = changed or s.changed[links[x].other]
        if not (changed or (before >= 0 and s.changed[before])):
            continue
        end = into[i]
        end[:] = 0.0
        for x in range(row.in_first, row.in_last + (before >= 0)):
            j, lag = (links[x].other, links[x].lag) if x < row.in_last else (before, 0)
            source = into[j] if s.changed[j] else s.ends[j]
            for d in range(len(end)):
                end[d] = max(end[d], source[d] + lag)
        old, changed = s.ends[i], False
        for d in range(len(end)):
            end[d] += s.took[i, d]
            changed |= end[d] != old[d]
        s.changed[i] = changed


@subkernel
def _values(t: OrderTables, s: Drawn) -> None:
    """The step's time in each step of the sample."""
    s.values[:] = 0.0
    for number in range(len(t.streams)):
        i = t.order[t.streams[number].last - 1]
        end = s.new[i] if s.changed[i] else s.ends[i]
        for d in range(len(end)):
            s.values[d] = max(s.values[d], end[d])


@subkernel
def _aim(values: Floats, share: float) -> float:
    """The mean; or a quantile, as the mean of the steps around it, which varies less than one step does: on each side half
    as many as are above the quantile."""
    if share == 0:
        return float(values.mean())
    middle, aside = int(share * len(values)), int((1 - share) / 2 * len(values))
    return float(np.sort(values)[middle - aside : middle + aside + 1].mean())


@subkernel
def _choice(t: OrderTables, s: Drawn, d: int) -> tuple[int, int, bool]:
    """A random move at a place of the critical path of step d where a pass waits for the one before it on its stream: one of
    the two passes moves. a = −1: there is no such place."""
    passes, links, order = t.passes, t.links, t.order
    at, end, place, seen = -1, -1.0, -1, 0
    for number in range(len(t.streams)):
        i = order[t.streams[number].last - 1]
        if s.ends[i, d] > end:
            at, end = i, s.ends[i, d]
    while at >= 0:
        row, source, most = passes[at], -1, -1.0
        for x in range(row.in_first, row.in_last):
            j = links[x].other
            if s.ends[j, d] + links[x].lag > most:
                source, most = j, s.ends[j, d] + links[x].lag
        if row.place > t.streams[row.stream].first and s.ends[order[row.place - 1], d] >= most:
            source = order[row.place - 1]
            seen += 1
            if np.random.randint(seen) == 0:
                place = row.place
        at = source
    if place < 0:
        return -1, -1, True
    stream, far = t.streams[passes[order[place]].stream], 0
    while far < REACH and np.random.random() < FARTHER:
        far += 1
    if np.random.random() < 0.5:
        return place - 1, min(place + far, stream.last - 1), True
    return max(place - 1 - far, stream.first), place, False


# --- Searches ---


@dataclass(frozen=True, eq=False)
class LeastUnderNoise:
    """The result of the search. drawn: times of its order (`FOUND`), and of the order that is shortest by the given times
    (`SHORTEST`), in steps that were not used to choose between them."""

    aim: Aim
    drawn: UnderNoise

    @property
    def this(self) -> Spread:
        """The times of the order that was found."""
        return self.drawn.spreads[FOUND]

    @property
    def less(self) -> tuple[float, float, float]:
        """By which share it is below the shortest order at the aim, and the 95 % confidence interval."""
        return self.this.less(self.drawn.spreads[SHORTEST], self.aim)

    @property
    def bound(self) -> tuple[float, float, float]:
        """A lower bound for every order at the aim, µs, and its 95 % confidence interval."""
        (mean, off), share = self.this.bound, AIMS[self.aim.what]
        return self.this.bound_at(share) if share else (mean, mean - off, mean + off)

    def to_json(self) -> dict[str, Any]:
        """The aim, `less`, `bound` and `drawn`."""
        return {"prefer": self.aim.what, "less": self.less, "bound": self.bound, **self.drawn.to_json()}


def _holds(schedule: Schedule) -> bool:
    """Whether it is valid and fits the memory with its messages."""
    return not verify(schedule.problem, schedule) and not lacking(schedule).any()


@dataclass(eq=False)
class NoiseSearch:
    """One annealing. best: the schedule that it begins with, later the best one found."""

    best: Schedule
    aim: Aim
    seed: int
    tables: OrderTables = field(init=False)
    drawn: Drawn = field(init=False)

    def __post_init__(self) -> None:
        problem, self.tables = self.best.problem, tables_of(self.best)
        count = len(problem.passes)
        steps = int(np.clip(SAMPLED_PASSES // count, LEAST_SAMPLE, SAMPLE))
        took = np.concatenate(list(self.aim.noise.steps(problem, steps, self.seed + SEEDS))).T.copy()
        further = np.zeros(count, bool), np.zeros(steps), self.tables.order.copy(), np.full(2, np.inf)
        self.drawn = Drawn(took, np.zeros(took.shape), np.zeros(took.shape), *further)

    def go_on(self, clock: Clock, seconds: float) -> None:
        """Anneal for so long, round after round."""
        random, share = np.random.default_rng(self.seed), clock.share(seconds)
        turn = self.drawn.took.size * SECONDS_PER_DRAWN_PASS
        while not share.over:
            turns = max(MIN_TURNS, int(TURN_SECONDS / turn))
            heat, known = HOT * (COLD / HOT) ** (1 - share.left / seconds), self.drawn.aims[0]
            clock.spend(turns * turn)
            _anneal(self.tables, self.drawn, AIMS[self.aim.what], turns, heat, int(random.integers(1 << 31)))
            if self.drawn.aims[0] < known:
                schedule = schedule_of(self.best.problem, self.tables, self.drawn.best)
                self.best = schedule if _holds(schedule) else self.best


def best_under_noise(
    shortest: Schedule,
    others: Iterable[Schedule],
    aim: Aim,
    clock: Clock,
    told: Callable[[LeastUnderNoise], object] = lambda _: None,
) -> Schedule:
    """The order that is best where times vary, with a certificate of its value by the given times.

    shortest: the shortest schedule by the given times, with a certificate.
    others: further schedules of the same step to start from; those of another problem need certificates.
    aim: what the order is optimized for.
    clock: the time for the search. If memory is not decided by orders alone, no pass moves and the best start is taken.
    told: called with the result, on steps that were not used in the search.

    KeyboardInterrupt ends it early.
    """
    assert shortest.certificate is not None
    aim = replace(aim, noise=replace(aim.noise, shuffled=True))  # measured steps alone would be too small a sample
    seed, starts = shortest.certificate.seed, _near(shortest, others)
    known = {start.problem.digest: start.certificate for start in reversed(starts) if start.certificate is not None}
    ranked = [starts[i] for i in _ranked(starts, aim, seed + SEEDS, FIRST)]
    searches = [NoiseSearch(schedule, aim, seed) for schedule in ranked[:SEARCHES] if decided_by_orders(schedule.problem)]
    try:
        for number, search in enumerate(searches):
            search.go_on(clock, FIRST_SHARE * clock.left / (len(searches) - FIRST_SHARE * number))
        if searches:
            min(searches, key=lambda search: search.drawn.aims[0]).go_on(clock, clock.left)
    except (KeyboardInterrupt, SystemError) as error:
        if interruption(error) is None:
            raise
    last = [shortest, *(search.best for search in searches), *ranked[:1]]
    best = last[_ranked(last, aim, seed + 2 * SEEDS, COMPARED)[0]]
    draws = _draws((shortest, best), TOLD)
    told(LeastUnderNoise(aim, under_noise({FOUND: best, SHORTEST: shortest}, aim.noise, draws=draws, seed=seed + 3 * SEEDS)))
    if best is shortest:
        return best
    certificate = known[best.problem.digest]
    took = certificate.seconds + (0.0 if clock.counted else clock.used)
    return certified_as(best, replace(certificate, seconds=took), NOISE_SOLVER)


def _near(shortest: Schedule, others: Iterable[Schedule]) -> list[Schedule]:
    """`shortest`, then the other valid schedules that are not much longer, without duplicates, the shortest first."""
    schedules, room = [shortest], (1 + LONGER) * shortest.timeline().value
    known = (other for other in others if other.timeline().value <= room)
    for schedule in sorted(known, key=lambda other: other.timeline().value):
        again = any(schedule.problem is other.problem and schedule.order == other.order for other in schedules)
        if not again and len(schedules) <= STARTS and _holds(schedule):
            schedules.append(with_syncs(schedule))
    return schedules


def _draws(schedules: Sequence[Schedule], most: int) -> int:
    """How many steps to draw: `most`, or fewer if the schedules have many passes."""
    return int(np.clip(MOST_PASSES // sum(len(schedule.problem.passes) for schedule in schedules), LEAST_SAMPLE, most))


def _ranked(schedules: Sequence[Schedule], aim: Aim, seed: int, draws: int) -> list[int]:
    """Indices of the schedules, the best by a sample first."""
    named = {str(number): schedule for number, schedule in enumerate(schedules)}
    spreads = under_noise(named, aim.noise, draws=_draws(schedules, draws), seed=seed).spreads
    values = [aim.of(spreads[name].values) for name in named]
    return sorted(range(len(values)), key=values.__getitem__)


def try_noise(schedule: Schedule) -> None:
    """Run a few turns, to compile the kernels."""
    aim = Aim("mean", Noise(rank=0.01))
    under_noise({"": schedule}, aim.noise, draws=2)
    NoiseSearch(schedule, aim, 0).go_on(Clock(1.0, 1e-9), 1e-9)
