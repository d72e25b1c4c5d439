"""Side inputs: what a stage makes beside the row and several later ones take, such as an encoder's output that every decoder
stage attends to. It goes once to each rank that needs it, and is kept there until its last user. Gradients are summed on
that rank and go back once.

Its edges only repeat what the row of stages orders already, so any order of a step without them is one with them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kinds import ALL_TO_ALL, ATTENTION, OFFLOAD, SHARDING, UPDATES, VOCABULARY
from ..problem import Problem
from ..tables import Edges, Ints
from ..util.errors import BadInput
from .numbers import check_apart

BACKWARDS = ("B", "BW")


@dataclass(frozen=True, slots=True)
class SideInput:
    """What a stage makes beside the row of stages, and later ones take.

    giver: the stage that makes it.
    takers: the later stages that take it, ascending.
    bytes: of it, for one microbatch.
    comm: µs of a message to another rank.
    gradient: whether one comes back.
    """

    giver: int
    takers: tuple[int, ...]
    bytes: int = 0
    comm: int = 0
    gradient: bool = True

    def of_ranks(self, route: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """The ranks that take it, and on each the stages that do, ascending. route: stage → rank."""
        for rank in dict.fromkeys(route[stage] for stage in self.takers):
            yield rank, tuple(stage for stage in self.takers if route[stage] == rank)


def with_side_inputs(problem: Problem, *sides: SideInput) -> Problem:
    """`problem` with side inputs: messages from the giving stage's F to the first F that takes it on each other rank, and
    from that stage's backward to the giving stage's. Of one giver and first taker all go in one message.

    A rank holds a side input from that F on, the giver's rank from its F on where it has takers, until the last backward
    there that takes it; each taker until its W, where it has one. From its first backward there on a rank with several
    takers holds as much for the sum of their gradients, the giver's rank until the giver's backward.

    sides: in any order.

    Put them in before uneven microbatches, sharding, updates and exchanges. Raises BadInput.
    """
    check_apart(problem, "side inputs", OFFLOAD, ALL_TO_ALL, VOCABULARY, ATTENTION, SHARDING, UPDATES)
    if problem.slices > 1:
        raise BadInput("side inputs: sequences are cut into slices, and run knows no side inputs of slices")
    found = _Found(problem)
    for number, side in enumerate(sides):
        _check(side, problem.stages, f"side inputs: number {number}")
        for turn, route in enumerate(problem.routes):
            found.add(side, np.arange(turn, problem.microbatches, len(problem.routes)), route)
    return replace(problem, edges=found.edges())


class _Found:
    """The edges of side inputs: rows at both ends → what they hold, and what they carry with its µs."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.forward, self.backward, self.weights = (self._rows(kinds) for kinds in (("F",), BACKWARDS, ("W",)))
        self.held: dict[tuple[int, int], int] = {}
        self.sent: dict[tuple[int, int, str], int] = {}

    def _rows(self, kinds: Sequence[str]) -> Ints:
        """The row of each stage's pass of these kinds for each microbatch, shape (stages, microbatches); −1: none."""
        found = np.full((self.problem.stages, self.problem.microbatches), -1, np.int64)
        rows, p = self.problem.rows(*kinds), self.problem.passes
        found[p.stage[rows], p.microbatch[rows]] = rows
        return found

    def add(self, side: SideInput, microbatches: Ints, route: Sequence[int]) -> None:
        """A side input of these microbatches, which take one route."""
        F, B, W = (rows[:, microbatches] for rows in (self.forward, self.backward, self.weights))
        home = route[side.giver]
        for rank, takers in side.of_ranks(route):
            trained = [stage for stage in takers if (B[stage] >= 0).all()]
            begin = F[side.giver if rank == home else takers[0]]
            self._hold(begin, B[trained[0]] if trained else F[takers[-1]], side.bytes)
            for stage in trained:
                if (W[stage] >= 0).all():
                    self._hold(B[stage], W[stage], side.bytes)
            if rank != home:
                self._send(F[side.giver], F[takers[0]], "side input", side.comm)
            if not (side.gradient and trained and (B[side.giver] >= 0).all()):
                continue
            self._hold(B[trained[-1]], B[side.giver if rank == home else trained[0]], side.bytes)
            if rank != home:
                self._send(B[trained[0]], B[side.giver], "side gradient", side.comm)

    def _hold(self, before: Ints, after: Ints, size: int) -> None:
        for pair in zip(before.tolist(), after.tolist(), strict=True):
            if size and pair[0] != pair[1]:
                self.held[pair] = self.held.get(pair, 0) + size

    def _send(self, before: Ints, after: Ints, what: str, comm: int) -> None:
        for a, b in zip(before.tolist(), after.tolist(), strict=True):
            self.sent[a, b, what] = self.sent.get((a, b, what), 0) + comm

    def edges(self) -> Edges:
        """Those of the problem, with what is held on the ones that are there, and further ones."""
        old, count = self.problem.edges, len(self.problem.passes)
        size, added = old.bytes.copy(), Edges.of(old.before[:0], old.before[:0])
        if self.held:
            pairs, sizes = np.array(list(self.held), np.int64), np.array(list(self.held.values()), np.int64)
            key, there = (
                pairs @ np.array([count, 1]),
                np.where(old.handing | (old.pool > 0), -1, old.before * count + old.after),
            )
            order = np.argsort(there, kind="stable")
            place = order[np.minimum(np.searchsorted(there, key, sorter=order), len(order) - 1)]
            known = there[place] == key
            size[place[known]] += sizes[known]
            added += Edges.of(*pairs[~known].T, bytes=sizes[~known])
        if self.sent:
            before, after, words = zip(*self.sent, strict=True)
            ends = (np.array(end, np.int64) for end in (before, after))
            added += Edges.of(*ends, lag=np.array(list(self.sent.values()), np.int64), carries=np.array(words))
        return replace(old, bytes=size) + added


def _check(side: SideInput, stages: int, where: str) -> None:
    if not side.takers or list(side.takers) != sorted({*side.takers}):
        raise BadInput(f"{where}: takers are stages, ascending, at least one")
    if not 0 <= side.giver < side.takers[0] or side.takers[-1] >= stages:
        raise BadInput(f"{where}: stage {side.giver} gives it to {list(side.takers)}: to later stages, of {stages}")
    if side.bytes < 0 or side.comm < 0:
        raise BadInput(f"{where}: bytes and µs are from 0 up")
