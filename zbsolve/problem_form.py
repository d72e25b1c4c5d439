"""A problem in a file: its form, and the tables that it says. Columns are lists or their runs in a text (`util.columns`)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import msgspec
import numpy as np

from .kinds import KINDS, OURS, TABLE, Kind, register
from .tables import CARGO, COUNTS, Edges, Ints, Passes, Slowdown, coded, usual_cargo, whole_column
from .util.columns import packed, packed_words, unpacked, unpacked_words
from .util.errors import BadInput

Column = list[int] | str


class PassesForm(msgspec.Struct):
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


class EdgesForm(msgspec.Struct):
    """Columns of edges in a file; `carries` indexes `cargo` (files of 0.1 have neither). `sent` is there where links block
    their sender, `pool` where bytes lie off the devices."""

    before: Column
    after: Column
    lag: Column
    bytes: Column
    carries: Column | None = None
    cargo: list[str] = []
    sent: Column | None = None
    pool: Column | None = None


class PoolForm(msgspec.Struct):
    """A pool of memory in a file; capacity in bytes, null where it is unlimited."""

    name: str
    capacity: int | None = None


class MessagesForm(msgspec.Struct):
    """Bytes of messages over each boundary, and what each rank keeps free for them."""

    sizes: list[int]
    reserved: list[int]
    sides: list[tuple[int, int, int]] = []


class ProblemForm(msgspec.Struct):
    """A problem in a file."""

    objective: str
    source: str
    layers: list[int]
    passes: PassesForm
    edges: EdgesForm
    capacity: list[int] | None = None
    pools: list[PoolForm] = []
    messages: MessagesForm | None = None
    slice_lengths: list[float] = []
    recomputed: list[int] = []
    slowdowns: list[Slowdown] = []
    sizes: list[int] = []


def passes_as_json(passes: Passes) -> dict[str, Any]:
    """The body of a `PassesForm`."""
    columns = {what: packed(getattr(passes, what)) for what in (*COUNTS, "streams")}
    own = [asdict(TABLE[kind]) for kind in passes.kinds if TABLE[kind] not in OURS]
    found = {"kind": packed_words(passes.kind, KINDS), **columns, "stream_sets": [list(one) for one in passes.stream_sets]}
    return {**found, "kinds": own} if own else found


def edges_as_json(edges: Edges) -> dict[str, Any]:
    """The body of an `EdgesForm`."""
    told = ["before", "after", "lag", "bytes", "carries", *(one for one in ("sent", "pool") if getattr(edges, one).any())]
    columns = {what: packed(getattr(edges, what)) for what in told}
    return {**columns, "cargo": list(CARGO)}


def passes_from(form: PassesForm, where: str) -> Passes:
    """The table that a file says. Raises BadInput naming `where` and the field."""
    for kind in form.kinds:
        try:
            register(kind)
        except BadInput as error:
            raise BadInput(f"{where}: {error}") from None
    columns = {what: _numbers(getattr(form, what), what, where) for what in (*COUNTS, "streams")}
    return Passes(kind=_kinds(form.kind, where), stream_sets=tuple(map(tuple, form.stream_sets)), **columns)


def _numbers(column: Column, what: str, where: str) -> Ints:
    """A column of whole numbers."""
    said = f"{where}: field '{what}'"
    return unpacked(column, said) if isinstance(column, str) else whole_column(column, said)


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
    """The table that a file says, between these passes. Raises BadInput naming `where` and the field."""
    before, after, lag, size = (_numbers(getattr(form, what), what, where) for what in ("before", "after", "lag", "bytes"))
    carries = before if form.carries is None else _cargo(form.carries, form.cargo, where)
    none = np.zeros(len(before), np.int64)
    sent = none if form.sent is None else _numbers(form.sent, "sent", where)
    pool = none if form.pool is None else _numbers(form.pool, "pool", where)
    if len({len(column) for column in (before, after, lag, size, carries, sent, pool)}) > 1:
        raise BadInput(f"{where}: the columns of 'edges' differ in length")
    if form.carries is None:  # a file of 0.1; one whose edges point outside is refused in a moment
        inside = len(before) == 0 or (min(before.min(), after.min()) >= 0 and max(before.max(), after.max()) < len(passes))
        carries = usual_cargo(passes, before, after) if inside else np.zeros(len(before), np.int64)
    return Edges(before, after, lag, size, carries, sent, pool)


def _cargo(carries: Column, words: list[str], where: str) -> Ints:
    """Indices into CARGO; a file has its own table of the words."""
    said = _numbers(carries, "carries", where)
    strange = [word for word in words if word not in CARGO]
    if strange:
        raise BadInput(f"{where}: field 'cargo' names '{strange[0]}': {', '.join(map(repr, CARGO))} are known")
    if len(said) and not (said.min() >= 0 and said.max() < len(words)):
        raise BadInput(f"{where}: field 'carries' points outside 'cargo'")
    return coded(words, CARGO, "cargo")[said] if len(said) else said
