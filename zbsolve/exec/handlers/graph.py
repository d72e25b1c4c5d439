"""What handlers ask of a problem's graph when a schedule is lowered."""

from __future__ import annotations

from dataclasses import replace
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
        """The row of the pass of this kind that has the stage, microbatch and slice of `like`; None where there is none."""
        return self.problem.index.get(pass_name(kind, like.stage, like.microbatch, like.slice))

    def beside(self, like: Pass, step: int) -> Pass | None:
        """What `like` is for the next slice (step 1) or for the one before (−1); None where there is none. Raises BadInput
        where its pass is missing."""
        if not 0 <= like.slice + step < self.problem.slices:
            return None
        other = replace(like, slice=like.slice + step)
        row = self.row(like.kind, other)
        if row is None:
            raise BadInput(f"pass {like.name}: there is no {other.name}")
        return self.one(row)

    def ordered(self, before: int, after: int) -> bool:
        """Whether an edge goes from one row to the other."""
        return (before, after) in self._pairs

    def need(self, kind: str, like: Pass) -> int:
        """The row of the pass of this kind that `like` needs, of its stage, microbatch and slice. Raises BadInput where
        there is none."""
        row = self.row(kind, like)
        if row is None:
            raise BadInput(f"pass {like.name}: there is no {pass_name(kind, like.stage, like.microbatch, like.slice)}")
        return row

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, int]]:
        edges = self.problem.edges
        return frozenset(zip(edges.before.tolist(), edges.after.tolist(), strict=True))
