"""Makes a `Trace` from a `Recording`. Its problem has the median times. Its steps are measured Timelines by one clock, which
is derived from messages if each rank has its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from statistics import median, median_low
from typing import Any

import numpy as np

from ...build.joined import with_fused_backward
from ...build.plain import pipeline
from ...problem import Problem
from ...problem.tables import Bools
from ...profile.lengths import factors_of, lengths_of, with_times
from ...profile.measured_run import FROM_STEPS, LINKS
from ...schedule.timeline import Floats, Timeline
from ...schedule.trace import Trace
from ...util.columns import quartiles
from ...util.errors import BadInput
from ...util.files import Fields
from ...util.text import format_time, printable
from ...verifier import verify
from .recording import HOST, MOST, ONE, OWN, RecordedStep, Recording

# A message may seem to arrive before it was sent, by this share of a step or this many µs, because clocks are not exact:
# clocks synchronised over a network differ by some 0.5 ms.
TOLERANCE, LEAST_TOLERANCE = 1e-3, {OWN: 50.0, HOST: 50.0, ONE: 500.0}
ALIGNED = "aligned by messages"
Pair = tuple[int, int]
Delays = dict[Pair, float]


def tolerance(step: RecordedStep, clocks: str) -> float:
    """The largest accepted difference of clocks in a step, µs."""
    longest = max(max(ran_pass.end for ran_pass in row) - row[0].start for row in step.rows if row)
    return max(LEAST_TOLERANCE[clocks], TOLERANCE * longest)


def least_delays(step: RecordedStep) -> Delays:
    """(sender, receiver) → the least delay of their messages, µs (see `Hop.delay`)."""
    delays: Delays = {}
    for hop in step.hops():
        delays[hop.pair] = min(hop.delay, delays.get(hop.pair, hop.delay))
    return delays


def fit(recording: Recording) -> bool:
    """Whether no message arrives before it was sent."""
    steps = recording.steps
    return all(min(least_delays(step).values(), default=0.0) >= -tolerance(step, recording.clocks) for step in steps)


def only_fitting(recording: Recording) -> Recording:
    """The recording without steps in which a message arrives before it was sent. Raises BadInput if these are too many."""
    early = [min(step.hops(), key=lambda hop: hop.delay, default=None) for step in recording.steps]
    wrong = {
        number: hop
        for number, (step, hop) in enumerate(zip(recording.steps, early, strict=True))
        if hop is not None and hop.delay < -tolerance(step, recording.clocks)
    }
    if not wrong:
        return recording
    number, hop = next(iter(wrong.items()))
    name = recording.steps[number].name
    if len(wrong) > (1 - MOST) * len(recording.steps):
        raise BadInput(
            f"{recording.where}: step {name}: clocks do not fit: {hop.receiver.name} on rank {hop.receiver.rank} began "
            f"{format_time(-hop.delay)} before {hop.sender.name} on rank {hop.sender.rank} ended, whose message it takes"
        )
    kept = tuple(step for i, step in enumerate(recording.steps) if i not in wrong)
    note = f"{len(wrong)} of {len(recording.steps)} steps, whose clocks do not fit (step {name})"
    return replace(recording, steps=kept, left_out=(*recording.left_out, note))


def aligned(recording: Recording) -> Recording:
    """The recording by one clock, rank 0's. Raises BadInput, naming step and ranks, if no offsets of clocks are possible."""
    steps = tuple(step.moved(_offsets(step, recording.where)) for step in recording.steps)
    return replace(recording, clocks=OWN, steps=steps, facts=recording.facts | {"clocks": ALIGNED})


def _offsets(step: RecordedStep, where: str) -> list[float]:
    """µs to add to each rank's times. Offsets follow from pairs of ranks, as in a minimum spanning tree over the least
    delays there and back: there ranks waited for each other, so that the delay is a message's time."""
    delays, ranks, limit = least_delays(step), len(step.rows), tolerance(step, OWN)
    offsets = {0: 0.0}
    while len(offsets) < ranks:
        near = [
            (delays[a, b] + delays[b, a], a, b) for a, b in delays if a in offsets and b not in offsets and (b, a) in delays
        ]
        if not near:
            apart = next(rank for rank in range(ranks) if rank not in offsets)
            raise BadInput(
                f"{where}: step {step.name}: rank {apart} has no messages both ways with the others, so its clock is unknown"
            )
        both, a, b = min(near)
        if both < -2 * limit:
            raise BadInput(
                f"{where}: step {step.name}: clocks of ranks {a} and {b} do not fit: messages there and back take "
                f"{format_time(both)} together, less than nothing"
            )
        offsets[b] = offsets[a] + (delays[b, a] - delays[a, b]) / 2
    return [offsets[rank] for rank in range(ranks)]


WARM = 1.25  # times the median step: longer steps at the beginning are warm-up
Order = dict[str, tuple[str, ...]]

SHARE, MOST_HELD = 0.5, 2.0  # least and most extra idle time after a send, in message times, if messages block their sender
MIN_GAPS = 4  # fewer gaps tell nothing


def trace_of(recording: Recording) -> Trace:
    """The measured run of a recording. Its problem has the median time of passes for each kind and stage (times a factor for
    each microbatch if lengths differ, see `factors_of`) and of messages for each pair of ranks. Messages block their sender
    if the run shows that (see `gaps_of`) and its replay gets closer. A stage counts as one layer; there are no bytes. Raises
    BadInput, naming file, step, rank and pass, for contradictions."""
    recording = recording.checked()
    if recording.clocks == OWN or (recording.clocks == HOST and not fit(recording)):
        recording = aligned(recording)
    recording = _without_warm_up(only_fitting(recording))
    trace = _run(recording, problem_of(recording))
    violations = verify(trace.problem, trace.planned())
    if violations:
        raise BadInput(f"{recording.where}: the order in which passes ran does not hold: {violations[0]}")
    if (gaps := gaps_of(trace)).blocked:
        blocked = _run(recording, problem_of(recording, blocking=True), trace.facts | {"blocking": gaps.to_json()})
        trace = blocked if abs(blocked.replay_error()) < abs(trace.replay_error()) else trace
    lengths = lengths_of(trace)
    factors = factors_of(trace, lengths)
    if not factors:
        return trace
    facts = {"microbatch_factors": list(factors), "spread": lengths.spread, "spread_left": lengths.left}
    return _run(recording, with_times(trace.problem, lengths.base).scaled(factors, inf), trace.facts | facts)


def _run(recording: Recording, problem: Problem, facts: Mapping[str, Any] | None = None) -> Trace:
    """The recording as a run of this problem. facts: of the trace; None: those of the recording."""
    order = {f"compute:{rank}": names for rank, names in enumerate(recording.steps[0].order)}
    computed = [_timeline(problem, step) for step in recording.steps]
    sent = tuple(_sent(problem, order, step) for step in computed)
    steps = tuple(replace(step, end=step.end + more) for step, more in zip(computed, sent, strict=True))
    if facts is None:
        names = [step.name for step in recording.steps]
        left_out = {"left_out": list(recording.left_out)} if recording.left_out else {}
        facts = recording.facts | {"format": recording.format, "steps": names, LINKS: FROM_STEPS} | left_out
    ready = tuple(_ready(problem, step) for step in steps)
    return Trace(problem, order, steps, ready, (), (), dict(facts), sent=sent if problem.sending.any() else ())


def _without_warm_up(recording: Recording) -> Recording:
    usual = median_low([step.length for step in recording.steps])
    warm = next((i for i, step in enumerate(recording.steps) if step.length <= WARM * usual), 0)
    if not warm:
        return recording
    note = f"warm-up: the first {warm} of {len(recording.steps)} steps, over {WARM:g} times as long as the median"
    return replace(recording, steps=recording.steps[warm:], left_out=(*recording.left_out, note))


def problem_of(recording: Recording, blocking: bool = False) -> Problem:
    """The run's problem, with median times, whole µs. blocking: messages block their sender. Raises BadInput."""
    stages, first = len(recording.placement), recording.steps[0]
    microbatches = 1 + max(each_pass.microbatch for each_pass in first.passes)
    times = _medians(recording)
    whole: Bools = np.zeros((stages, microbatches), bool)
    for each_pass in first.passes:
        whole[each_pass.stage, each_pass.microbatch] |= each_pass.kind == "BW"
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
        blocking=blocking,
        layers=(1,) * stages,
        source=f"measured: {printable(Path(recording.where).name) or recording.format}",
    )
    return with_fused_backward(problem, whole, BW) if split and whole.any() else problem


def _medians(recording: Recording) -> dict[tuple[str, int], int]:
    samples: dict[tuple[str, int], list[float]] = {}
    for step in recording.steps:
        for each_pass in step.passes:
            samples.setdefault((each_pass.kind, each_pass.stage), []).append(each_pass.end - each_pass.start)
    return {of: round(median(row)) for of, row in samples.items()}


def _comm(recording: Recording) -> dict[Pair, float]:
    """Pair of ranks → µs of a message: the recorded median, or else estimated from the times of passes."""
    times_of: dict[Pair, float] = {pair: round(median(times)) for pair, times in recording.links.items() if len(times)}
    waits = _message_times(recording.steps, both_ways=recording.facts.get("clocks") == ALIGNED)
    for a, b in zip(recording.placement, recording.placement[1:], strict=False):
        for pair in ((a, b), (b, a)):
            if a != b and pair not in times_of:
                times_of[pair] = round(max(0.0, waits.get(pair, 0.0)))
    return times_of


def _message_times(steps: tuple[RecordedStep, ...], both_ways: bool) -> dict[Pair, float]:
    """Pair of ranks → µs of a message, estimated: the median delay of messages whose receiver was idle when they were sent;
    if there are none, the least delay, but at most the median of other pairs. both_ways: the same for both, as aligned."""
    waited: dict[Pair, list[float]] = {}
    least: dict[Pair, float] = {}
    for step in steps:
        idle_since = {ran_pass: before.end for row in step.rows for before, ran_pass in zip(row, row[1:], strict=False)}
        for hop in step.hops():
            pair = (min(hop.pair), max(hop.pair)) if both_ways else hop.pair
            least[pair] = min(hop.delay, least.get(pair, hop.delay))
            if idle_since.get(hop.receiver, -np.inf) <= hop.sender.end:
                waited.setdefault(pair, []).append(hop.delay)
    medians = {pair: median(delays) for pair, delays in waited.items()}
    usual = median(medians.values()) if medians else np.inf
    typical = {pair: medians.get(pair, min(delay, usual)) for pair, delay in least.items()}
    return typical | {(b, a): took for (a, b), took in typical.items()} if both_ways else typical


def _timeline(problem: Problem, step: RecordedStep) -> Timeline:
    origin = min(each_pass.start for each_pass in step.passes)
    times = np.array([step.by_name[name][-2:] for name in problem.names], np.float64) - origin
    return Timeline(problem, times[:, 0].copy(), times[:, 1].copy())


def _sent(problem: Problem, order: Order, step: Timeline) -> Floats:
    """µs after each pass in which it sent, if messages block their sender. Traces do not record this: it is the problem's
    time, but ends at the latest when the rank's next pass or the receiver starts."""
    edges, until = problem.edges, np.full(len(problem.passes), np.inf)
    sends = edges.sent > 0
    np.minimum.at(until, edges.before[sends], step.start[edges.after[sends]])
    for names in order.values():
        rows = [problem.index[name] for name in names]
        np.minimum.at(until, rows[:-1], step.start[rows[1:]])
    return np.asarray(np.clip(until - step.end, 0.0, problem.sending), np.float64)


def _ready(problem: Problem, timeline: Timeline) -> Floats:
    """When each pass had its inputs: the last end plus lag of the passes before it, but at most its own start."""
    ready, edges = np.zeros(len(problem.passes)), problem.edges
    np.maximum.at(ready, edges.after, timeline.end[edges.before] + edges.lag)
    return np.asarray(np.minimum(ready, timeline.start), np.float64)


@dataclass(frozen=True, slots=True)
class Gaps(Fields):
    """Median idle times between two passes of a rank, µs, if the second had its inputs when the first ended. sending: after
    passes that send to another rank; count: their number; lower: their lower quartile. silent: after passes that send
    nothing, the least over ranks (0: there are none). message: the median message of passes that send."""

    count: int
    sending: float
    lower: float
    silent: float
    message: float

    @property
    def blocked(self) -> bool:
        """Do messages block their sender? Then even the lower quartile of gaps contains a message, and little else does."""
        longer = self.lower - self.silent, self.sending - self.silent
        return self.count >= MIN_GAPS and longer[0] >= SHARE * self.message > 0 and longer[1] <= MOST_HELD * self.message


def gaps_of(trace: Trace) -> Gaps:
    """The gaps of a run whose problem has messages beside compute."""
    problem = trace.problem
    edges, rank = problem.edges, problem.passes.rank
    apart = edges.only(np.flatnonzero(rank[edges.before] != rank[edges.after]))
    message = np.zeros(len(problem.passes))
    np.maximum.at(message, apart.before, apart.lag)
    sends = np.bincount(apart.before, minlength=len(message)) > 0
    behind: list[float] = []
    silent: dict[int, list[float]] = {}
    sizes: list[float] = []
    for step in trace.steps:
        arrived = np.full(len(message), -np.inf)
        np.maximum.at(arrived, apart.after, step.end[apart.before] + apart.lag)
        for names in trace.schedule.values():
            rows = np.array([problem.index[name] for name in names])
            before, after = rows[:-1], rows[1:]
            ready = arrived[after] <= step.end[before]
            gap = np.maximum(0.0, step.start[after] - step.end[before])
            behind += gap[ready & sends[before]].tolist()
            sizes += message[before[ready & sends[before]]].tolist()
            silent.setdefault(int(rank[rows[0]]), []).extend(gap[ready & ~sends[before]].tolist())
    least = min((median(row) for row in silent.values() if row), default=0.0)
    row = behind or [0.0]
    return Gaps(len(behind), median(row), quartiles(row)[0], least, median(sizes or [0.0]))
