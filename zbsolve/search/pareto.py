"""The frontier: the shortest step found and its lower bound, over the memory of a rank (see `memory_limits`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..problem import Ints, Problem
from ..problem.placement import describe
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Schedule
from ..systems.table import system
from ..util.clock import Clock
from ..util.errors import BadInput
from ..util.files import write_document
from .memory_limits import MemoryLimits, Named, Point, known_orders, needs
from .solver import ready
from .state import State
from .task_runner import TaskRunner

MAX_POINTS = 1000
AMPLE = 1 << 50  # bytes: a limit that never binds, to compute the bytes of a rank beside activations


@dataclass(frozen=True)
class Frontier:
    """The frontier of a step. fixed: bytes of each rank beside activations. work: µs of the busiest rank. device: bytes of
    the profiled device, or None. seconds, effort: the limit of the search. points: by rising memory, from the least in which
    one microbatch fits to the peak of the best schedule without a limit. named: named schedules. source: the profile's.
    free_bound, free_proof: a lower bound that holds without a memory limit, µs, and its proof."""

    model: str
    ranks: int
    microbatches: int
    placement: str
    objective: str
    fixed: tuple[int, ...]
    work: int
    device: int | None
    seconds: float
    effort: float | None
    seed: int
    points: tuple[Point, ...]
    named: tuple[Named, ...]
    source: str = "measured"
    free_bound: int = 0
    free_proof: str = ""

    def to_json(self) -> dict[str, Any]:
        """All fields but the schedules."""
        body = {name: getattr(self, name) for name in self.__dataclass_fields__}
        body |= {"fixed": list(self.fixed), "points": [point.to_json() for point in self.points]}
        return {**body, "named": [asdict(limit) for limit in self.named]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a frontier file, whole or not at all; `-` is standard output."""
        write_document(path, "frontier", self.to_json())


def frontier(
    asked: Profile | Problem,
    step: Step | None = None,
    *,
    points: int = 12,
    seconds: float = 60.0,
    effort: float | None = None,
    progress: Callable[[str, State], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Frontier:
    """Value and bound over memory, of a profile's step or of a problem.

    asked: a profile, or a problem, whose memory is that of activations alone. Its own memory limit is ignored.
    step: the step of a profile; None for a problem.
    points: the least number of memory limits (peaks of named schedules are added); fewer if the range has fewer bytes.
    seconds, effort: of all points together, as in `solve`.
    progress: called with a point's number and the state of its search.
    stop: when it returns True no further point is solved, and points without a schedule are left out.
    options: of `solve`. `workers` (`zbsolve.solvers_on`): who solves, in place of this process.

    Limits are solved from unlimited memory down, then open ones again from the tightest up, each from the best schedule that
    fits. If the time ends on the way down, the tightest limit without a schedule is still solved, since its schedule fits
    all others. Limits are closer together where memory is tight.

    Raises BadInput, and Infeasible if a rank's parameters fit no memory.
    """
    if points < 2:
        raise BadInput(f"points: at least 2 are needed, got {points}")
    if points > MAX_POINTS:
        raise BadInput(f"points: {points} are more than a frontier has ({MAX_POINTS})")
    ready()
    clock, options = Clock(seconds, effort), {"seed": 0, **options}
    if (step is None) == isinstance(asked, Profile):
        raise BadInput("frontier: a profile needs a step, and a problem is one")
    free, fixed, named, of = _of_problem(asked) if isinstance(asked, Problem) else _of_profile(asked, step)
    if not free.taken.any():
        lacks = "zbsolve numbers --activation 1GiB says how many bytes a layer holds for a microbatch"
        raise BadInput(f"frontier: no pass holds any bytes, so all limits of memory are alike; {lacks}")
    runner = TaskRunner(options.pop("workers", None), clock.counted, progress=progress)
    limits = MemoryLimits(free, fixed, named, clock, options, runner, stop)
    limits.solve((None, 1 / (points + 1), "unlimited"))
    limits.plan(points)
    limits.down()
    limits.up()
    if (proven := limits.bound(None)) is not None:
        of |= {"free_bound": proven[1].bound, "free_proof": proven[1].proof}
    of |= {"ranks": free.ranks, "microbatches": free.microbatches, "objective": free.objective, "work": free.work}
    of |= {"seconds": seconds, "effort": effort, "seed": options["seed"], "fixed": tuple(fixed.tolist())}
    return Frontier(points=limits.points(), named=named, **of)


# A step without a limit of memory; bytes a rank beside activations; the literature's schedules; fields of `Frontier`.
_Asked = tuple[Problem, Ints, tuple[Named, ...], dict[str, Any]]


def _of_profile(profile: Profile, step: Any) -> _Asked:
    free = replace(step, memory=None).problem(replace(profile, capacity=None))
    fixed = AMPLE - np.array(replace(step, memory=AMPLE).problem(profile).capacity, np.int64)
    of = {"model": profile.title, "placement": step.title, "device": profile.capacity, "source": profile.source}
    return free, fixed, _named(profile, step, fixed), of


def _of_problem(problem: Problem) -> _Asked:
    free, fixed = replace(problem, capacity=None), np.zeros(problem.ranks, np.int64)
    named = tuple(_timed(*known_order, fixed) for known_order in known_orders(free))
    placement = "/".join(map(describe, problem.routes))
    return free, fixed, named, {"model": problem.source or "a problem", "placement": placement, "device": None}


def _timed(name: str, schedule: Schedule, fixed: Ints) -> Named:
    return Named(name, needs(schedule, fixed), int(schedule.timeline().value), schedule.problem.work)


def _named(profile: Profile, step: Step, fixed: Ints) -> tuple[Named, ...]:
    """The placement's named schedules, with the backward of their papers (1F1B: fused); of a fused step only fused ones."""
    named = []
    for fused in (True,) if step.fused or profile.fused_only else (True, False):
        backward = replace(step.with_backward(profile, fused), memory=None)
        orders = known_orders(backward.problem(replace(profile, capacity=None)))
        named += [_timed(name, schedule, fixed) for name, schedule in orders if system(name).fused == fused]
    return tuple(named)
