"""`solve` and what is built on it: an incumbent and a bound, races between placements, the frontier over memory."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .auto import Tried as Tried
    from .auto import solve_auto as solve_auto
    from .memory_limits import Point as Point
    from .pareto import Frontier as Frontier
    from .pareto import frontier as frontier
    from .solver import METHODS as METHODS
    from .solver import ready as ready
    from .solver import solve as solve
    from .state import State as State

__getattr__, __dir__ = handing_on(__name__)
