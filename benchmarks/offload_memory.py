"""`python -m benchmarks.offload_memory`: activation memory of a rank over the number of ranks, with offload and without.

One model of 256 equal layers (F, B, W 1,000 µs each, no messages' time) on p ranks, in 2 and in 4 chunks a rank, two
microbatches a rank; V-Min has 2 chunks, 1F1B one. Memory is that of the fullest rank as a share of M, what 1F1B's first rank
holds: p microbatches of a rank's layers, so all layers' activations of one microbatch. Copies out and back take k times F +
B + W of their chunk: k = 1 for PO-F, 1.5 for PO-H, which is for links on which not all fits. `search in PO-H` (PO-F): the
shortest step that solve finds with the copies of PO-H (PO-F) and no rank above what PO-H (PO-F) holds there, and its bound.
Bubbles are shares of the makespan.

Last, seconds of solve at the most ranks, with the copies and in the memory of each, and without copies in 0.9 of what GIS-H
holds (no plain step fits in so little): to the first schedule, to within 1 % of the last one, and all that an effort takes.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import Any

from zbsolve import Problem, Schedule, pipeline, preset, verify
from zbsolve.bench import timed_solve
from zbsolve.build import Host, with_offload
from zbsolve.placement import parse
from zbsolve.search.solver import compiled
from zbsolve.systems.table import system
from zbsolve.util.text import aligned

from .harness import Benchmark

LAYERS, LAYER_TIME = 256, 1000  # µs of each of F, B and W
NAMED = ("1f1b", "interleaved", "v-min", "gis-h", "po-h", "po-f")
COPIES = {"po-h": 1.5, "po-f": 1.0}  # k


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument("--seconds", type=float, default=30.0, help="for each search")
    parser.add_argument("--effort", type=float, default=0.5, help="for each solve whose time is measured")
    parser.add_argument("--repeats", type=int, default=2, help="of these")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Print each row as it comes; keep all."""
    compiled()
    rows = []
    for chunks in (2, 4):
        for ranks in options.ranks:
            for name in NAMED:
                if chunks == 2 or name not in ("1f1b", "v-min"):
                    rows += _rows(name, ranks, chunks, options.seconds if chunks == 2 else 0.0)
    return {"rows": rows, "times": _times(max(options.ranks), options.effort, options.repeats)}


def step(name: str, ranks: int, chunks: int) -> Problem:
    """The model as the system called `name` runs it; chunks: a rank, where the system leaves that open."""
    one = system(name)
    place = {"single": "single", "vee": "vee"}.get(one.placement, f"loop{chunks}")
    spot = parse(place, ranks)
    layers = LAYERS // len(spot)
    time = LAYER_TIME * layers
    times: dict[str, Any] = {"BW": 2 * time} if one.fused else {"B": time, "W": time}
    plain = pipeline(time, placement=spot, microbatches=2 * ranks, held_until_W=layers, **times)
    if one.copies is None:
        return plain
    copy = round(COPIES[name] * 3 * time / 2)
    return with_offload(plain, copy, copy, which=one.copies(plain, copy, copy), host=Host(shared_bus=1))


def _rows(name: str, ranks: int, chunks: int, seconds: float) -> list[dict[str, Any]]:
    """The row of a named schedule; where it offloads, that of the search in its memory, if there are seconds for it."""
    problem = step(name, ranks, chunks)
    schedule = preset(name, problem)
    assert not verify(problem, schedule)
    found = [_row(name, chunks, schedule, {})]
    if name in COPIES and seconds:
        certificate = timed_solve(_in_memory_of(schedule), seconds=seconds).certificate
        assert certificate.value <= schedule.timeline().makespan
        bound = {"bound": 1 - problem.work / certificate.bound, "solver": certificate.solver}
        row = {**found[0], "bubble": 1 - problem.work / certificate.value, **bound, "seconds": certificate.seconds}
        found.append({**row, "system": f"search in {name.upper()}"})
        print(_line(found[-1]), flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Of the rows with one chunk or two a rank: a line a system, of each number of ranks the memory and the bubble."""
    few = [row for row in rows if row["chunks"] <= 2]
    ranks = sorted({row["ranks"] for row in few})
    lines = [("ranks", *map(str, ranks))]
    for name in dict.fromkeys(row["system"] for row in few):
        mine = {row["ranks"]: row for row in few if row["system"] == name}
        lines.append((name, *(f"{mine[p]['memory']:.3f} {100 * mine[p]['bubble']:.1f}%" for p in ranks)))
    return "\n".join(aligned(lines, left=(0,))) + "\n"


def _in_memory_of(schedule: Schedule, share: float = 1.0) -> Problem:
    peaks = schedule.timeline().peak_bytes
    return replace(schedule.problem, capacity=tuple(int(share * peak) for peak in peaks))


def _row(name: str, chunks: int, schedule: Schedule, more: dict[str, Any]) -> dict[str, Any]:
    timeline, problem = schedule.timeline(), schedule.problem
    row = {
        "system": name,
        "ranks": problem.ranks,
        "chunks": problem.stages // problem.ranks,
        "passes": len(problem.passes),
        "layers": max(timeline.peak_bytes),
        "memory": max(timeline.peak_bytes) / LAYERS,
        "host_layers": list(timeline.pool_peaks),
        "bubble": 1 - problem.work / timeline.makespan,
        **more,
    }
    print(_line(row), flush=True)
    return row


def _line(row: dict[str, Any]) -> str:
    bound = f", at least {row['bound']:.2%} ({row['solver']})" if "bound" in row else ""
    return (
        f"p={row['ranks']:<3} v={row['chunks']}  {row['system']:15} {row['memory']:.4f} M, {row['layers']:>4} layers, "
        f"bubble {row['bubble']:.2%}{bound}"
    )


def _times(ranks: int, effort: float, repeats: int) -> dict[str, Any]:
    """Of solve on three steps, in turn, so that a busy machine is busy for all of them."""
    problems = {name: _in_memory_of(preset(name, step(name, ranks, 2))) for name in COPIES}
    problems["without"] = _in_memory_of(preset("gis-h", step("gis-h", ranks, 2)), 0.9)
    found: dict[str, Any] = {name: [] for name in problems}
    for _ in range(repeats):
        for name, problem in problems.items():
            one = timed_solve(problem, effort=effort)
            near = next(each.seconds for each in one.improvements if each.value <= 1.01 * one.certificate.value)
            row = {"first": one.improvements[0].seconds, "near": near, "all": one.seconds, "load": os.getloadavg()[0]}
            found[name].append(row)
            print(f"solve at p={ranks}, {name}, {len(problem.passes)} passes: {row}", flush=True)
    return {"ranks": ranks, "passes": {name: len(one.passes) for name, one in problems.items()}, "samples": found}


BENCHMARK = Benchmark("offload_memory", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
