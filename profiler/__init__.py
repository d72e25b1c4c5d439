"""The profiler measures a model's layers, and the links between ranks, using the executor that will run the schedule."""

from typing import TYPE_CHECKING

from zbsolve.util.lazy import handing_on

if TYPE_CHECKING:
    from .measurement import measure as measure
    from .roofline import estimate as estimate

__getattr__, __dir__ = handing_on(__name__)
