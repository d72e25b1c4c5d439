"""The names of the ways to split a backward (see `graphs.auto`), and what was decided about them, in lines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

from ..util.text import format_bytes

SPLITS = ("layers", "graph", "graph:least", "inductor", "inductor:least", "auto", "auto:inductor")
# What a microbatch costs a block, split in one way: µs of F, B and W; bytes held after F and after B.
COSTS = ("F", "B", "W", "after_F", "after_B")
Row = dict[str, Any]


def merged(tables: Iterable[Sequence[Row]]) -> list[Row]:
    """Rows of several ranks as one table (see `Pipeline.splits`): what was decided alike is one row, with the costs that
    were measured first."""
    alike: dict[tuple[str, str, str], Row] = {}
    for row in (row for table in tables for row in table):
        first = alike.setdefault((row["block"], row["split"], row["why"]), row | {"layers": []})
        first["layers"] = sorted({*first["layers"], *row["layers"]})
    return sorted(alike.values(), key=lambda row: row["layers"])


def as_lines(rows: Iterable[Row]) -> list[str]:
    """A line for each row: "layers 1–4 (Block): graph, 310 µs a microbatch (layers 330 µs)"."""
    return [_line(row) for row in rows]


def _line(row: Row) -> str:
    numbers, costs = row["layers"], row["costs"]
    starts = [numbers[0], *(b for a, b in pairwise(numbers) if b != a + 1)]
    ends = [*(a for a, b in pairwise(numbers) if b != a + 1), numbers[-1]]
    ranges = ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True))
    head = f"layer{'s' * (len(numbers) > 1)} {ranges} ({row['block']}): {row['split']}"
    if not costs:
        return f"{head}: {row['why']}"
    texts = {
        name: f"{cost['F'] + cost['B'] + cost['W']:.0f} µs and {format_bytes(max(cost['after_F'], cost['after_B']))}"
        for name, cost in costs.items()
    }
    others = ", ".join(f"{name} {text}" for name, text in texts.items() if name != row["split"])
    line = f"{head}, {texts[row['split']]} a microbatch" + (f" ({others})" if others else "")
    return f"{line}; {row['why']}" if row["why"] else line
