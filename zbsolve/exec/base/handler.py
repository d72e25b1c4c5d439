"""`Handler`: all that the executor knows of one kind of pass. `Graph`: a problem's passes and edges, which handlers check.

The interpreter and lowering read handlers and know no kind themselves. A new kind of pass needs a row in `zbsolve.kinds`, a
builder that puts its passes into a problem, and a handler in `exec.handlers.HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from ...problem import Problem
from ...problem.tables import Ints, Pass
from ...util.errors import BadInput
from .part import RankState, Run
from .program import Action


class Graph:
    """Finds a problem's passes by kind, stage and microbatch, and its edges. training: each forward needs a backward."""

    def __init__(self, problem: Problem, training: bool = True) -> None:
        self.problem, self.training = problem, training

    def one(self, row: int) -> Pass:
        """The pass in a row of the problem's table."""
        return self.problem.passes[row]

    def each(self, rows: Ints) -> Iterator[tuple[int, Pass]]:
        """Rows with their passes."""
        return ((row, self.one(row)) for row in rows.tolist())

    def row(self, kind: str, like: Pass) -> int | None:
        """The row of the pass of this kind that is like `like` otherwise; None where there is none."""
        return self.problem.index.get(replace(like, kind=kind).name)

    def check_order(self, checked: Pass, *rows: int | None, alone: bool = False) -> None:
        """Raise BadInput naming `checked` unless edges order these rows (None left out). alone: they must share a rank."""
        for before, after in pairwise(row for row in rows if row is not None):
            a, b = self.one(before), self.one(after)
            if not self.ordered(before, after):
                raise BadInput(f"pass {checked.name}: no edge orders {a.name} and {b.name}")
            if alone and a.rank != b.rank:
                raise BadInput(f"pass {checked.name}: {a.name} and {b.name} are on two ranks")

    def ordered(self, before: int, after: int) -> bool:
        """Is there an edge from one row to the other?"""
        return (before, after) in self._pairs

    def need(self, kinds: str, like: Pass) -> int:
        """The `row` that `like` needs, of the first of some kinds ("X|B|BW") that is there. Raises BadInput for none."""
        rows = [self.row(kind, like) for kind in kinds.split("|")]
        if (row := next((row for row in rows if row is not None), None)) is None:
            names = [replace(like, kind=kind).name for kind in kinds.split("|")]
            raise BadInput(f"pass {like.name}: there is no {' or '.join(names)}")
        return row

    def check_orders(self, rows: Ints, handler: Handler) -> None:
        """Raise BadInput unless passes have the others of their stage and part that their handler's `orders` say."""
        for _, this in self.each(rows) if handler.orders else ():
            for order in handler.orders:
                there = [self.need(kinds, this) for kinds in order.split()]
                if len(there) > 1:
                    self.check_order(this, *there, alone=handler.alone)

    @cached_property
    def _pairs(self) -> frozenset[tuple[int, int]]:
        edges = self.problem.edges
        return frozenset(zip(edges.before.tolist(), edges.after.tolist(), strict=True))


# Release: (state, stage). Settle: (state, name of a pass, must it be done?). Ended: (state, pass) → monotonic ns or a GPU
# event; 0 where nothing ran. `Handler` says when each is called.
Release = Callable[[RankState, int], None]
Settle = Callable[[RankState, str, bool], None]
Ended = Callable[[RankState, Action], Any]
Check = Callable[[Graph, Ints], None]


@dataclass(frozen=True)
class Handler:
    """How the executor runs one kind of pass. Passes whose `Kind` is `together` or `away` only start work, and synchronize
    with other ranks themselves: their edges between ranks carry nothing.

    run(state, action, given): does the pass's work and returns its output, a pytree of tensors, or None. `given` is what the
    edge to the pass carries, or None. The interpreter takes the output wherever the schedule's edges carry it.
    orders: passes of its stage and part that must be there, and edges that must order them: "F X B|BW" says that X comes
    behind F, and before B, or BW where there is no B. alone: they must share a rank.
    check(graph, rows): raises BadInput where the executor cannot run these passes for another reason. rows: all passes of
    the kind. By default a schedule may put them anywhere.
    takes: what the pass cannot do without: "activation" (on the first stage it reads the batch instead), "gradient" (on the
    last stage the loss gives it), or "" where it needs nothing.
    makes: the name of its output in errors about NaN and inf.
    adds_gradients: it adds to the gradients of its stage's parameters.
    uses_weights: it uses its stage's weights; where passes U update them, it has a version of its own.
    repeatable: it changes nothing that stays, so it can run a second time (see `exec.ahead`).
    only_time: it runs nothing; an emulated device gives it a duration.
    reads: what it needs of its microbatch's batch ("inputs", "targets"), on whichever rank it runs.
    in_parts: it can run for a part of a microbatch.
    before_its_pass: it runs nothing; the next pass of its stage and part does its work. Where that pass does not follow
    directly, a rank that helps it goes on in the meantime.
    ends_with_step: it sums gradients over ranks, and the end of the step tells when it ended.
    release(state, stage): its pass prepares weights; called when the last pass has ended that an edge from it leads to.
    settle(state, name, sure): finish the work that pass `name` started, since a pass depends on it or takes the memory that
    it frees. Not sure: only if it is done already.
    ended(state, action): of a pass that only starts work while its rank goes on. Called at the end of the step: waits for
    the work, and returns when it was done.
    """

    run: Run
    check: Check = lambda graph, rows: None
    takes: str = ""
    makes: str = ""
    adds_gradients: bool = False
    uses_weights: bool = False
    repeatable: bool = False
    only_time: bool = False
    in_parts: bool = False
    before_its_pass: bool = False
    ends_with_step: bool = False
    orders: tuple[str, ...] = ()
    alone: bool = False
    reads: str = ""
    release: Release | None = None
    settle: Settle | None = None
    ended: Ended | None = None

    @property
    def goes_on(self) -> bool:
        """Does its rank go on while its work is done? (Of passes `Kind.away`, each action says so itself.)"""
        return self.ended is not None or self.ends_with_step


def side_work_of(kind: type[Any]) -> dict[str, Any]:
    """`settle` and `ended` of passes that only start work; the part of this type has that work in `side`, by pass name."""
    return {
        "settle": lambda state, name, sure: state.part(kind).side.settle(name, sure),
        "ended": lambda state, action: state.part(kind).side.ended(action.name),
    }
