"""A `Recording` as a `Trace`: its problem has the medians of what ran, its steps are measured Timelines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median, median_low

import numpy as np

from ...build.fused_backward import with_fused_backward
from ...build.plain import pipeline
from ...problem import Problem
from ...profile.measured_run import FROM_STEPS, LINKS
from ...schedule import Schedule
from ...tables import Bools
from ...timeline import Floats, Timeline
from ...trace import Trace
from ...util.errors import BadInput
from ...util.text import printable
from ...verifier import verify
from .clocks import aligned, fit, only_fitting
from .recording import HOST, OWN, RecordedStep, Recording

WARM = 1.25  # times the median step: longer steps at the beginning are warm-up
Pair = tuple[int, int]


def trace_of(recording: Recording) -> Trace:
    """The measured run of a recording. Its problem: medians of passes a kind and stage, of messages a pair of ranks; a stage
    counts as one layer; no bytes. Raises BadInput, naming file, step, rank and pass, for what does not hold together."""
    recording = recording.checked()
    if recording.clocks == OWN or (recording.clocks == HOST and not fit(recording)):
        recording = aligned(recording)
    recording = _without_warm_up(only_fitting(recording))
    problem = problem_of(recording)
    order = {f"compute:{rank}": names for rank, names in enumerate(recording.steps[0].order)}
    violations = verify(problem, Schedule(problem, order))
    if violations:
        raise BadInput(f"{recording.where}: the order in which passes ran does not hold: {violations[0]}")
    steps = tuple(_timeline(problem, step) for step in recording.steps)
    facts = recording.facts | {
        "format": recording.format,
        "steps": [step.name for step in recording.steps],
        LINKS: FROM_STEPS,
    }
    if recording.left_out:
        facts["left_out"] = list(recording.left_out)
    return Trace(problem, order, steps, tuple(_ready(problem, one) for one in steps), (), (), facts)


def _without_warm_up(recording: Recording) -> Recording:
    usual = median_low([step.length for step in recording.steps])
    warm = next((i for i, step in enumerate(recording.steps) if step.length <= WARM * usual), 0)
    if not warm:
        return recording
    said = f"warm-up: the first {warm} of {len(recording.steps)} steps, over {WARM:g} times as long as the median"
    return replace(recording, steps=recording.steps[warm:], left_out=(*recording.left_out, said))


def problem_of(recording: Recording) -> Problem:
    """The step that ran, with medians over all microbatches and steps, whole µs. Raises BadInput."""
    stages, first = len(recording.placement), recording.steps[0]
    microbatches = 1 + max(one.microbatch for one in first.passes)
    times = _medians(recording)
    whole: Bools = np.zeros((stages, microbatches), bool)
    for one in first.passes:
        whole[one.stage, one.microbatch] |= one.kind == "BW"
    split = not whole.all()
    halves = {kind: [times.get((kind, s), round(times.get(("BW", s), 0) / 2)) for s in range(stages)] for kind in ("B", "W")}
    BW: list[int] = [times.get(("BW", s), 0) for s in range(stages)]
    problem = pipeline(
        [times["F", s] for s in range(stages)],
        halves["B"] if split else None,
        halves["W"] if split else None,
        None if split else BW,
        placement=recording.placement,
        microbatches=microbatches,
        comm=_comm(recording),
        layers=(1,) * stages,
        source=f"measured: {printable(Path(recording.where).name) or recording.format}",
    )
    return with_fused_backward(problem, whole, BW) if split and whole.any() else problem


def _medians(recording: Recording) -> dict[tuple[str, int], int]:
    samples: dict[tuple[str, int], list[float]] = {}
    for step in recording.steps:
        for one in step.passes:
            samples.setdefault((one.kind, one.stage), []).append(one.end - one.start)
    return {of: round(median(row)) for of, row in samples.items()}


def _comm(recording: Recording) -> dict[Pair, float]:
    """µs of a message by pair of ranks: as recorded, else as told from when passes ran."""
    found: dict[Pair, float] = {pair: round(median(times)) for pair, times in recording.links.items() if len(times)}
    told = _told(recording.steps)
    for a, b in zip(recording.placement, recording.placement[1:], strict=False):
        for pair in ((a, b), (b, a)):
            if a != b and pair not in found:
                found[pair] = round(max(0.0, median(told.get(pair, [0.0]))))
    return found


def _told(steps: tuple[RecordedStep, ...]) -> dict[Pair, list[float]]:
    """What messages took whose receiver stood idle from before they were sent; where there is no such one, the least time
    from the sender's end to the receiver's start, which is no less than the message took."""
    waited: dict[Pair, list[float]] = {}
    least: dict[Pair, float] = {}
    for step in steps:
        idle_since = {one: before.end for row in step.rows for before, one in zip(row, row[1:], strict=False)}
        for hop in step.hops():
            least[hop.pair] = min(hop.delay, least.get(hop.pair, hop.delay))
            if idle_since.get(hop.receiver, -np.inf) <= hop.sender.end:
                waited.setdefault(hop.pair, []).append(hop.delay)
    return {pair: waited.get(pair, [delay]) for pair, delay in least.items()}


def _timeline(problem: Problem, step: RecordedStep) -> Timeline:
    origin = min(one.start for one in step.passes)
    times = np.array([step.by_name[name][-2:] for name in problem.names], np.float64) - origin
    return Timeline(problem, times[:, 0].copy(), times[:, 1].copy())


def _ready(problem: Problem, timeline: Timeline) -> Floats:
    """When each pass had its inputs: the last of their ends and messages, at most its start."""
    ready, edges = np.zeros(len(problem.passes)), problem.edges
    np.maximum.at(ready, edges.after, timeline.end[edges.before] + edges.lag)
    return np.asarray(np.minimum(ready, timeline.start), np.float64)
