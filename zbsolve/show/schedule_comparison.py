"""Compares schedules of the same work: step time, memory, where the time goes, and how the order differs from the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from ..problem import Problem
from ..schedule import Certificate, Schedule
from ..util.errors import BadInput
from ..util.text import first_difference, format_times

if TYPE_CHECKING:
    from ..profile.noise import UnderNoise

PARTS = ("S", "FQ")  # kinds that do a part of the work of F or of a backward
BACKWARDS = ("B", "W", "BW")


@dataclass(frozen=True, slots=True)
class TimeShares:
    """How one rank spends a step, µs; the parts add up to the step's value.

    work: its compute passes. warm_up: idle until its first backward starts, from the step's start. cool_down: idle after its
    last forward has ended, until the step's end. steady: idle between the two.
    """

    work: int
    warm_up: int
    steady: int
    cool_down: int


@dataclass(frozen=True, slots=True)
class OrderDifference:
    """How an order differs from the first schedule's. moved: the number of passes that follow another pass on their rank
    than in the first schedule. first: for each rank the first difference: (rank, place, its pass, this schedule's pass)."""

    moved: int
    first: tuple[tuple[int, int, str, str], ...]


@dataclass(frozen=True, slots=True)
class ComparedSchedule:
    """One schedule of a comparison.

    value: makespan or span (the problem's objective), µs. bubble: the share of it in which the busiest rank is idle. peaks:
    activation bytes of each rank. ratio: value over the first schedule's. shares: how each rank spends the step. difference:
    None for the first schedule, and for one with other passes. other_times: a sentence if passes have other times than in
    the first schedule, so that the ratio is not due to the order alone; otherwise "".
    """

    name: str
    schedule: Schedule
    value: int
    bubble: float
    peaks: tuple[int, ...]
    ratio: float
    shares: tuple[TimeShares, ...]
    difference: OrderDifference | None
    other_times: str

    @property
    def certificate(self) -> Certificate | None:
        """The schedule's certificate; None: nothing is proven."""
        return self.schedule.certificate

    @property
    def busiest(self) -> int:
        """The rank with the most work, the first of equals."""
        return max(range(len(self.shares)), key=lambda rank: self.shares[rank].work)

    def to_json(self) -> dict[str, Any]:
        """The numbers, without the schedule."""
        body = {name: getattr(self, name) for name in ("name", "value", "bubble", "ratio", "busiest")}
        certificate = None if self.certificate is None else self.certificate.to_json()
        lists = {"peaks": list(self.peaks), "shares": [asdict(share) for share in self.shares], "certificate": certificate}
        difference = None if self.difference is None else asdict(self.difference)
        times = {"source": self.schedule.problem.source, "other_times": self.other_times}
        return body | lists | {"difference": difference, **times}


@dataclass(frozen=True)
class ScheduleComparison:
    """Schedules of the same work, in the order given; the others are compared with the first. absent: (name, why) of those
    that are impossible. objective: "makespan" or "span". noise: step times where passes' times vary; None: not asked for."""

    rows: tuple[ComparedSchedule, ...]
    absent: tuple[tuple[str, str], ...]
    objective: str
    noise: UnderNoise | None = None

    @property
    def best(self) -> ComparedSchedule:
        """The schedule with the least value, the first of several."""
        return min(self.rows, key=lambda row: row.value)

    def to_json(self) -> dict[str, Any]:
        """All rows, and the impossible schedules with their reasons."""
        absent = [{"name": name, "why": why} for name, why in self.absent]
        rows = [row.to_json() for row in self.rows]
        noise = {} if self.noise is None else {"under_noise": self.noise.to_json()}
        return {"objective": self.objective, "best": self.best.name, "schedules": rows, "absent": absent, **noise}


def compare_schedules(named: Sequence[tuple[str, Schedule]], absent: Sequence[tuple[str, str]] = ()) -> ScheduleComparison:
    """Compare schedules with the first one.

    named: (name, schedule). Their problems may differ in placement and backward, but not in ranks, microbatches, layers or
        objective: such a schedule is put into `absent`.
    absent: (name, why) of further schedules, which do not exist.

    Raises BadInput if `named` is empty.
    """
    if not named:
        raise BadInput("compare: " + "; ".join(f"{name}: {why}" for name, why in absent))
    first = named[0][1]
    rows, left = [], list(absent)
    for name, schedule in named:
        if other := _other_work(first, schedule):
            left.append((name, other))
        else:
            rows.append(_compared(name, schedule, first))
    return ScheduleComparison(_with_shared_bounds(rows), tuple(left), first.problem.objective)


def _with_shared_bounds(rows: Sequence[ComparedSchedule]) -> tuple[ComparedSchedule, ...]:
    """The rows with the highest bound that was proven with any schedule of the same problem. A row that is shorter than it
    keeps its own: the bound is for lanes by number, and the row's order may differ from that."""
    known = sorted((row.certificate for row in rows if row.certificate), key=lambda proof: proof.bound)
    highest = {proof.digest: proof for proof in known if proof.checked}
    compared_schedules = list(rows)
    for i, row in enumerate(rows):
        own = row.certificate
        if own is not None and own.bound < (best := highest.get(own.digest, own)).bound <= row.value:
            raised = replace(own, bound=best.bound, relaxation=best.relaxation, ranks=best.ranks, proof=best.proof)
            compared_schedules[i] = replace(row, schedule=row.schedule.certified(raised))
    return tuple(compared_schedules)


def _other_work(first: Schedule, schedule: Schedule) -> str:
    """Why two schedules are not of the same work, or ""."""
    a, b = first.problem, schedule.problem
    if a.objective != b.objective:
        return f"its objective is {b.objective}, not {a.objective}"
    if a.microbatches != b.microbatches:
        return f"a step of {b.microbatches} microbatches, not {a.microbatches}: not the same work"
    if a.layers and b.layers and sum(a.layers) != sum(b.layers):
        return f"a model of {sum(b.layers)} layers, not {sum(a.layers)}: not the same work"
    if a.ranks != b.ranks:
        return f"on {b.ranks} ranks, not {a.ranks}"
    return ""


def _compared(name: str, schedule: Schedule, first: Schedule) -> ComparedSchedule:
    timeline = schedule.timeline()
    value, base = int(timeline.value), int(first.timeline().value)
    shares = tuple(time_shares(schedule, rank) for rank in range(schedule.problem.ranks))
    ratio = value / base if base else 1.0
    further = _difference(first, schedule), other_times(first.problem, schedule.problem)
    return ComparedSchedule(name, schedule, value, timeline.bubble_rate, timeline.peak_bytes, ratio, shares, *further)


def time_shares(schedule: Schedule, rank: int) -> TimeShares:
    """Where a rank's time goes in a step, see `TimeShares`."""
    problem, timeline = schedule.problem, schedule.timeline()
    rows = np.flatnonzero((problem.passes.rank == rank) & problem.computing)
    start, end = timeline.start[rows], timeline.end[rows]
    makespan = problem.objective == "makespan"
    begin = int(timeline.start.min() if makespan else timeline.windows[0][rank])
    stop = begin + int(timeline.value)
    backward = start[problem.passes.are("B", "BW")[rows]]
    forward = end[problem.passes.are("F")[rows]]
    first = int(backward.min(initial=stop))
    last = max(first, int(forward.max(initial=begin)))

    def idle(a: int, b: int) -> int:
        return b - a - int(np.clip(np.minimum(end, b) - np.maximum(start, a), 0, None).sum())

    return TimeShares(int((end - start).sum()), idle(begin, first), idle(first, last), idle(last, stop))


def _difference(first: Schedule, schedule: Schedule) -> OrderDifference | None:
    """How the order differs from the first one's; None for the first schedule itself, and for one with other passes."""
    if schedule is first or sorted(first.problem.names) != sorted(schedule.problem.names):
        return None
    before = _followed(first)
    moved = sum(before[name] != ahead for name, ahead in _followed(schedule).items())
    places = []
    for rank in range(first.problem.ranks):
        if differs := first_difference(*(each.order.get(f"compute:{rank}", ()) for each in (first, schedule))):
            places.append((rank, *differs))
    return OrderDifference(moved, tuple(places))


def other_times(first: Problem, problem: Problem) -> str:
    """A sentence on how the times of two problems of the same work differ; "" if no difference is found.

    With the same passes and the same layers, each pass and each message is compared. Otherwise the sum over all passes of a
    kind, for kinds that do the same work in both problems; these sums may differ by rounding.
    """
    if problem is first:
        return ""
    if first.layers == problem.layers and first.names == problem.names:
        return _one_by_one(first, problem)
    if any((kind in first.passes.kinds) != (kind in problem.passes.kinds) for kind in PARTS):
        return ""
    kinds = set(first.passes.kinds)
    whole = first.passes.kinds == problem.passes.kinds and not {"B", "BW"} <= kinds  # otherwise kinds do different work
    for kind in ("F", *(BACKWARDS if whole else ())):
        rows = first.rows(kind), problem.rows(kind)
        there, here = (
            int((each.passes.duration - each.sending)[of].sum()) for each, of in zip((first, problem), rows, strict=True)
        )
        if abs(here - there) > sum(map(len, rows)) / 2:
            there_in_all, in_all = format_times(there, here)
            return f"its passes {kind} take {in_all} in all, in place of {there_in_all}"
    return ""


def _one_by_one(first: Problem, problem: Problem) -> str:
    """A sentence on the first pass, or message, with another time in two problems with the same passes; or ""."""
    other = np.flatnonzero(first.passes.duration != problem.passes.duration)
    if len(other):
        i = int(other[0])
        there, here = format_times(*(int(each_problem.passes.duration[i]) for each_problem in (first, problem)))
        return f"{len(other):,} passes take longer or shorter, {first.names[i]} {here} in place of {there}"
    there_lag, here_lag = (_lags(each_problem) for each_problem in (first, problem))
    arcs = [arc for arc, lag in there_lag.items() if here_lag.get(arc, lag) != lag]
    if not arcs:
        return ""
    ends = " → ".join(first.names[i] for i in arcs[0])
    there, here = format_times(there_lag[arcs[0]], here_lag[arcs[0]])
    return f"{len(arcs):,} messages take longer or shorter, {ends} {here} in place of {there}"


def _lags(problem: Problem) -> dict[tuple[int, int], int]:
    e = problem.edges
    return dict(zip(zip(e.before.tolist(), e.after.tolist(), strict=True), e.lag.tolist(), strict=True))


def _followed(schedule: Schedule) -> dict[str, str | None]:
    """Name of a pass → name of the pass before it on its compute stream; None for the first pass."""
    streams = [names for stream, names in schedule.order.items() if stream.startswith("compute:")]
    return {b: a for names in streams for a, b in pairwise((None, *names)) if b is not None}
