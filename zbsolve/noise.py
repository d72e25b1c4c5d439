"""Steps whose times vary: a schedule's order is held fixed, times are drawn anew for each step.

An order is found for medians. Real steps differ: a microbatch is longer or shorter on all stages, a rank is slower, a pass
stalls. Here many steps of the same order are drawn and run, each as the longest path. All schedules see the same draws.
(`search.noisy` looks for the order that is best so.)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from .kinds import TABLE
from .problem import Problem
from .profile.lengths import STALLED, lengths_of
from .schedule import Schedule
from .tables import Bools, Ints
from .timeline import Floats, Paced, Precedence, longest_path, paced
from .trace import Trace
from .util.columns import compiled
from .util.errors import BadInput
from .util.kernels import kernel
from .util.text import parse_share

DRAWS, CHUNK = 10_000, 256  # steps that are drawn; so many share a generator of random numbers
BLOCK = 2**22  # times of passes that are drawn at once, so that memory stays small
MOST_WALKED = 2e9  # passes on ways of what is held, in all draws of a schedule together
MOST_PASSES, LEAST_DRAWS = 100_000_000, 200  # of all draws of a schedule together, some ten seconds; but so many draws
SURE, BELOW = 1.96, 0.025  # deviations of a normal number that leave 5 % outside; half of that
SHARES = (0.5, 0.95, 0.99)
AIMS = {"mean": 0.0, **{f"p{round(100 * share)}": share for share in SHARES}}  # what an order may be best at → its share
RESAMPLED = 200  # times that draws are drawn again, for what a difference may be
MEDIAN = np.pi / 2  # how much more the median of normal numbers varies than their mean
MOST, LEAST = 2.0, 1e-3  # a deviation that is one; of its usual time, what a pass without any counts as
_paced = compiled(paced)
STALL = re.compile(r"(.+)x([0-9]+(?:\.[0-9]*)?)")


@dataclass(frozen=True, eq=False)
class Measured:
    """What passes took in the steps of a run, as multiples of their usual times. kinds: their labels; factors: shape (steps,
    kinds, ranks, chunks, microbatches, slices). off: how much longer (below 0: shorter) than measured the run's own order
    takes with each step's own times, the mean as a share."""

    kinds: tuple[str, ...]
    factors: Floats
    off: float

    @classmethod
    def of(cls, trace: Trace, usual: Floats, rows: Ints) -> Measured:
        """rows: of the passes that count. A place that no pass has (another route's) takes the step's median."""
        p, took, slices = trace.problem.passes, trace.computed(), trace.problem.slices
        kinds, kind = np.unique(p.kind[rows], return_inverse=True)
        chunk = _chunks(trace.problem)[rows]
        sizes = len(kinds), trace.problem.ranks, int(chunk.max()) + 1, trace.problem.microbatches, slices
        factors = np.full((len(took), *sizes), np.nan)
        factors[:, kind, p.rank[rows], chunk, p.microbatch[rows], p.slice[rows]] = took[:, rows] / usual[rows]
        whole = np.nanmedian(factors, axis=(1, 2, 3, 4, 5), keepdims=True)
        names = tuple(p.kind_names[rows[kind == i][0]] for i in range(len(kinds)))
        return cls(names, np.where(np.isnan(factors), whole, factors), trace.replay_error())

    def places(self, problem: Problem) -> tuple[Ints, ...]:
        """Of each pass the kind whose factors it takes (its own, else one of the same half of a step; −1: none, so it takes
        its rank's median), and the chunk and the slice that lie as far along as its own."""
        number = {kind: i for i, kind in enumerate(self.kinds)}
        halves = {TABLE[kind].half: i for kind, i in reversed(number.items()) if TABLE[kind].half}
        of = {kind: number.get(kind, halves.get(TABLE[kind].half, -1)) for kind in problem.passes.kinds}
        kind = np.array([of[name] for name in problem.passes.kind_names], np.int64)
        chunk, (chunks, _, slices) = _chunks(problem), self.factors.shape[3:]
        there = chunk * chunks // (int(chunk.max()) + 1), problem.passes.slice * slices // problem.slices
        return np.where(problem.in_microbatch, kind, -1), *there

    def drawn(self, problem: Problem, step: Ints, random: np.random.Generator, shuffled: bool) -> Callable[[Ints], Floats]:
        """step: numbers of measured steps, shape (CHUNK,). Their ranks and microbatches lend factors to the problem's.
        The function gives the factors of some of these steps, shape (some, passes)."""
        _, _, ranks, _, microbatches, _ = self.factors.shape
        microbatch = _taken(random, problem.microbatches, microbatches, shuffled)
        rank, (kind, chunk, piece), p = _taken(random, problem.ranks, ranks, False), self.places(problem), problem.passes
        of, level = np.where(problem.in_microbatch, p.microbatch, 0), np.median(self.factors, axis=(1, 3, 4, 5))

        def some(block: Ints) -> Floats:
            own, at = step[block, None], rank[block][:, p.rank]
            factors = self.factors[own, kind, at, chunk, microbatch[block][:, of], piece]
            return np.asarray(np.where(kind >= 0, factors, level[own, at]))

        return some

    def fits(self, problem: Problem) -> bool:
        """Whether it has as many ranks and microbatches as the run."""
        return bool(self.factors.shape[2] == problem.ranks and self.factors.shape[4] == problem.microbatches)


def _chunks(problem: Problem) -> Ints:
    """Which of its rank's stages each pass is of, shape (passes,)."""
    there = np.zeros((problem.stages, problem.ranks), np.int64)
    there[problem.passes.stage, problem.passes.rank] = 1
    return np.asarray((there.cumsum(axis=0) - 1)[problem.passes.stage, problem.passes.rank])


def _taken(random: np.random.Generator, wanted: int, count: int, shuffled: bool) -> Ints:
    """Which of `count` measured ones each of `wanted` takes, shape (CHUNK, wanted): its own where there are as many, or all
    in another order; else any."""
    if wanted != count:
        return random.integers(count, size=(CHUNK, wanted))
    own = np.tile(np.arange(count), (CHUNK, 1))
    return random.permuted(own, axis=1) if shuffled else own


@dataclass(frozen=True)
class Noise:
    """How the times of passes that compute vary about a problem's, which are taken as medians.

    step, rank, microbatch, single: standard deviation of the logarithm of a factor that all passes of a step have, those of
        one rank in it, those of one microbatch on all stages, or a pass alone.
    stall, times: the chance of a pass to stall, and how many times as long it is then.
    measured: steps of a run, one of which each drawn step is, in place of all that; None: none.
    shuffled: of measured steps, microbatches in another order in each draw.
    lengths: how long microbatches are in problems of the run (see `lengths.factors_of`). Steps have others, so these do not
        count in them; (): alike.

    Factors are not below 0, so no time gets negative. Raises BadInput for deviations below 0 or above 2, chances above 1,
    and stalls that are shorter.
    """

    step: float = 0.0
    rank: float = 0.0
    microbatch: float = 0.0
    single: float = 0.0
    stall: float = 0.0
    times: float = 1.0
    measured: Measured | None = None
    shuffled: bool = False
    lengths: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> Noise:
        """From words such as `rank=1%,microbatch=20%,pass=3%,stall=0.1%x8`. Raises BadInput."""
        fields = {"step": "step", "rank": "rank", "microbatch": "microbatch", "pass": "single", "stall": "stall"}
        parts = dict[str, Any]()
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in fields or fields[name] in parts:
                raise BadInput(f"noise '{part}': rank=1%,microbatch=20%,pass=3%,stall=0.1%x8, each once, or a trace's file")
            stalls = STALL.fullmatch(value) if name == "stall" else None
            if name == "stall" and stalls is None:
                raise BadInput(f"noise '{part}': a chance, and how many times as long: stall=0.1%x8")
            parts[fields[name]] = parse_share(stalls[1] if stalls else value, f"noise: {name}")
            if stalls:
                parts["times"] = float(stalls[2])
        return cls(**parts)

    def __post_init__(self) -> None:
        shares = (self.step, self.rank, self.microbatch, self.single, self.stall)
        if not 0 <= min(shares) <= max(shares) <= MOST or self.stall > 1 or not 1 <= self.times <= 1e6:
            raise BadInput("noise: deviations are 0 to 200%, a chance is 0 to 100%, a stall 1 to 1,000,000 times as long")

    @classmethod
    def of(cls, trace: Trace, where: str = "trace") -> Noise:
        """As it was in a run: its steps, whole. Deviations and stalls are what a step's passes have in common, then a
        microbatch's, then a rank's, then the rest: they count without `measured`. Raises BadInput for fewer than three
        steps."""
        if len(trace.steps) < 3:
            count = "one step does" if len(trace.steps) == 1 else f"{len(trace.steps)} steps do"
            raise BadInput(f"{where}: {count} not say how times vary: at least 3 are needed")
        problem, p, lengths = trace.problem, trace.problem.passes, lengths_of(trace)
        factors = tuple(trace.facts.get("microbatch_factors", ()))
        base, counted = _usual(problem, factors), problem.computing & problem.in_microbatch
        rows = np.flatnonzero(counted & (base > 0) & (lengths.usual > 0))
        if not len(rows):
            raise BadInput(f"{where}: no pass takes time")
        each = np.log(lengths.each)
        whole, apart = np.median(each, axis=1, keepdims=True), _apart(each - np.median(each, axis=1, keepdims=True))
        left = np.log(np.maximum(trace.computed()[:, rows] / lengths.usual[rows], LEAST)) - each[:, p.microbatch[rows]]
        present = np.unique(p.rank[rows])
        ranks = np.stack([np.median(left[:, p.rank[rows] == rank], axis=1) for rank in present], axis=1)
        left = left - ranks[:, np.searchsorted(present, p.rank[rows])]
        stalls, chance = left > np.log(STALLED), MEDIAN * apart**2 / each.shape[1]  # of the median of so few microbatches
        shares = np.sqrt(max(0.0, whole.var() - chance)), _apart(ranks), apart, left[~stalls].std()
        times = float(np.exp(np.median(left[stalls]))) if stalls.any() else 1.0
        step, rank, microbatch, single = np.minimum(shares, MOST).tolist()
        seen = Measured.of(trace, base, rows)
        return cls(step, rank, microbatch, single, float(stalls.mean()), times, measured=seen, lengths=factors)

    def __str__(self) -> str:
        parts = [f"steps {self.step:.1%}", f"ranks {self.rank:.1%}", f"microbatches {self.microbatch:.1%}"]
        parts += [f"passes {self.single:.1%}"]
        parts += [f"{self.stall:.2%} of passes are {self.times:.3g} times as long"] if self.stall else []
        if self.measured is None:
            return ", ".join(parts)
        count, off = len(self.measured.factors), self.measured.off
        return f"{count} measured steps ({', '.join(parts)}; with their own times the order that ran takes {off:+.1%})"

    @property
    def independent(self) -> int | None:
        """How many steps the draws can say no more than; None: as many as are drawn."""
        return None if self.measured is None else len(self.measured.factors)

    def steps(self, problem: Problem, draws: int, seed: int = 0) -> Iterator[Floats]:
        """µs of each pass in `draws` steps, shape (some steps, passes). Measured steps come in turn. They, and factors of
        ranks and of microbatches, are the same for all problems with as many."""
        sent, computing, base = problem.sending, problem.computing, _usual(problem, self.lengths)
        for begin in range(0, draws, CHUNK):
            factors, count = self._factors(problem, begin, seed), min(CHUNK, draws - begin)
            for block in np.array_split(np.arange(count), -(-count * len(base) // BLOCK)):
                yield np.asarray(base * np.where(computing, factors(block), 1.0) + sent, np.float64)

    def _factors(self, problem: Problem, begin: int, seed: int) -> Callable[[Ints], Floats]:
        """The factors of all passes in some of the CHUNK steps from `begin` on, shape (some, passes)."""
        p, own = problem.passes, problem.in_microbatch
        shared, single = (np.random.default_rng([seed, begin // CHUNK, turn]) for turn in (0, 1))
        if self.measured is not None:
            step = np.arange(begin, begin + CHUNK) % len(self.measured.factors)
            return self.measured.drawn(problem, step, shared, self.shuffled)
        ranks = self.rank * shared.standard_normal((CHUNK, problem.ranks))
        ranks += self.step * shared.standard_normal((CHUNK, 1))
        microbatches = self.microbatch * shared.standard_normal((CHUNK, problem.microbatches))
        of = np.where(own, p.microbatch, 0)

        def some(block: Ints) -> Floats:
            alone = self.single * single.standard_normal((len(block), len(of)))
            alone += np.log(self.times) * (single.random(alone.shape) < self.stall) if self.stall else 0.0
            return np.exp(ranks[block][:, p.rank] + np.where(own, microbatches[block][:, of], 0.0) + alone)

        return some


@dataclass(frozen=True)
class Aim:
    """What an order is to be best at where times vary: `what` (mean, p50, p95 or p99) of its steps under `noise`."""

    what: str
    noise: Noise

    @classmethod
    def read(cls, text: str, noise: Callable[[str], Noise] = Noise.read) -> Aim:
        """From words such as `p95:rank=1%,microbatch=20%`; noise: reads what is behind the colon. Raises BadInput."""
        what, _, words = text.partition(":")
        if what not in AIMS or not words:
            raise BadInput(f"prefer '{text}': time, memory, or {', '.join(AIMS)} of a noise: p95:rank=1%,microbatch=20%")
        return cls(what, noise(words))

    def of(self, values: Floats) -> float:
        """µs: the mean of steps, or what such a share of them does not exceed."""
        share = AIMS[self.what]
        return float(np.quantile(values, share)) if share else float(values.mean())


@dataclass(frozen=True, eq=False)
class Spread:
    """What a schedule's steps take under noise. given: µs by the problem's own times. values: µs of each drawn step, shape
    (draws,). bounds: µs that no order of the problem's passes takes less than in that step, shape (draws,). often: in which
    share of steps each pass is on the critical path; took: its share of the time of critical paths; shape (passes,).
    independent: steps that intervals count with, where draws are of fewer measured ones."""

    problem: Problem
    given: float
    values: Floats
    bounds: Floats
    often: Floats
    took: Floats
    independent: int

    @property
    def critical(self) -> Floats:
        """Each rank's share of the time of critical paths, shape (ranks,)."""
        return np.asarray(np.bincount(self.problem.passes.rank, self.took, self.problem.ranks), np.float64)

    @property
    def parts(self) -> dict[str, float]:
        """The same of the passes of a kind and stage, such as `3B`, the largest first."""
        p, shares = self.problem.passes, Counter[str]()
        for kind, stage, share in zip(p.kind_names, p.stage.tolist(), self.took.tolist(), strict=True):
            shares[f"{stage}{kind}"] += share
        return dict(sorted(shares.items(), key=lambda part: -part[1]))

    @property
    def mean(self) -> tuple[float, float]:
        """µs, and how far the true mean may be from it (95 %)."""
        return self._mean(self.values)

    @property
    def bound(self) -> tuple[float, float]:
        """The same of `bounds`: on average no order takes less, even one that is made for each step's own times."""
        return self._mean(self.bounds)

    def at(self, share: float) -> tuple[float, float, float]:
        """µs that such a share of steps does not exceed, and between what the true number is (95 %, by order statistics)."""
        return self._at(self.values, share)

    def bound_at(self, share: float) -> tuple[float, float, float]:
        """The same of `bounds`: of no order so large a share of steps takes less.

        Let an order take v_d in draw d, and b_d ≤ v_d. The k draws with the least v have b_d ≤ v_(k), the k-th least v. So k
        of the b or more are not above v_(k), and b_(k) ≤ v_(k) for every k. Quantiles are means of neighbours of these. True
        distributions keep it, since P(v ≤ x) ≤ P(b ≤ x) for every x. It holds for orders that change from step to step, too.
        """
        return self._at(self.bounds, share)

    def _at(self, values: Floats, share: float) -> tuple[float, float, float]:
        ranked, n = np.sort(values), len(values)
        off = SURE * n * np.sqrt(share * (1 - share) / self.independent)
        low, high = ranked[np.clip([n * share - off, n * share + off], 0, n - 1).astype(np.int64)].tolist()
        return float(np.quantile(ranked, share)), low, high

    def shorter(self, other: Spread) -> float:
        """In which share of the draws it is shorter than the other."""
        return float((self.values < other.values).mean())

    def less(self, other: Spread, aim: Aim) -> tuple[float, float, float]:
        """By which share it is below the other, of the same draws, and between what that truly is (95 %: both are drawn
        again from their draws, a step of one with that of the other, as many as are independent)."""
        again = np.random.default_rng(0).integers(len(self.values), size=(RESAMPLED, self.independent))
        gains = [1 - aim.of(self.values[rows]) / aim.of(other.values[rows]) for rows in again]
        low, high = np.quantile(gains, (0.025, 0.975)).tolist()
        return 1 - aim.of(self.values) / aim.of(other.values), low, high

    def _mean(self, values: Floats) -> tuple[float, float]:
        return float(values.mean()), float(SURE * values.std(ddof=1) / np.sqrt(self.independent))

    def to_json(self) -> dict[str, Any]:
        """Numbers for programs, µs and shares."""
        return {
            "given": self.given,
            "mean": self.mean,
            "bound": self.bound,
            **{name: self.at(share) for name, share in AIMS.items() if share},
            "bounds": {name: self.bound_at(share) for name, share in AIMS.items() if share},
            "critical": self.critical.tolist(),
            "critical_parts": {name: share for name, share in self.parts.items() if share > 0},
            "critical_often": {n: o for n, o in zip(self.problem.names, self.often.tolist(), strict=True) if o},
        }


@dataclass(frozen=True, eq=False)
class UnderNoise:
    """Schedules by name, each with its `Spread` under the same noise."""

    noise: Noise
    draws: int
    spreads: dict[str, Spread]

    @property
    def unbounded(self) -> tuple[str, ...]:
        """Quantiles that so few independent steps set no upper end to: their longest may well be below (p95 takes 72)."""
        steps = min(spread.independent for spread in self.spreads.values())
        return tuple(name for name, share in AIMS.items() if share**steps > BELOW)

    def to_json(self) -> dict[str, Any]:
        """The noise and each schedule's numbers."""
        noise = asdict(replace(self.noise, measured=None)) | {"measured": self.noise.independent}
        head = {"noise": noise, "draws": self.draws, "unbounded": self.unbounded}
        return head | {"schedules": {n: s.to_json() for n, s in self.spreads.items()}}


def under_noise(schedules: Mapping[str, Schedule], noise: Noise, *, draws: int | None = None, seed: int = 0) -> UnderNoise:
    """What each schedule's steps take where times vary.

    schedules: by name; each order is held fixed. The first is what others are held against.
    noise: how times vary.
    draws: steps that are drawn; None: measured ones once each, where schedules have as many ranks and microbatches; else
        10,000, or fewer (200 at least) where they have 100 million passes together.
    seed: of the draws.

    Raises BadInput for no schedule, fewer than two draws, or another objective than the makespan; Deadlock.
    """
    wrong = [name for name, schedule in schedules.items() if schedule.problem.objective != "makespan"]
    if wrong or not schedules:
        raise BadInput(f"{wrong[0] if wrong else 'noise'}: schedules whose objective is the makespan are needed")
    ran = noise.measured
    if draws is None and ran is not None and not noise.shuffled and all(ran.fits(s.problem) for s in schedules.values()):
        draws = len(ran.factors)
    if draws is None:
        most = max(len(schedule.problem.passes) for schedule in schedules.values())
        draws = int(np.clip(MOST_PASSES // most, LEAST_DRAWS, DRAWS))
    if draws < 2:
        raise BadInput(f"draws: {draws}: at least 2 are needed")
    return UnderNoise(noise, draws, {name: _spread(schedule, noise, draws, seed) for name, schedule in schedules.items()})


def _spread(schedule: Schedule, noise: Noise, draws: int, seed: int) -> Spread:
    problem = schedule.problem
    arcs = schedule.precedence()
    (ordered, free), paces = (_arcs(problem, some) for some in (arcs, Precedence.of(problem))), Paced.of(problem, arcs)
    rank, computing, held = problem.passes.rank.astype(np.int64), problem.computing, _held(problem, free[0], draws)
    often, critical = np.zeros(len(rank)), np.zeros(len(rank))
    values, bounds = list[Floats](), list[Floats]()
    for took in noise.steps(problem, draws, seed):
        took = np.rint(took) if problem.slowdowns else took  # as in problems
        values.append(_walked(ordered, _slowed(paces, took) if problem.slowdowns else took, often, critical))
        bounds.append(_bounded(free, took, rank, computing, problem.ranks, held))
    shares = often / draws, critical / max(critical.sum(), 1.0)
    independent = min(draws, noise.independent or draws)
    return Spread(
        problem, float(schedule.timeline().value), np.concatenate(values), np.concatenate(bounds), *shares, independent
    )


def _usual(problem: Problem, lengths: tuple[float, ...]) -> Floats:
    """µs that passes compute, of a microbatch whose length is 1 where the problem's have these."""
    own = (problem.passes.duration - problem.sending).astype(np.float64)
    if len(lengths) != problem.microbatches or problem.alike:
        return own
    inside = problem.in_microbatch
    return np.where(inside, own / np.array(lengths)[np.where(inside, problem.passes.microbatch, 0)], own)


def _apart(factors: Floats) -> float:
    """The deviation of factors, shape (steps, several), whose mean in each step was taken away."""
    count = factors.shape[1]
    return float(factors.std() * np.sqrt(count / max(count - 1, 1)))


def _arcs(problem: Problem, arcs: Precedence) -> tuple[Ints, Ints, Ints, Ints]:
    """Passes in an order that arcs allow; and the arcs by the pass behind them, in compressed rows: first, before, lag.
    Raises Deadlock."""
    _, turn = longest_path(problem, arcs)
    order = np.argsort(arcs.after, kind="stable")
    first = np.searchsorted(arcs.after[order], np.arange(len(turn) + 1))
    return np.argsort(turn), first, arcs.before[order], arcs.lag[order]


class _Held(NamedTuple):
    """Edges that hold bytes within a microbatch, in pools that cannot hold all at once. before (ascending), after, size,
    pool: of each. room: bytes of each pool. walk: passes by microbatch, in an order that arcs allow; place: of each pass in
    it; last: where all has come there that frees what a pass takes."""

    before: Ints
    after: Ints
    size: Floats
    pool: Ints
    room: Floats
    walk: Ints
    place: Ints
    last: Ints


def _held(problem: Problem, order: Ints, draws: int) -> _Held:
    """Of a problem whose passes can run in this order; no edges where looking at them in all draws took too long."""
    p, e, room = problem.passes, problem.edges, problem.room.astype(np.float64)
    own = np.where(problem.in_microbatch, p.microbatch, -1)
    pool = np.where(e.pool == 0, p.rank[e.before], problem.ranks - 1 + e.pool)
    short = np.bincount(pool, e.bytes, len(room)) > room
    rows = np.flatnonzero((e.bytes > 0) & (own[e.before] == own[e.after]) & (own[e.before] >= 0) & short[pool])
    rows, walk = rows[np.argsort(e.before[rows], kind="stable")], order[np.argsort(own[order], kind="stable")]
    last, place = np.zeros(len(p), np.int64), np.argsort(walk)
    np.maximum.at(last, e.before[rows], place[e.after[rows]] + 1)
    if (last - place)[np.unique(e.before[rows])].sum() * draws > MOST_WALKED:
        rows = rows[:0]
    return _Held(e.before[rows], e.after[rows], e.bytes[rows].astype(np.float64), pool[rows], room, walk, place, last)


@kernel
def _walked(arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, often: Floats, critical: Floats) -> Floats:
    """µs of each step, shape (steps,): the longest path. One for each pass on it is added to `often`, its time to
    `critical`."""
    (order, first, before, lag), (steps, count) = arcs, took.shape
    lengths = np.zeros(steps)
    end, source = np.zeros(count), np.zeros(count, np.int64)
    for d in range(steps):
        last = order[0]
        for i in order:
            begin, source[i] = 0.0, -1
            for e in range(first[i], first[i + 1]):
                if source[i] < 0 or end[before[e]] + lag[e] > begin:
                    begin, source[i] = end[before[e]] + lag[e], before[e]
            end[i] = begin + took[d, i]
            if end[i] > end[last]:
                last = i
        lengths[d] = end[last]
        while last >= 0:
            often[last] += 1
            critical[last] += took[d, last]
            last = source[last]
    return lengths


@kernel
def _slowed(p: Paced, took: Floats) -> Floats:
    """µs of passes that slow each other, shape (steps, passes). took: of each alone, whole µs."""
    slowed = np.zeros(took.shape)
    for d in range(len(took)):
        _, _, start, end, _ = _paced(p, took[d].astype(np.int64))
        slowed[d] = np.array(end) - np.array(start)
    return slowed


@kernel
def _bounded(
    arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, rank: Ints, computing: Bools, ranks: int, held: _Held
) -> Floats:
    """µs that no order takes less than in each step, shape (steps,): the longest path without any order, each rank's work
    between the earliest begin of a pass there and the least that comes behind one, and what memory asks for."""
    (order, first, before, lag), (steps, count) = arcs, took.shape
    bounds = np.zeros(steps)
    head, tail = np.zeros(count), np.zeros(count)
    work, soonest, least = np.zeros(ranks), np.zeros(ranks), np.zeros(ranks)
    for d in range(steps):
        tail[:], work[:], soonest[:], least[:] = 0.0, 0.0, np.inf, np.inf
        for i in order:
            head[i] = 0.0
            for e in range(first[i], first[i + 1]):
                head[i] = max(head[i], head[before[e]] + took[d, before[e]] + lag[e])
        for place in range(count - 1, -1, -1):
            i = order[place]
            bounds[d] = max(bounds[d], head[i] + took[d, i] + tail[i])
            for e in range(first[i], first[i + 1]):
                tail[before[e]] = max(tail[before[e]], lag[e] + took[d, i] + tail[i])
            if computing[i]:
                work[rank[i]] += took[d, i]
                soonest[rank[i]], least[rank[i]] = min(soonest[rank[i]], head[i]), min(least[rank[i]], tail[i])
        for r in range(ranks):
            if work[r] > 0:
                bounds[d] = max(bounds[d], soonest[r] + work[r] + least[r])
        bounds[d] = max(bounds[d], _holding(arcs, took[d], head, tail, held))
    return bounds


@kernel
def _holding(arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, head: Floats, tail: Floats, h: _Held) -> float:
    """µs that a step takes at least, for what pools must hold and how long. Bytes are held from the start of the pass that
    takes them, for the longest path to the end of the one that frees them. Of a pool all this together is no more than its
    room for the time between the earliest start and the least that comes behind an end, in whatever order."""
    _, first, before, lag = arcs
    area, soonest, least = np.zeros(len(h.room)), np.full(len(h.room), np.inf), np.full(len(h.room), np.inf)
    way = np.zeros(len(took))
    for at in range(len(h.before)):
        a, b, pool = h.before[at], h.after[at], h.pool[at]
        if at == 0 or h.before[at - 1] != a:
            for x in range(h.place[a], h.last[a]):
                i, longest = h.walk[x], 0.0 if h.walk[x] == a else -np.inf
                for e in range(first[i], first[i + 1]):
                    if h.place[a] <= h.place[before[e]] < x:
                        longest = max(longest, way[before[e]] + lag[e])
                way[i] = longest + took[i]
        area[pool] += h.size[at] * way[b]
        soonest[pool], least[pool] = min(soonest[pool], head[a]), min(least[pool], tail[b])
    longest = 0.0
    for pool in range(len(h.room)):
        if area[pool] > 0 and h.room[pool] > 0:
            longest = max(longest, soonest[pool] + area[pool] / h.room[pool] + least[pool])
    return longest
