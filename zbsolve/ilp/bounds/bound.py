"""`Bound`: a value that no schedule undercuts, and the relaxation that proves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...problem import Problem

# The relaxations that a bound may come from. Certificates name them, so these words stay ("area" is the energy of memory).
PATH, WORK, IDLE, AREA = "path", "work", "idle", "area"  # closed forms
RANKS, LEAN_RANKS = "ranks", "lean ranks"  # searches over some ranks' orders: whole, and without what `lanes.left_out` names
GROUP_KINDS = (RANKS, LEAN_RANKS)
WINDOW_KINDS = ("ranks in a window", "lean ranks in a window")  # the same within the span of the first, which is not kept
OWN_WINDOWS = "ranks in their windows"  # whole ones, each within its own span; all begin behind the first
SEARCHED_RANKS = (*GROUP_KINDS, *WINDOW_KINDS, OWN_WINDOWS)
BOTH_ENDS = "memory at both ends"  # of one rank: what it must hold, and two searches over what it loses
STREAMS = "ranks with streams"  # an exact solver on some ranks, with all their streams
WHOLE = "whole problem"  # an exact solver
CHOICES = "any choice"  # closed forms that hold whatever is copied: of the problem that copies all, and of those with less
# Proofs in words that several places give.
BUSIEST = "the busiest rank works as long"
ALL_ORDERS = "CP-SAT searched the orders of all passes"
ALONE = "passes count as long as alone, and no order is shorter where some slow each other"
IN_ORDER = "this is about orders that run each stage's microbatches by number"


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
    """The bound with what its proof leaves out where passes slow each other, and what it assumes where microbatches differ,
    or gathers or updates count on their numbers: that lanes run in table order. The work of the busiest rank assumes
    nothing."""
    if problem.slowdowns and ALONE not in bound.proof:
        bound = replace(bound, proof=f"{bound.proof}; {ALONE}")
    if not problem.ordered or bound.value <= problem.work or bound.proof.endswith(IN_ORDER):
        return bound
    why = "gathers or updates count on numbers of microbatches" if problem.alike else "microbatches differ"
    return replace(bound, proof=f"{bound.proof}; {why}: {IN_ORDER}")


def rank_names(ranks: tuple[int, ...]) -> str:
    """`rank 0` or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def serial_length(problem: Problem) -> int:
    """µs within which some schedule ends, if there is any: all passes and lags one after the other."""
    return int(problem.passes.duration.sum() + problem.edges.lag.sum())


def value_unit(problem: Problem) -> int:
    """µs that divide the value of every schedule, 1 or more: the greatest common divisor of all durations and lags where the
    objective is the makespan, else 1.

    Proof. Passes start as early as they may. Each start is then 0 or the end of another pass and a lag: of an edge, of the
    pass before on one of its streams, of a sync (both without a lag), and of nothing else, for a problem has no release
    times, and memory delays no pass but through orders and syncs. So each start and each end is a sum of durations and lags,
    those of side streams and messages among them, and the makespan is the last end.

    Of the span nothing is claimed: its bounds also hold where passes start later than they may, which can make the window of
    a rank shorter, by what need not be such a sum.
    """
    if problem.objective != "makespan":
        return 1
    return max(1, int(np.gcd.reduce(np.concatenate([problem.passes.duration, problem.edges.lag]))))


def rounded_up(bound: Bound, unit: int) -> Bound:
    """The bound as a multiple of `unit`, µs, which divides the value of every schedule (see `value_unit`)."""
    value = -(-bound.value // unit) * unit
    if value == bound.value:
        return bound
    return replace(bound, value=value, proof=f"{bound.proof}; a makespan is a multiple of {unit} µs, as all times are")


def least_before_rounding(value: int, unit: int) -> int:
    """The least bound that `rounded_up` makes `value` µs; `value` itself where it is no multiple of the unit."""
    return value if value % unit else value - unit + 1
