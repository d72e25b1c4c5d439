"""A file of rounds in a run: rank 0 checks it and gives each rank its part of it.

Every process reads the file, but for the orders: only rank 0 unfolds those, which takes as much memory as the order of few
microbatches has passes. What it finds, when passes start, each rank gets for its own passes and those near them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...long_steps.files import KIND, load, load_step
from ...long_steps.rank_part import CheckedRounds, RankPart, near_lanes
from ...long_steps.repeated import RepeatedSchedule
from ...long_steps.simulation import peaks
from ...problem import Problem
from ...schedule import Schedule
from ...util.files import document_kind
from ..mesh.sizes import PIPELINE, coordinate_of
from ..transport.peers import agreed
from ..transport.wires import Wires, receive_bytes, send_bytes

MARK_BYTES = 16


@dataclass(frozen=True, eq=False)
class Rounds:
    """A file of rounds as one process of a run knows it. long: without orders. mark: of all that the file says. checked: all
    of it, on rank 0."""

    path: str
    long: RepeatedSchedule
    mark: str
    checked: CheckedRounds | None

    @classmethod
    def read(cls, path: str, rank: int) -> Rounds:
        """That of a process by its number. Raises BadInput, on rank 0 also for a schedule that does not hold."""
        return cls(path, *load_step(path), None if rank else CheckedRounds.of(load(path)))

    def whole(self) -> Schedule:
        """The schedule with all its passes."""
        return load(self.path).unrolled()


Given = Schedule | CheckedRounds | Rounds


def read_schedule(path: str, rank: int) -> Schedule | Rounds:
    """What a process reads of a schedule's file. Raises BadInput."""
    return Rounds.read(path, rank) if document_kind(path) == KIND else Schedule.load(path)


def step_of(given: Given) -> Problem:
    """A problem that says what holds for the whole step but how many microbatches it has."""
    return given.problem if isinstance(given, Schedule) else given.long.one


class Prediction(NamedTuple):
    """What is predicted of a run. step: see `step_of`. makespan: µs. peaks: the most bytes that each rank's passes hold."""

    step: Problem
    makespan: float
    peaks: tuple[int, ...]

    @classmethod
    def of(cls, given: Schedule | CheckedRounds) -> Prediction:
        """That of a schedule."""
        if isinstance(given, Schedule):
            timeline = given.timeline()
            return cls(given.problem, timeline.makespan, timeline.peak_bytes)
        one = given.long.one
        return cls(one, given.makespan, tuple(peaks(one, given.long.order).tolist()))


def own_part(rounds: Rounds, wires: Wires, sizes: Mapping[str, int]) -> RankPart:
    """This process's part. sizes: of the mesh. All processes call this. Raises BadInput where their files differ."""
    with agreed(wires, "file of rounds", rounds.mark):
        pass
    rank, long = coordinate_of(sizes, wires.rank)[PIPELINE], rounds.long
    if rounds.checked is None:
        said = receive_bytes(wires, 0)
        lanes, digest = near_lanes(long.one, rank), said[:MARK_BYTES].decode()
        start = np.frombuffer(said[MARK_BYTES:], np.int64).reshape(len(lanes), long.few)
        return RankPart(long.one, long.microbatches, long.round, rank, lanes, start, digest)
    for other in range(1, wires.size):
        part = rounds.checked.part(coordinate_of(sizes, other)[PIPELINE])
        send_bytes(wires, part.digest.encode() + np.ascontiguousarray(part.start, np.int64).tobytes(), other)
    return rounds.checked.part(rank)
