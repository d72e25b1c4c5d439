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
from zbsolve.assign import Job, partition_of
from zbsolve.greedy.presets import preset
from zbsolve.placement import parse_routes
from zbsolve.search import compiled

from .__main__ import write
from .profiles import kept, names

RANKS = (8, 16, 32)


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="h200")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each solve")
    options = parser.parse_args()
    compiled()
    rows = {}
    for name in names():
        if name.startswith("estimated-") and name.endswith(f"-{options.device}"):
            row = first_that_fits(kept(name), options.seconds)
            if row is not None:
                rows[name] = row
                print(line(row), flush=True)
    write("published", {"device": options.device, "seconds": options.seconds, "rows": rows})


def first_that_fits(profile: Profile, seconds: float) -> dict[str, Any] | None:
    """The row of the fewest ranks on which 1F1B fits, else of the fewest on which anything does."""
    rest = None
    for ranks in RANKS:
        row = measure(profile, ranks, seconds)
        if row is not None and row["equal"]["fits"]:
            return row
        rest = rest or row
    return rest


def measure(profile: Profile, ranks: int, seconds: float) -> dict[str, Any] | None:
    """One model's row; None where not even one microbatch fits."""
    profile = replace(profile, layers=tuple(replace(one, BW=min(one.BW, one.B + one.W)) for one in profile.layers))
    microbatches = 4 * ranks
    job = Job(profile, parse_routes("single", ranks), microbatches, profile.capacity, fused=True)
    try:
        today = preset("1f1b", profile.problem(ranks, microbatches, layers=partition_of(job, "equal"), fused=True))
        base = preset("1f1b", profile.problem(ranks, microbatches, fused=True))
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


if __name__ == "__main__":
    main()
