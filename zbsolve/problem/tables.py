"""Tables of passes and edges, an array for each field. `Pass` and `Edge` are views of one row.

Kinds are only labels here: every rule between passes is an edge that a builder wrote. The one exception is `usual_cargo`,
which reads files from before edges said what they carry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..kinds import KINDS, OURS, kinds_that
from ..util.columns import coded, whole_column
from ..util.errors import BadInput

# What an edge carries from pass to pass; "": nothing, it only orders them. Side inputs skip the row of stages.
CARGO = ("", "activation", "gradient", "side input", "side gradient")
IDENTITY = ("kind", "stage", "microbatch", "slice")  # columns that make a pass's name
WHOLE = 1_000_000  # the pace of a pass that runs alone: work is counted in millionths of a µs
MAX_PLACES = 64  # the lookup table of `find` has at most so many entries a pass
COUNTS = ("stage", "microbatch", "slice", "rank", "duration")  # the columns that hold plain whole numbers

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Pass:
    """One unit of work on one rank, named `<stage><kind><microbatch>[.<slice>]`.

    kind: a label of `zbsolve.kinds`.
    stage, microbatch, slice: which part of the step it computes.
    rank: where it runs.
    duration: µs.
    streams: what it occupies while it runs; (): its rank's compute stream.
    """

    kind: str
    stage: int
    microbatch: int
    rank: int
    duration: int
    slice: int = 0
    streams: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.streams:
            object.__setattr__(self, "streams", (f"compute:{self.rank}",))

    @property
    def name(self) -> str:
        """`<stage><kind><microbatch>[.<slice>]`, for example `3B12` or `0F4.1` (slice 0 is not written)."""
        return pass_name(self.kind, self.stage, self.microbatch, self.slice)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """While a pass of kind `beside` runs on a rank, passes of `kind` there run `factor` times as slowly."""

    kind: str
    beside: str
    factor: float


@dataclass(frozen=True, slots=True)
class Edge:
    """`after` may start `lag` µs after `before` ends.

    before, after: names of passes.
    lag: µs, such as the time of a message.
    bytes: held from the start of `before` to the end of `after`, on the device of their rank or in `pool`.
    carries: what `before` makes and `after` takes, a word of CARGO; "": nothing; None: as in a plain pipeline.
    sent: µs at the end of `before`, part of its duration, in which its rank sends the message.
    pool: the name of a pool; "": the device.
    """

    before: str
    after: str
    lag: int = 0
    bytes: int = 0
    carries: str | None = None
    sent: int = 0
    pool: str = ""


@dataclass(frozen=True, slots=True)
class Pool:
    """Memory beside devices, which ranks may share, such as a node's host memory. capacity: bytes; None: unlimited."""

    name: str
    capacity: int | None = None


def pass_name(kind: str, stage: int, microbatch: int, slice: int = 0) -> str:
    """The name of a pass in files, logs, errors and traces."""
    return f"{stage}{kind}{microbatch}.{slice}" if slice else f"{stage}{kind}{microbatch}"


@dataclass(frozen=True, eq=False)
class Passes(Sequence[Pass]):
    """A table of passes, one array a field, of one length. `kind` indexes KINDS, `streams` the `stream_sets`."""

    kind: Ints
    stage: Ints
    microbatch: Ints
    slice: Ints
    rank: Ints
    duration: Ints
    streams: Ints
    stream_sets: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, passes: Iterable[Pass]) -> Passes:
        """A table from single passes. Raises BadInput for an unknown kind."""
        rows = list(passes)
        for row in rows:
            if row.kind not in KINDS:
                raise BadInput(f"pass {row.name}: unknown kind '{row.kind}' (one of {' '.join(KINDS)})")
        sets = tuple(dict.fromkeys(row.streams for row in rows))
        number = {streams: i for i, streams in enumerate(sets)}
        columns = {name: whole_column([getattr(row, name) for row in rows], name) for name in COUNTS}
        return cls(
            kind=coded([row.kind for row in rows], KINDS, "kind"),
            streams=whole_column([number[row.streams] for row in rows], "streams"),
            stream_sets=sets,
            **columns,
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        counts = {name: int(getattr(self, name)[i]) for name in COUNTS}
        return Pass(KINDS[self.kind[i]], **counts, streams=self.stream_sets[self.streams[i]])

    def __iter__(self) -> Iterator[Pass]:
        return (self[i] for i in range(len(self)))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that there are, in the order of KINDS."""
        return tuple(KINDS[k] for k in np.unique(self.kind).tolist())

    @cached_property
    def kind_names(self) -> list[str]:
        """The kind of each pass, shape (passes,)."""
        return [KINDS[k] for k in self.kind.tolist()]

    def are(self, *kinds: str) -> Bools:
        """Which passes are of these kinds, shape (passes,)."""
        return np.isin(self.kind, [KINDS.index(kind) for kind in kinds])

    def that(self, **facts: object) -> Bools:
        """Which passes are of a kind with these fields (see `kinds.Kind`), such as `away=True`; shape (passes,)."""
        return self.are(*kinds_that(**facts))

    @cached_property
    def lasting(self) -> tuple[tuple[str, ...], Ints]:
        """`kinds` and `kind` for digests. They do not depend on the order in which users registered their own kinds."""
        own = [kind for kind in self.kinds if KINDS.index(kind) >= len(OURS)]
        if not own:
            return self.kinds, self.kind
        order = [*KINDS[: len(OURS)], *sorted(own)]
        number = np.array([order.index(kind) if kind in order else -1 for kind in KINDS], np.int64)
        return tuple(sorted(self.kinds, key=order.index)), number[self.kind]

    def named_as(self, other: Passes) -> bool:
        """Whether the passes of both tables have the same names, row by row."""
        return self is other or all(np.array_equal(getattr(self, name), getattr(other, name)) for name in IDENTITY)

    def find(self, kind: Ints, stage: Ints, microbatch: Ints) -> Ints | None:
        """Rows of passes of these kinds (indices), stages, microbatches, and slice 0, shape (n,); None: one is missing."""
        place, widths = self._places
        wanted = np.stack([kind, stage, microbatch])
        if len(place) == 0 or (wanted >= np.array(widths)[:, None]).any():
            return None
        rows = place[(wanted[0] * widths[1] + wanted[1]) * widths[2] + wanted[2]]
        return None if (rows < 0).any() else rows

    @cached_property
    def _places(self) -> tuple[Ints, tuple[int, int, int]]:
        """The lookup table of `find`: the row of each kind, stage and microbatch (−1: none), flattened, and its shape. It is
        empty if it were much larger than the table of passes."""
        kinds, stages, microbatches = (int(getattr(self, name).max()) + 1 for name in IDENTITY[:3])
        if kinds * stages * microbatches > MAX_PLACES * len(self):
            return np.zeros(0, np.int64), (kinds, stages, microbatches)
        place = np.full(kinds * stages * microbatches, -1, np.int64)
        rows = np.flatnonzero(self.slice == 0)
        place[((self.kind * stages + self.stage) * microbatches + self.microbatch)[rows]] = rows
        return place, (kinds, stages, microbatches)

    def only(self, rows: Ints) -> Passes:
        """The table of these rows."""
        columns = {name: getattr(self, name)[rows] for name in ("kind", *COUNTS, "streams")}
        return Passes(**columns, stream_sets=self.stream_sets)

    def more(self, kind: ArrayLike, stream: str, **columns: Ints) -> Passes:
        """The table with further rows. kind: one for all, or one each. stream: passes run on `<stream>:<rank>`. columns:
        those of `COUNTS`, shape (rows,); slice may be left out and is 0 then."""
        (sets, first), count = self._with_streams(stream), len(columns["stage"])
        added = {"slice": np.zeros(count, np.int64), **columns}
        added |= {"kind": coded(kind, KINDS, "kind", count), "streams": first + columns["rank"]}
        return Passes(**{name: np.concatenate([getattr(self, name), new]) for name, new in added.items()}, stream_sets=sets)

    def like(self, rows: Ints, kind: ArrayLike, stream: str, duration: Ints, **other: Ints) -> Passes:
        """The table with a further pass for each of `rows`, whose part of the step and rank it has unless `other` does."""
        columns = {name: getattr(self, name)[rows] for name in (*IDENTITY[1:], "rank")}
        return self.more(kind, stream, **{**columns, "duration": duration, **other})

    def _with_streams(self, stream: str) -> tuple[tuple[tuple[str, ...], ...], int]:
        """The sets of streams, among them one `<stream>:<rank>` for each rank, in order; and the index of rank 0's."""
        ours = tuple((f"{stream}:{rank}",) for rank in range(int(self.rank.max()) + 1))
        for first in range(len(self.stream_sets) - len(ours) + 1):
            if self.stream_sets[first : first + len(ours)] == ours:
                return self.stream_sets, first
        return (*self.stream_sets, *ours), len(self.stream_sets)


@dataclass(frozen=True, eq=False)
class Edges:
    """A table of edges, an array for each field of `Edge`. `before` and `after` index the passes, `carries` indexes CARGO;
    `pool` is 0 for the rank's device, k for pool k − 1 of the problem."""

    before: Ints
    after: Ints
    lag: Ints
    bytes: Ints
    carries: Ints
    sent: Ints
    pool: Ints

    @classmethod
    def of(
        cls,
        before: Ints,
        after: Ints,
        *,
        lag: Ints | int = 0,
        bytes: Ints | int = 0,
        carries: ArrayLike = "",
        sent: Ints | int = 0,
        pool: Ints | int = 0,
    ) -> Edges:
        """Edges from rows `before` to `after`. Other columns: shape (edges,), or one value for all; `carries`: of CARGO."""
        none = np.zeros(len(before), np.int64)
        cargo = coded(carries, CARGO, "cargo", len(before))
        return cls(before, after, none + lag, none + bytes, cargo, none + sent, none + pool)

    def __len__(self) -> int:
        return len(self.before)

    def __add__(self, other: Edges) -> Edges:
        """Both tables, one behind the other."""
        columns = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return Edges(*(np.concatenate([a, b]).astype(np.int64) for a, b in columns))

    def only(self, rows: Ints) -> Edges:
        """The table of these rows."""
        return Edges(*(getattr(self, field.name)[rows] for field in fields(self)))

    def carrying(self, *cargo: str) -> Bools:
        """Which edges carry one of these, shape (edges,)."""
        return np.isin(self.carries, [CARGO.index(name) for name in cargo])

    @property
    def handing(self) -> Bools:
        """Which edges hand something on, shape (edges,)."""
        return self.carries > 0

    @property
    def beside(self) -> Bools:
        """Which edges hand on a side input or its gradient, shape (edges,)."""
        return self.carrying("side input", "side gradient")


def usual_cargo(passes: Passes, a: Ints, b: Ints) -> Ints:
    """What edges from passes `a` to passes `b` carry in a plain pipeline, as indices into CARGO, shape (edges,).

    An activation goes from F to the F of the next stage, a gradient from a backward to that of the stage before, through
    the all-to-all if there is one. The edges at the batch and at the loss carry nothing.
    """
    step = passes.stage[b] - passes.stage[a]
    first, last = passes.stage[a] == 0, passes.stage[a] == passes.stage.max(initial=0)
    forward, backward = passes.are("F"), passes.are("B", "BW")
    around_f, around_b = passes.are("AF"), passes.are("AB")
    down = (forward | around_f)[a] & forward[b] & (step == 1)
    up = (backward | around_b)[a] & backward[b] & (step == -1)
    down |= forward[a] & around_f[b] & (step == 0) & ~last
    up |= backward[a] & around_b[b] & (step == 0) & ~first
    same = passes.microbatch[a] == passes.microbatch[b]
    cargo = np.where(down & same, CARGO.index("activation"), np.where(up & same, CARGO.index("gradient"), 0))
    return cargo.astype(np.int64)


def microbatches_alike(passes: Passes, edges: Edges, lanes: list[Ints], in_microbatch: Bools) -> bool:
    """Whether the passes of each lane differ only by their microbatch: they take equally long, and every microbatch has the
    same edges within itself, with the same lags, bytes and pools.

    Then the lanes of any schedule can be sorted: let the k-th pass of a lane to start be the one of microbatch k. No pass
    waits longer, and ranks hold as many bytes. So some best schedule runs its lanes in order. Edges between microbatches,
    and those of passes of no microbatch (updates, gathers), are not compared, since builders write them for that order. But
    a pass of a free kind (see `kinds.Kind`) must have edges without bytes to all passes of a lane or to none.
    """
    lane, length = lane_of(len(passes), lanes)
    if length.max(initial=0) <= 1:
        return True
    took = passes.duration
    if any((took[rows] != took[rows[0]]).any() for rows in lanes if in_microbatch[rows[0]]):
        return False
    a, b, number = edges.before, edges.after, passes.microbatch[edges.before]
    for free, other in ((a, b), (b, a)):
        rows = passes.that(free=True)[free] & in_microbatch[other] & (edges.bytes == 0)
        if in_part(lane, length, free[rows], other[rows]):
            return False
    within = np.flatnonzero(in_microbatch[a] & in_microbatch[b] & (number == passes.microbatch[b]))
    pair = lane[a[within]] * len(lanes) + lane[b[within]]
    order = np.lexsort((edges.pool[within], edges.bytes[within], edges.lag[within], number[within], pair))
    for rows in np.split(within[order], np.flatnonzero(np.diff(pair[order])) + 1):
        if len(rows) and not _alike(edges, number, rows, set(length[lane[[a[rows[0]], b[rows[0]]]]].tolist())):
            return False
    return True


def lane_of(passes: int, lanes: list[Ints]) -> tuple[Ints, Ints]:
    """The lane of each pass, shape (passes,), and the length of each lane. passes: how many there are."""
    lane = np.empty(passes, np.int64)
    for at, rows in enumerate(lanes):
        lane[rows] = at
    return lane, np.array([len(rows) for rows in lanes])


def in_part(lane: Ints, length: Ints, outer: Ints, inner: Ints) -> bool:
    """Whether some pass of `outer` has edges to some passes of a lane (`inner`) but not to all of it."""
    pairs = np.unique(np.stack([outer, inner]), axis=1)
    met, count = np.unique(pairs[0] * len(length) + lane[pairs[1]], return_counts=True)
    return bool((count != length[met % len(length)]).any())


def _alike(edges: Edges, number: Ints, rows: Ints, lengths: set[int]) -> bool:
    """Whether every microbatch has the same edges between two lanes. rows: those edges, sorted by microbatch, lag, bytes and
    pool. number: the microbatch of every edge. lengths: of the two lanes."""
    most = max(lengths)
    if len(lengths) > 1 or len(rows) % most:
        return False
    table = rows.reshape(most, -1)
    same = np.all([array[table] == array[table[0]] for array in (edges.lag, edges.bytes, edges.pool)], axis=0)
    return bool(same.all() and (number[table] == number[table[:, :1]]).all())
