"""Work of a user's own beside a training step: passes J, which a search puts where ranks would wait.

A frozen encoder's forward of the next batch (Optimus, ATC'25, section 3), a teacher's forward, evaluation, copies of a
checkpoint: what the step does not wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kinds import WORK
from ..problem import Problem
from ..tables import Edges, Ints
from ..util.errors import BadInput
from .numbers import check_before

MOST_PIECES = 10_000


@dataclass(frozen=True, slots=True)
class Work:
    """Work on one rank.

    rank: that does it; None: its pieces go one by one to the rank that has least to compute.
    time: µs of all its pieces together.
    pieces: passes that it is cut into, which run in turn; 1: it is not cut.
    before: a stage of the rank whose first F waits for it.
    after: a stage of the rank whose last gradients it waits for; without either it runs whenever the rank is free.
    held: bytes from the start of its first piece to the end of its last one, or of the F that waits for it.
    """

    rank: int | None
    time: int
    pieces: int = 1
    before: int | None = None
    after: int | None = None
    held: int = 0


def with_work(problem: Problem, *works: Work) -> Problem:
    """A step with passes `<first stage of the rank>J<number>` of these `works` on `compute:<rank>`, numbered on each rank.

    Works of one rank run in turn, as they are given, but first those that an F waits for, and last those that wait for
    gradients. Put it in last: passes of other features do not know it. Raises BadInput for numbers that make no sense, and
    where the latest moment of a work lies before its earliest.
    """
    check_before(problem, WORK)
    passes, edges, placed = problem.passes, problem.edges, np.zeros(problem.ranks, np.int64)
    first = {rank: stage for stage in reversed(range(problem.stages)) for rank in problem.stage_ranks[stage]}
    for number, work in enumerate(works):
        _check(problem, work, f"work {number}")
    for rank, work in sorted(_on_ranks(problem, works), key=lambda placed: _turn(placed[1])):
        rows = len(passes) + np.arange(work.pieces)
        passes = passes.more(
            "J",
            "compute",
            stage=np.full(work.pieces, first[rank]),
            microbatch=placed[rank] + np.arange(work.pieces),
            rank=np.full(work.pieces, rank),
            duration=work.time // work.pieces + (np.arange(work.pieces) < work.time % work.pieces),
        )
        placed[rank] += work.pieces
        edges += _edges(problem, work, rank, rows)
    return replace(problem, passes=passes, edges=edges)


def _on_ranks(problem: Problem, works: Sequence[Work]) -> list[tuple[int, Work]]:
    """Each work with its rank; of work without one, what each rank does of it."""
    passes, found = problem.passes, [(work.rank, work) for work in works if work.rank is not None]
    busy = np.bincount(passes.rank, np.where(problem.computing, passes.duration, 0), problem.ranks).astype(np.float64)
    for rank, work in found:
        busy[rank] += work.time
    for work in (one for one in works if one.rank is None):
        piece, taken = work.time / work.pieces, np.zeros(problem.ranks, np.int64)
        for _ in range(work.pieces):
            taken[(busy + taken * piece).argmin()] += 1
        busy += taken * piece
        until = np.concatenate([[0], np.cumsum(taken)]) * work.time // work.pieces
        for rank in np.flatnonzero(taken).tolist():
            part = replace(work, pieces=int(taken[rank]), time=int(until[rank + 1] - until[rank]))
            found.append((rank, part))
    return found


def _turn(work: Work) -> tuple[int, int]:
    """Which work of a rank comes first: an F of a low stage needs its own early, gradients of a low stage are there late."""
    if work.before is not None:
        return 0, work.before
    return (1, 0) if work.after is None else (2, -work.after)


def _edges(problem: Problem, work: Work, rank: int, rows: Ints) -> Edges:
    """The pieces of a work in turn, behind and before what it says; with the bytes that it holds."""
    found, last = Edges.of(rows[:-1], rows[1:]), rows[-1:]
    if work.after is not None:
        gradients = np.flatnonzero(problem.passes.that(adds_gradients=True) & (problem.passes.stage == work.after))
        gradients = gradients[problem.passes.rank[gradients] == rank]
        found += Edges.of(gradients, np.repeat(rows[:1], len(gradients)))
    if work.before is not None:
        forwards = problem.rows("F", stage=work.before)
        forwards = forwards[problem.passes.rank[forwards] == rank]
        last = forwards[:1]
        found += Edges.of(np.repeat(rows[-1:], len(forwards)), forwards)
    return found + Edges.of(rows[:1], last, bytes=work.held) if work.held else found


def _check(problem: Problem, work: Work, where: str) -> None:
    if work.rank is None and (work.before, work.after, work.held) != (None, None, 0):
        raise BadInput(f"{where}: what has a moment or bytes has a rank: say which")
    if work.rank is not None and not 0 <= work.rank < problem.ranks:
        raise BadInput(f"{where}: there is no rank {work.rank} (they are 0 to {problem.ranks - 1})")
    if not 1 <= work.pieces <= MOST_PIECES:
        raise BadInput(f"{where}: {work.pieces} pieces: 1 to {MOST_PIECES} are possible")
    if work.time < 1 or work.held < 0:
        raise BadInput(f"{where}: time and bytes are whole numbers, the time at least 1 µs")
    if work.before is not None and work.after is not None:
        raise BadInput(
            f"{where}: its latest moment, before stage {work.before}, lies before its earliest, after {work.after}"
        )
    for stage in (work.before, work.after):
        if stage is not None and not (0 <= stage < problem.stages and work.rank in problem.stage_ranks[stage]):
            raise BadInput(f"{where}: stage {stage} does not lie on rank {work.rank}")
    if (
        work.after is not None
        and not (problem.passes.that(adds_gradients=True) & (problem.passes.stage == work.after)).any()
    ):
        raise BadInput(f"{where}: stage {work.after} makes no gradients that it could wait for")
    if work.held and work.pieces == 1 and work.before is None:
        raise BadInput(f"{where}: bytes are held from a first piece to a last one, and it has one: say 'before', or cut it")
