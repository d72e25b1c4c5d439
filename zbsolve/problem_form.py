"""A problem in a file: its form, and the tables that it says."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from .tables import CARGO, COUNTS, KINDS, Edges, Ints, Passes, coded, usual_cargo, whole_column
from .util.errors import BadInput


class PassesForm(msgspec.Struct):
    """Columns of passes in a file."""

    kind: list[str]
    stage: list[int]
    microbatch: list[int]
    slice: list[int]
    rank: list[int]
    duration: list[int]
    streams: list[int]
    stream_sets: list[Annotated[list[str], msgspec.Meta(min_length=1)]]


class EdgesForm(msgspec.Struct):
    """Columns of edges in a file; `carries` indexes `cargo` (files of 0.1 have neither)."""

    before: list[int]
    after: list[int]
    lag: list[int]
    bytes: list[int]
    carries: list[int] | None = None
    cargo: list[str] = []


class ProblemForm(msgspec.Struct):
    """A problem in a file."""

    objective: str
    source: str
    layers: list[int]
    passes: PassesForm
    edges: EdgesForm
    capacity: list[int] | None = None


def passes_from(form: PassesForm, where: str) -> Passes:
    """The table that a file says. Raises BadInput naming `where` and the field."""
    unknown = sorted({*form.kind} - {*KINDS})
    if unknown:
        raise BadInput(f"{where}: field 'kind' has an unknown kind '{unknown[0]}'")
    columns = {what: whole_column(getattr(form, what), f"{where}: field '{what}'") for what in (*COUNTS, "streams")}
    return Passes(kind=coded(form.kind, KINDS, "kind"), stream_sets=tuple(map(tuple, form.stream_sets)), **columns)


def edges_from(form: EdgesForm, passes: Passes, where: str) -> Edges:
    """The table that a file says, between these passes. Raises BadInput naming `where` and the field."""
    columns = [whole_column(getattr(form, what), f"{where}: field '{what}'") for what in ("before", "after", "lag", "bytes")]
    if form.carries is not None:
        columns.append(_cargo(form.carries, form.cargo, where))
    if len({len(column) for column in columns}) > 1:
        raise BadInput(f"{where}: the columns of 'edges' differ in length")
    before, after = columns[:2]
    if form.carries is None:  # a file of 0.1; one whose edges point outside is refused in a moment
        inside = len(before) == 0 or (min(before.min(), after.min()) >= 0 and max(before.max(), after.max()) < len(passes))
        columns.append(usual_cargo(passes, before, after) if inside else np.zeros(len(before), np.int64))
    return Edges(*columns)


def _cargo(carries: list[int], words: list[str], where: str) -> Ints:
    """Indices into CARGO; a file has its own table of the words."""
    said = whole_column(carries, f"{where}: field 'carries'")
    strange = [word for word in words if word not in CARGO]
    if strange:
        raise BadInput(f"{where}: field 'cargo' names '{strange[0]}': {', '.join(map(repr, CARGO))} are known")
    if len(said) and not (said.min() >= 0 and said.max() < len(words)):
        raise BadInput(f"{where}: field 'carries' points outside 'cargo'")
    return coded(words, CARGO, "cargo")[said] if len(said) else said
