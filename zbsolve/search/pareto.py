"""The frontier: the shortest step over the memory a rank has, and how short it could be at most.

A schedule that fits less memory also fits more, and a bound proven for more memory also holds for less; so values and
bounds fall with memory, and every point is as good as the best of its neighbours' findings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from ..placement import describe
from ..problem import Ints, Problem
from ..profile.profile import Profile
from ..schedule import Schedule
from ..step import Step
from ..systems.table import system
from ..util.clock import Clock
from ..util.errors import BadInput
from ..util.files import write_document
from .memory_limits import MemoryLimits, Named, Point, known_orders, needs
from .solver import ready
from .state import State
from .task_runner import TaskRunner

MAX_POINTS = 1000
AMPLE = 1 << 50  # bytes; a limit that no schedule meets, from which a rank's fixed part is read off


@dataclass(frozen=True)
class Frontier:
    """Points by rising memory, from the least in which any schedule exists to what the best schedule without a limit
    takes; named schedules; `fixed`: bytes a rank beside activations; `work`: µs of the busiest rank;
    `device`: bytes that the profiled device has, or None; `effort`: in place of the seconds, where it was given;
    `source`: the profile's; `free_bound`, `free_proof`: µs that hold without a limit of memory."""

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
        """Everything but the schedules."""
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

    asked: a profile, or a problem, which knows the memory of activations alone. A memory limit that it has does not count.
    step: what to make of a profile; None for a problem.
    points: how many memory limits at least (peaks of named schedules are added); fewer where the range has fewer bytes.
    seconds, effort: of all points together, as `solve` takes them.
    progress: called with a point's place and the State of its search.
    stop: once it says True no further point is solved, and points without a schedule are left out.
    options: go to `solve`; `workers` (`zbsolve.solvers_on`) solve in place of this process.

    Goes down from unlimited memory, then, with what time is left, up again over the points that are still open, each from
    the best schedule that fits. Where time is over on the way down, only the tightest limit without a schedule is still
    solved: what fits there fits everywhere. Limits lie closer together where memory is short.

    Raises BadInput, and Infeasible where a rank's parameters fit no memory.
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
    """The schedules of the literature that the placement knows, each with its own backward (1F1B: fused) on the step's
    stages; of a step that is fused as a whole those with a fused backward."""
    named = []
    for fused in (True,) if step.fused or profile.fused_only else (True, False):
        backward = replace(step.with_backward(profile, fused), memory=None)
        orders = known_orders(backward.problem(replace(profile, capacity=None)))
        named += [_timed(name, schedule, fixed) for name, schedule in orders if system(name).fused == fused]
    return tuple(named)
