"""zbsolve finds pipeline-parallel training schedules and proves how good they are.

    problem = zbsolve.Profile.load("profile.json").problem(ranks=4, microbatches=16, memory="40GiB")  # or pipeline(…)
    schedule = zbsolve.solve(problem, seconds=10)
    schedule.certificate.gap, schedule.timeline().bubble_rate, zbsolve.verify(problem, schedule)

All that a script needs is here; running schedules is in `zbsolve.exec`, builders are in `zbsolve.build`. `import zbsolve`
loads no torch and no solver; names load what they need when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .util.lazy import handing_on

if TYPE_CHECKING:  # for type checkers
    from . import planner as planner
    from . import systems as systems
    from .build.plain import pipeline as pipeline
    from .build.updates import with_updates as updates
    from .features.packing import pack as pack
    from .features.sizes import Batch as Batch
    from .ilp.bounds.any_choice import bound_over_choices as bound_over_choices
    from .ilp.bounds.any_choice import bound_over_orders as bound_over_orders
    from .ilp.bounds.any_choice import bound_over_sizes as bound_over_sizes
    from .partition.layer import HostLink as HostLink
    from .partition.layer import Layer as Layer
    from .partition.layer import Link as Link
    from .planner.planning import plan as plan
    from .problem import Edge as Edge
    from .problem import Pass as Pass
    from .problem import Problem as Problem
    from .problem import Slowdown as Slowdown
    from .profile.noise import Aim as Aim
    from .profile.noise import Noise as Noise
    from .profile.noise import under_noise as under_noise
    from .profile.profile import Profile as Profile
    from .profile.slow import slow_parts as slow_parts
    from .profile.step import Step as Step
    from .schedule import Certificate as Certificate
    from .schedule import Schedule as Schedule
    from .schedule.timeline import Timeline as Timeline
    from .schedule.trace import Trace as Trace
    from .search.auto import solve_auto as solve_auto
    from .search.idle_room import place_work as place_work
    from .search.idle_room import work_room as work_room
    from .search.packed_steps import PackedSteps as PackedSteps
    from .search.pareto import frontier as frontier
    from .search.solver import solve as solve
    from .search.task_runner import solvers_on as solvers_on
    from .show.comparison import compare as compare
    from .show.schedule_comparison import compare_schedules as compare_schedules
    from .systems.problems import problem_for as problem_for
    from .systems.table import preset as preset
    from .systems.torch_gathers import torch_window as torch_window
    from .util.errors import BadInput as BadInput
    from .util.errors import Deadlock as Deadlock
    from .util.errors import Infeasible as Infeasible
    from .util.errors import NotFound as NotFound
    from .util.errors import ZbsolveError as ZbsolveError
    from .verifier import Violation as Violation
    from .verifier import verify as verify

__version__ = "0.5.0"

__getattr__, __dir__ = handing_on(__name__)
__all__ = __dir__()
