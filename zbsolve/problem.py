"""A training step as a graph of passes: `Pass`, `Edge`, `Problem`.

Columns (NumPy arrays) hold the data; `Pass` and `Edge` are views of one row. Nothing here knows what an `F` is: kinds
are labels, and every rule between passes is an edge that a builder wrote.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import BadInput
from .files import field

KINDS = ("F", "B", "W", "BW", "X", "O", "R", "S", "T", "C", "U", "AF", "AB")
OBJECTIVES = ("makespan", "span")
NAME = re.compile(r"(\d+)([A-Z]+)(\d+)(?:\.(\d+))?")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pass:
    """One unit of work on one rank; `duration` in µs. `streams` are what it occupies while it runs."""

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
class Edge:
    """`after` may start `lag` µs after `before` ends; `bytes` live from before's start to after's end, on their rank."""

    before: str
    after: str
    lag: int = 0
    bytes: int = 0


def pass_name(kind: str, stage: int, microbatch: int, slice: int = 0) -> str:
    """The identity of a pass in files, logs, errors and traces."""
    return f"{stage}{kind}{microbatch}.{slice}" if slice else f"{stage}{kind}{microbatch}"


def _column(values: Any, what: str) -> Ints:
    try:
        array = np.asarray(values)
    except ValueError:  # lists among the numbers
        raise BadInput(f"{what}: whole numbers are needed, got a list of lists") from None
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise BadInput(f"{what}: whole numbers are needed, got {array.dtype if array.ndim == 1 else 'a list of lists'}")
    return np.ascontiguousarray(array, np.int64)


@dataclass(frozen=True, eq=False)
class Passes(Sequence[Pass]):
    """A table of passes, one array a field, all of the same length. `kind` and `streams` index the tables beside them."""

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
        return cls(
            _column([KINDS.index(row.kind) for row in rows], "kind"),
            _column([row.stage for row in rows], "stage"),
            _column([row.microbatch for row in rows], "microbatch"),
            _column([row.slice for row in rows], "slice"),
            _column([row.rank for row in rows], "rank"),
            _column([row.duration for row in rows], "duration"),
            _column([number[row.streams] for row in rows], "streams"),
            sets,
        )

    def __len__(self) -> int:
        return len(self.kind)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(len(self)))]
        return Pass(
            KINDS[self.kind[i]],
            int(self.stage[i]),
            int(self.microbatch[i]),
            int(self.rank[i]),
            int(self.duration[i]),
            int(self.slice[i]),
            self.stream_sets[self.streams[i]],
        )

    def __iter__(self) -> Iterator[Pass]:
        return (self[i] for i in range(len(self)))


@dataclass(frozen=True, eq=False)
class Edges:
    """A table of edges; `before` and `after` index the passes, `lag` in µs, `bytes` in bytes."""

    before: Ints
    after: Ints
    lag: Ints
    bytes: Ints

    def __len__(self) -> int:
        return len(self.before)


@dataclass(frozen=True, eq=False)
class Problem:
    """Passes, edges, memory capacity (bytes a rank, or None: unlimited) and objective: "makespan" or "span".

    Two notes for readers and the executor, which no solver looks at: `layers` is how many layers each stage holds (()
    where nobody said), `source` where the times come from ("measured: …", "estimated: …", or "" for given numbers).

    Raises BadInput for negative times, bytes or indices, memory on an edge between two ranks, doubled names, or a
    capacity that does not name every rank. Problems with the same content are equal and share a `digest`.
    """

    passes: Passes
    edges: Edges
    capacity: tuple[int, ...] | None = None
    objective: str = "makespan"
    layers: tuple[int, ...] = ()
    source: str = ""

    @classmethod
    def of(
        cls,
        passes: Iterable[Pass],
        edges: Iterable[Edge],
        capacity: Sequence[int] | None = None,
        objective: str = "makespan",
    ) -> Problem:
        """A problem from single passes and edges (edges name passes)."""
        table = Passes.of(passes)
        index = {one.name: i for i, one in enumerate(table)}
        rows = list(edges)
        for row in rows:
            for end in (row.before, row.after):
                if end not in index:
                    raise BadInput(f"edge {row.before} → {row.after}: there is no pass {end}")
        return cls(
            table,
            Edges(
                _column([index[row.before] for row in rows], "before"),
                _column([index[row.after] for row in rows], "after"),
                _column([row.lag for row in rows], "lag"),
                _column([row.bytes for row in rows], "bytes"),
            ),
            None if capacity is None else tuple(capacity),
            objective,
        )

    def __post_init__(self) -> None:
        passes, edges = self.passes, self.edges
        if len(passes) == 0:
            raise BadInput("problem: no passes")
        if self.objective not in OBJECTIVES:
            raise BadInput(f"objective '{self.objective}': one of {' '.join(OBJECTIVES)}")
        for what in ("stage", "microbatch", "slice", "rank", "duration", "streams"):
            column = getattr(passes, what)
            if len(column) != len(passes):
                raise BadInput(f"problem: column '{what}' has {len(column)} rows, not {len(passes)}")
            if column.min() < 0:
                worst = int(column.argmin())
                raise BadInput(f"pass {self.names[worst]}: {what} is negative ({column[worst]})")
        if passes.kind.min() < 0 or passes.kind.max() >= len(KINDS):
            raise BadInput("problem: column 'kind' names an unknown kind")
        if passes.streams.max() >= len(passes.stream_sets):
            raise BadInput("problem: column 'streams' points outside its table")
        self._check_edges(edges)
        if self.capacity is not None:
            if len(self.capacity) != self.ranks:
                raise BadInput(f"capacity: {len(self.capacity)} values for {self.ranks} ranks")
            if min(self.capacity) < 0:
                raise BadInput(f"capacity: rank {int(np.argmin(self.capacity))} is negative ({min(self.capacity)})")
        if len(self.index) != len(passes):
            seen: set[str] = set()
            double = next(name for name in self.names if name in seen or seen.add(name))  # type: ignore[func-returns-value]
            raise BadInput(f"pass {double}: named twice in the problem")

    def _check_edges(self, edges: Edges) -> None:
        if len(edges) == 0:
            return
        ends = np.concatenate([edges.before, edges.after])
        if ends.min() < 0 or ends.max() >= len(self.passes):
            raise BadInput("problem: an edge points outside the table of passes")
        for what in ("lag", "bytes"):
            column = getattr(edges, what)
            if column.min() < 0:
                i = int(column.argmin())
                raise BadInput(f"edge {self.names[edges.before[i]]} → {self.names[edges.after[i]]}: {what} is negative")
        rank = self.passes.rank
        bad = np.flatnonzero((edges.bytes > 0) & (rank[edges.before] != rank[edges.after]))
        if len(bad):
            i = int(bad[0])
            raise BadInput(
                f"edge {self.names[edges.before[i]]} → {self.names[edges.after[i]]}: bytes on an edge between two ranks"
            )

    @cached_property
    def ranks(self) -> int:
        """The number of ranks."""
        return int(self.passes.rank.max()) + 1

    @cached_property
    def names(self) -> list[str]:
        """Pass names, in table order."""
        p = self.passes
        plain = zip(p.stage.tolist(), p.kind.tolist(), p.microbatch.tolist(), p.slice.tolist(), strict=True)
        return [f"{s}{KINDS[k]}{m}.{i}" if i else f"{s}{KINDS[k]}{m}" for s, k, m, i in plain]

    @cached_property
    def index(self) -> dict[str, int]:
        """Pass name → row."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """All streams that passes occupy, sorted by kind of stream and rank."""
        sets = self.passes.stream_sets
        found = {name for i in np.unique(self.passes.streams).tolist() for name in sets[i]}
        return tuple(sorted(found, key=lambda name: (name.split(":")[0], len(name), name)))

    @cached_property
    def members(self) -> dict[str, Ints]:
        """Stream → rows of the passes that occupy it, in table order."""
        result = {}
        for stream in self.streams:
            sets = [i for i, streams in enumerate(self.passes.stream_sets) if stream in streams]
            result[stream] = np.flatnonzero(np.isin(self.passes.streams, sets)).astype(np.int64)
        return result

    @cached_property
    def taken(self) -> Ints:
        """Bytes that each pass takes at its start (on its rank)."""
        return np.bincount(self.edges.before, self.edges.bytes, len(self.passes)).astype(np.int64)

    @cached_property
    def freed(self) -> Ints:
        """Bytes that each pass frees at its end."""
        return np.bincount(self.edges.after, self.edges.bytes, len(self.passes)).astype(np.int64)

    @cached_property
    def computing(self) -> NDArray[np.bool_]:
        """Whether each pass occupies a compute stream."""
        computing = np.array([any(s.startswith("compute:") for s in streams) for streams in self.passes.stream_sets])
        result: NDArray[np.bool_] = computing[self.passes.streams]
        return result

    @cached_property
    def beside(self) -> Ints:
        """Rows of the passes that take no compute stream and no memory (all-to-alls, exchanges): they run beside whatever
        order the ranks' other passes have, and change nothing of what that order holds."""
        return np.flatnonzero(~self.computing & (self.taken == 0) & (self.freed == 0)).astype(np.int64)

    @cached_property
    def work(self) -> int:
        """The largest total duration of a rank's compute passes, µs: no step can be shorter."""
        durations = np.where(self.computing, self.passes.duration, 0)
        return int(np.bincount(self.passes.rank, durations, self.ranks).max())

    @cached_property
    def lanes(self) -> list[Ints]:
        """Passes of one (kind, stage, rank), in table order: interchangeable but for their microbatch, so solvers keep
        them in this order (symmetry; no optimum is lost where microbatches are alike)."""
        p = self.passes
        key = (p.rank * (int(p.stage.max()) + 1) + p.stage) * len(KINDS) + p.kind
        rows = np.argsort(key, kind="stable")
        cuts = np.flatnonzero(np.diff(key[rows])) + 1
        return np.split(rows, cuts)

    def head(self, microbatches: int) -> Problem:
        """The same step with only the first `microbatches` microbatches: same lanes, shorter."""
        return self.only(np.flatnonzero(self.passes.microbatch < microbatches))

    def only(self, keep: Ints) -> Problem:
        """The same step with only the passes of these rows, and the edges between them."""
        place = np.full(len(self.passes), -1, np.int64)
        place[keep] = np.arange(len(keep))
        p, e = self.passes, self.edges
        rows = np.flatnonzero((place[e.before] >= 0) & (place[e.after] >= 0))
        columns = {what: getattr(p, what)[keep] for what in ("kind", "stage", "microbatch", "slice", "rank", "duration")}
        passes = Passes(**columns, streams=p.streams[keep], stream_sets=p.stream_sets)
        edges = Edges(place[e.before[rows]], place[e.after[rows]], e.lag[rows], e.bytes[rows])
        return Problem(passes, edges, self.capacity, self.objective, self.layers, self.source)

    def slowed(self, factors: Sequence[float]) -> Problem:
        """The same step where compute on rank r takes `factors[r]` times as long, rounded to whole µs."""
        p = self.passes
        longer = np.rint(p.duration * np.asarray(factors, np.float64)[p.rank]).astype(np.int64)
        return replace(self, passes=replace(p, duration=np.where(self.computing, longer, p.duration)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content, 16 hexadecimal digits."""
        p, e = self.passes, self.edges
        kinds = [KINDS[k] for k in np.unique(p.kind).tolist()]  # a new kind leaves other problems' digests as they are
        head = [kinds, p.stream_sets, self.capacity, self.objective, self.layers, self.source, len(p), len(e)]
        sha = hashlib.sha256(json.dumps(head).encode())
        for column in (p.kind, p.stage, p.microbatch, p.slice, p.rank, p.duration, p.streams):
            sha.update(column.astype("<i8").tobytes())
        for column in (e.before, e.after, e.lag, e.bytes):
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> dict[str, Any]:
        """Columns as lists; `from_json` gives an equal problem back."""
        p, e = self.passes, self.edges
        return {
            "objective": self.objective,
            "source": self.source,
            "layers": list(self.layers),
            "capacity": None if self.capacity is None else list(self.capacity),
            "passes": {
                "kind": [KINDS[k] for k in p.kind.tolist()],
                **{
                    what: getattr(p, what).tolist()
                    for what in ("stage", "microbatch", "slice", "rank", "duration", "streams")
                },
                "stream_sets": [list(streams) for streams in p.stream_sets],
            },
            "edges": {what: getattr(e, what).tolist() for what in ("before", "after", "lag", "bytes")},
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any], where: str = "problem") -> Problem:
        """The problem that `to_json` wrote. Raises BadInput naming `where` and the field."""
        rows = field(dict(body), "passes", dict, where)
        links = field(dict(body), "edges", dict, where)
        kinds = field(rows, "kind", list, where)
        unknown = sorted({str(kind) for kind in kinds} - set(KINDS))
        if unknown:
            raise BadInput(f"{where}: field 'kind' has an unknown kind '{unknown[0]}'")
        number = {kind: i for i, kind in enumerate(KINDS)}
        columns = {
            what: _column(field(rows, what, list, where), f"{where}: field '{what}'")
            for what in ("stage", "microbatch", "slice", "rank", "duration", "streams")
        }
        ends = {
            what: _column(field(links, what, list, where), f"{where}: field '{what}'")
            for what in ("before", "after", "lag", "bytes")
        }
        if len({len(column) for column in ends.values()}) > 1:
            raise BadInput(f"{where}: the columns of 'edges' differ in length")
        sets = field(rows, "stream_sets", list, where)
        if not all(isinstance(one, list) and one and all(isinstance(stream, str) for stream in one) for one in sets):
            raise BadInput(f"{where}: field 'stream_sets' must hold lists of stream names")
        capacity = body.get("capacity")
        if capacity is not None and not (isinstance(capacity, list) and all(type(c) is int for c in capacity)):
            raise BadInput(f"{where}: field 'capacity' must be null or a list of whole bytes")
        return cls(
            Passes(
                kind=_column([number[kind] for kind in kinds], "kind"),
                stream_sets=tuple(map(tuple, sets)),
                **columns,
            ),
            Edges(**ends),
            None if capacity is None else tuple(capacity),
            field(dict(body), "objective", str, where),
            tuple(_column(field(dict(body), "layers", list, where), f"{where}: field 'layers'").tolist()),
            field(dict(body), "source", str, where),
        )
