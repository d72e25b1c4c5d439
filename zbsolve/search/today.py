"""What a measured step could be: its bubble, the best schedules of the same passes in the same memory, equal stages.

Also the order of a schedule with the times of another profile. It is refused if its file does not tell what step it is of
(see `step_again`)."""

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
from ..problem import Problem
from ..problem.placement import describe, loop, vee
from ..profile.known_steps import step_again
from ..profile.measured_run import FROM_STEPS, LINKS
from ..profile.profile import Profile
from ..profile.slow import problem_now
from ..schedule import GIVEN, Schedule
from ..schedule.handover import lacking
from ..schedule.trace import Trace
from ..util.errors import BadInput, Infeasible, NotFound
from ..verifier import verify
from .certify import certified
from .solver import lacking_in_words, solve
from .state import State

PIECES = 2  # a stage is cut into so many to have two stages a rank
IDLE, LATE_SECONDS = 19, 60  # the nice level of a search beside a run; seconds after its time at which it is killed
UNITS = PIECES  # memory units that a microbatch of a stage counts if bytes were not counted: one a piece


@dataclass(frozen=True)
class Better:
    """The best schedule found on one placement. cut: whether each stage was cut in two equal halves for it, which were not
    measured."""

    placement: str
    cut: bool
    schedule: Schedule

    @property
    def value(self) -> int:
        """The value of its schedule, µs."""
        return int(self.schedule.timeline().value)

    def to_json(self) -> dict[str, Any]:
        """Placement, value, bound, gap, peaks."""
        certificate, peaks = self.schedule.certificate, list(self.schedule.timeline().peak_bytes)
        assert certificate is not None
        numbers = {"value": self.value, "bound": certificate.bound, "gap": certificate.gap, "peaks": peaks}
        return {"placement": self.placement, "cut": self.cut, **numbers}


@dataclass(frozen=True)
class Today:
    """A measured step and what it could be. measured: the median step, µs. bubble: the share of it in which the busiest rank
    is idle. replayed: µs of the same order with the median time of each pass; compare other schedules with this. counted:
    whether memory is in bytes; else a microbatch of a stage counts `UNITS`. peaks: of the order that ran. room: memory of
    each rank. even: µs of the same order with equal stages. found: the best schedules by placement, today's first. alike:
    whether microbatches are; else each is as long as in the median step."""

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
        """The shortest of `found`; of equal ones the first."""
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
    """What the step of a run could be within its memory: the problem's capacity, or else the highest peak of any rank, in
    bytes if the problem has some, otherwise in microbatches in flight.

    trace: the run. If it switched orders, the last one counts.
    seconds, effort: of all searches together: today's placement, a vee and a loop of two stages a rank. 0 seconds: none.
        Steps that are not plain, or whose stages do not make two a rank, keep their placement.
    seed: of the searches.
    progress: called with a placement's name and the state of its search.
    stop: asked between two searches.
    """
    trace = trace.by_order()[-1]
    problem = trace.problem if trace.facts.get(LINKS) == FROM_STEPS else problem_now(trace)
    counted = bool(problem.edges.bytes.any())
    if not counted:
        problem = with_units_in_flight(problem, UNITS)
    timeline = Schedule(problem, trace.schedule, trace.syncs).timeline()
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
    """The best order found in `seconds` for a schedule's passes on their ranks, within the problem's capacity. If it has
    none: within the schedule's own peaks, in bytes or in microbatches in flight."""
    problem = schedule.problem
    limited = problem if problem.edges.bytes.any() else with_units_in_flight(problem, UNITS)
    held = Schedule(limited, schedule.order, schedule.syncs)
    room = problem.capacity if limited is problem and problem.capacity else held.timeline().peak_bytes
    limited = replace(limited, capacity=tuple(room))
    solved = solve(limited, seconds=seconds, hint=Schedule(limited, held.order, held.syncs), prefer=None)
    return Schedule(problem, solved.order, solved.syncs)


def order_in_file(source: str, target: str, seconds: str) -> None:
    """`order_again` from file to file, at the lowest priority. The process ends a minute after its time at the latest, and
    when its standard input is closed."""
    Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    os.nice(IDLE)
    signal.alarm(round(float(seconds)) + LATE_SECONDS)
    order_again(Schedule.load(source), float(seconds)).save(target)


def _candidates(problem: Problem) -> list[tuple[str, Problem]]:
    """Placements to search, by name: today's, and if they can be built a vee and a loop of two stages a rank."""
    routes = problem.model_routes
    candidates = [(describe(routes[0]) if len(routes) == 1 else "several routes", problem)]
    for make in (vee, loop):
        placement = make(problem.ranks, PIECES)
        with suppress(BadInput, Infeasible):
            if routes != (placement,):
                candidates.append((describe(placement), restaged(problem, placement)))
    return candidates


def even_stages(problem: Problem) -> Problem:
    """The same step with equal stages: passes of a kind and microbatch compute for their mean, in whole µs. Sends stay."""
    p, sent = problem.passes, problem.sending
    alike = p.kind * (int(p.microbatch.max()) + 1) + p.microbatch
    mean = np.bincount(alike, p.duration - sent) / np.maximum(np.bincount(alike), 1)
    even = np.where(problem.computing, np.rint(mean[alike]).astype(np.int64) + sent, p.duration)
    return replace(problem, passes=replace(p, duration=even))


# --- An order on the times of a profile ---

SHOWN = 3  # passes that an error names of those that only one problem has


def timed_again(
    schedule: Schedule, profile: Profile, *, memory: str | int | None = None, replicas: int | None = None
) -> Schedule:
    """The schedule's order with the times and sizes of a profile, verified, with a certificate. The schedule itself if its
    times are already those.

    memory: bytes a rank; None: the profile's capacity. replicas: of the pipeline, if the schedule has passes C. Raises
    BadInput if the profile makes other passes, if the file does not tell the step, or if the order does not fit the memory;
    Infeasible if no order does.
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
    """`timed_again` without verification (see `why_not`) and certificate. Raises BadInput, Infeasible."""
    problem = step_again(schedule.problem, profile, memory, replicas)
    _check_same_passes(schedule.problem, problem)
    return Schedule(problem, schedule.order, schedule.syncs)


def why_not(schedule: Schedule) -> str:
    """Why a schedule is not valid, in words; or ""."""
    for violation in verify(schedule.problem, schedule):
        return str(violation)
    return lacking_in_words(schedule) if lacking(schedule).any() else ""


def _check_same_passes(before: Problem, now: Problem) -> None:
    """Raise BadInput unless both problems have the same passes on the same ranks."""
    old, other = set(before.names), set(now.names)
    if old != other:
        sides = (("it alone has", old - other), ("the profile's step alone has", other - old))
        shown = {what: (sorted(names)[:SHOWN], len(names) - SHOWN) for what, names in sides if names}
        raise BadInput("; ".join(f"{w} {', '.join(n)}{f' and {more} more' * (more > 0)}" for w, (n, more) in shown.items()))
    rows = np.array([now.index[name] for name in before.names], np.int64)
    moved = np.flatnonzero(now.passes.rank[rows] != before.passes.rank)
    if len(moved):
        raise BadInput(f"the profile's step has {before.names[int(moved[0])]} on another rank")
