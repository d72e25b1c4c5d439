"""What the executor knows of one kind of pass, as one record: a `Handler`, and what it asks of a problem's graph.

The interpreter and lowering read handlers and know no kind themselves. A new kind of pass is a row of `zbsolve.kinds`, which
says all else that is known of it, a builder that puts it into a problem, and a handler in `exec.handlers.HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...problem import Problem
from ...tables import Ints, Pass, pass_name
from ...util.errors import BadInput
from .part import RankState, Run
from .program import Action


class Graph:
    """A problem's passes, found by what they are, and which of them an edge orders. training: forwards need backwards."""

    def __init__(self, problem: Problem, training: bool = True) -> None:
        self.problem, self.training = problem, training

    def one(self, row: int) -> Pass:
        """The pass of a row."""
        return self.problem.passes[row]

    def each(self, rows: Ints) -> Iterator[tuple[int, Pass]]:
        """Rows with their passes."""
        return ((row, self.one(row)) for row in rows.tolist())

    def row(self, kind: str, like: Pass) -> int | None:
        """The row of the pass of this kind that has the stage, microbatch and slice of `like`; None where there is none."""
        return self.problem.index.get(pass_name(kind, like.stage, like.microbatch, like.slice))

    def beside(self, like: Pass, step: int) -> int | None:
        """The row of what `like` is for the next slice (step 1) or for the one before (−1); None where there is none. Raises
        BadInput where its pass is missing."""
        if not 0 <= like.slice + step < self.problem.slices:
            return None
        other = replace(like, slice=like.slice + step)
        if (row := self.row(like.kind, other)) is None:
            raise BadInput(f"pass {like.name}: there is no {other.name}")
        return row

    def check_order(self, checked: Pass, *rows: int | None, alone: bool = False) -> None:
        """Raise BadInput, for pass `checked`, where no edge orders each of these rows that are there and the next. alone:
        also where they are not on one rank."""
        for before, after in pairwise(row for row in rows if row is not None):
            a, b = self.one(before), self.one(after)
            if not self.ordered(before, after):
                raise BadInput(f"pass {checked.name}: no edge orders {a.name} and {b.name}")
            if alone and a.rank != b.rank:
                raise BadInput(f"pass {checked.name}: {a.name} and {b.name} are on two ranks")

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


# (state, stage) → nothing; (state, name of a pass, surely?) → nothing; (state, pass) → monotonic ns or an event of a GPU; 0
# where nothing ran.
Release = Callable[[RankState, int], None]
Settle = Callable[[RankState, str, bool], None]
Ended = Callable[[RankState, Action], Any]
Check = Callable[[Graph, Ints], None]


@dataclass(frozen=True)
class Handler:
    """One kind of pass. Where its row says `together` or `away`, its work goes on, and joins ranks by itself: edges between
    ranks to and from it carry nothing.

    run(state, action, given): does the pass's work and returns its output, a pytree of tensors, or None. `given` is what the
    edge to the pass carries, or None. The interpreter takes the output wherever the schedule's edges carry it.
    check(graph, rows): raises BadInput where the executor cannot run these passes, all that a problem has of the kind; by
    default they run wherever a schedule puts them.
    takes: what the pass cannot do without: "activation" (on the first stage it reads the batch instead), "gradient" (on the
    last stage the loss gives it), or "" where it needs nothing.
    makes: what its output is called when a number in it is not finite.
    adds_gradients: it adds to the gradients of its stage's parameters.
    uses_weights: it uses the weights of its stage, so it has a version of them where there are updates.
    repeatable: it leaves nothing that stays, so it can run once more (see `exec.ahead`).
    only_time: nothing runs; an emulated device gives it a time.
    reads: what of the batch it needs of its microbatch ("inputs", "targets"), on whichever rank.
    sliced: it can run for a slice of a sequence.
    before_its_pass: what it does is done by the pass of its stage and part that comes behind it. Where that does not come
    right behind, the rank that helps it goes on while its work is done.
    ends_with_step: it sums gradients with other ranks, and when it has ended is known only when the step ends.
    does: what it does beside the passes that compute: with sharded parameters ("gather", "reduce"), so that no one else
    needs to, with what a microbatch keeps ("offload", "reload"), or with a sharded vocabulary ("broadcast",
    "merge", "sum", "embedding").
    release(state, stage): the last pass has ended that an edge from this one goes to.
    settle(state, name, sure): work that pass `name` began is to be done now, for what waits for it or takes what it frees;
    not sure: only if it is done anyway.
    ended(state, action): for a pass that only begins work, while its rank goes on. Asked when the step ends: waits until the
    work is done, and says when that was.
    """

    run: Run
    check: Check = lambda graph, rows: None
    takes: str = ""
    makes: str = ""
    adds_gradients: bool = False
    uses_weights: bool = False
    repeatable: bool = False
    only_time: bool = False
    sliced: bool = False
    before_its_pass: bool = False
    ends_with_step: bool = False
    reads: str = ""
    does: str = ""
    release: Release | None = None
    settle: Settle | None = None
    ended: Ended | None = None

    @property
    def goes_on(self) -> bool:
        """Does its rank go on while its work is done? (For one of another rank, `Kind.away`, the action says so.)"""
        return self.ended is not None or self.ends_with_step


def side_work_of(kind: type[Any]) -> dict[str, Any]:
    """`settle` and `ended` of passes that only begin work, which the part of this type keeps in `side` by their names."""
    return {
        "settle": lambda state, name, sure: state.part(kind).side.settle(name, sure),
        "ended": lambda state, action: state.part(kind).side.ended(action.name),
    }
