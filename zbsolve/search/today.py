"""What a measured step could be: its bubble, the best schedules of the same passes in the same memory, even stages.

And a schedule's order on the times of a profile: the same passes on the same ranks, timed again. What its file does not say
of its step is refused (see `step_again`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any

import numpy as np

from ..build.restage import restaged, with_units_in_flight
from ..greedy.syncs import with_syncs
from ..handover import lacking
from ..known_steps import step_again
from ..placement import describe, loop, vee
from ..problem import Problem
from ..profile.measured_run import FROM_STEPS, LINKS
from ..profile.profile import Profile
from ..profile.slow import problem_now
from ..schedule import GIVEN, Schedule
from ..trace import Trace
from ..util.errors import BadInput, Infeasible, NotFound
from ..verifier import verify
from .certify import certified
from .solver import lacking_in_words, solve
from .state import State

PIECES = 2  # a stage is cut into, where a rank has one alone
IDLE, LATE_SECONDS = 19, 60  # how nice a search behind a run is, and when it ends, whatever it does
UNITS = PIECES  # that a microbatch of a stage holds where bytes were not counted: one a piece


@dataclass(frozen=True)
class Better:
    """The best schedule found on one placement. cut: whether each stage was cut in two for it. Both halves count as
    equal; they were not measured."""

    placement: str
    cut: bool
    schedule: Schedule

    @property
    def value(self) -> int:
        """µs of its step."""
        return int(self.schedule.timeline().value)

    def to_json(self) -> dict[str, Any]:
        """Placement, value, bound, gap, peaks."""
        certificate, peaks = self.schedule.certificate, list(self.schedule.timeline().peak_bytes)
        assert certificate is not None
        numbers = {"value": self.value, "bound": certificate.bound, "gap": certificate.gap, "peaks": peaks}
        return {"placement": self.placement, "cut": self.cut, **numbers}


@dataclass(frozen=True)
class Today:
    """A measured step and what it could be, µs. measured: the median step. bubble: the share of it in which its busiest rank
    does nothing. replayed: what the order takes by the medians of all steps, which is what other schedules are to be held
    against. counted: whether peaks are bytes; else a microbatch of a stage counts `UNITS`. peaks: of the order that ran.
    room: what each rank may hold. even: the same order where all stages take the same. found: by placement, that of today
    first. alike: whether microbatches are; else each is as long as in the median step.
    """

    measured: int
    bubble: float
    replayed: int
    counted: bool
    peaks: tuple[int, ...]
    room: tuple[int, ...]
    even: int
    found: tuple[Better, ...]
    alike: bool = True

    @property
    def best(self) -> Better | None:
        """The shortest; of equal ones the first."""
        return min(self.found, key=lambda better: better.value, default=None)

    def to_json(self) -> dict[str, Any]:
        """The fields; memory in bytes, or in microbatches of a stage in flight."""
        unit = 1 if self.counted else UNITS
        return {
            "measured": self.measured,
            "bubble": self.bubble,
            "replayed": self.replayed,
            "memory": "bytes" if self.counted else "microbatches in flight",
            "peaks": [peak / unit for peak in self.peaks],
            "room": [size / unit for size in self.room],
            "even_stages_save": self.replayed - self.even,
            "microbatches_alike": self.alike,
            "found": [better.to_json() | {"peaks": [x / unit for x in better.to_json()["peaks"]]} for better in self.found],
        }


def today_of(
    trace: Trace,
    *,
    seconds: float = 10.0,
    effort: float | None = None,
    seed: int = 0,
    progress: Callable[[str, State], None] = lambda name, state: None,
    stop: Callable[[], bool] = lambda: False,
) -> Today:
    """What the run's step could be, in the memory that it has now: its problem's capacity, or else the highest peak of any
    rank for all of them, in bytes where its problem has some, in microbatches in flight where it has none.

    The search shares its `seconds` (or `effort`) among today's placement, a vee and a loop of two stages a rank; 0 seconds:
    it is left out. Problems that are no plain step, or whose stages do not make two a rank, keep their placement. `stop` is
    asked between two of them. Of a run that has switched, today's order is its last one.
    """
    trace = trace.by_order()[-1]
    problem = trace.problem if trace.facts.get(LINKS) == FROM_STEPS else problem_now(trace)
    counted = bool(problem.edges.bytes.any())
    if not counted:
        problem = with_units_in_flight(problem, UNITS)
    ran = Schedule(problem, trace.schedule, trace.syncs)
    timeline = ran.timeline()
    room = problem.capacity or (max(timeline.peak_bytes),) * problem.ranks
    problem = replace(problem, capacity=room)
    step = trace.steps[trace.median_step]
    computed = np.where(problem.computing, trace.computed()[trace.median_step], 0)
    busiest = float(np.bincount(problem.passes.rank, computed, problem.ranks).max())  # µs
    asked = _candidates(problem) if effort is not None or seconds > 0 else []
    betters: list[Better] = []
    for name, option in asked:
        if stop() and betters:
            break
        hint = Schedule(option, trace.schedule, trace.syncs) if option is problem else None
        limits: dict[str, Any] = {"seconds": seconds / len(asked), "effort": None if effort is None else effort / len(asked)}
        with suppress(Infeasible, NotFound):
            schedule = solve(option, **limits, seed=seed, hint=hint, prefer=None, progress=partial(progress, name))
            betters.append(Better(name, option.stages > problem.stages, schedule))
    return Today(
        int(np.rint(step.value)),
        1 - busiest / step.value if step.value else 0.0,
        int(timeline.value),
        counted,
        timeline.peak_bytes,
        room,
        int(Schedule(even_stages(problem), trace.schedule, trace.syncs).timeline().value),
        tuple(betters),
        problem.alike,
    )


def order_again(schedule: Schedule, seconds: float) -> Schedule:
    """The best order that `seconds` find for a schedule's passes on the ranks where they are, in the problem's memory; where
    it limits none, in what each rank holds by the schedule, in bytes or in microbatches in flight."""
    problem = schedule.problem
    limited = problem if problem.edges.bytes.any() else with_units_in_flight(problem, UNITS)
    held = Schedule(limited, schedule.order, schedule.syncs)
    room = problem.capacity if limited is problem and problem.capacity else held.timeline().peak_bytes
    limited = replace(limited, capacity=tuple(room))
    solved = solve(limited, seconds=seconds, hint=Schedule(limited, held.order, held.syncs), prefer=None)
    return Schedule(problem, solved.order, solved.syncs)


def order_in_file(source: str, target: str, seconds: str) -> None:
    """`order_again` from file to file, behind all else that runs here. It ends a minute late at most, and with whoever holds
    the other end of standard input."""
    Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    os.nice(IDLE)
    signal.alarm(round(float(seconds)) + LATE_SECONDS)
    order_again(Schedule.load(source), float(seconds)).save(target)


def _candidates(problem: Problem) -> list[tuple[str, Problem]]:
    """Today's placement, and on a vee and a loop of two stages a rank what can be built there."""
    routes = problem.model_routes
    candidates = [(describe(routes[0]) if len(routes) == 1 else "several routes", problem)]
    for make in (vee, loop):
        placement = make(problem.ranks, PIECES)
        with suppress(BadInput, Infeasible):
            if routes != (placement,):
                candidates.append((describe(placement), restaged(problem, placement)))
    return candidates


def even_stages(problem: Problem) -> Problem:
    """The same step where the passes of one kind and microbatch compute as long at all stages: their mean, rounded to whole
    µs. What they send takes as long as before."""
    p, sent = problem.passes, problem.sending
    alike = p.kind * (int(p.microbatch.max()) + 1) + p.microbatch
    mean = np.bincount(alike, p.duration - sent) / np.maximum(np.bincount(alike), 1)
    even = np.where(problem.computing, np.rint(mean[alike]).astype(np.int64) + sent, p.duration)
    return replace(problem, passes=replace(p, duration=even))


# --- An order on the times of a profile ---

SHOWN = 3  # passes of one side alone that a refusal names


def timed_again(
    schedule: Schedule, profile: Profile, *, memory: str | int | None = None, replicas: int | None = None
) -> Schedule:
    """The schedule's order on a profile's times and sizes, verified, with a certificate; the schedule itself where its times
    are those.

    memory: bytes a rank; None: the profile's capacity. replicas: pipelines that sum gradients, where it has passes C.
    Raises BadInput where the profile makes other passes, where the file does not say what the step was, and where the order
    does not hold in the memory; Infeasible where no order does.
    """
    timed = order_on(schedule, profile, memory=memory, replicas=replicas)
    if timed.problem.digest == schedule.problem.digest and schedule.certificate is not None:
        return schedule
    if wrong := why_not(timed):
        raise BadInput(f"by the profile's times: {wrong}")
    return certified(with_syncs(timed), GIVEN if schedule.certificate is None else schedule.certificate.solver)


def order_on(
    schedule: Schedule, profile: Profile, *, memory: str | int | None = None, replicas: int | None = None
) -> Schedule:
    """The same, not verified: see `why_not`. Raises BadInput and Infeasible as `timed_again`, but for the order."""
    problem = step_again(schedule.problem, profile, memory, replicas)
    _check_same_passes(schedule.problem, problem)
    return Schedule(problem, schedule.order, schedule.syncs)


def why_not(schedule: Schedule) -> str:
    """Why an order does not hold, in words; or ""."""
    for violation in verify(schedule.problem, schedule):
        return str(violation)
    return lacking_in_words(schedule) if lacking(schedule).any() else ""


def _check_same_passes(before: Problem, now: Problem) -> None:
    """Raise BadInput where the passes are not the same, or lie elsewhere."""
    old, other = set(before.names), set(now.names)
    if old != other:
        sides = (("it alone has", old - other), ("the profile's step alone has", other - old))
        shown = {what: (sorted(names)[:SHOWN], len(names) - SHOWN) for what, names in sides if names}
        raise BadInput("; ".join(f"{w} {', '.join(n)}{f' and {more} more' * (more > 0)}" for w, (n, more) in shown.items()))
    rows = np.array([now.index[name] for name in before.names], np.int64)
    moved = np.flatnonzero(now.passes.rank[rows] != before.passes.rank)
    if len(moved):
        raise BadInput(f"the profile's step has {before.names[int(moved[0])]} on another rank")
