"""zbsolve finds pipeline-parallel training schedules and proves how good they are.

    problem = zbsolve.Profile.load("profile.json").problem(ranks=4, microbatches=16, memory="40GiB")  # or pipeline(…)
    schedule = zbsolve.solve(problem, seconds=10)
    schedule.certificate.gap, schedule.timeline().bubble_rate, zbsolve.verify(problem, schedule)

Running schedules is in `zbsolve.exec`. `import zbsolve` loads no torch and no solver; names below load what they need when
they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for type checkers; at run time `__getattr__` below loads
    from .errors import BadInput, Deadlock, Infeasible, NotFound, ZbsolveError
    from .graphs import pipeline
    from .layer import Layer
    from .problem import Edge, Pass, Problem
    from .profile import Link, Profile
    from .schedule import Certificate, Schedule
    from .search import solve
    from .timeline import Timeline
    from .trace import Trace
    from .verifier import Violation, verify
    from .versions import updates

_HOMES = {
    "BadInput": "errors",
    "Certificate": "schedule",
    "Deadlock": "errors",
    "Edge": "problem",
    "Infeasible": "errors",
    "Layer": "layer",
    "NotFound": "errors",
    "Link": "profile",
    "Pass": "problem",
    "Problem": "problem",
    "Profile": "profile",
    "Schedule": "schedule",
    "Timeline": "timeline",
    "Trace": "trace",
    "Violation": "verifier",
    "ZbsolveError": "errors",
    "pipeline": "graphs",
    "solve": "search",
    "updates": "versions",
    "verify": "verifier",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'zbsolve' has no attribute '{name}'")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
