"""Draws docs/offload_memory.svg, the picture of offload: `python docs/offload_memory.py` writes it anew.

Activation memory of the fullest rank, and bubbles, over the number of ranks: rows of
`python -m benchmarks offload offload_memory`
with two chunks a rank (one of 1F1B). What the search found in PO-F's memory has that memory, so the left half shows both as
one; in PO-H's it found nothing shorter on 8 ranks and more. A test holds the file to the kept results.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from panels import Look, Panel

from zbsolve.show.pictures.drawing import Drawing, Mark, Words, to_svg

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "offload_memory.json"
TITLE = "Activations of one model on more and more ranks"
WIDTH, HEIGHT, TOP, FLOOR = 1000.0, 430.0, 80.0, 370.0  # pixels
PANELS = ((64.0, 400.0), (560.0, 896.0))  # left and right edges
LINES = {
    "interleaved": Look("interleaved", "#9c58b4"),
    "1f1b": Look("1F1B", "#6a3414"),
    "v-min": Look("V-Min", "#2fa583"),
    "po-h": Look("PO-H", "#f3b04b"),
    "po-f": Look("PO-F", "#6fb7ee"),
    "search in PO-F": Look("search in PO-F", "#1a5a9c", (5, 4)),
}

Rows = dict[str, dict[int, dict[str, Any]]]  # system → ranks → its row


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
    shares, rates = [2.0**-i for i in range(-1, 7)], [0.1, 0.15, 0.2, 0.25, 0.3, 0.35]
    edges = [(*sides, TOP, FLOOR, ranks, str, "ranks") for sides in PANELS]
    memory = Panel(*edges[0], "memory of the fullest rank, share of M", shares, _share, _memory_height)
    bubble = Panel(*edges[1], "bubble, share of the makespan", rates, _percent, _bubble_height)
    drawn = {name: found for name, found in known.items() if not name.startswith("search")}
    marks: list[Mark] = [Words(PANELS[0][0], 22, TITLE, 17, bold=True), *memory.grid(), *bubble.grid()]
    marks += [*memory.curves(_values(drawn, "memory"), LINES), *bubble.curves(_values(known, "bubble"), LINES)]
    return to_svg(Drawing(WIDTH, HEIGHT, TITLE, "Memory and bubble of each schedule over ranks.", tuple(marks)))


def _values(known: Rows, what: str) -> dict[str, dict[int, float]]:
    return {name: {count: row[what] for count, row in found.items()} for name, found in known.items()}


def _memory_height(share: float) -> float:
    return TOP + (FLOOR - TOP) * (1 - math.log2(share)) / 7


def _bubble_height(rate: float) -> float:
    return FLOOR - (FLOOR - TOP) * (rate - 0.1) / 0.25


def _share(value: float) -> str:
    return f"{value:g}" if value >= 1 else f"1/{round(1 / value)}"


def _percent(value: float) -> str:
    return f"{100 * value:g} %"


if __name__ == "__main__":
    (DOCS / "offload_memory.svg").write_text(picture(), encoding="utf-8")
