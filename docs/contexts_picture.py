"""Draws docs/contexts.svg, the picture of long contexts: `python docs/contexts_picture.py` writes it anew.

Utilisation where a schedule fits its devices, and what the fullest device needs, over the tokens of a sequence: rows of
`python -m benchmarks slices contexts`. A test holds the file to the kept results.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from panels import Look, Panel

from zbsolve.show.pictures.drawing import Drawing, Line, Mark, Words, to_svg

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results" / "contexts.json"
TITLE = "Llama 3 70B with long contexts on 256 H100 (estimated)"
WIDTH, HEIGHT, TOP, FLOOR = 1110.0, 430.0, 80.0, 370.0  # pixels
PANELS = ((64.0, 400.0), (600.0, 936.0))  # left and right edges
LEAST, MOST, ROOM = 4, 10, 80e9 / 2**30  # powers of two of GiB; GiB of a device
LINES = {
    "1f1b": Look("1F1B", "#6a3414"),
    "interleaved": Look("interleaved", "#9c58b4"),
    "zb-h1": Look("ZB-H1", "#2fa583"),
    "slimpipe": Look("SlimPipe, no exchange", "#f3b04b"),
    "seq1f1b": Look("Seq1F1B", "#6fb7ee"),
    "exchange": Look("SlimPipe", "#d05a5a"),
    "search": Look("search", "#1a5a9c", (5, 4)),
}


def picture() -> str:
    """Both panels as one SVG document."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8"))["results"]["rows"]
    contexts = sorted({row["context"] for row in rows})
    edges = [(*sides, TOP, FLOOR, contexts, "{}k".format, "tokens of a sequence") for sides in PANELS]
    used = Panel(*edges[0], "MFU, where the devices have the memory", [0.1 * i for i in range(7)], _percent, _share_height)
    sizes = [2.0**i for i in range(LEAST, MOST + 1)]
    needed = Panel(*edges[1], "GiB that the fullest device needs", sizes, "{:g}".format, _size_height)
    marks: list[Mark] = [Words(PANELS[0][0], 22, TITLE, 17, bold=True), *used.grid(), *needed.grid()]
    room = _size_height(ROOM)
    marks += [Line(((PANELS[1][0], room), (PANELS[1][1], room)), "#c03030", 1.5, (6, 3))]
    marks += [*used.curves(_values([row for row in rows if row["fits"]], "mfu"), LINES)]
    marks += [*needed.curves(_values(rows, "GiB"), LINES)]
    return to_svg(Drawing(WIDTH, HEIGHT, TITLE, "Utilisation and memory of each schedule over contexts.", tuple(marks)))


def _values(rows: list[dict[str, Any]], what: str) -> dict[str, dict[int, float]]:
    return {name: {row["context"]: row[what] for row in rows if row["schedule"] == name} for name in LINES}


def _share_height(share: float) -> float:
    return FLOOR - (FLOOR - TOP) * share / 0.6


def _size_height(size: float) -> float:
    return TOP + (FLOOR - TOP) * (MOST - math.log2(size)) / (MOST - LEAST)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


if __name__ == "__main__":
    (DOCS / "contexts.svg").write_text(picture(), encoding="utf-8")
