"""Exact methods: CP-SAT and MILP models, lower bounds and their proofs, the steady state."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .proof_check import recheck as recheck

# OR-tools takes a second to load: it is loaded with the first use of a name that needs it.
__getattr__, __dir__ = handing_on(__name__)
