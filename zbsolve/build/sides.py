"""Side inputs: a further output of a stage, which several later stages take, such as an encoder's output that every
decoder stage attends to. It is sent once to each rank that needs it, and held there until its last use. Gradients are summed
on that rank and sent back once.

Stages form a graph: some begin a row of their own, so no edge leads to them from the stage before. Where a row orders a
giver and its takers, edges of side inputs only repeat that. Otherwise they order them, and the takers on one rank one after
the other. So any order of a step with a single row is also valid for its graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..util.errors import BadInput
from .numbers import check_apart

BACKWARDS = ("B", "BW")


@dataclass(frozen=True, slots=True)
class SideInput:
    """A further output of a stage, which later stages take.

    giver: the stage that makes it.
    takers: the stages that take it, ascending: later ones, and the giver if further layers take it there.
    bytes: of it, for one microbatch.
    comm: µs of a message to another rank.
    gradient: does a gradient come back?
    kept: bytes of it that the giver's backward frees anyway, since its layers hold them, or they are the batch's.
    """

    giver: int
    takers: tuple[int, ...]
    bytes: int = 0
    comm: int = 0
    gradient: bool = True
    kept: int = 0

    def of_ranks(self, route: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Each rank with takers after the giver, and these takers, ascending. route: stage → rank."""
        later = [stage for stage in self.takers if stage != self.giver]
        for rank in dict.fromkeys(route[stage] for stage in later):
            yield rank, tuple(stage for stage in later if route[stage] == rank)


def with_side_inputs(problem: Problem, *sides: SideInput, begins: Sequence[int] = ()) -> Problem:
    """`problem` with side inputs: messages from the giving stage's F to the first F that takes it on each other rank, and
    from that stage's backward to the giving stage's. All with the same giver and first taker go in one message.

    A rank holds a side input from that F on (the giver's rank from its F on, if it has takers) until the last backward
    there that takes it; each taker until its W, if it has one. If the giver's own stage takes it and recomputes, it
    holds it from X on. A rank with several takers holds as many bytes for the sum of their gradients, from
    the first of their backwards to the last; the giver's rank holds them until the giver's backward.

    sides: in any order.
    begins: stages other than the first that begin a row: they take the batch, and no message connects them to the stage
    before.

    Apply it before what `kinds.LATER` lists. Raises BadInput.
    """
    check_apart(problem, "side inputs")
    if problem.slices > 1:
        raise BadInput("side inputs: sequences are cut into slices, and run knows no side inputs of slices")
    messages = _SideEdges(_without_rows(problem, begins), begins)
    for number, side in enumerate(sides):
        _check(side, problem.stages, f"side inputs: number {number}")
        for turn, route in enumerate(problem.routes):
            messages.add(side, np.arange(turn, problem.microbatches, len(problem.routes)), route)
    return replace(problem, edges=messages.edges())


def rows_begun(problem: Problem) -> tuple[int, ...]:
    """The stages other than the first that begin a row of their own: their F gets nothing from the stage before."""
    p, after = problem.passes, problem.edges.after[problem.edges.carrying("activation")]
    taking, forwards = p.stage[after[p.are("F")[after]]], p.stage[problem.rows("F")]
    return tuple(np.setdiff1d(forwards, [0, *taking]).tolist())


def _without_rows(problem: Problem, begins: Sequence[int]) -> Problem:
    """`problem` without the edges along the row to these stages and back. Raises BadInput."""
    if list(begins) != sorted({*begins}) or not all(0 < stage < problem.stages for stage in begins):
        raise BadInput(f"side inputs: begins {list(begins)}: stages from 1 to {problem.stages - 1} are needed, ascending")
    e, stage = problem.edges, problem.passes.stage
    along = e.carrying("activation", "gradient") & (stage[e.before] != stage[e.after])
    gone = along & np.isin(np.maximum(stage[e.before], stage[e.after]), begins)
    if e.sent[gone].any():
        raise BadInput("side inputs: messages occupy their sender, and a stage that begins a row is sent none")
    return replace(problem, edges=e.only(np.flatnonzero(~gone)))


class _SideEdges:
    """The edges of side inputs. held: (row, row) → bytes; sent: (row, row, what) → µs; ordered: what no row orders."""

    def __init__(self, problem: Problem, begins: Sequence[int]) -> None:
        self.problem, self.begins = problem, begins
        kinds = ("F",), BACKWARDS, ("W",), ("X",)
        self.forward, self.backward, self.weights, self.recompute = map(self._rows, kinds)
        self.held: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int, str], int] = {}
        self.ordered: dict[tuple[int, int], None] = {}

    def _rows(self, kinds: Sequence[str]) -> Ints:
        """The row of each stage's pass of these kinds for each microbatch, shape (stages, microbatches); −1: none."""
        table = np.full((self.problem.stages, self.problem.microbatches), -1, np.int64)
        rows, p = self.problem.rows(*kinds), self.problem.passes
        table[p.stage[rows], p.microbatch[rows]] = rows
        return table

    def add(self, side: SideInput, microbatches: Ints, route: Sequence[int]) -> None:
        """Add a side input of these microbatches, which take one route."""
        F, B, W = (rows[:, microbatches] for rows in (self.forward, self.backward, self.weights))
        home, more = route[side.giver], self._at_home(side, microbatches)
        for rank, takers in side.of_ranks(route):
            trained = [stage for stage in takers if (B[stage] >= 0).all()]
            begin, size = (F[side.giver], more) if rank == home else (F[takers[0]], side.bytes)
            self._hold(begin, B[trained[0]] if trained else F[takers[-1]], size)
            for stage in trained:
                if (W[stage] >= 0).all():
                    self._hold(B[stage], W[stage], side.bytes)
            if rank != home:
                self._send(F[side.giver], F[takers[0]], "side input", side.comm)
            givers = [side.giver] if rank == home else []
            self._order([F[stage] for stage in (*givers, *takers)], (*givers, *takers))
            back = [stage for stage in (*(givers if side.gradient else ()), *trained) if (B[stage] >= 0).all()][::-1]
            self._order([B[stage] for stage in back], back)
            if not (side.gradient and trained and (B[side.giver] >= 0).all()):
                continue
            self._hold(B[trained[-1]], B[side.giver if rank == home else trained[0]], side.bytes)
            if rank != home:
                self._send(B[trained[0]], B[side.giver], "side gradient", side.comm)

    def _at_home(self, side: SideInput, microbatches: Ints) -> int:
        """Add the bytes that the giver's stage holds if it is a taker itself. Returns the bytes that its rank holds from F
        on for later stages."""
        F, B, W, X = (rows[side.giver, microbatches] for rows in (self.forward, self.backward, self.weights, self.recompute))
        drops = bool((X >= 0).all())  # a recompute makes it again only then
        more = side.bytes if drops else side.bytes - side.kept
        if side.giver not in side.takers or (B < 0).any():
            return more
        whole = drops and not self.problem.recomputed
        self._hold(X if whole else F, B, side.bytes - side.kept if whole else more)
        if (W >= 0).all():
            self._hold(B, W, side.bytes)
        return more if whole else 0

    def _hold(self, before: Ints, after: Ints, size: int) -> None:
        for pair in zip(before.tolist(), after.tolist(), strict=True):
            if size and pair[0] != pair[1]:
                self.held[pair] = self.held.get(pair, 0) + size

    def _send(self, before: Ints, after: Ints, what: str, comm: int) -> None:
        for a, b in zip(before.tolist(), after.tolist(), strict=True):
            self.sent[a, b, what] = self.sent.get((a, b, what), 0) + comm

    def _order(self, rows: Sequence[Ints], stages: Sequence[int]) -> None:
        """Order the stages' passes one after the other, except where a row does so."""
        for (first, a), (other, b) in pairwise(zip(rows, stages, strict=True)):
            if any(min(a, b) < begun <= max(a, b) for begun in self.begins):
                self.ordered |= dict.fromkeys(zip(first.tolist(), other.tolist(), strict=True))

    def edges(self) -> Edges:
        """The edges of the problem, with further bytes on existing ones, and new edges."""
        old, count = self.problem.edges, len(self.problem.passes)
        size, added = old.bytes.copy(), Edges.of(old.before[:0], old.before[:0])
        if self.held:
            pairs, sizes = np.array(list(self.held), np.int64), np.array(list(self.held.values()), np.int64)
            existing = np.where(old.handing | (old.pool > 0), -1, old.before * count + old.after)
            key, existing = pairs @ np.array([count, 1]), np.append(existing, -1)  # a step may have no edges
            order = np.argsort(existing, kind="stable")
            place = order[np.minimum(np.searchsorted(existing, key, sorter=order), len(order) - 1)]
            known = existing[place] == key
            size[place[known]] += sizes[known]
            added += Edges.of(*pairs[~known].T, bytes=sizes[~known])
        if more := [pair for pair in self.ordered if pair not in self.held]:
            added += Edges.of(*np.array(more, np.int64).T)
        if self.sent:
            before, after, words = zip(*self.sent, strict=True)
            ends = (np.array(end, np.int64) for end in (before, after))
            added += Edges.of(*ends, lag=np.array(list(self.sent.values()), np.int64), carries=np.array(words))
        return replace(old, bytes=size) + added


def _check(side: SideInput, stages: int, where: str) -> None:
    if not side.takers or list(side.takers) != sorted({*side.takers}):
        raise BadInput(f"{where}: takers are stages, ascending, at least one")
    if not 0 <= side.giver <= side.takers[0] or side.takers[-1] >= stages:
        raise BadInput(f"{where}: stage {side.giver} gives it to {list(side.takers)}: to stages from there on, of {stages}")
    if side.comm < 0 or not 0 <= side.kept <= side.bytes:
        raise BadInput(f"{where}: bytes and µs are from 0 up, and those kept are of them")
