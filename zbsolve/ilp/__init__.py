"""Exact methods: CP-SAT and MILP models, lower bounds and their proofs, the steady state."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .cp import CpResult as CpResult
    from .cp import build_cp as build_cp
    from .cp import solve_cp as solve_cp
    from .milp import MilpResult as MilpResult
    from .milp import build_milp as build_milp
    from .milp import solve_milp as solve_milp
    from .proof_check import recheck as recheck

# OR-tools takes a second to load: it is loaded with the first use of a name that needs it.
__getattr__, __dir__ = handing_on(__name__)
