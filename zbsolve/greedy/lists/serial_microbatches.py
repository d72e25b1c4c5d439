"""One microbatch after the other, one pass after the other: a schedule of great length for very little memory.

Where pools of memory are short at several places at once (a host and the devices beside it), the next pass by any rule may
lead to where none fits. Inside a microbatch the search then goes back and tries another one.
"""

from __future__ import annotations

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import arrays_of
from ..side_streams.syncs import Moments, synced

# Which pass comes first: one that brings memory back, that copies it out, any other one, or one that takes it for others
# (a gather). Copies come back as soon as they are out; as late as possible; or go out as late as possible.
RULES = ((0, 1, 2, 3), (2, 0, 1, 2), (1, 2, 0, 3))
TRIES = 4000  # passes tried by one rule beyond those that a microbatch has


def one_after_another(problem: Problem) -> Schedule | None:
    """The schedule in which no two passes run at once, by memory (edges and syncs may let them run so by time). None where
    one microbatch does not fit in any order that was tried."""
    order = _Order(problem).found()
    if order is None:
        return None
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    sequences: dict[str, Ints] = {stream: rows[np.argsort(place[rows])] for stream, rows in problem.members.items()}
    return synced(problem, sequences, Moments(2 * place, 2 * place + 1))


class _Order:
    """Passes in order. used: bytes of each pool; moves: pool, bytes taken and bytes freed of each pass, where there is a
    limit; waiting: how many of a pass's inputs are not there; harmless: passes that leave no pool fuller."""

    def __init__(self, problem: Problem) -> None:
        a = arrays_of(problem)
        count = len(problem.passes)
        self.room: list[int] = problem.room.tolist()
        self.used = [0] * len(self.room)
        self.moves: list[list[tuple[int, int, int]]] = [[] for _ in range(count)]
        for pool in np.flatnonzero(problem.room < UNLIMITED).tolist():
            taken, freed = problem.moved(pool)
            for i in np.flatnonzero((taken > 0) | (freed > 0)).tolist():
                self.moves[i].append((pool, int(taken[i]), int(freed[i])))
        self.harmless = [all(freed >= taken for _, taken, freed in moves) for moves in self.moves]
        side = np.zeros(count, bool)
        side[problem.side_stream] = True
        out = np.zeros(count, bool)
        out[a.accounts.copy_out[a.accounts.copy_out >= 0]] = True
        back = brings_back(problem)
        self.kind = np.select([back, out, side & (problem.taken > 0)], [0, 1, 3], 2).tolist()
        self.depth = a.depth.tolist()
        # Passes of a lane keep their order, too.
        before = np.concatenate([problem.edges.before, *(rows[:-1] for rows in problem.lanes)])
        after = np.concatenate([problem.edges.after, *(rows[1:] for rows in problem.lanes)])
        self.waiting: list[int] = np.bincount(after, minlength=count).tolist()
        self.behind: list[list[int]] = [[] for _ in range(count)]
        for i, j in zip(before.tolist(), after.tolist(), strict=True):
            self.behind[i].append(j)
        order = np.argsort(a.account, kind="stable")
        self.accounts = np.split(order, np.flatnonzero(np.diff(a.account[order])) + 1)

    def found(self) -> list[int] | None:
        """All passes in order; None where those of one microbatch were not found to fit."""
        order: list[int] = []
        for rows in self.accounts:
            one = next((one for rule in RULES if (one := self._account(rows.tolist(), rule)) is not None), None)
            if one is None:
                return None
            order += one
        return order

    def _account(self, rows: list[int], rule: tuple[int, ...]) -> list[int] | None:
        """The passes of one microbatch in an order that fits, behind what has run; None: nothing has run of them."""
        bit = {i: 1 << k for k, i in enumerate(rows)}
        ready = {i for i in rows if self.waiting[i] == 0}
        order: list[int] = []
        done, dead, tries = 0, set[int](), len(rows) + TRIES
        choices = [self._choices(ready, rule)]
        while len(order) < len(rows):
            if choices[-1] and tries > 0:
                i = choices[-1].pop()
                if done | bit[i] in dead:
                    continue
                tries -= 1
                done |= bit[i]
                order.append(i)
                self._run(i, ready, bit)
                choices.append(self._choices(ready, rule))
                continue
            if not order:
                return None
            dead.add(done)
            choices.pop()
            i = order.pop()
            done ^= bit[i]
            self._take_back(i, ready)
        return order

    def _choices(self, ready: set[int], rule: tuple[int, ...]) -> list[int]:
        """The passes that fit next, the first by the rule last, of equals the deepest one; only one where it does no harm
        whatever comes behind."""
        fit = [i for i in ready if all(self.used[pool] + taken <= self.room[pool] for pool, taken, _ in self.moves[i])]
        fit.sort(key=lambda i: (-rule[self.kind[i]], self.depth[i], -i))
        return next(([i] for i in reversed(fit) if self.harmless[i]), fit)

    def _run(self, i: int, ready: set[int], mine: dict[int, int]) -> None:
        for pool, taken, freed in self.moves[i]:
            self.used[pool] += taken - freed
        ready.remove(i)
        for j in self.behind[i]:
            self.waiting[j] -= 1
            if self.waiting[j] == 0 and j in mine:
                ready.add(j)

    def _take_back(self, i: int, ready: set[int]) -> None:
        for pool, taken, freed in self.moves[i]:
            self.used[pool] -= taken - freed
        ready.add(i)
        for j in self.behind[i]:
            self.waiting[j] += 1
            ready.discard(j)
