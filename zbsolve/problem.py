"""A training step as a graph of passes: `Problem`. Its tables are in `tables`, where kinds are only labels."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np

from .problem_form import ProblemForm, edges_as_json, edges_from, passes_as_json, passes_from
from .tables import (
    CARGO,
    KINDS,
    PER_STEP,
    Bools,
    Edge,
    Edges,
    Ints,
    Pass,
    Passes,
    pass_name,
    usual_cargo,
    whole_column,
)
from .util.errors import BadInput
from .util.files import checked, read_one_of, write_document

__all__ = ["KINDS", "NAME", "OBJECTIVES", "Edge", "Edges", "Ints", "Pass", "Passes", "Problem", "pass_name"]

OBJECTIVES = ("makespan", "span")
MAX_SUM = 2.0**62  # of all times, and of all bytes, so that sums are whole numbers of 64 bits
NAME = re.compile(r"(\d+)([A-Z]+)(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, eq=False)
class Problem:
    """Passes, edges, memory capacity (bytes a rank, or None: unlimited) and objective: "makespan" or "span".

    Two notes for readers and the executor, which no solver looks at: `layers` is how many layers each stage holds (()
    where nobody said), `source` where the times come from ("measured: …", "estimated: …", or "" for given numbers).
    What edges carry is no part of the `digest`.

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
        """A problem from single passes and edges (edges name passes). Raises BadInput."""
        table = Passes.of(passes)
        index = {one.name: i for i, one in enumerate(table)}
        rows = list(edges)
        for row in rows:
            for end in (row.before, row.after):
                if end not in index:
                    raise BadInput(f"edge {row.before} → {row.after}: there is no pass {end}")
        before, after, lag, size = (
            whole_column(column, what)
            for what, column in {
                "before": [index[row.before] for row in rows],
                "after": [index[row.after] for row in rows],
                "lag": [row.lag for row in rows],
                "bytes": [row.bytes for row in rows],
            }.items()
        )
        usual = usual_cargo(table, before, after)
        for i, row in enumerate(rows):
            if row.carries is not None:
                if row.carries not in CARGO:
                    raise BadInput(f"edge {row.before} → {row.after}: carries '{row.carries}', none of {CARGO}")
                usual[i] = CARGO.index(row.carries)
        links = Edges(before, after, lag, size, usual)
        return cls(table, links, None if capacity is None else tuple(capacity), objective)

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
        for what, column, lags in (("times", passes.duration, edges.lag), ("bytes", edges.bytes, edges.lag[:0])):
            if float(column.sum(dtype=np.float64)) + float(lags.sum(dtype=np.float64)) > MAX_SUM:
                raise BadInput(f"problem: its {what} add up to more than zbsolve can count")
        if self.capacity is not None:
            if len(self.capacity) != self.ranks:
                raise BadInput(f"capacity: {len(self.capacity)} values for {self.ranks} ranks")
            if min(self.capacity) < 0:
                raise BadInput(f"capacity: rank {int(np.argmin(self.capacity))} is negative ({min(self.capacity)})")
        if not _all_differ(passes.kind, passes.stage, passes.microbatch, passes.slice):
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
    def stages(self) -> int:
        """The number of stages."""
        return int(self.passes.stage.max()) + 1

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return int(self.passes.microbatch[self.in_microbatch].max(initial=-1)) + 1

    @cached_property
    def in_microbatch(self) -> Bools:
        """Which passes belong to a microbatch; others are counted by the step (updates, exchanges). Shape (passes,)."""
        return ~self.passes.are(*PER_STEP)

    @cached_property
    def updating(self) -> Bools:
        """Which passes update weights, shape (passes,)."""
        return self.passes.are("U")

    @cached_property
    def round(self) -> int:
        """How many microbatches an update takes in; 0 without updates. Raises BadInput where updates are not alike."""
        count = int(self.passes.microbatch[self.updating].max(initial=-1)) + 1
        if count and self.microbatches % count:
            raise BadInput(f"problem: {self.microbatches} microbatches do not make {count} rounds, one an update")
        return self.microbatches // count if count else 0

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that microbatches visit, stage by stage: microbatch i follows route i modulo their number. Raises
        BadInput where a microbatch is on two ranks for one stage, or does not visit all stages."""
        p, rows = self.passes, np.flatnonzero(self.in_microbatch)
        table = np.full((self.microbatches, self.stages), -1, np.int64)
        back = rows[::-1].copy()  # in place, numpy may turn it round again
        table[p.microbatch[back], p.stage[back]] = p.rank[back]  # where ranks differ, the first one's
        wrong = np.flatnonzero(table[p.microbatch[rows], p.stage[rows]] != p.rank[rows])
        if len(wrong):
            one = p[rows[wrong[0]]]
            other = table[one.microbatch, one.stage]
            raise BadInput(f"pass {one.name}: its microbatch is on rank {other} and on rank {one.rank} for one stage")
        if table.min() < 0:
            microbatch, stage = np.argwhere(table < 0)[0].tolist()
            raise BadInput(f"problem: microbatch {microbatch} has no pass of stage {stage}")
        ranks = [tuple(row) for row in table.tolist()]
        period = next(n for n in range(1, len(ranks) + 1) if all(one == ranks[i % n] for i, one in enumerate(ranks)))
        return tuple(ranks[:period])

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage → rank. Raises BadInput where microbatches follow several routes."""
        if len(self.routes) > 1:
            raise BadInput(f"problem: its stages are on several ranks: microbatches follow {len(self.routes)} routes")
        return self.routes[0]

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that each stage lives on, ascending."""
        there = np.zeros((self.stages, self.ranks), bool)
        there[self.passes.stage, self.passes.rank] = True
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in there)

    def rows(self, *kinds: str, stage: int | None = None, rank: int | None = None) -> Ints:
        """The rows of the passes of these kinds, of one stage or rank where it is named."""
        p, found = self.passes, self.passes.are(*kinds)
        if stage is not None:
            found &= p.stage == stage
        if rank is not None:
            found &= p.rank == rank
        return np.flatnonzero(found).astype(np.int64)

    @cached_property
    def names(self) -> list[str]:
        """Pass names, in table order."""
        p = self.passes
        plain = zip(p.stage.tolist(), p.kind_names, p.microbatch.tolist(), p.slice.tolist(), strict=True)
        return [f"{s}{k}{m}.{i}" if i else f"{s}{k}{m}" for s, k, m, i in plain]

    @cached_property
    def index(self) -> dict[str, int]:
        """Pass name → row."""
        return {name: i for i, name in enumerate(self.names)}

    @cached_property
    def streams(self) -> tuple[str, ...]:
        """All streams that passes occupy, sorted by kind of stream and rank."""
        sets = self.passes.stream_sets
        found = {name for i in np.flatnonzero(np.bincount(self.passes.streams)).tolist() for name in sets[i]}
        return tuple(sorted(found, key=lambda name: (name.split(":")[0], len(name), name)))

    @cached_property
    def members(self) -> dict[str, Ints]:
        """Stream → rows of the passes that occupy it, in table order."""
        rows = np.argsort(self.passes.streams, kind="stable")
        of_set = np.split(rows, np.cumsum(np.bincount(self.passes.streams, minlength=len(self.passes.stream_sets)))[:-1])
        result = {}
        for stream in self.streams:
            mine = [of_set[i] for i, streams in enumerate(self.passes.stream_sets) if stream in streams]
            result[stream] = np.sort(np.concatenate(mine)).astype(np.int64)
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
    def computing(self) -> Bools:
        """Whether each pass occupies a compute stream."""
        computing = np.array([any(s.startswith("compute:") for s in streams) for streams in self.passes.stream_sets])
        result: Bools = computing[self.passes.streams]
        return result

    @cached_property
    def side_stream(self) -> Ints:
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
        key = (p.rank * self.stages + p.stage) * len(KINDS) + p.kind
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
        e = self.edges.only(np.flatnonzero((place[self.edges.before] >= 0) & (place[self.edges.after] >= 0)))
        edges = replace(e, before=place[e.before], after=place[e.after])
        return replace(self, passes=self.passes.only(keep), edges=edges)

    def slowed(self, factors: Sequence[float]) -> Problem:
        """The same step where compute on rank r takes `factors[r]` times as long, rounded to whole µs."""
        p = self.passes
        longer = np.rint(p.duration * np.asarray(factors, np.float64)[p.rank]).astype(np.int64)
        return replace(self, passes=replace(p, duration=np.where(self.computing, longer, p.duration)))

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content, 16 hexadecimal digits."""
        p, e = self.passes, self.edges
        # Of kinds the ones that are there: a new kind leaves other problems' digests as they are.
        head = [p.kinds, p.stream_sets, self.capacity, self.objective, self.layers, self.source, len(p), len(e)]
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
        """Columns as lists or as runs in a text; `from_json` gives an equal problem back."""
        return {
            "objective": self.objective,
            "source": self.source,
            "layers": list(self.layers),
            "capacity": None if self.capacity is None else list(self.capacity),
            "passes": passes_as_json(self.passes),
            "edges": edges_as_json(self.edges),
        }

    @classmethod
    def from_json(cls, body: Any, where: str = "problem") -> Problem:
        """The problem that `to_json` wrote. Raises BadInput naming `where` and the field."""
        return cls.from_form(checked(body, ProblemForm, where), where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a problem file, whole or not at all; `-` is standard output."""
        write_document(path, "problem", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Problem:
        """The problem of a problem file or of a schedule's file; `-` is standard input. Raises BadInput."""
        kind, body = read_one_of(path, ("problem", "schedule"))
        return cls.from_json(body if kind == "problem" else body.get("problem"), str(path))

    @classmethod
    def from_form(cls, form: ProblemForm, where: str) -> Problem:
        """The problem that a file says. Raises BadInput naming `where` and the field."""
        passes = passes_from(form.passes, where)
        edges = edges_from(form.edges, passes, where)
        capacity = None if form.capacity is None else tuple(form.capacity)
        return cls(passes, edges, capacity, form.objective, tuple(form.layers), form.source)


def _all_differ(*columns: Ints) -> bool:
    """Whether no two rows are alike; columns of whole numbers from 0 up, shape (rows,) each."""
    widths = [int(column.max()) + 1 for column in columns]
    if prod(widths) >= 2**62:
        return len(set(zip(*(column.tolist() for column in columns), strict=True))) == len(columns[0])
    key = np.zeros(len(columns[0]), np.int64)
    for column, width in zip(columns, widths, strict=True):
        key = key * width + column
    key.sort()  # np.unique's hashing takes ten times as long where keys are dense
    return bool((np.diff(key) > 0).all())
