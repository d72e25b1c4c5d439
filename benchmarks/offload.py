"""Steps that offload: values of the search against proven bounds, and the memory that offload saves on many ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from zbsolve import Problem, Schedule, pipeline, preset, verify
from zbsolve.build import Host, with_offload
from zbsolve.problem.placement import parse
from zbsolve.search.solver import compiled
from zbsolve.systems.table import system
from zbsolve.util.text import aligned

from .harness import Results, listed, mean_of, rows_of, solved, table, timed_solve

BYTES = 10  # that a stage keeps of a microbatch
# name: device and host memory (a rank) as a part of all stages' bytes, None for a host without a limit; ranks on one bus
ROOMS: dict[str, tuple[float, float | None, int]] = {
    "tight": (1.5, None, 0),
    "half": (0.5, None, 0),
    "half, host": (0.5, 0.25, 0),
    "half, bus": (0.5, None, 2),
    "half, bus, host": (0.5, 0.25, 2),
}
SIZES = ((2, 4, "single"), (2, 3, "vee"), (4, 4, "single"), (8, 24, "single"), (8, 24, "vee"), (16, 48, "single"))


@table()
def offload(effort: float = 1.0, first: int = len(SIZES), rooms: tuple[str, ...] = tuple(ROOMS)) -> Results:
    """Steps that offload, of the first sizes: the first schedule's value and that of `solve`, over the bound (geometric
    means). Devices hold a part of what is in flight, and so does the host memory if it has a limit. All stages offload all;
    a copy takes as long as a forward, on two streams or on one bus. Effort is counted, so all numbers but seconds are
    deterministic."""
    compiled()
    rows = rows_of(
        ("{2} p{0} m{1} {3}".format(*size, room), solved(room_step(*size, room), effort=effort))
        for size in SIZES[:first]
        for room in rooms
    )
    values = {"first": [row["changes"][0][1] for row in rows.values()], "value": [row["value"] for row in rows.values()]}
    bounds = [row["bound"] for row in rows.values()]
    means = {
        f"{what}_over_bound": mean_of(a / z for a, z in zip(some, bounds, strict=True)) for what, some in values.items()
    }
    return {**means, "proven": sum(row["gap"] <= 0 for row in rows.values()), "rows": rows}


def room_step(ranks: int, microbatches: int, placement: str, room: str) -> Problem:
    """A uniform step that offloads: F, B, W 30, 32, 21 µs, messages 1 µs. "tight" is a number of microbatches of one stage;
    the other rooms are multiples of as many microbatches as there are stages."""
    device, host, bus = ROOMS[room]
    spot = parse(placement, ranks)
    whole = BYTES * len(spot)
    plain = pipeline(30, 32, 21, placement=spot, microbatches=microbatches, comm=1, held_until_B=6, held_until_W=4)
    limit = None if host is None else max(whole, int(host * whole * ranks))
    capacity = max(BYTES, int(device * (BYTES if room == "tight" else whole)))
    return replace(with_offload(plain, 30, 30, host=Host(limit, None, bus)), capacity=(capacity,) * ranks)


# --- Memory on many ranks ---

LAYERS, LAYER_TIME = 256, 1000  # µs of each of F, B and W
NAMED = ("1f1b", "interleaved", "v-min", "gis-h", "po-h", "po-f")
COPIES = {"po-h": 1.5, "po-f": 1.0}  # k


@table()
def offload_memory(
    ranks: tuple[int, ...] = (4, 8, 16, 32, 64), seconds: float = 10.0, effort: float = 0.3, repeats: int = 2
) -> Results:
    """Activation memory of a rank over the number of ranks, with offload and without: one model of 256 equal layers (F, B, W
    1,000 µs each, no messages' time) on p ranks, in 2 and in 4 chunks a rank, two microbatches a rank; V-Min has 2 chunks,
    1F1B one. Memory is that of the fullest rank as a share of M, the memory of 1F1B's first rank: p microbatches of a rank's
    layers, which are all layers' activations of one microbatch. Copies out and back take k times F + B + W of their chunk: k
    = 1 for PO-F, 1.5 for PO-H, which is for links too slow for all copies. `search in PO-H` (PO-F): the shortest step that
    solve finds with the copies of PO-H (PO-F) and on each rank at most the memory of PO-H (PO-F), and its bound. Bubbles are
    shares of the makespan.

    Last, seconds of solve at the most ranks, with the copies and in the memory of each, and without copies in 0.9 of GIS-H's
    memory (no plain step fits into theirs): until the first schedule, until within 1 % of the last one, and in all for the
    effort."""
    compiled()
    rows = listed(
        row
        for chunks in (2, 4)
        for p in ranks
        for name in NAMED
        if chunks == 2 or name not in ("1f1b", "v-min")
        for row in _named(name, p, chunks, seconds if chunks == 2 else 0.0)
    )
    return {"rows": rows, "times": _times(max(ranks), effort, repeats)}


def step(name: str, ranks: int, chunks: int) -> Problem:
    """The model as the system `name` runs it; chunks: of a rank, if the system leaves that open."""
    one = system(name)
    spot = parse(one.placement if one.placement in ("single", "vee") else f"loop{chunks}", ranks)
    layers = LAYERS // len(spot)
    us = LAYER_TIME * layers
    times: dict[str, Any] = {"BW": 2 * us} if one.fused else {"B": us, "W": us}
    plain = pipeline(us, placement=spot, microbatches=2 * ranks, held_until_W=layers, **times)
    if one.copies is None:
        return plain
    copy = round(COPIES[name] * 3 * us / 2)
    return with_offload(plain, copy, copy, which=one.copies(plain, copy, copy), host=Host(shared_bus=1))


def _named(name: str, ranks: int, chunks: int, seconds: float) -> Iterator[Results]:
    """The row of a named schedule; if it offloads and `seconds` are given, also that of the search in its memory."""
    problem = step(name, ranks, chunks)
    schedule = preset(name, problem)
    assert not verify(problem, schedule)
    timeline = schedule.timeline()
    layers = max(timeline.peak_bytes)
    row = {
        "system": name,
        "ranks": problem.ranks,
        "chunks": problem.stages // problem.ranks,
        "passes": len(problem.passes),
        "layers": layers,
        "memory": layers / LAYERS,
        "host_layers": list(timeline.pool_peaks),
        "bubble": 1 - problem.work / timeline.makespan,
    }
    yield row
    if name in COPIES and seconds:
        found = solved(_in_memory_of(schedule), seconds=seconds)
        assert found["value"] <= timeline.makespan
        shares = {"bubble": 1 - problem.work / found["value"], "bound": 1 - problem.work / found["bound"]}
        yield {
            **row,
            "system": f"search in {name.upper()}",
            **shares,
            "solver": found["solver"],
            "seconds": found["seconds"],
        }


def memory_table(rows: list[Results]) -> str:
    """The rows with one or two chunks a rank: a line for each system, with memory and bubble for each number of ranks."""
    few = [row for row in rows if row["chunks"] <= 2]
    ranks = sorted({row["ranks"] for row in few})
    lines = [("ranks", *map(str, ranks))]
    for name in dict.fromkeys(row["system"] for row in few):
        at = {row["ranks"]: row for row in few if row["system"] == name}
        lines.append((name, *(f"{at[p]['memory']:.3f} {100 * at[p]['bubble']:.1f}%" for p in ranks)))
    return "\n".join(aligned(lines, left=(0,))) + "\n"


def _in_memory_of(schedule: Schedule, share: float = 1.0) -> Problem:
    peaks = schedule.timeline().peak_bytes
    return replace(schedule.problem, capacity=tuple(int(share * peak) for peak in peaks))


def _times(ranks: int, effort: float, repeats: int) -> Results:
    """Times of solve on three steps, in turn, so that other load of the machine affects all of them."""
    problems = {name: _in_memory_of(preset(name, step(name, ranks, 2))) for name in COPIES}
    problems["without"] = _in_memory_of(preset("gis-h", step("gis-h", ranks, 2)), 0.9)
    found: Results = {name: [] for name in problems}
    for _ in range(repeats):
        for name, problem in problems.items():
            schedule, seconds, changes = timed_solve(problem, effort=effort)
            near = next(when for when, value, _ in changes if value <= 1.01 * schedule.timeline().value)
            row = {"first": changes[0][0], "near": near, "all": seconds, "load": os.getloadavg()[0]}
            found[name].append(row)
            print(f"solve at p={ranks}, {name}, {len(problem.passes)} passes: {row}", flush=True)
    return {"ranks": ranks, "passes": {name: len(one.passes) for name, one in problems.items()}, "samples": found}
