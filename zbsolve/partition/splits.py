"""All splits of a model's layers into the stages of a placement: the data on them in certificates, and lower bounds on the
step of each. A bound is made of terms that are linear in the times of stages, so that one statement holds for all splits.

A **lane** is all passes of one stage and kind. Each microbatch passes the lanes F₀ … F_{N−1}, B_{N−1} … B₀ (or BW) in this
order, which is its path; W comes after its B. The **head** of a pass is a lower bound on its start. Its **tail** is a lower
bound on the time from its end to the end of the step. A **jump** leads from lane i to a later lane j of the same rank. From
the start of i's first pass to the end of j's pass m, the rank runs passes 0 … m of all its lanes from i to j, since each
comes after the former and before the latter. So a path with a jump in it gives a head, and a tail likewise:

    start of pass m of l ≥ path to i + (m + 1) · lanes of the jump + path from after j to l.

A **wave** is a bound from memory. A rank has stages s ≤ … ≤ t. From its F to its backward it keeps H bytes of each
microbatch, the sum over these stages. If (c + 1) H exceeds the rank's room, pass j of F_t starts only after pass j − c of
B_t has ended. *Proof.* When pass j of F_t starts, the rank has begun passes 0 … j of all its F lanes. Suppose that pass
j − c of B_t has not ended. Then no later pass of B_t has. Nor has any other backward of microbatches j − c … j begun here,
as each comes after the one in B_t. So c + 1 microbatches are held, which do not fit. ∎ From its start in F_t to its end in
B_t a microbatch takes D, the path between them. So every c microbatches take D:

    start of pass m of l ≥ path to l + ⌊m/c⌋ · D, for l from F_t on; and tails likewise, for l up to B_t.

A **cut** is a set of passes of one rank: microbatches x … y of some lanes. A step takes at least the least head in it, plus
all its work, plus the least tail (one machine; Carlier, *The one-machine sequencing problem*, 1982), in every split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import numpy as np

from ..build.plain import pipeline
from ..problem import Problem
from ..problem.tables import Ints
from ..schedule import EverySplit, LayerRow
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible
from ..util.kernels import kernel, subkernel
from .cuts import Floats
from .layer import NO_LINK, Layer, layer_cuts
from .stage_costs import StageCosts, least_step
from .stage_memory import StageMemory

MAX_LAYERS, MOST_OF_SIMPLE = 100_000, 20_000_000  # most layers of a file; stages · layers² of a simple bound (a second)
SCALE = 1000  # units in a µs, where layers' times are not whole
NEARLY, MAX_DESCENTS = 0.001, 2000  # descents go on from splits that cost at most this share more; their number at most
INTERRUPTIBLE = 0.3  # effort of descents in one call, which Ctrl-C does not end
SECONDS_PER_DESCENT, SECONDS_PER_CUT = 2e-9, 2e-6  # effort: of two stages and two lanes; of a pass in cuts
ROUNDED = 502  # units that a stage's pass may be shorter than its layers: half a µs, and the rounding of units


@dataclass(frozen=True)
class Splits:
    """All splits of these layers into stages. ranks: of each stage; rows: the layers, with times of F, B, W or of F, BW;
    message: the least µs of a message between two ranks; room: bytes of each rank, or None; roles: as in an `EverySplit`."""

    ranks: tuple[int, ...]
    microbatches: int
    rows: tuple[LayerRow, ...]
    message: int
    room: tuple[int, ...] | None
    roles: tuple[tuple[float, ...], ...] = ()

    @classmethod
    def of(cls, costs: StageCosts) -> Splits | None:
        """The splits of a step. None where stages' times are not sums of layers' times, where layers are not in one row, and
        where microbatches take several routes."""
        plain = len(costs.routes) == 1 and not costs.common.barriers and not costs.untrained and costs.row
        if not plain or costs.rank_factors or costs.microbatch_factors or len(costs.layers) < costs.stages:
            return None
        kinds = ("F", "BW") if costs.fused else ("F", "B", "W")
        held = _held_at_least(costs.memory)
        each = [(tuple(float(getattr(c, k)) for k in kinds), h) for c, h in zip(costs.layers, held, strict=True)]
        rows = tuple(LayerRow(len(list(same)), *layer) for layer, same in groupby(each))
        message = round(costs.least_message(costs.layers[:-1] or costs.layers))
        roles = tuple(tuple(float(getattr(role, k)) for k in kinds) for role in costs.roles)
        return cls(costs.routes[0], costs.microbatches, rows, message, costs.limit, roles)

    @classmethod
    def told(cls, every: EverySplit, problem: Problem) -> Splits:
        """The splits that a schedule's file describes. Raises BadInput naming a field that does not fit the problem, or
        where the problem is not the step of one of these splits."""
        ranks, layers, rows = problem.ranks, sum(problem.layers), every.layers
        splits = [*every.looked, *(split for split, _, _ in every.apart)]
        wrong = {
            "layers": layers > MAX_LAYERS
            or sum(row.number for row in rows) != layers
            or {len(row.times) for row in rows} not in ({2}, {3})
            or min(min(row.number - 1, row.held, *row.times) for row in rows) < 0,
            "roles": (bool(every.roles) and [len(row) for row in every.roles] != [len(rows[0].times)] * 3)
            or min((time for row in every.roles for time in row), default=0) < 0,
            "message": every.message < 0,
            "room": every.room is not None and (len(every.room) != ranks or min(every.room) < 0),
            "looked": any(len(split) != problem.stages or sum(split) != layers or min(split) < 1 for split in splits),
            "full": not set(every.full) <= set(range(ranks if every.room else 0)),
        }
        for name in (name for name, is_wrong in wrong.items() if is_wrong):
            raise BadInput(f"every_split: field '{name}' is not about the layers of this problem")
        homes = tuple(home[0] for home in problem.stage_ranks)
        read = cls(homes, problem.microbatches, rows, every.message, every.room, every.roles)
        if not read.covers(problem):
            raise BadInput("every_split: its layers do not make this problem's stages")
        return read

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @cached_property
    def layers(self) -> int:
        """The number of layers."""
        return sum(row.number for row in self.rows)

    @cached_property
    def times(self) -> list[list[float]]:
        """µs of the pass of each kind, [kind][layer]."""
        return [[row.times[k] for row in self.rows for _ in range(row.number)] for k in range(len(self.rows[0].times))]

    @cached_property
    def held(self) -> list[int]:
        """Bytes that each layer keeps."""
        return [row.held for row in self.rows for _ in range(row.number)]

    @cached_property
    def unit(self) -> int:
        """Units in a µs: 1 where all times are whole, else `SCALE`."""
        times = (*(row.times for row in self.rows), *self.roles)
        return 1 if all(float(time).is_integer() for row in times for time in row) else SCALE

    @property
    def rounded(self) -> int:
        """The most units by which a stage's pass may be shorter than its layers together."""
        return 0 if self.unit == 1 else ROUNDED

    @cached_property
    def beside(self) -> Floats:
        """µs by which its role makes a stage's pass longer than its layers, [kind, stage]."""
        roles = np.array(self.roles or [[0.0] * len(self.rows[0].times)] * 3)
        return roles[[0, *[1] * (self.stages - 2), 2][: self.stages]].T

    @cached_property
    def totals(self) -> Ints:
        """Units of all layers before layer a, [kind, a]."""
        sums = np.cumsum([[0.0, *row] for row in self.times], axis=1)
        return np.floor(self.unit * sums + 1e-6).astype(np.int64)

    @cached_property
    def simple(self) -> int:
        """A lower bound, µs, on the step of every split, from times alone (`least_step`); 0 if that takes too long."""
        fused = len(self.times) == 2
        each: list[tuple[float, float, float, float]]
        each = [(F, 0.0, 0.0, b[0]) if fused else (F, b[0], b[1], 0.0) for F, *b in zip(*self.times, strict=True)]
        layers = tuple(Layer("", *times, 0, 0, 0, 0, message=self.message) for times in each)
        costs = StageCosts(layers, NO_LINK, 1.0, (), (), (), (self.ranks,), self.microbatches, None, fused)
        few = max(20, self.stages) * self.layers**2 <= MOST_OF_SIMPLE  # few stages still need memory for layers²
        return least_step(costs, "makespan") if few else 0

    def problem(self, counts: Sequence[int]) -> Problem:
        """The step of one split. Its lower bounds also hold for a step whose passes take longer or keep more."""
        stages = list(pairwise(layer_cuts(counts)))
        held = [sum(self.held[a:b]) for a, b in stages]
        both = zip(self.times, self.beside.tolist(), strict=True)
        rows = [[round(sum(row[a:b]) + more) for (a, b), more in zip(stages, own, strict=True)] for row, own in both]
        passes: dict[str, Any] = dict(zip(("F", "BW") if len(rows) == 2 else ("F", "B", "W"), rows, strict=True))
        how: dict[str, Any] = {"placement": self.ranks, "microbatches": self.microbatches, "comm": self.message}
        return pipeline(**passes, **how, held_until_B=held, capacity=self.room, layers=tuple(counts))

    def covers(self, problem: Problem) -> bool:
        """Whether a problem is the step of one of these splits, or one whose passes take longer or keep more, in no more
        room. It may have further passes, by way of which passes wait for each other (see `_waits`). Its schedules, without
        the further passes, must be schedules of the split."""
        if len(problem.layers) != self.stages or sum(problem.layers) != self.layers or problem.objective != "makespan":
            return False
        try:
            own = self.problem(problem.layers)
        except Infeasible:  # layers that a file names may not fit the room that it names
            return False
        if not problem.index.keys() >= {*own.names}:
            return False
        rows, edges, its = np.array([problem.index[name] for name in own.names]), own.edges, problem.edges
        known, longer = _waits(problem, rows), problem.passes.duration[rows] - own.passes.duration
        ends = zip(rows[edges.before].tolist(), rows[edges.after].tolist(), strict=True)
        wanted = zip(ends, (edges.lag - longer[edges.before]).tolist(), strict=True)
        alone = [[f"compute:{rank}" in streams for rank in range(problem.ranks)] for streams in problem.passes.stream_sets]
        inner = np.all([c[its.before] == c[its.after] for c in (problem.passes.stage, problem.passes.microbatch)], axis=0)
        inner &= np.isin(its.after, rows) & problem.in_microbatch[its.before]
        # Bytes that lie here until the stage's backward, or W. On other splits a further pass before these may drop them.
        kept = np.bincount(its.before, np.where(inner, problem.device_bytes, 0), len(problem.passes))
        keeps = bool((kept[rows] >= own.taken).all() and np.isin(its.before[inner], rows).all())
        return bool(
            (problem.passes.rank[rows] == own.passes.rank).all()
            and np.array(alone)[problem.passes.streams[rows], own.passes.rank].all()
            and (longer >= 0).all()
            and all(pair in known and known[pair] >= lag for pair, lag in wanted)
            and (self.room is None or (keeps and (problem.room[: len(self.room)] <= self.room).all()))
        )


def _waits(problem: Problem, rows: Ints) -> dict[tuple[int, int], int]:
    """(a, b) → the most µs between the end of pass a and the start of pass b, for a in `rows`: the lag of an edge, or a path
    through passes of microbatches that are not in `rows`."""
    edges, duration = problem.edges, problem.passes.duration.tolist()
    between = problem.in_microbatch.copy()
    between[rows] = False
    onward, known = dict[int, list[list[int]]](), dict[tuple[int, int], int]()
    columns = list(zip(edges.before.tolist(), edges.after.tolist(), edges.lag.tolist(), strict=True))
    for a, *edge in (edge for edge in columns if between[edge[0]]):
        onward.setdefault(a, []).append(edge)
    own = set(rows.tolist())
    for a, *edge in (edge for edge in columns if edge[0] in own):
        ways = [edge]
        while ways:
            b, lag = ways.pop()
            if lag > known.get((a, b), -1):
                known[a, b] = lag
                ways += [[c, lag + duration[b] + more] for c, more in onward.get(b, ())]
    return known


class Jump(NamedTuple):
    """A jump from lane `first` to lane `last`, both on one rank (see the module)."""

    first: int
    last: int


NO_JUMP = Jump(-1, -1)


class Wave(NamedTuple):
    """A wave on a rank that has room for `fit` microbatches (see the module)."""

    rank: int
    fit: int


class Part(NamedTuple):
    """Microbatches `begin` … `end` of a lane in a cut. head, tail: the jump or wave that gives their head and their tail."""

    lane: int
    begin: int
    end: int
    head: Jump | Wave
    tail: Jump | Wave


Cut = tuple[Part, ...]


class LaneNumbers(NamedTuple):
    """The numbers of `Lanes` that compiled code reads. turns: [rank], the lanes of F and of the backward of its last stage;
    held: [a], bytes of the layers before a; room: bytes of each rank."""

    totals: Ints
    kind: Ints
    stage: Ints
    rank: Ints
    less: Ints
    waits: Ints
    turns: Ints
    held: Ints
    room: Ints
    microbatches: int


@kernel
def least_of_ranks(t: LaneNumbers, counts: Ints) -> Ints:
    """Lower bounds on a split's step, units, one for each rank. Each is the greatest of three: the path with one jump over
    all microbatches; the path with waves; the start of a lane and the rank's work in all lanes from there on."""
    path, ends, sizes = len(t.waits), np.zeros(len(counts) + 1, np.int64), np.zeros(len(t.room), np.int64)
    ends[1:] = np.cumsum(counts)
    length, start, least = np.empty(len(t.kind), np.int64), t.waits.copy(), np.zeros(len(t.room), np.int64)
    for q in range(len(length)):
        a, b, row = ends[t.stage[q]], ends[t.stage[q] + 1], t.totals[t.kind[q]]
        length[q] = max(0, row[b] - row[a] - t.less[q])
        if q < len(counts):
            sizes[t.rank[q]] += t.held[b] - t.held[a]
    start[1:] += np.cumsum(length[: path - 1])
    whole = start[-1] + length[path - 1]
    for i in range(path):
        r, inside = t.rank[i], np.int64(0)
        for j in range(i, path):
            if t.rank[j] == r:
                inside += length[j]
                least[r] = max(least[r], whole - (start[j] + length[j] - start[i]) + t.microbatches * inside)
        for q in range(path, len(length)):
            if t.rank[q] == r and path - 1 - t.stage[q] >= i:
                inside += length[q]
        least[r] = max(least[r], start[i] + t.microbatches * inside)
    for r in range(len(t.room)):
        F, B = t.turns[r, 0], t.turns[r, 1]
        fit = max(1, t.room[r] // max(1, sizes[r]))
        least[r] = max(least[r], whole + (t.microbatches - 1) // fit * (start[B] + length[B] - start[F]))
    return least


@subkernel
def _cost(t: LaneNumbers, split: Ints) -> float:
    """The highest of the ranks' bounds plus an eighth of their mean, so that splits with equal highest bounds differ."""
    least = least_of_ranks(t, split)
    return float(least.max() + least.mean() / 8)


@kernel
def _descend(t: LaneNumbers, starts: Ints, found: Ints, first: int, now: Ints, record: float, seed: int) -> float:
    """Descents from number `first` on. Rows of `found` become the cost of a split that no move of one layer to another stage
    makes cheaper, and the split. The first descents begin at `starts`. Each further one begins at `now`, the last split that
    cost nearly as little as the best, with a few layers moved at random (record-to-record travel; Dueck, 1993). Changes
    `now`. Returns the new `record`, the least cost so far. Calls are made in one thread, whose random state goes on."""
    if first == 0:
        np.random.seed(seed)
    count, stages = starts.shape
    for turn in range(first, first + len(found)):
        split = (starts[turn] if turn < count else now).copy()
        for _ in range(np.random.randint(2, 6) if turn >= count else 0):
            giver, taker = np.random.randint(stages), np.random.randint(stages)
            if split[giver] > 1:
                split[giver] -= 1
                split[taker] += 1
        cost, at, failed = _cost(t, split), np.random.randint(stages * stages), 0
        while failed < stages * stages:
            at, failed = (at + 1) % (stages * stages), failed + 1
            giver, taker = at // stages, at % stages
            if split[giver] > 1 and giver != taker:
                split[giver] -= 1
                split[taker] += 1
                new = _cost(t, split)
                if new < cost:
                    cost, failed = new, 0
                else:
                    split[giver] += 1
                    split[taker] -= 1
        found[turn - first, 0], found[turn - first, 1:] = cost, split
        if cost <= record * (1 + NEARLY):
            record, now[:] = min(record, cost), split
    return record


class Lanes:
    """The lanes of a placement: first those of the path, then each stage's W. stage, rank, kind (a row of `Splits.totals`):
    of each lane. waits: units of messages before each lane of the path. less: units by which a lane's passes may be shorter
    than its layers; below 0 if its stage's role makes them longer."""

    def __init__(self, splits: Splits) -> None:
        N, kinds = splits.stages, len(splits.rows[0].times)
        self.splits, self.path, self.microbatches = splits, 2 * N, splits.microbatches
        self.stage = np.array([*range(N), *reversed(range(N)), *(range(N) if kinds == 3 else ())])
        self.kind = np.repeat(np.arange(kinds), N)
        self.rank = np.array(splits.ranks)[self.stage]
        self.less = splits.rounded - np.floor(splits.unit * splits.beside[self.kind, self.stage]).astype(np.int64)
        hops = self.rank[1 : self.path] != self.rank[: self.path - 1]
        self.waits = splits.unit * splits.message * np.concatenate([[0], np.cumsum(hops)])
        on_rank = [np.flatnonzero(self.rank[: self.path] == r).tolist() for r in range(max(splits.ranks) + 1)]
        self.jumps = [Jump(i, j) for lanes in on_rank for at, i in enumerate(lanes) for j in lanes[at:]]

    def inside(self, jump: Jump) -> list[int]:
        """The lanes of a jump: those of its rank on the path between its ends."""
        return [q for q in range(jump.first, jump.last + 1) if self.rank[q] == self.rank[jump.first]]

    def turn(self, rank: int) -> tuple[int, int]:
        """The lanes of F and of the backward of a rank's last stage, F_t and B_t of its waves."""
        last = int(np.flatnonzero(self.rank[: self.splits.stages] == rank)[-1])
        return last, self.path - 1 - last

    def full(self, counts: Sequence[int]) -> list[Wave]:
        """The waves of a split: one for each rank without room for all microbatches."""
        ends, held, room = layer_cuts(counts), np.cumsum([0, *self.splits.held]), self.splits.room
        sizes = np.bincount(self.splits.ranks, np.diff(held[ends])).astype(np.int64)
        fit = [] if room is None else (np.array(room) // np.maximum(sizes, 1)).tolist()
        return [Wave(rank, max(1, few)) for rank, few in enumerate(fit) if few < self.microbatches and sizes[rank] > 0]

    def place(self, lane: int) -> int:
        """The position of a lane on the path; for W, the position of its B."""
        return lane if lane < self.path else self.path - 1 - int(self.stage[lane])

    def lengths(self, counts: Sequence[int]) -> Ints:
        """A lower bound, units, on a pass of each lane in a split."""
        ends = np.array(layer_cuts(counts))
        totals = self.splits.totals
        stages = totals[self.kind, ends[self.stage + 1]] - totals[self.kind, ends[self.stage]]
        return np.asarray(np.maximum(stages - self.less, 0))

    @cached_property
    def numbers(self) -> LaneNumbers:
        """The numbers that compiled code reads."""
        splits = self.splits
        turns = np.array([self.turn(rank) for rank in range(int(self.rank.max()) + 1)])
        held, room = np.cumsum([0, *splits.held]), np.array(splits.room or [1 << 60] * len(turns))
        lanes = splits.totals, self.kind, self.stage, self.rank, self.less, self.waits.astype(np.int64)
        return LaneNumbers(*lanes, turns, held, room, splits.microbatches)

    def descents(self, starts: Sequence[Sequence[int]], clock: Clock, seed: int) -> list[tuple[int, ...]]:
        """Splits that descents from `starts` find (see `_descend`): first that with the lowest bound by cuts, of equal ones
        the more even one. Descents take three quarters of the clock's time, and the cuts of what they find the rest."""
        each = self.splits.stages**2 * self.path * len(self.stage) * SECONDS_PER_DESCENT
        cuts = len(self.stage) * self.microbatches * SECONDS_PER_CUT
        begins, record, costs = np.array(starts, np.int64), np.inf, dict[tuple[int, ...], int]()
        now, until, rounds = begins[0].copy(), 0.25 * clock.left, min(MAX_DESCENTS, int(0.75 * clock.left / each))
        at_once = max(1, int(INTERRUPTIBLE / each))
        for first in range(0, rounds, at_once):
            found = np.empty((min(at_once, rounds - first), self.splits.stages + 1), np.int64)
            record = _descend(self.numbers, begins, found, first, now, record, seed)
            costs |= {tuple(row[1:]): row[0] for row in found.tolist()}
            clock.spend(len(found) * each)
            if clock.left <= until:  # slower than the effort says
                break
        ends = sorted(costs, key=costs.__getitem__)[: max(1, int(clock.left / cuts))]
        clock.spend(len(ends) * cuts)
        return sorted(ends, key=lambda end: (max(value for value, _ in self.cuts(end)), np.square(self.lengths(end)).sum()))

    def cuts(self, counts: Sequence[int]) -> list[tuple[int, Cut]]:
        """For each rank the highest bound on this split that a cut gives, units, and that cut."""
        length, B = self.lengths(counts), self.microbatches
        path = length[: self.path]
        start = np.concatenate([[0], np.cumsum(path)[:-1]]) + self.waits
        end, whole = start + path, int(start[-1] + path[-1])
        work = np.array([sum(int(length[q]) for q in self.inside(jump)) for jump in self.jumps])
        span = np.array([end[jump.last] - start[jump.first] for jump in self.jumps])
        gain = np.arange(1, B + 1) * work[:, None] - span[:, None]  # [jump, m]: added to the path over m + 1 microbatches
        waves = self.full(counts)
        turns: list[tuple[int, int]] = [self.turn(wave.rank) for wave in waves]
        reasons: list[Jump | Wave] = [*self.jumps, *waves, NO_JUMP]  # index −1: none
        wait = [np.arange(B) // wave.fit * (end[b] - start[f]) for wave, (f, b) in zip(waves, turns, strict=True)]
        gain = np.concatenate([gain, np.array(wait, np.int64).reshape(len(waves), B)])
        head_gain, by_up = _best(gain, np.array([*(jump.last for jump in self.jumps), *(f for f, _ in turns)]), self.path)
        first = np.array([self.path - 1 - p for p in (*(jump.first for jump in self.jumps), *(b for _, b in turns))])
        tail_gain, by_down = (array[::-1, ::-1] for array in _best(gain, first, self.path))
        head, tail = start[:, None] + head_gain, (whole - end)[:, None] + tail_gain
        cuts = []
        for rank in range(int(self.rank.max()) + 1):
            lanes = np.flatnonzero(self.rank == rank).tolist()
            places = [self.place(q) for q in lanes]
            is_W = [q >= self.path for q in lanes]
            heads = np.array([head[p] + (length[p] if w else 0) for p, w in zip(places, is_W, strict=True)])
            tails = np.array([np.zeros(B, np.int64) if w else tail[p] for p, w in zip(places, is_W, strict=True)])
            value, h, t = _densest(heads, tails, length[lanes])
            cut = []
            for row, (q, p) in enumerate(zip(lanes, places, strict=True)):
                inside = np.flatnonzero((heads[row] >= h) & (tails[row] >= t)).tolist()
                if inside:
                    by_tail = -1 if q >= self.path else by_down[p, inside[-1]]
                    cut.append(Part(q, inside[0], inside[-1], reasons[by_up[p, inside[0]]], reasons[by_tail]))
            cuts.append((value, tuple(cut)))
        return cuts


def _held_at_least(memory: StageMemory) -> list[int]:
    """Bytes for each layer, such that every stage keeps at least the sum over its layers. Each layer in turn gets as many as
    all stages that end with it, or later, leave to it."""
    n, least = len(memory.layers), list[int]()
    kept = memory.after_f(*np.ogrid[:n, 1 : n + 1])
    left = np.minimum.accumulate(kept[:, ::-1], axis=1)[:, ::-1]  # [a, b]: the least of stages a … b and longer ones
    for layer in range(n):
        least.append(int(left[: layer + 1, layer].min()))
        left[: layer + 1, layer + 1 :] -= least[-1]
    return least


def _best(more: Ints, place: Ints, count: int) -> tuple[Ints, Ints]:
    """Two arrays [l, m]: the largest of 0 and entry m of rows of `more` whose place is l or less; and its row (−1: none)."""
    best, which = np.zeros(more.shape[1], np.int64), np.full(more.shape[1], -1)
    rows = []
    for at in range(count):
        for row in np.flatnonzero(place == at).tolist():
            better = more[row] > best
            best, which = np.where(better, more[row], best), np.where(better, row, which)
        rows.append((best, which))
    return np.array([most for most, _ in rows]), np.array([index for _, index in rows])


def _densest(heads: Ints, tails: Ints, lengths: Ints) -> tuple[int, int, int]:
    """The highest value of h + work + t, and its h and t. work is that of all passes with heads ≥ h and tails ≥ t. heads,
    tails: [lane, microbatch]; lengths: of a pass of each lane; all in units."""
    rows, row = np.unique(heads, return_inverse=True)
    columns, column = np.unique(tails, return_inverse=True)
    work = np.zeros((len(rows), len(columns)), np.int64)
    np.add.at(work, (row.ravel(), column.ravel()), np.repeat(lengths, heads.shape[1]))
    work = work[::-1, ::-1].cumsum(axis=0).cumsum(axis=1)[::-1, ::-1]
    value = np.where(work > 0, work + rows[:, None] + columns[None, :], 0)
    h, t = np.unravel_index(int(value.argmax()), value.shape)
    return int(value[h, t]), int(rows[h]), int(columns[t])
