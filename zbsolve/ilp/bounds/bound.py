"""`Bound`: a value that no schedule undercuts, and the relaxation that proves it."""

from __future__ import annotations

from dataclasses import dataclass

# The relaxations that a bound may come from. Certificates name them, so these words stay ("area" is the energy of memory).
PATH, WORK, IDLE, AREA = "path", "work", "idle", "area"  # closed forms
RANKS, LEAN_RANKS = "ranks", "lean ranks"  # searches over some ranks' orders: whole, and without what `lanes.left_out` names
GROUP_KINDS = (RANKS, LEAN_RANKS)
WHOLE = "whole problem"  # an exact solver
# Proofs in words that several places give.
BUSIEST = "the busiest rank works as long"
ALL_ORDERS = "CP-SAT searched the orders of all passes"


@dataclass(frozen=True, slots=True)
class Bound:
    """No schedule whose lanes run in table order has a smaller value than `value` µs; `proof` says why.

    kind: the relaxation, one of those above; ranks: which ranks it keeps. With both, the bound can be proven again from the
    problem alone (`recheck`).
    """

    value: int
    proof: str
    kind: str = ""
    ranks: tuple[int, ...] = ()
