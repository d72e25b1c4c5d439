"""Schedules from building blocks: for several stages a rank and for tight memory, where list scheduling fails.

A block (one microbatch's passes with fixed offsets, see `modulo`) is repeated, squeezed and its ramps filled (see
`unroll`), after arXiv 2405.15362, section 3. Blocks of several periods and shapes are tried, since a short period wins
with many microbatches and a short lifespan with few; annealing over what is wished improves the shape of a block (see
`shapes`), and then single passes of the best walks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..clock import Clock
from ..problem import Ints, Problem
from ..schedule import Schedule
from .beside import with_beside, without_beside
from .modulo import Block, eager, least_period, serial, settle_near, shorter, strides
from .ramps import Walk, improve, walk
from .shapes import Shape, improve_shape
from .steady import WORTH, extended, few_microbatches, in_flight, shrunk
from .template import Template, reversed_template, shortened, template
from .unroll import Habit, decode, repeat, to_schedule

HABITS = (Habit(1, 0, 2), Habit(1, 8, 2), Habit(2, 0, 2), Habit(0, 0, 1), Habit(1, 0, 1), Habit(2, 8, 1), Habit(1, 16, 2))
AS_ORDERED = Habit(0, 0, 1)
BENT = Habit(2, 8, 1)  # with which shapes are walked at first
POOL = 3  # how many different walks are improved
CHUNK = 0.3  # seconds of annealing at a time
HEATS = (0.05, 0.15, 0.4)  # what annealing takes lightly at first, in mean passes
SHAPE_HEATS = (1.0, 0.75)  # the same for a new shape, and for the best one again
LOOSE = 1.05  # times the least period a new shape is repeated at
SOME = 6  # times what is in flight at once: so many microbatches show what a shape is worth
RUN, LONGEST = 0.1, 3.0  # of the time goes to one annealing of a shape; seconds at most, since nothing ends it before
NEAR = 1.005  # times the target: there shapes have no more to gain
ROWS = 2  # microbatches that a shape tells apart at most
DROP = 0.3  # how often the worst of the pool is given up
SHARES = (0.1, 0.45)  # of the time is over when blocks, then shapes have had their turn
PASS, LANE = 2e-7, 1.5e-8  # seconds of work that decoding a pass and settling a lane count for
EACH = 20  # walks' time that making a schedule of one and verifying it takes, about
SLOW = 3e-3  # seconds a walk from which on annealing is done with few microbatches
CURIOUS = 0.4  # how often the arm that gained less lately is tried


def blocks(
    problem: Problem,
    clock: Clock,
    seconds: float,
    seed: int = 0,
    target: int = 0,
    others: Callable[[], Sequence[Schedule]] = tuple,
) -> Iterator[Schedule]:
    """Better and better schedules of `problem` for `seconds` of the clock, the first at once; fewer where a schedule of
    value `target` (µs) is found. None where its microbatches differ or passes need more than one stream. `others`: what
    others have found by now; each is walked again by its times (mended where it is over the memory) and improved here."""
    t = template(without_beside(problem))
    if t is None:
        return
    t = t._replace(rows=np.setdiff1d(np.arange(len(problem.passes)), problem.beside)[t.rows])
    target = max(target, least_value(t))
    search = _Search(t, clock, clock.used + seconds, target, np.random.default_rng(seed), others, few_microbatches(t))
    for best in search.run():
        yield with_beside(problem, to_schedule(problem, t, best.order))


def one_trial_each(problem: Problem) -> None:
    """One trial of each kind of annealing, which `blocks` comes to only on harder problems: for their kernels' sake."""
    t = template(problem)
    if t is None:
        return
    search = _Search(t, Clock(1.0, 100.0), 100.0, 0, np.random.default_rng(0), tuple)
    search.block, search.cost = serial(t), 1.0  # so long that one trial is all there is time for at a time
    for _ in search.unroll(search.block, HABITS[:1]):
        pass
    for arm in (search.shapes(1.0), search.anneal()):
        next(arm)


def least_value(t: Template) -> int:
    """The largest work of a rank, µs: no schedule is shorter."""
    return int(np.bincount(t.rank, t.duration).max()) * t.microbatches


@dataclass
class _Search:
    """The walks found so far, best first, and the time left."""

    t: Template
    clock: Clock
    deadline: float
    target: int
    random: np.random.Generator
    others: Callable[[], Sequence[Schedule]]
    few: tuple[int, ...] = ()  # numbers of microbatches, fewer than the problem's, to solve and extend
    known: int = 0  # how many of the others' schedules were walked
    pool: list[Walk] = field(default_factory=list)
    block: Block = field(init=False)  # the shortest found
    cost: float = 1e-3  # seconds that one walk takes
    settling: float = 1e-5  # seconds that one round of `settle_near` takes

    def run(self) -> Iterator[Walk]:
        """Ever better walks; not all of them, since taking one costs about as much as `EACH` walks."""
        said, when = -1, 0.0
        for _ in self.steps():
            better = self.pool and (said < 0 or self.pool[0].value < said)
            ended = self.left <= 0 or (self.pool and self.pool[0].value <= self.target)
            if better and (said < 0 or ended or self.clock.used - when > EACH * self.cost):
                said, when = self.pool[0].value, self.clock.used
                yield self.pool[0]
            if ended:
                return
        if self.pool and self.pool[0].value < said:
            yield self.pool[0]

    @property
    def left(self) -> float:
        return min(self.clock.left, self.deadline - self.clock.used)

    def seed(self) -> int:
        return int(self.random.integers(1 << 31))

    def offer(self, found: Walk | None) -> bool:
        """Keep a walk among the best, one of each value. Is it the best?"""
        if found is None or any(found.value == other.value for other in self.pool):
            return False
        self.pool = sorted([*self.pool, found], key=lambda w: w.value)[:POOL]
        return self.pool[0] is found

    def steps(self) -> Iterator[None]:
        """Each step may offer walks: first a block found at once, then further blocks, then shapes, then blocks and
        annealing by what each gains."""
        began, total = self.clock.used, self.left
        self.block = serial(self.t)
        for block in self.shorter(self.block, 300):
            self.block = block
        yield from self.unroll(self.block, HABITS[:1])
        at = self.clock.used
        walk(self.t, repeat(self.t, *self.block))
        self.clock.spend(self.t.rank.size * self.t.microbatches * PASS)
        self.cost = self.clock.used - at
        yield from self.adopt()
        arms = [self.more_blocks(), self.shapes(min(LONGEST, RUN * total)), self.anneal()]
        if self.few and self.cost > SLOW:
            arms.append(self.fewer())
        for arm, share in zip(arms[:2], SHARES, strict=True):
            for _ in arm:
                yield
                if self.clock.used - began > share * total:
                    break
        yield from self.take_turns(arms)

    def take_turns(self, arms: list[Iterator[None]]) -> Iterator[None]:
        """Advance the arm that lately gained most a second, another one now and then; each while it has more to try."""
        gain = np.full(len(arms), np.inf)
        while self.pool and arms:
            yield from self.adopt()
            arm = int(self.random.integers(len(arms))) if self.random.random() < CURIOUS else int(np.argmax(gain))
            began, before = self.clock.used, self.pool[0].value
            ended = False
            while not ended and (self.clock.used - began < 0.02 * self.left or self.clock.used - began < 0.05):
                ended = next(arms[arm], self) is self
                yield
            if ended:
                del arms[arm]
                gain = np.delete(gain, arm)
                continue
            rate = (before - self.pool[0].value) / (self.clock.used - began)
            gain[arm] = rate if np.isinf(gain[arm]) else 0.6 * gain[arm] + 0.4 * rate

    def fewer(self) -> Iterator[None]:
        """Anneal the walks of the pool with few microbatches, where a trial costs little, and repeat the steady state."""
        steps, mean = strides(self.t), float(self.t.duration.mean())
        while self.pool:
            for begin in list(self.pool):
                if self.left <= 0:
                    return
                few = self.few[int(self.random.integers(len(self.few)))]
                small = shortened(self.t, few)
                found = walk(small, shrunk(begin.start, few, int(self.random.integers(1, few - 1))), begin.habit)
                cost = self.cost * few / self.t.microbatches
                if found is not None:
                    rounds = max(1, int(min(CHUNK, self.left) / cost))
                    heat = mean * float(self.random.choice(HEATS))
                    found = improve(small, found, steps, least_value(small), rounds, heat, self.seed())
                    self.clock.spend(rounds * self.t.rank.size * few * PASS)
                    yield
                    yield from self.extend(found)
                yield

    def extend(self, found: Walk) -> Iterator[None]:
        """Walk a schedule of few microbatches with its steady state repeated, the likeliest periods first."""
        tries = int(np.clip(0.03 * self.left / self.cost, 3, 30))
        for wish in extended(found.start, self.t.microbatches, tries):
            yield from self.walks(wish, (found.habit,))

    def annealed(self, rounds: int, began: float, few: int) -> None:
        """Count so many walks of `few` microbatches, and learn what one of all takes."""
        self.clock.spend(rounds * self.t.rank.size * few * PASS)
        self.cost = max(1e-7, (self.clock.used - began) / rounds * self.t.microbatches / few)

    def shapes(self, seconds: float) -> Iterator[None]:
        """Anneal shapes for so many seconds each: from the shortest lives, and the best so far again, of many microbatches
        with few of them at first; until what is left to gain is in the ramps."""
        tight = Shape(eager(self.t)[None], int(LOOSE * least_period(self.t)), BENT)
        m, some = self.t.microbatches, SOME * in_flight(self.t)
        few = some if some <= WORTH * m else m
        best: tuple[int, Shape] | None = None
        while True:
            for count, again in ((few, False), *((count, True) for count in sorted({few, m}))):
                if self.left <= 0 or (self.pool and self.pool[0].value <= NEAR * self.target):
                    return
                begin = self.told_apart(best[1]) if again and best is not None else tight
                found = self.shaped(begin, count, seconds, SHAPE_HEATS[again])
                if found is not None:
                    shape, value = found[0], found[1].value
                    if count == few and (best is None or value < best[0]):
                        best = value, shape
                    yield from self.walks(repeat(self.t, shape.offset, shape.period), (shape.habit,))
                yield

    def told_apart(self, shape: Shape) -> Shape:
        """The shape, at random with its microbatches told apart."""
        rows = int(self.random.integers(len(shape.offset), ROWS + 1))
        return shape._replace(offset=np.repeat(shape.offset, rows // len(shape.offset), axis=0))

    def shaped(self, begin: Shape, few: int, seconds: float, heat: float) -> tuple[Shape, Walk] | None:
        """What annealing finds from a shape with the first `few` microbatches alone; `heat` in mean passes."""
        small, share = shortened(self.t, few), few / self.t.microbatches
        target = self.target if share == 1 else least_value(small)
        rounds = max(1, int(min(seconds, self.left) / (share * self.cost)))
        at, warm = self.clock.used, heat * float(self.t.duration.mean())
        found = improve_shape(small, begin, HABITS, strides(self.t), target, rounds, warm, self.seed())
        self.annealed(rounds, at, few)
        return found

    def more_blocks(self) -> Iterator[None]:
        for block in self.blocks():
            yield from self.unroll(block, HABITS)

    def settled(self, start: Ints, period: int, rounds: int) -> tuple[Block, bool]:
        """`settle_near` in at most a twentieth of the time left."""
        began = self.clock.used
        allowed = max(1, min(rounds, int(0.05 * max(0.0, self.left) / self.settling)))
        found = settle_near(self.t, start, period, allowed, self.seed())
        self.clock.spend(allowed * self.t.rank.size * LANE)
        self.settling = max(1e-7, (self.clock.used - began) / allowed)
        return found

    def shorter(self, best: Block, rounds: int) -> Iterator[Block]:
        """Legal blocks of falling period while time is left."""
        return shorter(self.t, best, lambda start, period: self.settled(start, period, rounds), lambda: self.left > 0)

    def blocks(self) -> Iterator[Block]:
        """Blocks to unroll: ever shorter legal ones, then ones of a little more and a little less than the least period
        found (a block over its memory or with overlaps is mended when it is unrolled)."""
        yield self.block
        work = int(np.bincount(self.t.rank, self.t.duration).max())
        rounds = 1000
        while True:
            for block in self.shorter(self.block, rounds):
                self.block = block
                yield block
            for period in (
                self.block.period,
                self.block.period + self.block.period // 50 + 1,
                work,
                (work + self.block.period) // 2,
            ):
                for start in (np.zeros_like(self.block.offset), self.block.offset):
                    yield self.settled(start, max(1, period), rounds)[0]
            rounds *= 2

    def adopt(self) -> Iterator[None]:
        """Walk the schedules that others found since the last time."""
        new = self.others()[self.known :]
        self.known += len(new)
        for schedule in new:
            yield from self.walks(schedule.timeline().start[self.t.rows], (AS_ORDERED, *HABITS))

    def unroll(self, block: Block, habits: tuple[Habit, ...]) -> Iterator[None]:
        yield from self.walks(repeat(self.t, block.offset, block.period), habits)

    def walks(self, wish: Ints, habits: tuple[Habit, ...]) -> Iterator[None]:
        for habit in habits:
            found = walk(self.t, wish, habit)
            self.clock.spend(self.cost)
            if self.offer(found):
                self.back_and_forth(self.pool[0])
            yield
            if found is None:
                return

    def back_and_forth(self, best: Walk) -> None:
        """Push everything late, then early again (justification, Valls et al. 2005): shortens ramps."""
        back = reversed_template(self.t)
        for _ in range(2):
            if self.left < 4 * self.cost:
                return
            self.clock.spend(2 * self.cost)
            late, start, _ = decode(back, _mirrored(self.t, best.start), Habit(0, 0, 2))
            if late < 0:
                return
            found = walk(self.t, _mirrored(back, start), best.habit)
            self.offer(found)
            if found is None or found.value >= best.value:
                return
            best = found

    def anneal(self) -> Iterator[None]:
        """Anneal the walks of the pool in turn, each time from where it came; sometimes the worst is dropped."""
        steps, mean = strides(self.t), float(self.t.duration.mean())
        while self.pool:
            for begin in list(self.pool):
                if self.left <= 0:
                    return
                rounds = max(1, int(min(CHUNK, self.left) / self.cost))
                heat = mean * float(self.random.choice(HEATS))
                at = self.clock.used
                found = improve(self.t, begin, steps, self.target, rounds, heat, self.seed())
                self.annealed(rounds, at, self.t.microbatches)
                if found.value < begin.value:
                    self.pool = [w for w in self.pool if w is not begin]
                    self.offer(found)
                yield
            if len(self.pool) > 1 and self.random.random() < DROP:
                self.pool.pop()


def _mirrored(t: Template, start: Ints) -> Ints:
    """Times of the reversed problem: what ended last starts first."""
    end = start + t.duration[:, None]
    times: Ints = (end.max() - end)[::-1, ::-1]
    return np.ascontiguousarray(times)
