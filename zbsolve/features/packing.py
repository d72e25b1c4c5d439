"""Packs the sequences of a batch into microbatches of even work, for a data loader: in milliseconds, with a bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapreplace
from math import inf

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule.timeline import Floats
from ..util.errors import BadInput

SWAPS, NEAR = 500, 1e-3  # exchanges at most; distance of the fullest microbatch from its bound that is good enough


@dataclass(frozen=True)
class Packing:
    """A packing of sequences. microbatches: numbers of the sequences in each, the one with the most work first; works: their
    work, in tokens without attention; bound: the fullest microbatch of any packing has at least so much."""

    microbatches: tuple[tuple[int, ...], ...]
    works: tuple[float, ...]
    bound: float

    @property
    def gap(self) -> float:
        """By which share the work of the fullest microbatch could be reduced, at most."""
        return 1 - self.bound / max(self.works)

    def placed(self, problem: Problem) -> Packing:
        """The microbatches in a step's order: the fullest one is where the step's longest microbatch is, and so
        on. Raises BadInput where the step has another number of them."""
        if problem.microbatches != len(self.microbatches):
            raise BadInput(f"packing: {len(self.microbatches)} microbatches for a step of {problem.microbatches}")
        inside = problem.in_microbatch
        takes = np.bincount(problem.passes.microbatch[inside], problem.passes.duration[inside])
        own = np.argsort([-work for work in self.works], kind="stable")
        order = own[np.argsort(np.argsort(-takes, kind="stable"))].tolist()
        works = tuple(self.works[i] for i in order)
        return replace(self, microbatches=tuple(self.microbatches[i] for i in order), works=works)


def pack(lengths: Sequence[float], microbatches: int, attention: float = 0.0) -> Packing:
    """Pack the sequences of a batch into microbatches of even work.

    lengths: tokens of each sequence.
    microbatches: their number; each gets at least one sequence.
    attention: the time of attention for a token and each token of its sequence, relative to all other time of a token: a
        sequence of l tokens is l · (1 + attention · l) of work.

    Longest work first (at most 4/3 of the optimum: Graham, 1969), then the fullest microbatch exchanges sequences
    with others while that helps. Raises BadInput.
    """
    length = np.asarray(lengths, np.float64)
    wrong = np.flatnonzero(~((length > 0) & (length < inf)))
    if len(wrong):
        raise BadInput(f"lengths: length {wrong[0]} is {length[wrong[0]]:g}: above 0 is needed")
    if not 1 <= microbatches <= len(length) or not 0 <= attention < inf:
        raise BadInput(f"pack: {len(length)} sequences in {microbatches} microbatches, attention {attention}")
    work = length * (1 + attention * length)
    down = np.argsort(-work, kind="stable")
    ranked, most = work[down], (len(work) - 1) // microbatches
    # Of the k · microbatches + 1 longest sequences, some microbatch has k + 1.
    together = (ranked[k * microbatches - k : k * microbatches + 1].sum() for k in range(1, most + 1))
    bound = float(max(ranked[0], work.sum() / microbatches, *together, 0.0))
    where, rooms = np.zeros(len(work), np.int64), [(0.0, number) for number in range(microbatches)]
    for i in down.tolist():
        load, where[i] = rooms[0]
        heapreplace(rooms, (load + work[i], int(where[i])))
    loads = _evened(work, where, bound * (1 + NEAR))
    order = np.argsort(-loads, kind="stable").tolist()
    return Packing(
        tuple(tuple(np.flatnonzero(where == number).tolist()) for number in order),
        tuple(loads[order].tolist()),
        min(bound, float(loads.max())),
    )


def _evened(work: Floats, where: Ints, enough: float) -> Floats:
    """Let the fullest microbatch give away a sequence, or exchange it, while both microbatches end less full than it was.
    where: the microbatch of each sequence, changed in place. Returns the work of each microbatch."""
    count = int(where.max()) + 1
    loads = np.asarray(np.bincount(where, work, count), np.float64)
    each = np.append(work, np.zeros(count))  # an empty sequence in each: an exchange may be one-sided
    for _ in range(SWAPS):
        top = int(loads.argmax())
        if loads[top] <= enough:
            break
        home = np.append(where, np.arange(count))
        own, theirs = np.flatnonzero(where == top), np.flatnonzero(home != top)
        less = each[own][:, None] - each[theirs]
        fuller = np.maximum(loads[top] - less, loads[home[theirs]] + less)
        out, taken = divmod(int(fuller.argmin()), len(theirs))
        if fuller[out, taken] >= loads[top] * (1 - 1e-12):
            break
        other = int(home[theirs[taken]])
        where[own[out]] = other
        if theirs[taken] < len(work):
            where[theirs[taken]] = top
        loads[[top, other]] += np.array([-1, 1]) * less[out, taken]
    return loads
