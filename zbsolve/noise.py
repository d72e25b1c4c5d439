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
from typing import Any

import numpy as np

from .problem import Problem
from .profile.lengths import lengths_of
from .schedule import Schedule
from .tables import Bools, Ints
from .timeline import Floats, Precedence, longest_path
from .trace import Trace
from .util.errors import BadInput
from .util.kernels import kernel
from .util.text import parse_share

DRAWS, CHUNK = 10_000, 256  # steps that are drawn; so many share a generator of random numbers
BLOCK = 2**22  # times of passes that are drawn at once, so that memory stays small
MOST_PASSES, LEAST_DRAWS = 100_000_000, 200  # of all draws of a schedule together, some ten seconds; but so many draws
SURE = 1.96  # deviations of a normal number that leave 5 % outside
SHARES = (0.5, 0.95, 0.99)
AIMS = {"mean": 0.0, **{f"p{round(100 * share)}": share for share in SHARES}}  # what an order may be best at → its share
RESAMPLED = 200  # times that draws are drawn again, for what a difference may be
MEDIAN = np.pi / 2  # how much more the median of normal numbers varies than their mean
MEASURED = 20_000  # factors of single passes that are kept of a trace
STALL = re.compile(r"(.+)x([0-9]+(?:\.[0-9]*)?)")


@dataclass(frozen=True)
class Noise:
    """How the times of passes that compute vary about a problem's, which are taken as medians.

    step, rank, microbatch, single: standard deviation of the logarithm of a factor that all passes of a step have, those of
        one rank in it, those of one microbatch on all stages, or a pass alone.
    stall, times: the chance of a pass to stall, and how many times as long it is then.
    measured: logarithms of factors of single passes, drawn in place of `single` and stalls; (): none.
    measured_steps: the same of whole steps, in place of `step`.

    Factors are above 0, so no time gets negative. Raises BadInput for deviations below 0 or above 2, chances above 1, and
    stalls that are shorter.
    """

    step: float = 0.0
    rank: float = 0.0
    microbatch: float = 0.0
    single: float = 0.0
    stall: float = 0.0
    times: float = 1.0
    measured: tuple[float, ...] = ()
    measured_steps: tuple[float, ...] = ()

    @classmethod
    def read(cls, text: str) -> Noise:
        """From words such as `rank=1%,microbatch=20%,pass=3%,stall=0.1%x8`. Raises BadInput."""
        fields = {"step": "step", "rank": "rank", "microbatch": "microbatch", "pass": "single", "stall": "stall"}
        found = dict[str, Any]()
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            if name not in fields or fields[name] in found:
                raise BadInput(f"noise '{part}': rank=1%,microbatch=20%,pass=3%,stall=0.1%x8, each once, or a trace's file")
            stalls = STALL.fullmatch(value) if name == "stall" else None
            if name == "stall" and stalls is None:
                raise BadInput(f"noise '{part}': a chance, and how many times as long: stall=0.1%x8")
            found[fields[name]] = parse_share(stalls[1] if stalls else value, f"noise: {name}")
            if stalls:
                found["times"] = float(stalls[2])
        return cls(**found)

    def __post_init__(self) -> None:
        shares = (self.step, self.rank, self.microbatch, self.single, self.stall)
        if not 0 <= min(shares) <= max(shares) <= 2 or self.stall > 1 or not 1 <= self.times <= 1e6:
            raise BadInput("noise: deviations are 0 to 200%, a chance is 0 to 100%, a stall 1 to 1,000,000 times as long")

    @classmethod
    def of(cls, trace: Trace, where: str = "trace") -> Noise:
        """As it was in a run: of each pass's time beside the median of its lane, what a step's passes have in common, then a
        microbatch's, then a rank's, and the rest as it is. Raises BadInput for fewer than three steps."""
        if len(trace.steps) < 3:
            count = "one step does" if len(trace.steps) == 1 else f"{len(trace.steps)} steps do"
            raise BadInput(f"{where}: {count} not say how times vary: at least 3 are needed")
        problem, took, lengths = trace.problem, trace.computed(), lengths_of(trace)
        p, usual = problem.passes, lengths.usual
        rows = np.flatnonzero(problem.computing & problem.in_microbatch & (usual > 0) & (took > 0).all(axis=0))
        if not len(rows):
            raise BadInput(f"{where}: no pass takes time in every step")
        each = np.log(lengths.each)
        whole = np.median(each, axis=1, keepdims=True)
        rest = np.log(took[:, rows] / usual[rows]) - each[:, p.microbatch[rows]]
        present = np.unique(p.rank[rows])
        ranks = np.stack([np.median(rest[:, p.rank[rows] == rank], axis=1) for rank in present], axis=1)
        rest = rest - ranks[:, np.searchsorted(present, p.rank[rows])]
        several = np.sort(rest.ravel())
        kept = several[np.linspace(0, len(several) - 1, min(MEASURED, len(several))).astype(np.int64)]
        found = cls(0.0, _apart(ranks), _apart(each - whole), measured=tuple(kept.tolist()))
        seen = whole - np.median(whole)
        chance = MEDIAN * found.microbatch**2 / each.shape[1]  # of the median of so few microbatches
        seen = seen * np.sqrt(max(0.0, 1 - chance / max(seen.var(), 1e-30)))
        return replace(found, measured_steps=tuple(np.sort(seen.ravel()).tolist()))

    def __str__(self) -> str:
        whole = float(np.std(self.measured_steps)) if self.measured_steps else self.step
        parts = [f"steps {whole:.1%}", f"ranks {self.rank:.1%}", f"microbatches {self.microbatch:.1%}"]
        single = f"passes as measured ({np.std(self.measured):.1%})" if self.measured else f"passes {self.single:.1%}"
        stalls = [f"{self.stall:.2%} of passes are {self.times:g} times as long"] if self.stall else []
        return ", ".join([*parts, single, *stalls])

    def steps(self, problem: Problem, draws: int, seed: int = 0) -> Iterator[Floats]:
        """µs of each pass in `draws` steps, shape (some steps, passes). Factors of ranks and of microbatches are the same
        for all problems with as many."""
        p, own, sent, computing = problem.passes, problem.in_microbatch, problem.sending, problem.computing
        of = np.where(own, p.microbatch, 0)
        for number, begin in enumerate(range(0, draws, CHUNK)):
            shared, single = (np.random.default_rng([seed, number, turn]) for turn in (0, 1))
            ranks, steps = self.rank * shared.standard_normal((CHUNK, problem.ranks)), np.array(self.measured_steps)
            ranks += shared.choice(steps, (CHUNK, 1)) if len(steps) else self.step * shared.standard_normal((CHUNK, 1))
            microbatches = self.microbatch * shared.standard_normal((CHUNK, problem.microbatches))
            count = min(CHUNK, draws - begin)
            for block in np.array_split(np.arange(count), -(-count * len(p) // BLOCK)):
                factor = ranks[block][:, p.rank] + np.where(own, microbatches[block][:, of], 0.0)
                factor += self._alone(single, factor.shape)
                yield np.asarray((p.duration - sent) * np.exp(np.where(computing, factor, 0.0)) + sent, np.float64)

    def _alone(self, draw: np.random.Generator, shape: tuple[int, ...]) -> Floats:
        """Logarithms of the factors that passes have alone."""
        if self.measured:
            return draw.choice(np.array(self.measured), shape)
        alone = self.single * draw.standard_normal(shape)
        return alone + np.log(self.times) * (draw.random(shape) < self.stall) if self.stall else alone


@dataclass(frozen=True)
class Aim:
    """What an order is to be best at where times vary: `what` (mean, p50, p95 or p99) of its steps under `noise`."""

    what: str
    noise: Noise

    @classmethod
    def read(cls, text: str, noise: Callable[[str], Noise] = Noise.read) -> Aim:
        """From words such as `p95:rank=1%,microbatch=20%`; noise: reads what is behind the colon. Raises BadInput."""
        what, _, said = text.partition(":")
        if what not in AIMS or not said:
            raise BadInput(f"prefer '{text}': time, memory, or {', '.join(AIMS)} of a noise: p95:rank=1%,microbatch=20%")
        return cls(what, noise(said))

    def of(self, values: Floats) -> float:
        """µs: the mean of steps, or what such a share of them does not exceed."""
        share = AIMS[self.what]
        return float(np.quantile(values, share)) if share else float(values.mean())


@dataclass(frozen=True, eq=False)
class Spread:
    """What a schedule's steps take under noise. given: µs by the problem's own times. values: µs of each drawn step, shape
    (draws,). bounds: µs that no order of the problem's passes takes less than in that step, shape (draws,). often: in which
    share of steps each pass is on the critical path; took: its share of the time of critical paths; shape (passes,)."""

    problem: Problem
    given: float
    values: Floats
    bounds: Floats
    often: Floats
    took: Floats

    @property
    def critical(self) -> Floats:
        """Each rank's share of the time of critical paths, shape (ranks,)."""
        return np.asarray(np.bincount(self.problem.passes.rank, self.took, self.problem.ranks), np.float64)

    @property
    def parts(self) -> dict[str, float]:
        """The same of the passes of a kind and stage, such as `3B`, the largest first."""
        p, found = self.problem.passes, Counter[str]()
        for kind, stage, share in zip(p.kind_names, p.stage.tolist(), self.took.tolist(), strict=True):
            found[f"{stage}{kind}"] += share
        return dict(sorted(found.items(), key=lambda part: -part[1]))

    @property
    def mean(self) -> tuple[float, float]:
        """µs, and how far the true mean may be from it (95 %)."""
        return _mean(self.values)

    @property
    def bound(self) -> tuple[float, float]:
        """The same of `bounds`: on average no order takes less, even one that is made for each step's own times."""
        return _mean(self.bounds)

    def at(self, share: float) -> tuple[float, float, float]:
        """µs that such a share of steps does not exceed, and between what the true number is (95 %, by order statistics)."""
        ranked, n = np.sort(self.values), len(self.values)
        off = SURE * np.sqrt(n * share * (1 - share))
        places = np.clip([n * share, n * share - off, n * share + off], 0, n - 1).astype(np.int64)
        one, low, high = ranked[places].tolist()
        return one, low, high

    def shorter(self, other: Spread) -> float:
        """In which share of the draws it is shorter than the other."""
        return float((self.values < other.values).mean())

    def less(self, other: Spread, aim: Aim) -> tuple[float, float, float]:
        """By which share it is below the other, of the same draws, and between what that truly is (95 %: both are drawn
        again from their draws, a step of one with that of the other)."""
        again = np.random.default_rng(0).integers(len(self.values), size=(RESAMPLED, len(self.values)))
        found = [1 - aim.of(self.values[rows]) / aim.of(other.values[rows]) for rows in again]
        low, high = np.quantile(found, (0.025, 0.975)).tolist()
        return 1 - aim.of(self.values) / aim.of(other.values), low, high

    def to_json(self) -> dict[str, Any]:
        """Numbers for programs, µs and shares."""
        return {
            "given": self.given,
            "mean": self.mean,
            "bound": self.bound,
            **{name: self.at(share) for name, share in AIMS.items() if share},
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

    def to_json(self) -> dict[str, Any]:
        """The noise and each schedule's numbers."""
        noise = asdict(self.noise) | {"measured": len(self.noise.measured), "measured_steps": len(self.noise.measured_steps)}
        return {"noise": noise, "draws": self.draws, "schedules": {n: s.to_json() for n, s in self.spreads.items()}}


def under_noise(schedules: Mapping[str, Schedule], noise: Noise, *, draws: int | None = None, seed: int = 0) -> UnderNoise:
    """What each schedule's steps take where times vary.

    schedules: by name; each order is held fixed. The first is what others are held against.
    noise: how times vary.
    draws: steps that are drawn; None: 10,000, or fewer (200 at least) where they have 100 million passes together.
    seed: of the draws.

    Raises BadInput for no schedule, fewer than two draws, or another objective than the makespan; Deadlock.
    """
    wrong = [name for name, one in schedules.items() if one.problem.objective != "makespan"]
    if wrong or not schedules:
        raise BadInput(f"{wrong[0] if wrong else 'noise'}: schedules whose objective is the makespan are needed")
    if draws is None:
        most = max(len(one.problem.passes) for one in schedules.values())
        draws = int(np.clip(MOST_PASSES // most, LEAST_DRAWS, DRAWS))
    if draws < 2:
        raise BadInput(f"draws: {draws}: at least 2 are needed")
    return UnderNoise(noise, draws, {name: _spread(one, noise, draws, seed) for name, one in schedules.items()})


def _spread(schedule: Schedule, noise: Noise, draws: int, seed: int) -> Spread:
    problem = schedule.problem
    ordered, free = (_arcs(problem, arcs) for arcs in (schedule.precedence(), Precedence.of(problem)))
    rank, computing = problem.passes.rank.astype(np.int64), problem.computing
    often, critical = np.zeros(len(rank)), np.zeros(len(rank))
    values, bounds = list[Floats](), list[Floats]()
    for took in noise.steps(problem, draws, seed):
        values.append(_walked(ordered, took, often, critical))
        bounds.append(_bounded(free, took, rank, computing, problem.ranks))
    shares = often / draws, critical / max(critical.sum(), 1.0)
    return Spread(problem, float(schedule.timeline().value), np.concatenate(values), np.concatenate(bounds), *shares)


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


def _mean(values: Floats) -> tuple[float, float]:
    return float(values.mean()), float(SURE * values.std(ddof=1) / np.sqrt(len(values)))


@kernel
def _walked(arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, often: Floats, critical: Floats) -> Floats:
    """µs of each step, shape (steps,): the longest path. One for each pass on it is added to `often`, its time to
    `critical`."""
    (order, first, before, lag), (steps, count) = arcs, took.shape
    found = np.zeros(steps)
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
        found[d] = end[last]
        while last >= 0:
            often[last] += 1
            critical[last] += took[d, last]
            last = source[last]
    return found


@kernel
def _bounded(arcs: tuple[Ints, Ints, Ints, Ints], took: Floats, rank: Ints, computing: Bools, ranks: int) -> Floats:
    """µs that no order takes less than in each step, shape (steps,): the longest path without any order, and each rank's
    work between the earliest begin of a pass there and the least that comes behind one."""
    (order, first, before, lag), (steps, count) = arcs, took.shape
    found = np.zeros(steps)
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
            found[d] = max(found[d], head[i] + took[d, i] + tail[i])
            for e in range(first[i], first[i + 1]):
                tail[before[e]] = max(tail[before[e]], lag[e] + took[d, i] + tail[i])
            if computing[i]:
                work[rank[i]] += took[d, i]
                soonest[rank[i]], least[rank[i]] = min(soonest[rank[i]], head[i]), min(least[rank[i]], tail[i])
        for r in range(ranks):
            if work[r] > 0:
                found[d] = max(found[d], soonest[r] + work[r] + least[r])
    return found
