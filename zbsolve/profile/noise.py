"""Steps whose times vary: the order of a schedule is fixed, and the times of passes are drawn anew for each step.

An order is found for median times. In real steps a microbatch is longer on all stages, a rank is slower, or a pass stalls.
Here many steps of one order are drawn and simulated; all schedules see the same. `search.noisy` looks for the best order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from ..kinds import TABLE
from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..schedule import Schedule
from ..schedule.timeline import Floats, Paced, Precedence, longest_path, paced
from ..schedule.trace import Trace
from ..util.columns import compiled
from ..util.errors import BadInput
from ..util.kernels import kernel, subkernel
from ..util.text import parse_share
from .lengths import STALLED, lengths_of

DRAWS, CHUNK = 10_000, 256  # steps that are drawn by default; steps that share one random generator
BLOCK = 2**22  # times of passes that are drawn at once, to limit memory
MOST_WALKED = 2e9  # passes that memory bounds walk over in all draws of a schedule; above, they are left out
MOST_PASSES, LEAST_DRAWS = 100_000_000, 200  # passes of all draws of a schedule (some ten seconds); but so many draws
SURE, BELOW = 1.96, 0.025  # standard deviations that contain 95 % of a normal distribution; the share on each side outside
SHARES = (0.5, 0.95, 0.99)
AIMS = {"mean": 0.0, **{f"p{round(100 * share)}": share for share in SHARES}}  # name of an aim → its quantile; 0: the mean
RESAMPLED = 200  # bootstrap samples for the interval of a difference
MEDIAN = np.pi / 2  # variance of the median over variance of the mean, of normal numbers
MOST, LEAST = 2.0, 1e-3  # the largest deviation; the least factor that a measured pass counts with
_paced = compiled(paced)
STALL = re.compile(r"(.+)x([0-9]+(?:\.[0-9]*)?)")


@dataclass(frozen=True, eq=False)
class Measured:
    """Times of passes in the steps of a run, as multiples of their usual times. kinds: their labels. factors: shape (steps,
    kinds, ranks, chunks, microbatches, slices). off: `Trace.replay_error` of the run."""

    kinds: tuple[str, ...]
    factors: Floats
    off: float

    @classmethod
    def of(cls, trace: Trace, usual: Floats, rows: Ints) -> Measured:
        """usual: µs of each pass, shape (passes,). rows: passes that count. Places without a pass get the step's median."""
        p, took, slices = trace.problem.passes, trace.computed(), trace.problem.slices
        kinds, kind = np.unique(p.kind[rows], return_inverse=True)
        chunk = trace.problem.chunks[rows]
        sizes = len(kinds), trace.problem.ranks, int(chunk.max()) + 1, trace.problem.microbatches, slices
        factors = np.full((len(took), *sizes), np.nan)
        factors[:, kind, p.rank[rows], chunk, p.microbatch[rows], p.slice[rows]] = took[:, rows] / usual[rows]
        whole = np.nanmedian(factors, axis=(1, 2, 3, 4, 5), keepdims=True)
        names = tuple(p.kind_names[rows[kind == i][0]] for i in range(len(kinds)))
        return cls(names, np.where(np.isnan(factors), whole, factors), trace.replay_error())

    def places(self, problem: Problem) -> tuple[Ints, ...]:
        """For each pass of a problem the indices of the kind, chunk and slice whose factors it takes: its own kind, or one
        of the same half of a step (−1: neither, so it takes its rank's median); chunk and slice at the same share."""
        number = {kind: i for i, kind in enumerate(self.kinds)}
        halves = {TABLE[kind].half: i for kind, i in reversed(number.items()) if TABLE[kind].half}
        of = {kind: number.get(kind, halves.get(TABLE[kind].half, -1)) for kind in problem.passes.kinds}
        kind = np.array([of[name] for name in problem.passes.kind_names], np.int64)
        chunk, (chunks, _, slices) = problem.chunks, self.factors.shape[3:]
        places = chunk * chunks // (int(chunk.max()) + 1), problem.passes.slice * slices // problem.slices
        return np.where(problem.in_microbatch, kind, -1), *places

    def drawn(self, problem: Problem, step: Ints, random: np.random.Generator, shuffled: bool) -> Callable[[Ints], Floats]:
        """A function that gives the factors of some of these steps, shape (some, passes). step: measured steps, shape
        (CHUNK,), from whose ranks and microbatches the problem's take their factors."""
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
        """Whether the problem has as many ranks and microbatches as the run."""
        return bool(self.factors.shape[2] == problem.ranks and self.factors.shape[4] == problem.microbatches)


def _taken(random: np.random.Generator, wanted: int, count: int, shuffled: bool) -> Ints:
    """Which of `count` measured ranks or microbatches each of `wanted` takes, shape (CHUNK, wanted). If there are equally
    many, each takes its own, or if `shuffled` a random permutation; otherwise each takes any."""
    if wanted != count:
        return random.integers(count, size=(CHUNK, wanted))
    own = np.tile(np.arange(count), (CHUNK, 1))
    return random.permuted(own, axis=1) if shuffled else own


@dataclass(frozen=True)
class Noise:
    """How the times of compute passes vary around those of a problem, which are taken as medians.

    step, rank, microbatch, single: standard deviation of the logarithm of a random factor, for all passes of a step, of one
        rank in a step, of one microbatch in a step, or for each pass alone.
    stall, times: the chance that a pass stalls, and how many times as long it takes then.
    measured: steps of a run; each drawn step has the factors of one of them in place of all above. None: no run.
    shuffled: whether each draw permutes the microbatches of a measured step.
    lengths: relative lengths of microbatches in the run's problems (see `lengths.factors_of`), which are divided out since
        each measured step has lengths of its own; (): equal.

    Raises BadInput for deviations below 0 or above 2, chances above 1, and stalls that shorten a pass.
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
                known = "or a trace's file" if "=" in part else "and no trace's file has this name"
                raise BadInput(f"noise '{part}': step=1%,rank=1%,microbatch=20%,pass=3%,stall=0.1%x8, each once, {known}")
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
        """The noise of a run: its measured steps. Its deviations are estimated too, for use without `measured`: first what
        all passes of a step have in common, then those of a microbatch, of a rank, then the rest. Raises BadInput for
        fewer than three steps."""
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
        stalls, chance = left > np.log(STALLED), MEDIAN * apart**2 / each.shape[1]  # chance: variance of `whole` by sampling
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
        """The number of independent steps, however many are drawn: the measured ones. None: every draw is independent."""
        return None if self.measured is None else len(self.measured.factors)

    def steps(self, problem: Problem, draws: int, seed: int = 0) -> Iterator[Floats]:
        """µs of each pass in `draws` steps, in blocks of shape (steps, passes). Measured steps come in turn. All problems
        with as many ranks and microbatches see the same steps, and the same factors of ranks and microbatches."""
        sent, computing, base = problem.sending, problem.computing, _usual(problem, self.lengths)
        for begin in range(0, draws, CHUNK):
            factors, count = self._factors(problem, begin, seed), min(CHUNK, draws - begin)
            for block in np.array_split(np.arange(count), -(-count * len(base) // BLOCK)):
                yield np.asarray(base * np.where(computing, factors(block), 1.0) + sent, np.float64)

    def _factors(self, problem: Problem, begin: int, seed: int) -> Callable[[Ints], Floats]:
        """A function that gives the factors of some of the CHUNK steps from `begin` on, shape (some, passes)."""
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
    """What an order is optimized for where times vary: `what` (mean, p50, p95 or p99) of its steps under `noise`."""

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
        """µs: the mean or the quantile of these steps."""
        share = AIMS[self.what]
        return float(np.quantile(values, share)) if share else float(values.mean())


@dataclass(frozen=True, eq=False)
class Spread:
    """The times of a schedule's steps under noise. given: µs by the problem's own times. values: µs of each drawn step,
    shape (draws,). bounds: a lower bound for every order in each step, µs, shape (draws,). often: the share of steps in
    which each pass is on the critical path; took: its share of the time of all critical paths; shape (passes,) each.
    independent: the number of independent steps, for confidence intervals."""

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
        """The share of critical paths of each kind and stage, such as `3B`, the largest first."""
        p, shares = self.problem.passes, Counter[str]()
        for kind, stage, share in zip(p.kind_names, p.stage.tolist(), self.took.tolist(), strict=True):
            shares[f"{stage}{kind}"] += share
        return dict(sorted(shares.items(), key=lambda part: -part[1]))

    @property
    def mean(self) -> tuple[float, float]:
        """The mean in µs, and the half width of its 95 % confidence interval."""
        return self._mean(self.values)

    @property
    def bound(self) -> tuple[float, float]:
        """`mean` of the bounds: on average no order takes less, even one that is made anew for each step."""
        return self._mean(self.bounds)

    def at(self, share: float) -> tuple[float, float, float]:
        """The quantile `share` of steps, µs, and its 95 % confidence interval (by order statistics)."""
        return self._at(self.values, share)

    def bound_at(self, share: float) -> tuple[float, float, float]:
        """`at` of the bounds: no order has a smaller quantile, even one that is made anew for each step.

        Proof. Let an order take v_d in draw d, with bound b_d ≤ v_d, and let v_(k) be the k-th least v. The k draws with the
        least v have b_d ≤ v_(k). So k of the b or more are at most v_(k), hence b_(k) ≤ v_(k). Sample quantiles are means of
        neighbouring order statistics. For true distributions P(v ≤ x) ≤ P(b ≤ x) for every x.
        """
        return self._at(self.bounds, share)

    def _at(self, values: Floats, share: float) -> tuple[float, float, float]:
        ranked, n = np.sort(values), len(values)
        off = SURE * n * np.sqrt(share * (1 - share) / self.independent)
        low, high = ranked[np.clip([n * share - off, n * share + off], 0, n - 1).astype(np.int64)].tolist()
        return float(np.quantile(ranked, share)), low, high

    def shorter(self, other: Spread) -> float:
        """The share of draws in which this schedule is shorter than the other."""
        return float((self.values < other.values).mean())

    def less(self, other: Spread, aim: Aim) -> tuple[float, float, float]:
        """By which share this schedule is below the other at an aim, and its 95 % confidence interval. It is by bootstrap:
        draws of both are resampled in pairs, as many as are independent."""
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
        """Quantiles whose confidence interval has no upper end, for want of independent steps (p95 needs 72)."""
        steps = min(spread.independent for spread in self.spreads.values())
        return tuple(name for name, share in AIMS.items() if share**steps > BELOW)

    def to_json(self) -> dict[str, Any]:
        """The noise and each schedule's numbers."""
        noise = asdict(replace(self.noise, measured=None)) | {"measured": self.noise.independent}
        head = {"noise": noise, "draws": self.draws, "unbounded": self.unbounded}
        return head | {"schedules": {n: s.to_json() for n, s in self.spreads.items()}}


def under_noise(schedules: Mapping[str, Schedule], noise: Noise, *, draws: int | None = None, seed: int = 0) -> UnderNoise:
    """The times of each schedule's steps where times of passes vary.

    schedules: by name; each order is fixed. Others are compared with the first.
    noise: how times vary.
    draws: steps that are drawn; None: each measured step once, if the schedules have as many ranks and microbatches as the
        run; else 10,000, or fewer (at least 200) so that all have at most 100 million passes together.
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
        took = np.rint(took) if problem.slowdowns else took  # slowdowns are simulated in whole µs
        values.append(_walked(ordered, _slowed(paces, took) if problem.slowdowns else took, often, critical))
        bounds.append(_bounded(free, took, rank, computing, problem.ranks, held))
    shares = often / draws, critical / max(critical.sum(), 1.0)
    independent = min(draws, noise.independent or draws)
    return Spread(
        problem, float(schedule.timeline().value), np.concatenate(values), np.concatenate(bounds), *shares, independent
    )


def _usual(problem: Problem, lengths: tuple[float, ...]) -> Floats:
    """µs that each pass computes, shape (passes,), divided by its microbatch's length. lengths: see `Noise`."""
    own = (problem.passes.duration - problem.sending).astype(np.float64)
    if len(lengths) != problem.microbatches or problem.alike:
        return own
    inside = problem.in_microbatch
    return np.where(inside, own / np.array(lengths)[np.where(inside, problem.passes.microbatch, 0)], own)


def _apart(factors: Floats) -> float:
    """The standard deviation of factors, shape (steps, several), from whose rows a mean was subtracted."""
    count = factors.shape[1]
    return float(factors.std() * np.sqrt(count / max(count - 1, 1)))


def _arcs(problem: Problem, arcs: Precedence) -> tuple[Ints, Ints, Ints, Ints]:
    """Passes in topological order, and the arcs sorted by their second pass, in compressed rows: first, before, lag. Raises
    Deadlock."""
    _, turn = longest_path(problem, arcs)
    order = np.argsort(arcs.after, kind="stable")
    first = np.searchsorted(arcs.after[order], np.arange(len(turn) + 1))
    return np.argsort(turn), first, arcs.before[order], arcs.lag[order]


class _Held(NamedTuple):
    """Edges that hold bytes within a microbatch, in pools that cannot hold all at once. before (ascending), after, size,
    pool: of each edge. room: bytes of each pool. walk: passes by microbatch, each in topological order. place: of each pass
    in it. last: behind the last pass in it that frees what the pass takes."""

    before: Ints
    after: Ints
    size: Floats
    pool: Ints
    room: Floats
    walk: Ints
    place: Ints
    last: Ints


def _held(problem: Problem, order: Ints, draws: int) -> _Held:
    """The `_Held` of a problem. order: passes in topological order. It has no edges if walking them took too long."""
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
    """µs of each step, shape (steps,): the longest path. For each pass on it, adds 1 to `often` and its time to `critical`.
    took: µs of each pass, shape (steps, passes)."""
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
    """µs of passes that slow each other, shape (steps, passes). took: µs of each pass that runs alone."""
    slowed = np.zeros(took.shape)
    for d in range(len(took)):
        _, _, start, end, _ = _paced(p, took[d].astype(np.int64))
        slowed[d] = np.array(end) - np.array(start)
    return slowed


@kernel
def _bounded(
    arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, rank: Ints, computing: Bools, ranks: int, held: _Held
) -> Floats:
    """A lower bound for every order in each step, µs, shape (steps,): the largest of the longest path over edges alone, of
    each rank's earliest start plus its work plus the least time behind its passes, and of `_holding`."""
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


@subkernel
def _holding(arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, head: Floats, tail: Floats, h: _Held) -> float:
    """A lower bound of one step by memory over time, µs. Bytes are held from the start of the pass that takes them, at least
    for the longest path to the end of the pass that frees them. The sum of bytes · time in a pool is at most its room times
    the window from the earliest start to the last end there. Time before and behind that window is added."""
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
