"""The names of the ways to split a backward (see `graphs.auto`), and what was decided about them, in lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..util.text import format_bytes

SPLITS = ("layers", "graph", "graph:least", "inductor", "inductor:least", "auto", "auto:inductor")
Row = dict[str, Any]


def merged(tables: Iterable[Sequence[Row]]) -> list[Row]:
    """Rows of several ranks as one table (see `Pipeline.splits`): what was decided alike is one row, with the costs that
    were measured first."""
    found: dict[tuple[str, str, str], Row] = {}
    for row in (row for table in tables for row in table):
        one = found.setdefault((row["block"], row["split"], row["why"]), row | {"layers": []})
        one["layers"] = sorted({*one["layers"], *row["layers"]})
    return sorted(found.values(), key=lambda row: row["layers"])


def as_lines(rows: Iterable[Row]) -> list[str]:
    """A line for each row: "layers 1–4 (Block): graph, 310 µs a microbatch (layers 330 µs)"."""
    return [_line(row) for row in rows]


def _line(row: Row) -> str:
    several = len(row["layers"]) > 1
    head = f"layer{'s' * several} {_ranges(row['layers'])} ({row['block']}): {row['split']}"
    costs = row["costs"]
    if not costs:
        return f"{head}: {row['why']}"
    texts = {name: f"{_time(cost):.0f} µs and {format_bytes(_bytes(cost))}" for name, cost in costs.items()}
    others = ", ".join(f"{name} {text}" for name, text in texts.items() if name != row["split"])
    line = f"{head}, {texts[row['split']]} a microbatch" + (f" ({others})" if others else "")
    return f"{line}; {row['why']}" if row["why"] else line


def _time(cost: dict[str, float]) -> float:
    return cost["F"] + cost["B"] + cost["W"]


def _bytes(cost: dict[str, int]) -> int:
    return max(cost["after_F"], cost["after_B"])


def _ranges(numbers: Sequence[int]) -> str:
    """ "0, 2–4" of 0, 2, 3, 4."""
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
