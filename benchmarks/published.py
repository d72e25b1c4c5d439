"""`python -m benchmarks.published`: what a schedule wins on the published models, from the profiles kept for one device.

Each model on as many ranks as 1F1B needs (where 8, 16 and 32 are too few: as any schedule needs), 4 microbatches a rank,
in the device's memory (!: does not fit): 1F1B with a fused backward, as people run it, on the equal split and on the
balanced one; then `solve` on one stage a rank and on the V shape, both split evenly by the ranks' work. All of it is
estimated: rooflines, not measurements. A fused backward is taken to cost no more than B and W: torch adds weight gradients
up in kernels of their own, which training frameworks avoid.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

from zbsolve import Infeasible, Profile, Schedule, solve
from zbsolve.search.solver import compiled
from zbsolve.step import Step
from zbsolve.systems import preset

from .harness import Benchmark
from .profiles import kept, names

RANKS = (8, 16, 32)


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--device", default="h200", help="a100, h100 or h200")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each solve")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a model."""
    compiled()
    rows = {}
    for name in names():
        if name.startswith("estimated-") and name.endswith(f"-{options.device}"):
            row = first_that_fits(kept(name), options.seconds)
            if row is not None:
                rows[name] = row
                print(line(row), flush=True)
    return {"device": options.device, "seconds": options.seconds, "rows": rows}


def first_that_fits(profile: Profile, seconds: float) -> dict[str, Any] | None:
    """The row of the fewest ranks on which 1F1B fits, else of the fewest on which anything does."""
    rest = None
    for ranks in RANKS:
        row = model_row(profile, ranks, seconds)
        if row is not None and row["equal"]["fits"]:
            return row
        rest = rest or row
    return rest


def model_row(profile: Profile, ranks: int, seconds: float) -> dict[str, Any] | None:
    """One model's row; None where not even one microbatch fits."""
    profile = replace(profile, layers=tuple(replace(one, BW=min(one.BW, one.B + one.W)) for one in profile.layers))
    microbatches = 4 * ranks
    step = Step(ranks, microbatches, fused=True)
    try:
        today = preset("1f1b", replace(step, partition="equal").problem(profile))
        base = preset("1f1b", step.problem(profile))
        single, vee = (solve(profile.problem(ranks, microbatches, place), seconds=seconds) for place in ("single", "vee"))
    except Infeasible:
        return None
    return {
        "model": profile.model,
        "source": profile.source,
        "ranks": ranks,
        "microbatches": microbatches,
        "equal": numbers(today),
        "balanced": numbers(base),
        "single": numbers(single),
        "vee": numbers(vee),
    }


def numbers(schedule: Schedule) -> dict[str, Any]:
    """Of one schedule: µs, the bound (of a search), bytes of activations of the fullest rank, whether they fit."""
    timeline, capacity = schedule.timeline(), schedule.problem.capacity
    assert capacity is not None
    fits = all(peak <= room for peak, room in zip(timeline.peak_bytes, capacity, strict=True))
    bound = schedule.certificate.bound if schedule.certificate is not None else None
    return {"us": int(timeline.makespan), "bound_us": bound, "bytes": max(timeline.peak_bytes), "fits": fits}


def line(row: dict[str, Any]) -> str:
    """A row for reading."""
    base = row["equal"]["us"]
    cells = [f"{row['model']:12} p={row['ranks']:<3}", f"{base / 1e3:10.1f} ms{'' if row['equal']['fits'] else '!'}"]
    for what in ("balanced", "single", "vee"):
        one = row[what]
        gap = f" (bound {base / one['bound_us']:.3f})" if what in ("single", "vee") else ""
        cells.append(f"{what} {base / one['us']:.3f}{'' if one['fits'] else '!'}{gap}")
    return "  ".join(cells)


BENCHMARK = Benchmark("published", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
