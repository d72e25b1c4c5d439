"""Draws docs/offload_memory.svg, the picture of offload: `python docs/offload_memory.py` writes it anew.

Activation memory of the fullest rank, and bubbles, over the number of ranks: rows of `python -m benchmarks.offload_memory`
with two chunks a rank (one of 1F1B). What the search found in PO-F's memory has that memory, so the left half shows both as
one; in PO-H's it found nothing shorter on 8 ranks and more. A test holds the file to the kept results.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zbsolve.show.pictures.drawing import GRID, INK, SOFT, Dot, Drawing, Line, Mark, Words
from zbsolve.show.pictures.svg import to_svg

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "offload_memory.json"
TITLE = "Activations of one model on more and more ranks"
WIDTH, HEIGHT, TOP, FLOOR = 1000.0, 430.0, 80.0, 370.0  # pixels
PANELS = ((64.0, 400.0), (560.0, 896.0))  # left and right edges
# Systems: what they are called here, colour, dashes.
LINES: dict[str, tuple[str, str, tuple[float, ...]]] = {
    "interleaved": ("interleaved", "#9c58b4", ()),
    "1f1b": ("1F1B", "#6a3414", ()),
    "v-min": ("V-Min", "#2fa583", ()),
    "po-h": ("PO-H", "#f3b04b", ()),
    "po-f": ("PO-F", "#6fb7ee", ()),
    "search in PO-F": ("search in PO-F", "#1a5a9c", (5, 4)),
}

Rows = dict[str, dict[int, dict[str, Any]]]  # system → ranks → its row
Height = Callable[[float], float]


def rows() -> Rows:
    """Of the kept results, those that are drawn."""
    found: Rows = {name: {} for name in LINES}
    for row in json.loads(RESULTS.read_text(encoding="utf-8"))["results"]["rows"]:
        if row["system"] in found and row["chunks"] <= 2:
            found[row["system"]][row["ranks"]] = row
    return found


def picture() -> str:
    """Both panels as one SVG document."""
    known = rows()
    ranks = sorted(known["1f1b"])
    memory, bubble = _memory_height, _bubble_height
    shares, rates = [2.0**-i for i in range(-1, 7)], [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]
    marks: list[Mark] = [Words(PANELS[0][0], 22, TITLE, 17, bold=True)]
    marks += _panel(PANELS[0], ranks, "memory of the fullest rank, share of M", shares, memory, _share)
    marks += _panel(PANELS[1], ranks, "bubble, share of the makespan", rates, bubble, _percent)
    drawn = [name for name in LINES if not name.startswith("search")]
    marks += _curves(PANELS[0], ranks, {name: known[name] for name in drawn}, "memory", memory)
    marks += _curves(PANELS[1], ranks, known, "bubble", bubble)
    return to_svg(Drawing(WIDTH, HEIGHT, TITLE, "Memory and bubble of each schedule over ranks.", tuple(marks)))


def _memory_height(share: float) -> float:
    return TOP + (FLOOR - TOP) * (1 - math.log2(share)) / 7


def _bubble_height(rate: float) -> float:
    return FLOOR - (FLOOR - TOP) * (rate - 0.1) / 0.25


def _share(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{round(1 / value)}"


def _percent(value: float) -> str:
    return f"{100 * value:g} %"


def _place(edges: tuple[float, float], ranks: list[int], count: int) -> float:
    low, high = math.log2(ranks[0]), math.log2(ranks[-1])
    return edges[0] + (edges[1] - edges[0]) * (math.log2(count) - low) / (high - low)


def _panel(
    edges: tuple[float, float],
    ranks: list[int],
    says: str,
    ticks: list[float],
    height: Height,
    text: Callable[[float], str],
) -> Iterator[Mark]:
    """The grid of one half, and what its axes are."""
    yield Words(edges[0], TOP - 26, says, 13, SOFT)
    for tick in ticks:
        y = height(tick)
        yield Line(((edges[0], y), (edges[1], y)), GRID)
        yield Words(edges[0] - 8, y, text(tick), 12, SOFT, "end")
    for count in ranks:
        x = _place(edges, ranks, count)
        yield Line(((x, TOP), (x, FLOOR)), GRID)
        yield Words(x, FLOOR + 18, str(count), 12, SOFT, "middle")
    yield Words((edges[0] + edges[1]) / 2, FLOOR + 40, "ranks", 12, SOFT, "middle")


def _curves(edges: tuple[float, float], ranks: list[int], known: Rows, what: str, height: Height) -> Iterator[Mark]:
    """A line a system, and its name behind its end, names apart from each other."""
    ends = []
    for name, found in known.items():
        called, colour, dashes = LINES[name]
        points = tuple((_place(edges, ranks, count), height(found[count][what])) for count in ranks)
        yield Line(points, colour, 2.0, dashes)
        for x, y in points:
            yield Dot(x, y, 3.0, colour, colour, 0.0)
        ends.append((points[-1][1], called))
    lowest = -math.inf
    for y, called in sorted(ends):
        lowest = max(lowest + 14, y)
        yield Words(edges[1] + 10, lowest, called, 12, INK)


if __name__ == "__main__":
    (DOCS / "offload_memory.svg").write_text(picture(), encoding="utf-8")
