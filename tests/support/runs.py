"""Schedules written out, and runs of them made by perturbing the prediction."""

from __future__ import annotations

import numpy as np

import zbsolve
from zbsolve import Schedule, Timeline, Trace


def one_f_one_b(ranks: int, microbatches: int, objective: str = "makespan", comm: int = 3, **more: object) -> Schedule:
    """1F1B with W right after its B, written out."""
    problem = zbsolve.pipeline(
        F=[10 + r for r in range(ranks)],
        B=[12] * ranks,
        W=[8] * ranks,
        microbatches=microbatches,
        comm=comm,
        held_until_B=2,
        held_until_W=1,
        objective=objective,
        **more,  # type: ignore[arg-type]
    )
    order = {}
    for r in range(ranks):
        warm = min(ranks - r, microbatches)
        names = [f"{r}F{i}" for i in range(warm)]
        for i in range(microbatches):
            names += [f"{r}B{i}", f"{r}W{i}"]
            names += [f"{r}F{warm + i}"] if warm + i < microbatches else []
        order[f"compute:{r}"] = tuple(names)
    return Schedule(problem, order)


def run_of(schedule: Schedule, longer: np.ndarray, launch: np.ndarray, offset: float = 0.0) -> tuple[Timeline, np.ndarray]:
    """A step in which every pass takes `longer` µs more and starts `launch` µs later than it could; and its ready times."""
    problem, precedence = schedule.problem, schedule.precedence()
    count = len(problem.passes)
    start, ready, end = np.full(count, offset), np.full(count, offset), np.zeros(count)
    arcs = list(zip(precedence.before.tolist(), precedence.after.tolist(), precedence.lag.tolist(), strict=True))
    for row in np.argsort(schedule.timeline().start, kind="stable").tolist():
        waits = [(e < len(problem.edges), end[a] + lag) for e, (a, b, lag) in enumerate(arcs) if b == row]
        ready[row] = max([offset, *(t for edge, t in waits if edge)])
        start[row] = max([offset, *(t for _, t in waits)]) + launch[row]
        end[row] = start[row] + problem.passes.duration[row] + longer[row]
    return Timeline(problem, start, end), ready


def trace_of(schedule: Schedule, *steps: tuple[Timeline, np.ndarray]) -> Trace:
    timelines, ready = zip(*steps, strict=True)
    return Trace(
        schedule.problem,
        dict(schedule.order),
        timelines,
        ready,
        (1.0,) * len(steps),
        ((1,),) * len(steps),
        {},
        syncs=schedule.syncs,
    )


def random_run(schedule: Schedule, seed: int, whole: bool = True) -> tuple[Timeline, np.ndarray]:
    random = np.random.default_rng(seed)
    count = len(schedule.problem.passes)
    longer, launch = random.uniform(-3, 5, count), random.exponential(2, count)
    return run_of(schedule, np.rint(longer) if whole else longer, np.rint(launch) if whole else launch, 100.0)
