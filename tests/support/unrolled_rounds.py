"""A file of rounds unrolled pass by pass and judged, from its text alone and docs/files.md: nothing of zbsolve is used."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple


class Judged(NamedTuple):
    """passes: how many there are; value: makespan or span, as the file's objective says, µs; peaks: bytes, one a rank;
    wrong: what does not hold."""

    passes: int
    value: int
    peaks: list[int]
    wrong: list[str]


def judge(path: Path) -> Judged:
    """The step of a file of rounds with all its passes."""
    body = json.loads(path.read_text(encoding="utf-8"))
    table = body["step"]["passes"]
    columns = {name: _column(table[name]) for name in ("kind", "stage", "rank", "duration", "microbatch", "slice")}
    assert set(map(int, columns["microbatch"])) == set(map(int, columns["slice"])) == {0}
    words = [f"{stage}{kind}" for stage, kind in zip(columns["stage"], columns["kind"], strict=True)]
    rank, duration = [int(one) for one in columns["rank"]], [int(one) for one in columns["duration"]]
    orders, wrong = [], []
    for own in range(max(rank) + 1):
        here = [lane for lane, home in enumerate(rank) if home == own]
        order = _whole_order(body, here, words, body["order"][f"compute:{own}"])
        if Counter(order) != dict.fromkeys(here, body["microbatches"]):
            wrong.append(f"rank {own}: its passes are not there once each")
        orders.append(order)
    told = body["step"]["edges"]
    edges = list(
        zip(*([int(one) for one in _column(told[name])] for name in ("before", "after", "lag", "bytes")), strict=True)
    )
    start = _starts(orders, edges, duration, body)
    if start is None:
        return Judged(0, 0, [], [*wrong, "ranks wait for each other"])
    value, peaks = _value(orders, start, duration, body["step"]["objective"]), _peaks(edges, start, duration, rank)
    if value != body["certificate"]["value"]:
        wrong.append(f"it takes {value} µs, the file states {body['certificate']['value']}")
    wrong += [f"rank {i}: over its capacity" for i, most in enumerate(body["step"]["capacity"] or []) if peaks[i] > most]
    return Judged(len(start), value, peaks, wrong)


def _column(told: list[Any] | str) -> list[Any]:
    """A column: values, or runs such as 5*32 and 0..31."""
    if not isinstance(told, str):
        return told
    found: list[Any] = []
    for run in told.split():
        if ".." in run:
            first, last = run.split("..")
            found += range(int(first), int(last) + 1)
        else:
            value, _, times = run.partition("*")
            found += [value] * int(times or 1)
    return found


def _whole_order(body: dict[str, Any], lanes: list[int], words: list[str], text: str) -> list[int]:
    """The lanes of one rank in order, for all microbatches."""
    lane_of = {words[lane]: lane for lane in lanes}
    few: list[int] = []
    for part, times in re.findall(r"(\([^)]*\)|[^\s*()]+)(?:\*(\d+))?", text):
        few += [lane_of[word] for word in part.strip("()").split()] * int(times or 1)
    begin, width = _column(body["round"]["begin"]), body["round"]["microbatches"] * len(lanes)
    first = sum(int(begin[lane]) for lane in lanes)
    more, rest = divmod(body["microbatches"] - body["few"], body["round"]["microbatches"])
    assert rest == 0
    return few[:first] + few[first : first + width] * more + few[first:]


def _starts(
    orders: list[list[int]], edges: list[tuple[int, ...]], duration: list[int], body: dict[str, Any]
) -> dict[tuple[int, int], int] | None:
    """(lane, microbatch) → its start, µs, each as early as its rank's order and its edges allow, and in rounds a period
    behind its like of the round before; None in a deadlock."""
    begin, every, period = _column(body["round"]["begin"]), body["round"]["microbatches"], body["round"]["period"]
    repeated = body["round"]["copies"] * every + body["microbatches"] - body["few"]
    into: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for before, after, lag, _ in edges:
        into[after].append((before, lag))
    start: dict[tuple[int, int], int] = {}
    at, free, count = [0] * len(orders), [0] * len(orders), [0] * len(duration)
    total = sum(map(len, orders))
    while len(start) < total:
        begun = len(start)
        for rank, order in enumerate(orders):
            while at[rank] < len(order):
                lane, now = order[at[rank]], free[rank]
                j = count[lane]
                if any((before, j) not in start for before, _ in into[lane]):
                    break
                for before, lag in into[lane]:
                    now = max(now, start[before, j] + duration[before] + lag)
                if every <= j - int(begin[lane]) < repeated:
                    now = max(now, start[lane, j - every] + period)
                start[lane, j] = now
                free[rank], count[lane], at[rank] = now + duration[lane], j + 1, at[rank] + 1
        if len(start) == begun:
            return None
    return start


def _value(orders: list[list[int]], start: dict[tuple[int, int], int], duration: list[int], objective: str) -> int:
    """The step's makespan or span, µs."""
    windows = []
    for order in orders:
        last = len(order) - 1
        ends = order[0], 0, order[last], order.count(order[last]) - 1
        windows.append((start[ends[:2]], start[ends[2:]] + duration[order[last]]))
    if objective == "span":
        return max(last - first for first, last in windows)
    return max(last for _, last in windows) - min(first for first, _ in windows)


def _peaks(
    edges: list[tuple[int, ...]], start: dict[tuple[int, int], int], duration: list[int], rank: list[int]
) -> list[int]:
    """The most bytes that each rank holds: those of an edge from the start of its first pass to the end of its second."""
    changes: list[list[tuple[int, int]]] = [[] for _ in range(max(rank) + 1)]
    holding: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for before, after, _, held in edges:
        holding[before] += [(after, held)] * (held > 0)
    for lane, j in start:
        for after, held in holding[lane]:
            changes[rank[lane]] += [(start[lane, j], held), (start[after, j] + duration[after], -held)]
    peaks = []
    for events in changes:
        most = held = 0
        for _, change in sorted(events):  # at one moment what is freed goes first
            held += change
            most = max(most, held)
        peaks.append(most)
    return peaks
