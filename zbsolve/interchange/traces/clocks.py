"""Clocks of ranks: one time for all of them, from messages alone.

A message takes as long one way as the other, so where the least delay from a to b, each end by its own clock, is f and back
is g, the link takes (f + g) / 2 and b's clock is (f − g) / 2 ahead of a's. The least delay counts: there the receiver
waited.
"""

from __future__ import annotations

from dataclasses import replace

from ...util.errors import BadInput
from ...util.text import format_time
from .recording import HOST, MOST, ONE, OWN, RecordedStep, Recording

# So early a message may seem to arrive: this share of a step, or so many µs; clocks that were synchronised over a network
# and are said to be one are some 0.5 ms apart.
TOLERANCE, LEAST_TOLERANCE = 1e-3, {OWN: 50.0, HOST: 50.0, ONE: 500.0}
ALIGNED = "aligned by messages"
Pair = tuple[int, int]
Delays = dict[Pair, float]


def tolerance(step: RecordedStep, clocks: str) -> float:
    """µs by which clocks may differ in a step."""
    longest = max(max(one.end for one in row) - row[0].start for row in step.rows if row)
    return max(LEAST_TOLERANCE[clocks], TOLERANCE * longest)


def least_delays(step: RecordedStep) -> Delays:
    """From rank to rank: µs of the shortest way from the end of a pass to the start of the one that takes its message."""
    found: Delays = {}
    for hop in step.hops():
        found[hop.pair] = min(hop.delay, found.get(hop.pair, hop.delay))
    return found


def fit(recording: Recording) -> bool:
    """Whether no message arrives before it was sent."""
    steps = recording.steps
    return all(min(least_delays(one).values(), default=0.0) >= -tolerance(one, recording.clocks) for one in steps)


def only_fitting(recording: Recording) -> Recording:
    """The recording without steps in which a message arrives before it was sent, where nearly all have none. Raises
    BadInput, naming step and passes, where more have one."""
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
    said = f"{len(wrong)} of {len(recording.steps)} steps, whose clocks do not fit (step {name})"
    return replace(recording, steps=kept, left_out=(*recording.left_out, said))


def aligned(recording: Recording) -> Recording:
    """The recording by one clock, rank 0's. Raises BadInput, naming step and ranks, where no clocks would do."""
    steps = tuple(step.moved(_offsets(step, recording.where)) for step in recording.steps)
    return replace(recording, clocks=OWN, steps=steps, facts=recording.facts | {"clocks": ALIGNED})


def _offsets(step: RecordedStep, where: str) -> list[float]:
    """µs to add to each rank's times: of all pairs of ranks those with the shortest messages that reach every rank tell it,
    since there ranks waited for each other."""
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
