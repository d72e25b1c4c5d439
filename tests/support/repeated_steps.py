"""Steps of many microbatches as schedules of rounds, without any search: named orders by lanes."""

from __future__ import annotations

from functools import cache

from zbsolve import Problem, pipeline
from zbsolve.long_steps.check import earliest_starts
from zbsolve.long_steps.repeated import RepeatedSchedule, find_round
from zbsolve.systems.table import lane_order, long_systems_of

CHUNKS = {"single": 1, "loop": 2, "vee": 2}


def one_microbatch(placement: str, ranks: int, fused: bool = False) -> Problem:
    stages = ranks * CHUNKS[placement]
    backward = {"BW": [400] * stages} if fused else {"B": [200] * stages, "W": [180] * stages}
    held = {"held_until_B": 4096, "held_until_W": 2048}
    return pipeline([200] * stages, **backward, placement=placement, microbatches=1, comm=10, layers=[1] * stages, **held)


@cache
def repeated(placement: str, ranks: int, rounds: int = 3, fused: bool = False) -> RepeatedSchedule:
    """The step with `rounds` more rounds than the fewest microbatches of a named schedule that show its rounds."""
    one = one_microbatch(placement, ranks, fused)
    for system in long_systems_of(one):
        for every in (one.ranks,) if system.grouped else (1, ranks - 1, ranks):
            for few in (every * n for n in range(4, 16 * ranks)):
                order = lane_order(one, few, system)
                round = find_round(one, order, earliest_starts(one, few, order), every)
                if round is not None:
                    return RepeatedSchedule(one, few + rounds * every, few, order, round)
    raise AssertionError(f"{placement} on {ranks} ranks: no named schedule shows rounds")
