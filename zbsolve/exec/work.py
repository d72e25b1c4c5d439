"""Work of a user's own beside the step: a pass J calls the function that was given, at the moment that the schedule says."""

from __future__ import annotations

from collections import Counter

from ..util.errors import BadInput
from .base.handler import Handler
from .base.part import Part
from .base.program import Program
from .connecting import OwnWork


class WorkBeside(Part):
    """What a rank does beside the step. work(rank, piece, pieces): is called for each piece, in their order; what it makes
    stays with the caller. pieces: of this rank in a step."""

    name = "work"
    no_capture = "work beside the step is a function of the caller's, which runs anew in every step"
    no_ahead = "work beside the step would be done twice where a step begins again"

    def __init__(self, work: OwnWork, rank: int, pieces: int) -> None:
        self.work, self.rank, self.pieces = work, rank, pieces

    @classmethod
    def of(cls, program: Program, work: OwnWork | None) -> WorkBeside | None:
        """The part of a rank with passes J. Raises BadInput where nobody says what they do."""
        pieces = Counter(action.kind for action in program.actions)["J"]
        if not pieces:
            return None
        if work is None:
            raise BadInput(
                f"work: rank {program.rank} has {pieces} passes J, and nobody says what they do: give Pipeline(work=), or a "
                "function work(rank, piece, pieces) beside the model's"
            )
        return cls(work, program.rank, pieces)

    def run(self, piece: int) -> None:
        """The pass of a piece."""
        self.work(self.rank, piece, self.pieces)


HANDLERS = {"J": Handler(lambda state, action, _: state.part(WorkBeside).run(action.part))}
