"""One microbatch after the other, one pass after the other: an order that fits even in very little memory.

If memory is short in several pools at once (the host and the devices), any rule for the next pass may run into a dead end.
Then it backtracks within the microbatch."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from ...problem import UNLIMITED, Ints, Problem
from ...schedule import Schedule
from ..arrays.accounts import brings_back
from ..arrays.problem_arrays import arrays_of
from ..syncs import Moments, synced

# The priority (0 first) of passes that bring memory back, that copy it out, of all others, and of those that take memory for
# others. Rule 0 brings copies back at once; rule 1 as late as possible; rule 2 copies out as late as possible.
RULES = ((0, 1, 2, 3), (2, 0, 1, 2), (1, 2, 0, 3))
TRIES = 4000  # passes that one rule tries in a microbatch, beyond one try each


def one_after_another(problem: Problem) -> Schedule | None:
    """The schedule that fits as if no two passes ran at once (its edges and syncs may still let them overlap). None if one
    microbatch fits in no order that was tried."""
    order = _Order(problem).all_passes()
    if order is None:
        return None
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    sequences: dict[str, Ints] = {stream: rows[np.argsort(place[rows])] for stream, rows in problem.members.items()}
    return synced(problem, sequences, Moments(2 * place, 2 * place + 1))


class _Order:
    """Makes an order of all passes. used: bytes held in each pool. moves: (pool, bytes taken, bytes freed) of each pass in
    pools with a limit. waiting: how many inputs of each pass are missing. harmless: passes that leave no pool fuller."""

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
        out, reserving = np.isin(np.arange(count), a.accounts.copy_out), ~problem.computing & (problem.taken > 0)
        self.kind = np.select([brings_back(problem), out, reserving], [0, 1, 3], 2).tolist()
        self.depth = a.depth.tolist()
        # Lanes keep their order, too.
        before = np.concatenate([problem.edges.before, *(rows[:-1] for rows in problem.lanes)])
        after = np.concatenate([problem.edges.after, *(rows[1:] for rows in problem.lanes)])
        self.waiting: list[int] = np.bincount(after, minlength=count).tolist()
        self.behind: list[list[int]] = [[] for _ in range(count)]
        for i, j in zip(before.tolist(), after.tolist(), strict=True):
            self.behind[i].append(j)
        order = np.argsort(a.account, kind="stable")
        self.accounts = np.split(order, np.flatnonzero(np.diff(a.account[order])) + 1)

    def all_passes(self) -> list[int] | None:
        """All passes in order; None if no order of some microbatch was found."""
        order: list[int] = []
        for rows in self.accounts:
            tried = (self._account(rows.tolist(), rule) for rule in RULES)
            behind = next((passes for passes in tried if passes is not None), None)
            if behind is None:
                return None
            order += behind
        return order

    def _account(self, rows: list[int], rule: tuple[int, ...]) -> list[int] | None:
        """The passes of one microbatch in an order that fits, or None; found by backtracking. rows: its passes."""
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
                self._move(i, 1, ready, bit)
                choices.append(self._choices(ready, rule))
                continue
            if not order:
                return None
            dead.add(done)
            choices.pop()
            i = order.pop()
            done ^= bit[i]
            self._move(i, -1, ready, bit)
        return order

    def _choices(self, ready: set[int], rule: tuple[int, ...]) -> list[int]:
        """The passes that fit next, the best last, of equals the deepest; a pass alone where it leaves no pool fuller."""
        fit = [i for i in ready if all(self.used[pool] + taken <= self.room[pool] for pool, taken, _ in self.moves[i])]
        fit.sort(key=lambda i: (-rule[self.kind[i]], self.depth[i], -i))
        return next(([i] for i in reversed(fit) if self.harmless[i]), fit)

    def _move(self, i: int, way: int, ready: set[int], account: Collection[int]) -> None:
        """Run pass i (way 1), or undo it (way −1). account: the passes of the microbatch."""
        for pool, taken, freed in self.moves[i]:
            self.used[pool] += way * (taken - freed)
        ready ^= {i}
        for j in self.behind[i]:
            self.waiting[j] -= way
            if self.waiting[j] == 0 and j in account:
                ready.add(j)
            else:
                ready.discard(j)
