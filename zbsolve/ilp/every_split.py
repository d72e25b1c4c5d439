"""A bound over every split of layers into stages. The split is a variable of CP-SAT; cuts bound the step of any split.

The model has the end of each stage, and the step's time T, which is at least the value of each cut (see `partition.splits`).
CP-SAT finds the split with the least T, and the cuts that are highest for it are added, again and again, until they do not
exceed T. Then this split is bounded by itself, by a closed form or an exact solver. If that bound is higher, the split is
excluded from the model (it is *set apart*). The bound over every split is the least of T and of the bounds of splits that
were set apart. A certificate keeps the splits whose cuts were added, so that these can be made again. Before CP-SAT has
proven anything, the bound is a simple one (`Splits.simple`).

Memory: a layer's bytes are held at least for the path from the layer to the last one and back. The sum of bytes · µs of a
rank's layers must fit its room times the window from its first start to its last backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from ..partition.layer import layer_cuts
from ..partition.splits import NO_JUMP, Cut, Jump, Lanes, Splits, Wave
from ..schedule import EverySplit, Split
from ..util.clock import Clock
from ..util.errors import Infeasible
from .bounds.bound import PATH, WHOLE
from .bounds.closed_forms import closed_form
from .cp import FOUND, refutes, timed_solver

MAX_WHOLE = 600  # the most passes of a split for an exact solver
BUILD_EFFORT = 0.1  # effort for each call of CP-SAT, which its deterministic time leaves out
WHOLE_SHARE = 0.25  # the share of the time left that an exact solver may take for one split
MAX_HELD = 1 << 40  # the most bytes · units of a rank in the model: it is scaled down to that
MAX_TIME = 1 << 62  # units: with a longer step CP-SAT refuses the model


class SplitModel:
    """The model: `ends[s]`, the layers before stage s; `time`, µs of the step; `most`, units that no time in it exceeds."""

    def __init__(self, splits: Splits, below: int) -> None:
        self.splits, self.lanes = splits, Lanes(splits)
        self._known: dict[Wave, Any] = {}
        self.most = min(MAX_TIME, splits.unit * below)
        self.model = model = cp_model.CpModel()
        stages, layers = splits.stages, splits.layers
        inner = [model.new_int_var(s, layers - stages + s, f"end{s}") for s in range(1, stages)]
        self.ends: list[Any] = [0, *inner, layers]
        for a, b in zip(self.ends, self.ends[1:], strict=False):
            model.add(a + 1 <= b)
        self.time = model.new_int_var(0, below, "time")
        totals = [[self._table(row, end) for end in self.ends] for row in splits.totals.tolist()]
        lanes = self.lanes
        self.length: list[Any] = [
            self._positive(totals[k][s + 1] - totals[k][s] - less, int(np.diff(splits.totals[k]).min()) - less)
            for k, s, less in zip(lanes.kind, lanes.stage, lanes.less.tolist(), strict=True)
        ]
        self.start: list[Any] = [sum(self.length[:q]) + int(lanes.waits[q]) for q in range(lanes.path)]
        self.end = [start + length for start, length in zip(self.start, self.length, strict=False)]
        for jump in lanes.jumps:
            self._at_least(self._with_jump(self.end[-1], jump, lanes.microbatches))
        for q in range(lanes.path):
            on_rank = np.flatnonzero(lanes.rank == lanes.rank[q]).tolist()
            behind = [self.length[lane] for lane in on_rank if lanes.place(lane) >= q]
            self._at_least(self.start[q] + lanes.microbatches * sum(behind))
        model.minimize(self.time)

    def _table(self, row: Sequence[int], end: Any) -> Any:
        """`row[end]`."""
        if isinstance(end, int):
            return row[end]
        if len(set(np.diff(row).tolist())) == 1:
            return row[1] * end
        entry = self.model.new_int_var(0, row[-1], "")
        self.model.add_element(end, row, entry)
        return entry

    def _positive(self, units: Any, least: int) -> Any:
        """The maximum of `units` and 0, as `Lanes.lengths` has it. least: a known lower bound of `units`."""
        if least >= 0:
            return units
        value = self.model.new_int_var(0, self.most, "")
        self.model.add_max_equality(value, [units, 0])
        return value

    def _at_least(self, units: Any) -> None:
        self.model.add(self.splits.unit * self.time >= units)

    def _with_jump(self, way: Any, jump: Jump | Wave, microbatches: int) -> Any:
        """The length `way` along the path with a jump over so many microbatches, or with waves."""
        if isinstance(jump, Wave):
            return way + self._waves(jump, (microbatches - 1) // jump.fit)
        if jump == NO_JUMP:
            return way
        inside = sum(self.length[q] for q in self.lanes.inside(jump))
        return way - (self.end[jump.last] - self.start[jump.first]) + microbatches * inside

    def _waves(self, wave: Wave, times: int) -> Any:
        """The time of so many waves if the wave's rank has no room for one microbatch more than `fit`; else 0."""
        F, B = self.lanes.turn(wave.rank)
        length = self.model.new_int_var(0, self.most, "")
        self.model.add(length >= times * (self.end[B] - self.start[F])).only_enforce_if(self._full(wave))
        return length

    def _full(self, wave: Wave) -> Any:
        """A variable that must be true if `fit` + 1 microbatches do not fit the wave's rank."""
        splits = self.splits
        if wave not in self._known:
            assert splits.room is not None
            held, ends = [0, *np.cumsum(splits.held).tolist()], self.ends
            stages = [s for s, rank in enumerate(splits.ranks) if rank == wave.rank]
            size = sum(self._table(held, ends[s + 1]) - self._table(held, ends[s]) for s in stages)
            self._known[wave] = full = self.model.new_bool_var("")
            self.model.add((wave.fit + 1) * size <= splits.room[wave.rank]).only_enforce_if(~full)
        return self._known[wave]

    def add(self, cut: Cut) -> None:
        """Add: T is at least this cut."""
        lanes, heads, tails = self.lanes, list[Any](), list[Any]()
        work = list[Any]()  # a list, since `+=` on a sum would change a term of the model
        for part in cut:
            at, late = lanes.place(part.lane), part.lane >= lanes.path
            head = self._with_jump(self.start[at], part.head, part.begin + 1)
            heads.append(head + (self.length[at] if late else 0))
            tails.append(
                0 if late else self._with_jump(self.end[-1] - self.end[at], part.tail, lanes.microbatches - part.end)
            )
            work.append((part.end - part.begin + 1) * self.length[part.lane])
        self._at_least(self._least(heads) + sum(work) + self._least(tails))

    def _least(self, all_: Sequence[Any]) -> Any:
        if any(isinstance(value, int) for value in all_):
            return 0  # before the first lane, or behind a W
        if len(all_) == 1:
            return all_[0]
        least = self.model.new_int_var(0, self.most, "")
        self.model.add_min_equality(least, all_)
        return least

    def _held(self, rank: int, ends: Sequence[Any]) -> tuple[Any, Any, int]:
        """For stages with these ends: bytes of one microbatch on a rank; bytes · units of all; and its room. In units that
        may be coarser than bytes."""
        splits, lanes, sizes, need = self.splits, self.lanes, list[Any](), list[Any]()
        assert splits.room is not None
        chain, each = splits.totals[:2].sum(axis=0).astype(np.float64), np.array(splits.held, np.float64)
        way = each * (chain[-1] - chain[:-1])
        coarse = max(1.0, (way.sum() + each.sum() * lanes.waits[-1]) * splits.microbatches / MAX_HELD)
        off = 0 if coarse == 1 else 2  # more than rounding adds to a stage
        ways, held = ([0, *np.floor(np.cumsum(column) / coarse).astype(np.int64).tolist()] for column in (way, each))
        for s in (s for s, home in enumerate(splits.ranks) if home == rank):
            size = self._table(held, ends[s + 1]) - self._table(held, ends[s]) - off
            hops = int(lanes.waits[lanes.path - 1 - s] - lanes.waits[s])
            less = off + (held[-1] + 1) * 2 * splits.rounded * (splits.stages - s)
            need.append(self._table(ways, ends[s + 1]) - self._table(ways, ends[s]) - less + hops * size)
            sizes.append(size)
        return sum(sizes), splits.microbatches * sum(need), int(splits.room[rank] // coarse) + int(coarse > 1)

    def _around(self, rank: int, start: Sequence[Any], end: Sequence[Any]) -> Any:
        """Units before the first pass of a rank and behind its last backward."""
        first = self.splits.ranks.index(rank)
        return start[first] + end[-1] - end[self.lanes.path - 1 - first]

    def fill(self, rank: int) -> None:
        """Add: what this rank holds fits its room."""
        size, need, room = self._held(rank, self.ends)
        self.model.add(size <= room)
        self.model.add(room * (self.splits.unit * self.time - self._around(rank, self.start, self.end)) >= need)

    def overfull(self, split: Split, time: int) -> list[int]:
        """The ranks whose room is too small for this split within `time` µs."""
        path, ranks = self.lanes.lengths(split)[: self.lanes.path], list[int]()
        start = np.cumsum(path) - path + self.lanes.waits
        for rank in range(len(self.splits.room or ())):
            size, need, room = self._held(rank, layer_cuts(split))
            left = self.splits.unit * time - int(self._around(rank, start.tolist(), (start + path).tolist()))
            ranks += [rank] if size > room or room * left < need else []
        return ranks

    def set_apart(self, split: Split) -> None:
        """Exclude this split from the model."""
        inner = [end for end in self.ends if not isinstance(end, int)]
        if not inner:
            self.model.add(self.time < 0)  # there is only one split
        else:
            self.model.add_forbidden_assignments(inner, [layer_cuts(split)[1:-1]])

    def split_of(self, solver: cp_model.CpSolver) -> Split:
        """The split of the solver's solution."""
        return tuple(np.diff([solver.value(end) for end in self.ends]).tolist())


@dataclass
class SplitSearch:
    """The search for the bound. below: the value of the best known schedule, µs, where the search ends. looked, apart, full:
    see `EverySplit`. known: bounds, µs, that an exact solver has proven elsewhere. ended: whether `below` is reached."""

    splits: Splits
    below: int
    bound: int = 0
    looked: list[Split] = field(default_factory=list)
    apart: list[tuple[Split, int, str]] = field(default_factory=list)
    full: list[int] = field(default_factory=list)
    known: dict[Split, int] = field(default_factory=dict)
    ended: bool = False

    def __post_init__(self) -> None:
        self._model, self.bound = SplitModel(self.splits, self.below), min(self.below, self.splits.simple)
        self._model.model.add(self._model.time >= self.bound)

    def go_on(self, clock: Clock, below: int, stop: Callable[[], bool] = lambda: False) -> None:
        """Raise the bound while there is time, up to `below` µs."""
        self.below, model, unit = min(self.below, below), self._model, self.splits.unit
        model.model.add(model.time < self.below)
        while clock.left > 0 and not self.ended and self.bound < self.below and not stop():
            solver = timed_solver(clock)
            status = solver.solve(model.model)
            clock.spend(BUILD_EFFORT + solver.response_proto.deterministic_time)
            closed = status == cp_model.INFEASIBLE  # all splits that are left were set apart
            high = self.below if closed else int(np.ceil(max(0.0, solver.best_objective_bound - 1e-6)))
            if not self._raise(high, clock, closed) or status not in FOUND:
                return
            model.model.add(model.time >= high)  # proven for all splits in the model, so not searched again
            time, split = solver.value(model.time), model.split_of(solver)
            cuts = model.lanes.cuts(split)
            most = -(-max(value for value, _ in cuts) // unit)
            full = [rank for rank in model.overfull(split, time) if rank not in self.full]
            for rank in full:
                model.fill(rank)
            self.full += full
            if most > time:
                self.looked.append(split)
                for value, cut in cuts:
                    if value > unit * time:
                        model.add(cut)
            elif not full and (status != cp_model.OPTIMAL or not self._set_apart(split, time, clock)):
                return

    def _raise(self, high: int, clock: Clock, closed: bool) -> bool:
        """Raise the bound, where all splits in the model take `high` µs or more. closed: no split in the model takes less
        than `below`. Returns whether to go on."""
        while (low := min(self.apart, key=lambda entry: entry[1], default=None)) is not None and low[1] < high:
            if not self._refuted(low[0], clock):
                break
            self.apart[self.apart.index(low)] = (low[0], self.below, WHOLE)
        self.bound = max(self.bound, min([high, *(bound for _, bound, _ in self.apart)]))
        self.ended = closed and self.bound >= self.below
        return not closed

    def _refuted(self, split: Split, clock: Clock) -> bool:
        """Whether an exact solver proves that this split takes as long as the best schedule known."""
        if self.known.get(split, 0) >= self.below:
            return True
        if self.splits.microbatches * len(self._model.lanes.stage) > MAX_WHOLE or clock.left <= 0:
            return False
        part = clock.apart(clock.left * WHOLE_SHARE)
        proven = refutes(self.splits.problem(split), self.below, part)
        clock.spend(part.used)
        return proven

    def _set_apart(self, split: Split, time: int, clock: Clock) -> bool:
        """Set the split apart if it can be proven to take more than `time` µs. Returns whether it was."""
        bound, kind = alone(self.splits, split), PATH
        if bound < self.below and self._refuted(split, clock):
            bound, kind = self.below, WHOLE
        if bound <= time:
            return False
        self._model.set_apart(split)
        self.apart.append((split, min(bound, self.below), kind))
        return True

    @property
    def found(self) -> EverySplit:
        """The bound, and what proves it again."""
        splits = self.splits
        proof = (tuple(self.looked), tuple(self.apart), tuple(self.full), splits.roles)
        return EverySplit(self.bound, splits.rows, splits.message, splits.room, *proof)


def alone(splits: Splits, split: Split) -> int:
    """The closed-form bound of one split, µs; `MAX_TIME` if it has no schedule."""
    try:
        return closed_form(splits.problem(split)).value
    except Infeasible:
        return MAX_TIME


def proven_again(splits: Splits, every: EverySplit, seconds: float) -> str:
    """Prove the bound again. Returns why it is not proven, or ""."""
    if splits.simple >= every.bound:
        return ""
    clock, model = Clock(seconds), SplitModel(splits, every.bound - 1)
    for rank in every.full:
        model.fill(rank)
    for split in every.looked:
        for _, cut in model.lanes.cuts(split):
            model.add(cut)
    for split, bound, kind in every.apart:
        if bound < every.bound:
            return f"split {split} is listed with {bound} µs or more alone"
        if alone(splits, split) < every.bound and (kind != WHOLE or not refutes(splits.problem(split), every.bound, clock)):
            return f"split {split} is not proven to take {every.bound} µs"
        model.set_apart(split)
    if timed_solver(clock).solve(model.model) != cp_model.INFEASIBLE:
        return f"some split may take less than {every.bound} µs"
    return ""
