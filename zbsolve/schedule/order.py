"""The order of passes on every stream: kept as rows of the problem's table, read as names, written as one line a stream."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import numpy as np

from ..kinds import KINDS
from ..problem import Problem
from ..problem.tables import Ints, Passes
from ..util.errors import BadInput

LETTERS, FIGURES = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"
SHAPE = re.compile(r"0{1,9}A+0{1,9}")  # a name without slice, with each figure replaced by 0 and each letter by A
TO_SHAPE = str.maketrans(LETTERS + FIGURES, "A" * 26 + "0" * 10)
TO_NUMBERS, TO_KIND = str.maketrans(LETTERS, " " * 26), str.maketrans("", "", FIGURES)
Names = Mapping[str, tuple[str, ...]]


class Order(Mapping[str, tuple[str, ...]]):
    """Stream → pass names, `{"compute:0": ("0F0", "0F1", "0B0", …)}`; equal to any other mapping of these names.

    rows: stream → rows of the problem's table, shape (passes of the stream,). Names are made when they are first read, since
    in a long step they take more memory than the tables.
    """

    def __init__(self, problem: Problem, rows: Mapping[str, Ints]) -> None:
        self._problem = problem
        # A copy, since a search goes on writing to its arrays.
        self._rows = {stream: np.array(array, np.int64) for stream, array in rows.items()}

    @cached_property
    def _names(self) -> dict[str, tuple[str, ...]]:
        names = self._problem.names
        return {stream: tuple([names[i] for i in rows.tolist()]) for stream, rows in self._rows.items()}

    def __getitem__(self, stream: str) -> tuple[str, ...]:
        return self._names[stream]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, stream: object) -> bool:
        return stream in self._rows

    def __repr__(self) -> str:
        return f"Order({self._names!r})"

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Order):
            own, theirs = self._rows, other.rows_in(self._problem)
            return own.keys() == theirs.keys() and all(np.array_equal(own[name], theirs[name]) for name in own)
        return isinstance(other, Mapping) and self._names == dict(other)

    def rows_in(self, problem: Problem) -> dict[str, Ints]:
        """Stream → rows of another problem's table. Raises BadInput for a pass that it does not have."""
        if self._problem.passes.named_as(problem.passes):
            return self._rows
        return rows_of(problem, self._names)


def rows_of(problem: Problem, order: Names) -> dict[str, Ints]:
    """Stream → rows of the problem's table. Raises BadInput for a pass that the problem does not have."""
    if isinstance(order, Order):
        return order.rows_in(problem)
    index = problem.index
    try:
        return {stream: np.array([index[name] for name in names], np.int64) for stream, names in order.items()}
    except KeyError as error:
        raise BadInput(f"schedule: pass {error.args[0]} is not in the problem") from None


def order_as_json(order: Names) -> dict[str, str]:
    """Stream → its passes, separated by blanks: `0F0 0F1 0B0`."""
    return {stream: " ".join(names) for stream, names in order.items()}


def order_from(problem: Problem, lines: Mapping[str, str | Iterable[str]]) -> Names:
    """The order in a file: for each stream a line of names, or (in files of format 1) a list. If it names passes that the
    problem does not have, the names are kept, so that `verify` can report them."""
    orders = {}
    for stream, names in lines.items():
        rows = _rows_of_text(problem.passes, names if isinstance(names, str) else " ".join(names))
        if rows is None:
            return {name: tuple(row.split()) if isinstance(row, str) else tuple(row) for name, row in lines.items()}
        orders[stream] = rows
    return Order(problem, orders)


def _rows_of_text(passes: Passes, text: str) -> Ints | None:
    """Rows of the passes that the text names; None where one is unknown or has a slice."""
    if not all(map(SHAPE.fullmatch, set(text.translate(TO_SHAPE).split()))):
        return None
    kinds, numbers = text.translate(TO_KIND).split(), np.fromstring(text.translate(TO_NUMBERS), np.int64, sep=" ")
    known = {kind: KINDS.index(kind) for kind in set(kinds) if kind in KINDS}
    if len(known) < len(set(kinds)):
        return None
    return passes.find(np.array([known[kind] for kind in kinds], np.int64), numbers[::2], numbers[1::2])
