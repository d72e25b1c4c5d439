"""A user's own work beside the step: a pass J calls the user's function when the schedule says so."""

from __future__ import annotations

from typing import Any

from ..problem import Problem
from ..util.errors import BadInput
from .base.handler import Handler
from .base.part import Part, RankState
from .base.program import Action
from .connecting import Connecting, OwnWork


class WorkBeside(Part):
    """The user's work on a rank. work(rank, piece, pieces[, input]) is called for each piece of work (a pass J), with an
    input if an edge brings one; what it returns goes to the piece that takes it. pieces: of all ranks in a step."""

    name = "work"
    no_capture = "work beside the step is a function of the caller's, which runs anew in every step"
    no_ahead = "work beside the step would be done twice where a step begins again"

    def __init__(self, work: OwnWork, rank: int, problem: Problem) -> None:
        self.work, self.rank, rows = work, rank, problem.rows("J").tolist()
        self.numbers = {problem.names[row]: int(problem.passes.microbatch[row]) for row in rows}

    @classmethod
    def of(cls, c: Connecting) -> WorkBeside | None:
        """The part of a rank with passes J. Raises BadInput where it has some, but no `work` is given."""
        rank, work = c.own.program.rank, c.given.work
        pieces = len(c.problem.rows("J", rank=rank))
        if pieces and work is None:
            raise BadInput(
                f"work: rank {rank} has {pieces} passes J, and no function for them: give Pipeline(work=), or a "
                "function work(rank, piece, pieces) beside the model's"
            )
        return cls(work, rank, c.problem) if pieces and work is not None else None


def _run(state: RankState, action: Action, given: Any) -> Any:
    part, taken = state.part(WorkBeside), () if action.takes is None else (given,)
    made = part.work(part.rank, part.numbers[action.name], len(part.numbers), *taken)
    return made if action.sends or action.hands else None


HANDLERS = {"J": Handler(_run, makes="what it hands on", in_parts=True)}
