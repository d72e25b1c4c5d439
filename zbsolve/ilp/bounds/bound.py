"""`Bound`: a value that no schedule undercuts, and the relaxation that proves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...problem import Problem

# The relaxations that a bound may come from. Certificates name them, so these words stay ("area" is the energy of memory).
PATH, WORK, IDLE, AREA = "path", "work", "idle", "area"  # closed forms
RANKS, LEAN_RANKS = "ranks", "lean ranks"  # searches over some ranks' orders: whole, and without what `lanes.left_out` names
GROUP_KINDS = (RANKS, LEAN_RANKS)
STREAMS = "ranks with streams"  # an exact solver on some ranks, with all their streams
WHOLE = "whole problem"  # an exact solver
CHOICES = "any choice"  # closed forms that hold whatever is copied: of the problem that copies all, and of those with less
# Proofs in words that several places give.
BUSIEST = "the busiest rank works as long"
ALL_ORDERS = "CP-SAT searched the orders of all passes"
IN_ORDER = "microbatches differ: this is about orders that run each stage's microbatches by number"


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


def with_assumption(bound: Bound, problem: Problem) -> Bound:
    """The bound with what its proof assumes where microbatches differ: that lanes run in table order. Nothing is assumed
    where they are alike, nor by the work of the busiest rank."""
    if problem.alike or bound.value <= problem.work or bound.proof.endswith(IN_ORDER):
        return bound
    return replace(bound, proof=f"{bound.proof}; {IN_ORDER}")
