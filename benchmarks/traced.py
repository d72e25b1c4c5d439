"""`python -m benchmarks.traced`: what real steps, traced by other people, could have been.

For each sample under tests/data/traces: the measured step, how close its order comes by the longest path (with messages
beside compute and with messages that hold their sender up), where each rank's time went in its median step, and the best
schedules found of the same passes in the same memory (the most microbatches in flight that any rank had), on today's
placement, a vee and a loop (each stage cut in two alike ones), with the backward as traced and split (estimated: B and W
half of it each), with the stages as they are and all alike. Values and bounds are µs.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import numpy as np

from tests.support.recorded import SAMPLES
from zbsolve import Problem, Schedule, Timeline, Trace, solve, verify
from zbsolve.build.in_flight import with_units_in_flight
from zbsolve.build.restage import restaged
from zbsolve.build.split_backward import with_halved_backward
from zbsolve.interchange.traces import read_trace
from zbsolve.placement import loop, vee
from zbsolve.profile.lengths import lengths_of
from zbsolve.profile.stalls import stalls_of
from zbsolve.search.solver import compiled
from zbsolve.search.today import UNITS, even_stages, today_of
from zbsolve.show.comparison import Parts, compare
from zbsolve.util.text import aligned

from .harness import Benchmark

NAMES = {"primus-pp8": "primus-pp8", "bytedance-ST": "bytedance-ST.parquet"}  # sample → its file or folder
BACKWARDS = ("as traced", "split")
STAGES = ("as they are", "even")
MESSAGES = ("beside compute", "hold their sender up")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--effort", type=float, default=4.0, help="for each solve")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A sample after the other."""
    compiled()
    found = {}
    for name, file in NAMES.items():
        trace = read_trace(SAMPLES / file)
        found[name] = sample = _sample(trace, options.effort)
        tables = (*replays_table(sample), *ranks_table(sample), *table(sample))
        print(f"{name}\n" + "\n".join(tables), flush=True)
    return found


def _sample(trace: Trace, effort: float) -> dict[str, Any]:
    today = today_of(trace, seconds=0)
    comparison = compare(trace.planned(), trace)
    problem = replace(with_units_in_flight(trace.problem, UNITS), capacity=today.room)
    rows = []
    for backward in BACKWARDS:
        fused = backward == BACKWARDS[0]
        step = problem if fused else with_halved_backward(problem)
        for stages in STAGES:
            given = step if stages == STAGES[0] else even_stages(step)
            rows += [_row(one, backward, stages, name, effort) for name, one in _placed(given)]
    return {
        "steps": len(trace.steps),
        "measured": today.measured,
        "bubble": today.bubble,
        "replayed": today.replayed,
        "replays": {MESSAGES[0]: _replays(_beside(trace)), MESSAGES[1]: _replays(trace)},
        "blocking": trace.facts.get("blocking"),
        "even_stages_save": today.replayed - today.even,
        "in_flight": max(today.room) / UNITS,
        "ranks": [_shares(one.measured) for one in comparison.ranks],
        "stalls": [one.to_json() | {"step": trace.facts["steps"][one.step]} for one in stalls_of(trace)],
        "rows": rows,
    }


def _beside(trace: Trace) -> Trace:
    """The run with messages beside compute, whatever it shows."""
    problem, sent = trace.problem, trace.sent or (trace.problem.sending,) * len(trace.steps)
    edges = replace(problem.edges, lag=problem.edges.lag + problem.edges.sent, sent=0 * problem.edges.sent)
    passes = replace(problem.passes, duration=problem.passes.duration - problem.sending)
    problem = replace(problem, passes=passes, edges=edges)
    steps = (Timeline(problem, one.start, one.end - more) for one, more in zip(trace.steps, sent, strict=True))
    return replace(trace, problem=problem, steps=tuple(steps), sent=())


def _replays(trace: Trace) -> dict[str, float]:
    """How much longer than measured the order takes by the longest path, as a share: with each step's own times, their mean
    and the worst; with the medians of all steps, against the median step; and with each step's own factors a microbatch, the
    mean of what it is off."""
    own = [trace.replayed(i).value / step.value - 1 for i, step in enumerate(trace.steps)]
    lengths, sent = lengths_of(trace), trace.problem.sending
    off = []
    for step, each in zip(trace.steps, lengths.each, strict=True):
        took = lengths.base * each[trace.problem.passes.microbatch]
        passes = replace(trace.problem.passes, duration=np.rint(took).astype(np.int64) + sent)
        replayed = Schedule(replace(trace.problem, passes=passes), trace.schedule).timeline().value
        off.append(abs(replayed / step.value - 1))
    medians = trace.planned().timeline().value / trace.median().value - 1
    return {"own": sum(own) / len(own), "worst": max(own, key=abs), "medians": medians, "factors": sum(off) / len(off)}


def replays_table(sample: dict[str, Any]) -> list[str]:
    """How close the order comes to what was measured, by what messages do."""
    rows = [("messages", "own times", "worst step", "medians", "with factors")]
    for name, one in sample["replays"].items():
        rows.append((name, f"{one['own']:+.2%}", f"{one['worst']:+.2%}", f"{one['medians']:+.2%}", f"{one['factors']:.2%}"))
    return aligned(rows)


def _shares(parts: Parts) -> dict[str, int]:
    """Where a rank's time went, µs."""
    idle = {"waiting": parts.waiting, "launch": parts.launch, "before": parts.before, "after": parts.after}
    return {"busy": sum(parts.passes.values()), **idle}


def _placed(problem: Problem) -> list[tuple[str, Problem]]:
    """Today's placement, a vee and a loop."""
    ranks = problem.ranks
    return [("today's", problem), ("vee", restaged(problem, vee(ranks))), ("loop", restaged(problem, loop(ranks)))]


def _row(problem: Problem, backward: str, stages: str, placement: str, effort: float) -> dict[str, Any]:
    schedule: Schedule = solve(problem, effort=effort, prefer=None)
    assert not verify(problem, schedule)
    certificate = schedule.certificate
    assert certificate is not None
    most = max(schedule.timeline().peak_bytes) / UNITS
    said = {"backward": backward, "stages": stages, "placement": placement, "in_flight": most, "solver": certificate.solver}
    return {**said, "value": certificate.value, "bound": certificate.bound, "gap": certificate.gap}


def ranks_table(sample: dict[str, Any]) -> list[str]:
    """Where each rank's time went in the median step, ms."""
    rows = [("rank", *sample["ranks"][0])]
    rows += [(str(rank), *(f"{us / 1e3:,.1f}" for us in one.values())) for rank, one in enumerate(sample["ranks"])]
    return aligned(rows)


def table(sample: dict[str, Any]) -> list[str]:
    """The best schedules found, ms; gaps are what is proven; changes are against today's order by the medians."""
    rows = [("backward", "stages", "placement", "step, ms", "gap", "change")]
    for one in sample["rows"]:
        change = one["value"] / sample["replayed"] - 1
        shown = (f"{one['value'] / 1e3:,.1f}", f"{one['gap']:.2%}", f"{change:+.1%}")
        rows.append((one["backward"], one["stages"], one["placement"], *shown))
    return aligned(rows, (0, 1, 2))


BENCHMARK = Benchmark("traced", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
