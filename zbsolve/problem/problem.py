"""`Problem`: a training step as a graph of passes. `tables` has the tables of passes and edges."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import numpy as np

from ..kinds import KINDS, LINKS, SLICES, TABLE
from ..util.columns import coded, whole_column
from ..util.errors import BadInput, prefixed
from ..util.files import checked, read_one_of, write_document
from ..util.text import plural
from . import form as problem_form
from . import tables
from .form import MessageRoom
from .tables import CARGO, WHOLE, Bools, Edge, Edges, Ints, Pass, Passes, Pool, Slowdown, usual_cargo

OBJECTIVES = ("makespan", "span")
UNLIMITED = 2**60  # bytes: the room of a pool without a limit
NAME = re.compile(r"(\d+)([A-Z]+)(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, eq=False)
class Problem:
    """A training step: passes, edges between them, memory and objective. Equal content makes equal problems and digests.

    passes, edges: columns; `Problem.of` takes single ones.
    capacity: bytes of each rank's device; None: unlimited.
    objective: "makespan" or "span".
    pools: further memory, which an edge may name for its bytes. Pools 0 … ranks − 1 are the devices, then come these.
    slowdowns: kinds of passes that slow each other while they run at the same time on a rank. Durations are those of passes
        that run alone. Of several slowdowns the largest counts. A pass ends with the µs in which its work is done.

    Notes for readers and the executor, which no solver looks at:

    layers: how many layers each stage holds; (): unknown.
    recomputed: how many of each stage's layers, from its first on, a pass X recomputes; (): all of them.
    source: where the times come from: "measured: …", "estimated: …", or "" for given numbers.
    messages: their sizes and the memory kept free for them, if a profile says so; how many wait at once depends on the
        schedule (see `handover`). The digest leaves it out, as it does `carries` and `sent` of edges.
    slice_lengths: the relative length of each slice of a sequence; (): equal slices.
    sizes: how many sequences each microbatch has; (): as many as the profile's.
    settings: options that the executor's parts read while a rank runs, such as the largest norm of gradients; by name.

    Raises BadInput for negative times, bytes or indices, device memory on an edge between two ranks, messages longer than
    their pass, doubled names, an unknown pool, or a capacity that does not name every rank.
    """

    passes: Passes
    edges: Edges
    capacity: tuple[int, ...] | None = None
    objective: str = "makespan"
    layers: tuple[int, ...] = ()
    source: str = ""
    pools: tuple[Pool, ...] = ()
    messages: MessageRoom | None = None
    slice_lengths: tuple[float, ...] = ()
    recomputed: tuple[int, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    sizes: tuple[int, ...] = ()
    settings: Mapping[str, problem_form.Setting] = field(default_factory=dict)

    def __repr__(self) -> str:  # of columns it would be pages long
        sizes = plural(rank=self.ranks, stage=self.stages, microbatch=self.microbatches, pass_=len(self.passes))
        return f"<Problem {self.digest}: {sizes}>"

    @classmethod
    def of(
        cls,
        passes: Iterable[Pass],
        edges: Iterable[Edge],
        capacity: Sequence[int] | None = None,
        objective: str = "makespan",
        pools: Sequence[Pool] = (),
    ) -> Problem:
        """A problem from single passes and edges (edges name passes and pools). Raises BadInput."""
        table = Passes.of(passes)
        index = {each.name: i for i, each in enumerate(table)}
        rows = list(edges)
        for row in rows:
            for end in (row.before, row.after):
                if end not in index:
                    raise BadInput(f"edge {row.before} → {row.after}: there is no pass {end}")
        before, after = (whole_column([index[getattr(row, end)] for row in rows], end) for end in ("before", "after"))
        lag, size, sent = (whole_column([getattr(row, what) for row in rows], what) for what in ("lag", "bytes", "sent"))
        usual = usual_cargo(table, before, after)
        for i, row in enumerate(rows):
            if row.carries is not None:
                if row.carries not in CARGO:
                    raise BadInput(f"edge {row.before} → {row.after}: carries '{row.carries}', none of {CARGO}")
                usual[i] = CARGO.index(row.carries)
        known = ("", *(each.name for each in pools))
        pool = coded([row.pool for row in rows], known, "pool") if rows else before
        links = Edges(before, after, lag, size, usual, sent, pool)
        return cls(table, links, None if capacity is None else tuple(capacity), objective, pools=tuple(pools))

    def __post_init__(self) -> None:
        problem_form.check_tables(self.passes, self.edges, self.pools)
        if self.objective not in OBJECTIVES:
            raise BadInput(f"objective '{self.objective}': one of {' '.join(OBJECTIVES)}")
        problem_form.check_notes(self.slice_lengths, self.slices, self.recomputed, self.layers)
        problem_form.check_capacity(self.capacity, self.ranks)
        problem_form.check_slowdowns(self.slowdowns, float(self.passes.duration.sum(dtype=np.float64)))

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
    def slices(self) -> int:
        """How many slices each microbatch's sequence is cut into; 1 where it is not."""
        return int(self.passes.slice.max()) + 1

    @cached_property
    def parts(self) -> Ints:
        """Microbatch and slice of each pass as one number, microbatch · slices + slice, shape (passes,)."""
        return self.passes.microbatch * self.slices + self.passes.slice

    @cached_property
    def in_microbatch(self) -> Bools:
        """Which passes belong to a microbatch; the others belong to the step (updates, exchanges). Shape (passes,)."""
        return ~self.passes.that(per_step=True)

    @cached_property
    def updating(self) -> Bools:
        """Which passes update weights, shape (passes,)."""
        return self.passes.are("U")

    @cached_property
    def round(self) -> int:
        """How many microbatches each update covers; 0 without updates. Raises BadInput if updates cover unequal numbers."""
        count = int(self.passes.microbatch[self.updating].max(initial=-1)) + 1
        if count and self.microbatches % count:
            raise BadInput(f"problem: {self.microbatches} microbatches do not make {count} rounds, one an update")
        return self.microbatches // count if count else 0

    @cached_property
    def routes(self) -> tuple[tuple[int, ...], ...]:
        """The routes of microbatches: for each the rank of each stage. Microbatch i follows route i modulo their number.
        Passes that help another rank (`away`) do not count. Raises BadInput where a stage of one is on two ranks or none."""
        p, rows = self.passes, np.flatnonzero(self.in_microbatch & ~self.passes.that(away=True))
        table = np.full((self.microbatches, self.stages), -1, np.int64)
        back = rows[::-1].copy()  # a copy, since numpy may reorder an assignment through a reversed view
        table[p.microbatch[back], p.stage[back]] = p.rank[back]  # where ranks differ, the first row's stays
        wrong = np.flatnonzero(table[p.microbatch[rows], p.stage[rows]] != p.rank[rows])
        if len(wrong):
            first = p[rows[wrong[0]]]
            other = table[first.microbatch, first.stage]
            raise BadInput(f"pass {first.name}: its microbatch is on rank {other} and on rank {first.rank} for one stage")
        if table.min() < 0:
            microbatch, stage = np.argwhere(table < 0)[0].tolist()
            raise BadInput(f"problem: microbatch {microbatch} has no pass of stage {stage}")
        ranks = [tuple(row) for row in table.tolist()]
        period = next(n for n in range(1, len(ranks) + 1) if all(row == ranks[i % n] for i, row in enumerate(ranks)))
        return tuple(ranks[:period])

    @cached_property
    def chunks(self) -> Ints:
        """The chunk of each pass: its stage counted among the stages of its rank, 0 for the lowest; shape (passes,)."""
        there = np.zeros((self.stages, self.ranks), np.int64)
        there[self.passes.stage, self.passes.rank] = 1
        return np.asarray((there.cumsum(axis=0) - 1)[self.passes.stage, self.passes.rank])

    def has(self, feature: str) -> bool:
        """Whether `features` has this one."""
        return feature in self.features

    @cached_property
    def features(self) -> tuple[str, ...]:
        """The features that its passes show: those that bring their kinds (see `kinds.Kind`), and `SLICES`."""
        names = (*(TABLE[kind].feature for kind in self.passes.kinds), SLICES if self.slices > 1 else "")
        return tuple(dict.fromkeys(filter(None, names)))

    @cached_property
    def model_stages(self) -> int:
        """The number of stages that have layers, which come first: up to the last with an F. All if there is no F."""
        return int(self.passes.stage[self.rows("F")].max(initial=-1)) + 1 or self.stages

    @property
    def model_routes(self) -> tuple[tuple[int, ...], ...]:
        """`routes` through the stages that have layers. Raises BadInput as `routes` does."""
        return tuple(route[: self.model_stages] for route in self.routes)

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage → rank. Raises BadInput where microbatches follow several routes."""
        if len(self.routes) > 1:
            raise BadInput(f"problem: its stages are on several ranks: microbatches follow {len(self.routes)} routes")
        return self.routes[0]

    @cached_property
    def stage_ranks(self) -> tuple[tuple[int, ...], ...]:
        """The ranks that each stage lives on, ascending; not those that only help it."""
        there = np.zeros((self.stages, self.ranks), bool)
        home = ~self.passes.that(away=True)
        there[self.passes.stage[home], self.passes.rank[home]] = True
        return tuple(tuple(np.flatnonzero(row).tolist()) for row in there)

    def rows(self, *kinds: str, stage: int | None = None, rank: int | None = None) -> Ints:
        """The rows of the passes of these kinds, of one stage or rank where it is named."""
        p, chosen = self.passes, self.passes.are(*kinds)
        if stage is not None:
            chosen &= p.stage == stage
        if rank is not None:
            chosen &= p.rank == rank
        return np.flatnonzero(chosen).astype(np.int64)

    def grid(self, *kinds: str) -> Ints:
        """Rows of stages' and microbatches' passes of these kinds (last slices), shape (stages, microbatches); −1: none."""
        rows, table = self.rows(*kinds), np.full((self.stages, self.microbatches), -1, np.int64)
        table[self.passes.stage[rows], self.passes.microbatch[rows]] = rows
        return table

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
        names = {name for i in np.flatnonzero(np.bincount(self.passes.streams)).tolist() for name in sets[i]}
        return tuple(sorted(names, key=lambda name: (name.split(":")[0], len(name), name)))

    @cached_property
    def members(self) -> dict[str, Ints]:
        """Stream → rows of the passes that occupy it, in table order."""
        rows = np.argsort(self.passes.streams, kind="stable")
        of_set = np.split(rows, np.cumsum(np.bincount(self.passes.streams, minlength=len(self.passes.stream_sets)))[:-1])
        result = {}
        for stream in self.streams:
            sets = [of_set[i] for i, streams in enumerate(self.passes.stream_sets) if stream in streams]
            result[stream] = np.sort(np.concatenate(sets)).astype(np.int64)
        return result

    @cached_property
    def device_bytes(self) -> Ints:
        """Bytes of each edge on its rank's device, shape (edges,)."""
        return np.where(self.edges.pool == 0, self.edges.bytes, 0) if self.pools else self.edges.bytes

    @cached_property
    def taken(self) -> Ints:
        """Bytes that each pass takes at its start on its rank's device."""
        return np.bincount(self.edges.before, self.device_bytes, len(self.passes)).astype(np.int64)

    @cached_property
    def freed(self) -> Ints:
        """Bytes that each pass frees at its end on its rank's device."""
        return np.bincount(self.edges.after, self.device_bytes, len(self.passes)).astype(np.int64)

    @cached_property
    def room(self) -> Ints:
        """Bytes that each pool has (`UNLIMITED` where it has no limit): the ranks' devices, then `pools`."""
        devices = (None,) * self.ranks if self.capacity is None else self.capacity
        limits = (*devices, *(pool.capacity for pool in self.pools))
        return np.array([UNLIMITED if limit is None else min(limit, UNLIMITED) for limit in limits], np.int64)

    def pool_name(self, pool: int) -> str:
        """The name of a pool in texts: `rank 3` for a rank's device, else its own name."""
        return f"rank {pool}" if pool < self.ranks else self.pools[pool - self.ranks].name

    def edges_in(self, pool: int) -> Ints:
        """Rows of the edges whose bytes lie in a pool."""
        e = self.edges
        if pool >= self.ranks:
            return np.flatnonzero((e.bytes > 0) & (e.pool == pool - self.ranks + 1))
        return np.flatnonzero((self.device_bytes > 0) & (self.passes.rank[e.before] == pool))

    def moved(self, pool: int) -> tuple[Ints, Ints]:
        """Bytes that each pass takes at its start and frees at its end in a pool, shape (passes,) each."""
        if pool < self.ranks:
            own = self.passes.rank == pool
            return np.where(own, self.taken, 0), np.where(own, self.freed, 0)
        rows, e, count = self.edges_in(pool), self.edges, len(self.passes)
        taken, freed = (np.bincount(end[rows], e.bytes[rows], count) for end in (e.before, e.after))
        return taken.astype(np.int64), freed.astype(np.int64)

    @cached_property
    def sending(self) -> Ints:
        """µs at the end of each pass in which it sends, as part of its duration; above 0 where links block their sender."""
        return np.bincount(self.edges.before, self.edges.sent, len(self.passes)).astype(np.int64)

    @cached_property
    def computing(self) -> Bools:
        """Whether each pass occupies a compute stream."""
        computing = np.array([any(s.startswith("compute:") for s in streams) for streams in self.passes.stream_sets])
        return computing[self.passes.streams]

    @cached_property
    def copying(self) -> Bools:
        """Whether each pass moves bytes to a further pool, or back, beside computing."""
        ends = np.concatenate([rows[self.edges.pool > 0] for rows in (self.edges.before, self.edges.after)])
        return ~self.computing & np.isin(np.arange(len(self.passes)), ends)

    @cached_property
    def side_stream(self) -> Ints:
        """Rows of the passes that occupy no compute stream (all-to-alls, exchanges, gathers) and run beside the others."""
        return np.flatnonzero(~self.computing).astype(np.int64)

    @cached_property
    def paces(self) -> Ints:
        """The pace of a pass of one kind (row) beside one of another (column), in 1/WHOLE; shape (kinds, kinds)."""
        parts = np.full((len(KINDS), len(KINDS)), WHOLE)
        for slow in self.slowdowns:
            parts[KINDS.index(slow.kind), KINDS.index(slow.beside)] = round(WHOLE / slow.factor)
        return parts

    @cached_property
    def collective(self) -> Ints:
        """The number of each pass's collective, from 0; −1: none; shape (passes,). Its parts are of one kind, microbatch and
        slice, one on each rank. All ranks run collectives in the same order; none ends before all ranks have begun it."""
        p, numbers = self.passes, np.full(len(self.passes), -1, np.int64)
        rows = np.flatnonzero(p.that(together=True))
        names = np.stack([p.kind[rows], p.microbatch[rows], p.slice[rows]])
        numbers[rows] = np.unique(names, axis=1, return_inverse=True)[1].ravel()
        return numbers

    @cached_property
    def busy(self) -> Ints:
        """The total duration of each rank's compute passes, µs, shape (ranks,)."""
        durations = np.where(self.computing, self.passes.duration, 0)
        return np.bincount(self.passes.rank, durations, self.ranks).astype(np.int64)

    @property
    def work(self) -> int:
        """The largest total duration of a rank's compute passes, µs: no step can be shorter."""
        return int(self.busy.max())

    @cached_property
    def lanes(self) -> list[Ints]:
        """Rows of the passes of each lane: one kind, stage, slice and rank on the same streams, by number of microbatch.

        Solvers keep lanes in this order. If microbatches are `alike` no optimum is lost, by symmetry; otherwise their bounds
        assume it. Passes of free kinds (see `kinds.Kind`) form a lane only where edges put them into a row."""
        p, e = self.passes, self.edges
        key = ((p.rank * self.stages + p.stage) * len(KINDS) + p.kind) * self.slices + p.slice
        key = key * len(p.stream_sets) + p.streams
        rows = np.lexsort((p.microbatch, key))
        apart = np.diff(key[rows]) != 0
        if (free := p.that(free=True)[rows[1:]]).any():
            apart |= free & ~np.isin(rows[:-1] * len(p) + rows[1:], e.before * len(p) + e.after)
        return np.split(rows, np.flatnonzero(apart) + 1)

    def head(self, microbatches: int) -> Problem:
        """The step with only the first `microbatches` microbatches."""
        return self.only(np.flatnonzero(self.passes.microbatch < microbatches))

    def only(self, keep: Ints) -> Problem:
        """The step with only the passes of these rows, and the edges between them."""
        place = np.full(len(self.passes), -1, np.int64)
        place[keep] = np.arange(len(keep))
        e = self.edges.only(np.flatnonzero((place[self.edges.before] >= 0) & (place[self.edges.after] >= 0)))
        edges = replace(e, before=place[e.before], after=place[e.after])
        return replace(self, passes=self.passes.only(keep), edges=edges)

    @cached_property
    def alike(self) -> bool:
        """Whether microbatches differ only by their number (see `tables.microbatches_alike`)."""
        p, own = self.passes, self.in_microbatch
        rows = [lane[0] for lane in self.lanes if own[lane[0]]]
        lanes = np.stack([column[rows] for column in (p.rank, p.stage, p.kind, p.slice, p.streams)])
        on_one_link = np.unique(lanes, axis=1).shape[1] == np.unique(lanes[:-1], axis=1).shape[1]
        return on_one_link and tables.microbatches_alike(p, self.edges, self.lanes, own)

    @cached_property
    def ordered(self) -> bool:
        """Whether bounds hold only for schedules whose lanes run by number. So it is if microbatches differ, or if one
        waits for another; if a lane has several passes of no microbatch (gathers, updates), or if such a pass has edges with
        some passes of a lane and not with all."""
        p, e = self.passes, self.edges
        own, by_step = self.in_microbatch, p.that(per_step=True, free=False)
        lane, length = tables.lane_of(len(p), self.lanes)
        between = own[e.before] & own[e.after] & (p.microbatch[e.before] != p.microbatch[e.after])
        ends = ((e.before, e.after), (e.after, e.before))
        parts = (tables.in_part(lane, length, a[rows], b[rows]) for a, b in ends for rows in [by_step[a] & own[b]])
        return bool(not self.alike or between.any() or (length[lane[by_step]] > 1).any() or any(parts))

    def slowed(self, factors: Sequence[float]) -> Problem:
        """The step where compute on rank r takes `factors[r]` times as long, in whole µs; the time of sends stays."""
        p, sent = self.passes, self.sending
        longer = np.rint((p.duration - sent) * np.asarray(factors, np.float64)[p.rank]).astype(np.int64) + sent
        return replace(self, passes=replace(p, duration=np.where(self.computing, longer, p.duration)))

    def scaled(self, factors: Sequence[float], latency: float = 0.0) -> Problem:
        """The step where microbatches differ in size, rounded to whole µs and bytes.

        factors: how many times as large each microbatch is, shape (microbatches,). It scales times of passes and messages,
            and bytes held. What belongs to no microbatch (updates, gathered parameters) stays.
        latency: µs of each message and collective that do not scale (infinite: nothing of them scales). A message that is
            a pass (feature links) scales as a whole, and the lag behind it stays.

        Raises BadInput for factors that are not one a microbatch, or no numbers from 0 up.
        """
        each = np.asarray(factors, np.float64)
        if each.shape != (self.microbatches,):
            raise BadInput(f"factors: shape {each.shape}, not one for each of {self.microbatches} microbatches")
        if not (np.isfinite(each) & (each >= 0)).all():
            raise BadInput(f"factors: number {int(np.argmin(np.isfinite(each) & (each >= 0)))} is no number from 0 up")
        p, e, repeated = self.passes, self.edges, self.in_microbatch
        factor = np.where(repeated, each[np.where(repeated, p.microbatch, 0)], 1.0)
        inside = repeated[e.before] & repeated[e.after] & (p.microbatch[e.before] == p.microbatch[e.after])
        larger = np.where(inside, factor[e.before], 1.0)

        def moved(time: Ints, factors: Any) -> Ints:
            fixed = np.minimum(time, latency)
            return np.asarray(np.rint(fixed + (time - fixed) * factors), np.int64)

        sends, sent, size = p.that(feature=LINKS), moved(e.sent, larger), np.rint(e.bytes * larger).astype(np.int64)
        lag = np.where(sends[e.before], e.lag, moved(e.lag, larger))
        longer = np.rint((p.duration - self.sending) * factor) + np.bincount(e.before, sent, len(p))
        other = np.where(sends & np.isfinite(latency), np.rint(p.duration * factor), moved(p.duration, factor))
        passes = replace(p, duration=np.where(self.computing, longer, other).astype(np.int64))
        room = None if self.messages is None else self.messages.larger(max(1.0, each.max()))
        return replace(self, passes=passes, edges=replace(e, lag=lag, sent=sent, bytes=size), messages=room)

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the content, 16 hexadecimal digits."""
        p, e = self.passes, self.edges
        # Only the kinds that occur: so a new kind leaves the digests of other problems as they are.
        kinds, kind = p.lasting
        head: list[object] = [kinds, p.stream_sets, self.capacity, self.objective, self.layers, self.source, len(p), len(e)]
        if self.pools:
            head.append([[pool.name, pool.capacity] for pool in self.pools])
        if self.slice_lengths:
            head.append(self.slice_lengths)
        slower, settings = sorted(astuple(pair) for pair in self.slowdowns), sorted(self.settings.items())
        notes = {"recomputed": self.recomputed, "slowdowns": slower, "sizes": self.sizes, "settings": settings}
        head += [{name: note} for name, note in notes.items() if note]
        sha = hashlib.sha256(json.dumps(head).encode())
        for column in (kind, p.stage, p.microbatch, p.slice, p.rank, p.duration, p.streams):
            sha.update(column.astype("<i8").tobytes())
        for column in (e.before, e.after, e.lag, e.bytes, *((e.pool,) if self.pools else ())):
            sha.update(column.astype("<i8").tobytes())
        return sha.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def to_json(self) -> dict[str, Any]:
        """Fields and columns, the latter packed as text (`util.columns`); `from_json` reads them back."""
        return {
            "objective": self.objective,
            "source": self.source,
            "layers": list(self.layers),
            "capacity": None if self.capacity is None else list(self.capacity),
            **({"pools": [asdict(pool) for pool in self.pools]} if self.pools else {}),
            **({"messages": self.messages.as_json()} if self.messages else {}),
            **{name: list(note) for name in problem_form.NOTES if (note := getattr(self, name))},
            **({"slowdowns": [asdict(slowdown) for slowdown in self.slowdowns]} if self.slowdowns else {}),
            **({"settings": dict(self.settings)} if self.settings else {}),
            "passes": problem_form.passes_as_json(self.passes),
            "edges": problem_form.edges_as_json(self.edges),
        }

    @classmethod
    def from_json(cls, body: Any, where: str = "problem") -> Problem:
        """The problem that `to_json` wrote. Raises BadInput naming `where` and the field."""
        return cls.from_form(checked(body, problem_form.ProblemForm, where), where)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a problem file, whole or not at all; `-` is standard output."""
        write_document(path, "problem", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Problem:
        """The problem in a problem file or a schedule file; `-` is standard input. Raises BadInput."""
        kind, body = read_one_of(path, ("problem", "schedule"))
        return cls.from_json(body if kind == "problem" else body.get("problem"), str(path))

    @classmethod
    def from_form(cls, form: problem_form.ProblemForm, where: str) -> Problem:
        """The problem of a parsed file. Raises BadInput naming `where` and the field."""
        passes = problem_form.passes_from(form.passes, where)
        edges = problem_form.edges_from(form.edges, passes, where)
        read = msgspec.structs.asdict(form)
        rows: dict[str, Any] = {name: tuple(row) if isinstance(row, list) else row for name, row in read.items()}
        with prefixed(where):
            problem = cls(**rows | {"passes": passes, "edges": edges, "messages": None})
        sizes = problem.stages, problem.ranks
        room = None if form.messages is None else problem_form.message_room(form.messages, *sizes, where)
        return problem if room is None else replace(problem, messages=room)
