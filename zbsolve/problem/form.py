"""A problem in a file: its form, and the tables read from it. Columns are lists, or text with runs (`util.columns`).

Also what every `Problem` must fulfil: columns of one length, nothing negative, sums that can be counted exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from ..kinds import KINDS, OURS, TABLE, Kind, register
from ..util.columns import coded, packed, packed_words, unpacked, unpacked_words, whole_column
from ..util.errors import BadInput, prefixed
from .tables import CARGO, COUNTS, WHOLE, Edges, Ints, Passes, Pool, Slowdown, usual_cargo

Column = list[int] | str
Setting = bool | int | float | str


class PassesForm(msgspec.Struct, forbid_unknown_fields=True):
    """Columns of passes in a file, and the rows of kinds that are not zbsolve's own."""

    kind: list[str] | str
    stage: Column
    microbatch: Column
    slice: Column
    rank: Column
    duration: Column
    streams: Column
    stream_sets: list[Annotated[list[str], msgspec.Meta(min_length=1)]]
    kinds: list[Kind] = []


class EdgesForm(msgspec.Struct, forbid_unknown_fields=True):
    """Columns of edges in a file. `carries` indexes `cargo` (files of 0.1 have neither). `sent` is there if links block
    their sender, `pool` if bytes lie beside the devices."""

    before: Column
    after: Column
    lag: Column
    bytes: Column
    carries: Column | None = None
    cargo: list[str] = []
    sent: Column | None = None
    pool: Column | None = None


class MessagesForm(msgspec.Struct, forbid_unknown_fields=True):
    """Bytes of messages over each boundary, and bytes that each rank keeps free for them (see `MessageRoom`)."""

    sizes: list[int]
    reserved: list[int]
    sides: list[tuple[int, int, int]] = []


class ProblemForm(msgspec.Struct, forbid_unknown_fields=True):
    """A problem in a file."""

    objective: str
    source: str
    layers: list[int]
    passes: PassesForm
    edges: EdgesForm
    capacity: list[int] | None = None
    pools: list[Pool] = []
    messages: MessagesForm | None = None
    slice_lengths: list[float] = []
    recomputed: list[int] = []
    slowdowns: list[Slowdown] = []
    sizes: list[int] = []
    settings: dict[str, Setting] = {}


class MessageRoom(NamedTuple):
    """Sizes of messages and memory for them. sizes: bytes of a message from each stage but the last to the next. reserved:
    bytes of each rank kept free for them, beside its capacity. sides: giving stage, first taking stage, bytes of each."""

    sizes: tuple[int, ...]
    reserved: tuple[int, ...]
    sides: tuple[tuple[int, int, int], ...] = ()

    def larger(self, factor: float) -> MessageRoom:
        """The same with `factor` times as many bytes in each message."""
        sides = tuple((giver, taker, math.ceil(factor * size)) for giver, taker, size in self.sides)
        return self._replace(sizes=tuple(math.ceil(factor * size) for size in self.sizes), sides=sides)

    def as_json(self) -> dict[str, Any]:
        """Fields for a file; `sides` only if there are side inputs."""
        return {name: value for name, value in self._asdict().items() if value or name != "sides"}


def passes_as_json(passes: Passes) -> dict[str, Any]:
    """The body of a `PassesForm`."""
    columns = {what: packed(getattr(passes, what)) for what in (*COUNTS, "streams")}
    own = [asdict(TABLE[kind]) for kind in passes.kinds if TABLE[kind] not in OURS]
    body = {"kind": packed_words(passes.kind, KINDS), **columns, "stream_sets": [list(row) for row in passes.stream_sets]}
    return {**body, "kinds": own} if own else body


def edges_as_json(edges: Edges) -> dict[str, Any]:
    """The body of an `EdgesForm`."""
    used = ["before", "after", "lag", "bytes", "carries", *(key for key in ("sent", "pool") if getattr(edges, key).any())]
    columns = {what: packed(getattr(edges, what)) for what in used}
    return {**columns, "cargo": list(CARGO)}


def passes_from(form: PassesForm, where: str) -> Passes:
    """The table of passes in a file. Raises BadInput naming `where` and the field."""
    for kind in form.kinds:
        with prefixed(where):
            register(kind)
    columns = {what: _numbers(getattr(form, what), what, where) for what in (*COUNTS, "streams")}
    return Passes(kind=_kinds(form.kind, where), stream_sets=tuple(map(tuple, form.stream_sets)), **columns)


def _numbers(column: Column, what: str, where: str) -> Ints:
    """A column of whole numbers."""
    name = f"{where}: field '{what}'"
    return unpacked(column, name) if isinstance(column, str) else whole_column(column, name)


def _kinds(column: list[str] | str, where: str) -> Ints:
    """Indices into KINDS."""

    def code(kind: str) -> int:
        if kind not in KINDS:
            raise BadInput(f"{where}: field 'kind' has an unknown kind '{kind}'")
        return KINDS.index(kind)

    if isinstance(column, str):
        return unpacked_words(column, code, f"{where}: field 'kind'")
    for kind in sorted(set(column)):
        code(kind)
    return coded(column, KINDS, "kind")


def edges_from(form: EdgesForm, passes: Passes, where: str) -> Edges:
    """The table of edges in a file, between these passes. Raises BadInput naming `where` and the field."""
    before, after, lag, size = (_numbers(getattr(form, what), what, where) for what in ("before", "after", "lag", "bytes"))
    carries = before if form.carries is None else _cargo(form.carries, form.cargo, where)
    none = np.zeros(len(before), np.int64)
    sent = none if form.sent is None else _numbers(form.sent, "sent", where)
    pool = none if form.pool is None else _numbers(form.pool, "pool", where)
    if len({len(column) for column in (before, after, lag, size, carries, sent, pool)}) > 1:
        raise BadInput(f"{where}: the columns of 'edges' differ in length")
    if form.carries is None:  # a file of 0.1; edges that point outside the table are refused by `check_tables`
        inside = len(before) == 0 or (min(before.min(), after.min()) >= 0 and max(before.max(), after.max()) < len(passes))
        carries = usual_cargo(passes, before, after) if inside else np.zeros(len(before), np.int64)
    return Edges(before, after, lag, size, carries, sent, pool)


def _cargo(carries: Column, words: list[str], where: str) -> Ints:
    """Indices into CARGO; a file has its own table of the words."""
    indices = _numbers(carries, "carries", where)
    strange = [word for word in words if word not in CARGO]
    if strange:
        raise BadInput(f"{where}: field 'cargo' names '{strange[0]}': {', '.join(map(repr, CARGO))} are known")
    if len(indices) and not (indices.min() >= 0 and indices.max() < len(words)):
        raise BadInput(f"{where}: field 'carries' points outside 'cargo'")
    return coded(words, CARGO, "cargo")[indices] if len(indices) else indices


def message_room(form: MessagesForm, stages: int, ranks: int, where: str) -> MessageRoom:
    """The messages' sizes and room of a parsed file. Raises BadInput."""
    for name, counts, most in (("sizes", form.sizes, stages - 1), ("reserved", form.reserved, ranks)):
        if len(counts) > most or min(counts, default=0) < 0 or (name == "reserved" and len(counts) < most):
            raise BadInput(f"{where}: field 'messages.{name}': {most} numbers from 0 up are needed, got {len(counts)}")
    wrong = [side for side in form.sides if not (0 <= side[0] < side[1] < stages and side[2] >= 0)]
    if wrong:
        raise BadInput(f"{where}: field 'messages.sides': {list(wrong[0])}: a stage, a later one and bytes are needed")
    return MessageRoom(tuple(form.sizes), tuple(form.reserved), tuple(form.sides))


# --- What every problem must fulfil ---

MAX_FACTOR = 1000.0
EXACT = 2.0**53  # limit for µs of all passes and lags, and for bytes of one pass: below it sums of floats are exact
MAX_SUM = 2.0**62  # limit for bytes of all edges: below it their sum fits 64 bits


def check_tables(passes: Passes, edges: Edges, pools: Sequence[Pool]) -> None:
    """Raises BadInput, naming column, pass, pool or edge: for invalid tables, for names that occur twice, and for times or
    bytes whose sum reaches `EXACT` or `MAX_SUM`."""
    _check_passes(passes)
    names = [pool.name for pool in pools]
    for i, pool in enumerate(pools):
        if not pool.name or pool.name in names[:i]:
            raise BadInput(f"pool {i}: '{pool.name}' is no name of its own")
        if pool.capacity is not None and pool.capacity < 0:
            raise BadInput(f"pool {pool.name}: its capacity is negative ({pool.capacity})")
    if len(edges):
        _check_edges(edges, passes, len(pools))
    for what, columns, most in (("times", (passes.duration, edges.lag), EXACT), ("bytes", (edges.bytes,), MAX_SUM)):
        if sum(float(column.sum(dtype=np.float64)) for column in columns) >= most:
            raise BadInput(f"problem: its {what} add up to more than zbsolve can count")
    if max(np.bincount(end, edges.bytes, 1).max() for end in (edges.before, edges.after)) >= EXACT:
        raise BadInput("problem: a pass takes or frees more bytes than zbsolve can count")


def _check_passes(passes: Passes) -> None:
    if len(passes) == 0:
        raise BadInput("problem: no passes")
    for what in ("stage", "microbatch", "slice", "rank", "duration", "streams"):
        column = getattr(passes, what)
        if len(column) != len(passes):
            raise BadInput(f"problem: column '{what}' has {len(column)} rows, not {len(passes)}")
        if column.min() < 0:
            worst = int(column.argmin())
            raise BadInput(f"pass {passes[worst].name}: {what} is negative ({column[worst]})")
    if passes.kind.min() < 0 or passes.kind.max() >= len(KINDS):
        raise BadInput("problem: column 'kind' names an unknown kind")
    if passes.streams.max() >= len(passes.stream_sets):
        raise BadInput("problem: column 'streams' points outside its table")
    if not _all_differ(passes.kind, passes.stage, passes.microbatch, passes.slice):
        seen: set[str] = set()
        double = next(row.name for row in passes if row.name in seen or seen.add(row.name))  # type: ignore[func-returns-value]
        raise BadInput(f"pass {double}: named twice in the problem")


def _check_edges(edges: Edges, passes: Passes, pools: int) -> None:
    """Raises BadInput, naming the edge or pass, for an edge that points to no pass or pool, has a negative field, or holds
    device memory between two ranks; and for a pass that sends longer than it takes."""
    ends = np.concatenate([edges.before, edges.after])
    if ends.min() < 0 or ends.max() >= len(passes):
        raise BadInput("problem: an edge points outside the table of passes")

    def name(row: int) -> str:
        return f"edge {passes[int(edges.before[row])].name} → {passes[int(edges.after[row])].name}"

    for what in ("lag", "bytes", "sent"):
        column = getattr(edges, what)
        if column.min() < 0:
            raise BadInput(f"{name(int(column.argmin()))}: {what} is negative")
    sending = np.bincount(edges.before, edges.sent, len(passes)).astype(np.int64)
    if (over := np.flatnonzero(sending > passes.duration)).size:
        i = int(over[0])
        raise BadInput(f"pass {passes[i].name}: sends for {sending[i]} µs of its {passes.duration[i]} µs")
    if edges.pool.min() < 0 or edges.pool.max() > pools:
        i = int(np.flatnonzero((edges.pool < 0) | (edges.pool > pools))[0])
        raise BadInput(f"{name(i)}: there is no pool {edges.pool[i]} beside the devices ({pools} are)")
    apart = passes.rank[edges.before] != passes.rank[edges.after]
    if (bad := np.flatnonzero((edges.bytes > 0) & (edges.pool == 0) & apart)).size:
        raise BadInput(f"{name(int(bad[0]))}: bytes on an edge between two ranks")


def check_slowdowns(slowdowns: Sequence[Slowdown], times: float = 0.0) -> None:
    """Raises BadInput for unknown kinds, doubled pairs, and factors not from 1 to 1000. times: the sum of durations, µs."""
    seen = set[tuple[str, str]]()
    for slowdown in slowdowns:
        head, pair = f"slowdown of {slowdown.kind[:20]} beside {slowdown.beside[:20]}", (slowdown.kind, slowdown.beside)
        if unknown := [kind for kind in pair if kind not in KINDS]:
            raise BadInput(f"{head}: there is no kind '{unknown[0][:20]}'")
        if pair in seen:
            raise BadInput(f"{head}: is there twice")
        if not 1 <= slowdown.factor <= MAX_FACTOR:
            raise BadInput(f"{head}: {slowdown.factor:g} is not from 1 to {MAX_FACTOR:g}")
        seen.add(pair)
    if slowdowns and times * WHOLE > MAX_SUM:
        raise BadInput("problem: its times add up to more than zbsolve can count where passes slow each other")


def check_capacity(capacity: Sequence[int] | None, ranks: int) -> None:
    """Raises BadInput for a capacity that does not name every rank, or is negative."""
    if capacity is None:
        return
    if len(capacity) != ranks:
        raise BadInput(f"capacity: {len(capacity)} values for {ranks} ranks")
    if min(capacity) < 0:
        raise BadInput(f"capacity: rank {int(np.argmin(capacity))} is negative ({min(capacity)})")


# Field of a problem that its passes do not show → what it is.
NOTES = {"slice_lengths": "lengths of slices", "recomputed": "layers that recompute", "sizes": "sizes of microbatches"}


def check_notes(lengths: Sequence[float], slices: int, counts: Sequence[int], layers: Sequence[int]) -> None:
    """Raises BadInput for notes that do not fit the problem. lengths: of its slices. slices: their number. counts: the
    recomputed layers of each stage. layers: all layers of each stage."""
    if lengths and (len(lengths) < slices or not all(math.isfinite(length) and length > 0 for length in lengths)):
        raise BadInput(f"problem: slice_lengths {list(lengths)}: {slices} numbers above 0 are needed")
    if counts and (len(counts) != len(layers) or not all(0 <= n <= of for n, of in zip(counts, layers, strict=True))):
        raise BadInput(f"problem: recomputed {list(counts)} are not from 0 to the layers of each stage, {list(layers)}")


def _all_differ(*columns: Ints) -> bool:
    """Whether no two rows are equal. columns: whole numbers from 0 up, shape (rows,) each."""
    widths = [int(column.max()) + 1 for column in columns]
    if math.prod(widths) >= 2**62:
        return len(set(zip(*(column.tolist() for column in columns), strict=True))) == len(columns[0])
    key = np.zeros(len(columns[0]), np.int64)
    for column, width in zip(columns, widths, strict=True):
        key = key * width + column
    key.sort()  # np.unique's hashing takes ten times as long where keys are dense
    return bool((np.diff(key) > 0).all())
