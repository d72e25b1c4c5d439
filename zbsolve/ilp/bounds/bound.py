"""`Bound`: a proven lower bound, and the relaxation that proves it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...problem import Problem

# The relaxations from which a bound may come. Certificates name them, so these words must not change.
PATH, WORK, IDLE, AREA = "path", "work", "idle", "area"  # closed forms; "area" is the energy of memory
RANKS, LEAN_RANKS = "ranks", "lean ranks"  # searches over orders of some ranks: of all passes; without `lanes.left_out`
GROUP_KINDS = (RANKS, LEAN_RANKS)
WINDOW_KINDS = ("ranks in a window", "lean ranks in a window")  # the same in the span of the first rank, which is not kept
OWN_WINDOWS = "ranks in their windows"  # all passes of some ranks, each rank within its own span
SEARCHED_RANKS = (*GROUP_KINDS, *WINDOW_KINDS, OWN_WINDOWS)
BOTH_ENDS = "memory at both ends"  # of one rank: the energy of memory, and two searches for what is lost at both ends
IN_A_ROW = "microbatches in a row"  # of a long step: one rank, and all passes that others wait for, for some microbatches
STREAMS = "ranks with streams"  # an exact solver on some ranks, with all their streams
WHOLE = "whole problem"  # an exact solver
CHOICES = "any choice"  # closed forms that hold for any choice of copies
# Proofs in words that are used in several places.
BUSIEST = "the busiest rank works as long"
ALL_ORDERS = "CP-SAT searched the orders of all passes"
ALONE = "passes count as long as alone, and no order is shorter where some slow each other"
SLOWED = "passes that slow each other may also wait for each other"
IN_ORDER = "this is about orders that run each stage's microbatches by number"


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound on the value of every schedule whose lanes run by number.

    value: µs. proof: why, in words. kind: the relaxation, one of those above. ranks: the ranks that it keeps. kind and ranks
    are enough to prove the bound again (`recheck`).
    """

    value: int
    proof: str
    kind: str = ""
    ranks: tuple[int, ...] = ()


def with_assumption(bound: Bound, problem: Problem) -> Bound:
    """The bound with notes in its proof: with slowdowns, that it ignores them, as all but CP-SAT do; for `ordered` problems,
    that it assumes lanes by number. The work of the busiest rank assumes nothing."""
    note = SLOWED if ALL_ORDERS in bound.proof else ALONE
    if problem.slowdowns and note not in bound.proof:
        bound = replace(bound, proof=f"{bound.proof}; {note}")
    if not problem.ordered or bound.value <= problem.work or bound.proof.endswith(IN_ORDER):
        return bound
    why = "gathers or updates count on numbers of microbatches" if problem.alike else "microbatches differ"
    return replace(bound, proof=f"{bound.proof}; {why}: {IN_ORDER}")


def rank_names(ranks: tuple[int, ...]) -> str:
    """`rank 0` or `ranks 0, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def serial_length(problem: Problem) -> int:
    """µs within which some schedule ends, if there is one: the sum of all durations and lags."""
    return int(problem.passes.duration.sum() + problem.edges.lag.sum())


def value_unit(problem: Problem, kind: str = "") -> int:
    """A number of µs that divides the value of every schedule: for the makespan the greatest common divisor of all durations
    and lags, else 1. With slowdowns values are arbitrary, but no less than without: so it is 1 for bounds of the kinds that
    count slowdowns, and holds for the others.

    Proof. Passes start as early as possible. So each start is 0, or the end of another pass plus a lag: by an edge, by the
    stream's order, or by a sync (the last two without lag). There is nothing else: a problem has no release times, and
    memory delays passes only through orders and syncs. So each start and each end is a sum of durations and lags, and the
    makespan is the last end.

    For the span nothing is claimed: its bounds also hold for passes that start late, which may shorten a rank's window.
    """
    if problem.objective != "makespan" or (problem.slowdowns and kind in (WHOLE, STREAMS)):
        return 1
    return max(1, int(np.gcd.reduce(np.concatenate([problem.passes.duration, problem.edges.lag]))))


def rounded_up(bound: Bound, unit: int) -> Bound:
    """The bound as a multiple of `unit`, µs, which divides the value of every schedule (see `value_unit`)."""
    value = -(-bound.value // unit) * unit
    if value == bound.value:
        return bound
    return replace(bound, value=value, proof=f"{bound.proof}; a makespan is a multiple of {unit} µs, as all times are")


def least_before_rounding(value: int, unit: int) -> int:
    """The least bound that `rounded_up` turns into `value`, µs; `value` itself if it is not a multiple of the unit."""
    return value if value % unit else value - unit + 1
