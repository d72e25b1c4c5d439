"""What the Trace Event Format asks of a file (and Perfetto's reader of it), as a check.

JSON Object Format: `traceEvents` and an optional `displayTimeUnit`. Events: `ph`, `pid`, `tid` whole numbers, `ts` and
`dur` in µs. Complete events (X) of one thread nest or do not touch. Metadata (M): `process_name`, `thread_name`,
`…_sort_index`. Counters (C): arguments are numbers. Flow events (s, f): `cat`, `name` and `id` make one arrow; a start
binds to the slice around it, an end with `bp: "e"` as well. Perfetto reads ids that are texts as hexadecimal numbers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

METADATA = {"process_name": str, "thread_name": str, "process_sort_index": int, "thread_sort_index": int}
NS = 1e-3


def faults(text: str) -> list[str]:
    """What is wrong with a file; [] where nothing is."""
    body = json.loads(text, parse_constant=lambda word: f"not JSON: {word}")
    if not isinstance(body, dict) or body.get("displayTimeUnit", "ms") not in ("ms", "ns"):
        return ["no JSON Object Format"]
    events = body["traceEvents"]
    return [*(f for e in events for f in _event(e)), *_nesting(events), *_flows(events)]


def _event(e: dict[str, Any]) -> Iterator[str]:
    phase = e.get("ph")
    if phase not in ("X", "M", "C", "s", "f"):
        yield f"unknown phase {phase}"
    for number in ("pid", "tid"):
        if type(e.get(number, 0)) is not int:
            yield f"{number} of {e} is no whole number"
    if not isinstance(e.get("name"), str):
        yield f"{e} has no name"
    if phase != "M" and not (isinstance(e.get("ts"), int | float) and e["ts"] >= 0):
        yield f"{e} has no time"
    if phase == "X" and not (isinstance(e.get("dur"), int | float) and e["dur"] >= 0 and "tid" in e and "cat" in e):
        yield f"{e} is not complete"
    if phase == "M":
        value = next(iter(e["args"].values()))
        if not isinstance(value, METADATA.get(e["name"], type(None))):
            yield f"{e} is no metadata"
    if phase == "C" and not all(type(v) in (int, float) for v in e["args"].values()):
        yield f"{e} counts no numbers"


def _slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[tuple[float, float]]]:
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X":
            found.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    return {track: sorted(slices, key=lambda one: (one[0], -one[1])) for track, slices in found.items()}


def _nesting(events: list[dict[str, Any]]) -> Iterator[str]:
    for track, slices in _slices(events).items():
        open_until: list[float] = []
        for start, end in slices:
            while open_until and open_until[-1] <= start + NS:
                open_until.pop()
            if open_until and end > open_until[-1] + NS:
                yield f"slices of {track} overlap at {start}"
            open_until.append(end)


def _flows(events: list[dict[str, Any]]) -> Iterator[str]:
    slices = _slices(events)
    ends: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for e in events:
        if e["ph"] not in ("s", "f"):
            continue
        number = e.get("id")
        if type(number) is not int and not (isinstance(number, str) and re.fullmatch(r"(0x)?[0-9a-fA-F]+", number)):
            yield f"Perfetto cannot read the id of {e}"
        if e["ph"] == "f" and e.get("bp") != "e":
            yield f"{e} binds to the next slice"
        if not any(a <= e["ts"] - NS and e["ts"] + NS <= b for a, b in slices.get((e["pid"], e["tid"]), [])):
            yield f"{e} has no slice around it"
        ends.setdefault((e["cat"], e["name"], str(number)), []).append(e)
    for key, pair in ends.items():
        if Counter(e["ph"] for e in pair) != {"s": 1, "f": 1}:
            yield f"arrow {key} has not one start and one end"
        elif [e["ts"] for e in pair if e["ph"] == "s"] > [e["ts"] for e in pair if e["ph"] == "f"]:
            yield f"arrow {key} goes back in time"
