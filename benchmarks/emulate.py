"""`python -m benchmarks.emulate`: do emulated devices keep to the prediction? p = 8, m = 24 on whatever cores are here.

One model of 16 layers, passes of 5 ms and more, a last layer that costs more than the others. Each schedule is predicted,
run on 8 processes that stretch their (tiny) real work to the profile's times, and compared; so are the speed-ups over
1F1B. The last row asks for devices fifty times as fast: this machine cannot keep up, and the measured step says so.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from zbsolve import Schedule, Trace, solve
from zbsolve.exec.run.launch import run_local
from zbsolve.problem import Problem
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.show.comparison import compare
from zbsolve.systems import preset
from zbsolve.util.text import aligned

from .harness import Benchmark

RANKS, MICROBATCHES, LAYERS = 8, 24, 16
STEPS, SECONDS, MEMORY = 9, 20, 48_000_000  # bytes of activations that 1F1B needs
MODEL = f"mlp-{LAYERS}"


def profile(scale: float = 1.0) -> Profile:
    """The emulated model; µs and bytes are made up."""
    times = {"F": 5_000 * scale, "B": 6_000 * scale, "W": 5_000 * scale, "BW": 11_000 * scale}
    plain = Layer("", **times, held_until_B=2_000_000, held_until_W=1_000_000, parameter_bytes=0, output_bytes=1_000_000)
    layers = [replace(plain, name=f"layer{i}") for i in range(LAYERS)]
    layers[-1] = replace(layers[-1], **{kind: 1.3 * us for kind, us in times.items()})
    return Profile("estimated: made up", MODEL, tuple(layers), Link(100 * scale, 10_000 / scale), 4.0, None, {}, {})


def schedules(costs: Profile) -> dict[str, Schedule]:
    """1F1B as people run it, and three schedules with a split backward in the same memory."""
    return {
        "1F1B": preset("1f1b", step(costs, "single", fused=True)),
        "ZB-H1": preset("zb-h1", step(costs, "single")),
        "solved, single": solve(step(costs, "single"), seconds=SECONDS),
        "solved, vee": solve(step(costs, "vee"), seconds=SECONDS),
    }


def step(costs: Profile, placement: str, fused: bool = False) -> Problem:
    """One training step in the memory."""
    return replace(costs.problem(RANKS, MICROBATCHES, placement, fused=fused), capacity=(MEMORY,) * RANKS)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every schedule's row; the table is printed at the end."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-emulate-") as folder:
        path, fast = Path(folder) / "profile.json", profile(1 / 50)
        rows = table(schedules(profile()), profile(), path)
        one = {"1F1B, fifty times as fast": preset("1f1b", step(fast, "single", fused=True))}
        rows |= table(one, fast, path)
    print("\n".join(lines(rows)))
    return {"ranks": RANKS, "microbatches": MICROBATCHES, "model": MODEL, "memory": MEMORY, "rows": rows}


def table(all_of_them: dict[str, Schedule], costs: Profile, path: Path) -> dict[str, dict[str, Any]]:
    """A row a schedule, with its speed-up over the first."""
    costs.save(path)
    runs = {name: (one, run(one, str(path))) for name, one in all_of_them.items()}
    base = next(iter(runs.values()))
    return {name: row(one, trace, base) for name, (one, trace) in runs.items()}


def run(schedule: Schedule, path: str) -> Trace:
    """With the times of the profile at `path`, gradients checked."""
    trace = run_local(schedule, MODEL, steps=STEPS, emulate=path, check=True, timeout=300)
    return replace(trace, facts={**trace.facts, "load": os.getloadavg()[0]})


def row(schedule: Schedule, trace: Trace, base: tuple[Schedule, Trace]) -> dict[str, Any]:
    """What the run shows beside the prediction, µs."""
    found = compare(schedule, trace, base)
    result = {
        "predicted": found.predicted,
        "measured": found.measured,
        "error": found.difference / found.predicted,
        "steps": list(found.steps),
        "bubble": schedule.timeline().bubble_rate,
        "load": trace.facts["load"],
        "gradients": trace.facts["check"]["worst"],
        **{what: trace.facts["emulated"][what] for what in ("passes", "late", "worst_late_us", "waited")},
    }
    assert found.speedup is not None
    return result | {"speedup_predicted": found.speedup.predicted, "speedup_measured": found.speedup.measured}


def lines(rows: dict[str, dict[str, Any]]) -> list[str]:
    """The table as text."""
    cells = [("", "bubble", "predicted", "measured", "error", "speed-up", "measured", "late, waited for")]
    for name, one in rows.items():
        times = (f"{one[what] / 1000:.2f} ms" for what in ("predicted", "measured"))
        speedups = (f"{one[what]:.4f}" for what in ("speedup_predicted", "speedup_measured"))
        late = f"{one['late']} of {one['passes']}, {one['waited']} (load {one['load']:.0f})"
        cells.append((name, f"{one['bubble']:.2%}", *times, f"{one['error']:.3%}", *speedups, late))
    return aligned(cells, left=(0, -1))


BENCHMARK = Benchmark("emulate", __doc__, measure)

if __name__ == "__main__":
    BENCHMARK.main()
