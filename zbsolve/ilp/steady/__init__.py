"""Training without an end: rounds, their period, and bounds of it."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .periodic import PeriodicSchedule as PeriodicSchedule
    from .periodic import SteadyState as SteadyState
    from .periodic import least_memory as least_memory
    from .periodic import least_period as least_period
    from .rounds import CycleMean as CycleMean
    from .rounds import period as period
    from .rounds import rounds_of as rounds_of
    from .rounds import steady_peaks as steady_peaks

__getattr__, __dir__ = handing_on(
    __name__,
    {
        "periodic": "PeriodicSchedule SteadyState least_memory least_period",
        "rounds": "CycleMean period rounds_of steady_peaks",
    },
)
