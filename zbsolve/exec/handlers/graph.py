"""What handlers ask of a problem's graph when a schedule is lowered."""

from __future__ import annotations

from functools import cached_property

from ...problem import Problem
from ...tables import Pass, pass_name
from ...util.errors import BadInput


class Graph:
    """A problem's passes, found by what they are, and which of them an edge orders. training: forwards need backwards."""

    def __init__(self, problem: Problem, training: bool = True) -> None:
        self.problem, self.training = problem, training

    def one(self, row: int) -> Pass:
        """The pass of a row."""
        found: Pass = self.problem.passes[row]
        return found

    def row(self, kind: str, like: Pass) -> int | None:
        """The row of the pass of this kind that has the stage and microbatch of `like`; None where there is none."""
        return self.problem.index.get(pass_name(kind, like.stage, like.microbatch))

    def ordered(self, before: int, after: int) -> bool:
        """Whether an edge goes from one row to the other."""
        return (before, after) in self._pairs

    def need(self, kind: str, like: Pass) -> int:
        """The row of the pass of this kind that `like` needs, of its stage and microbatch. Raises BadInput where there is
        none."""
        row = self.row(kind, like)
        if row is None:
            raise BadInput(f"pass {like.name}: there is no {pass_name(kind, like.stage, like.microbatch)}")
        return row

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, int]]:
        edges = self.problem.edges
        return frozenset(zip(edges.before.tolist(), edges.after.tolist(), strict=True))
