"""JaxPP: a schedule class whose tasks have the schedule's times (`src/jaxpp/schedules.py`, 0.9.2).

It can map any stage to any rank. Its `BWD` is zbsolve's BW, its `BWD_I` zbsolve's B. With a split backward it joins `BWD_I`
and `BWD_W` of stage 0 to one task. It accumulates gradients in the order of microbatches, so a stage runs them in order.
"""

from __future__ import annotations

from typing import Any

from ..planner.engines import target
from ..problem.placement import describe
from ..schedule import Schedule
from ..util.text import plural
from .exports import Export, Options
from .foreign_order import python_file
from .order import order_for

TARGET = target("jaxpp")
WORDS = {"F": "FWD", "B": "BWD_I", "W": "BWD_W", "BW": "BWD"}
CODE = '''
from dataclasses import dataclass

from jaxpp.schedules import BaseSchedule, Task
from jaxpp.types import MpmdIdx, TaskType


@dataclass(eq=True, frozen=True)
class ZbsolveSchedule(BaseSchedule):
    """The tasks above."""

    def __post_init__(self):
        super().__post_init__()
        if self.num_stages != len(PLACEMENT):
            raise ValueError(f"this schedule has {len(PLACEMENT)} stages, not {self.num_stages}")
        object.__setattr__(self, "is_partial_bwd", SPLIT_BACKWARD)

    def get_mpmd_idx(self, stage_id):
        return MpmdIdx(PLACEMENT[stage_id])

    def tasks(self, n_mubatches):
        if n_mubatches != MICROBATCHES:
            raise ValueError(f"this schedule has {MICROBATCHES} microbatches, not {n_mubatches}")
        return [
            [Task.make(stage, microbatch, TaskType[word], latency) for stage, microbatch, word, latency in rank]
            for rank in TASKS
        ]


schedule = ZbsolveSchedule(num_stages=len(PLACEMENT))
'''


def write(schedule: Schedule, options: Options) -> Export:
    """A Python module with `schedule`. Raises Refused, BadInput, Deadlock."""
    order = order_for(schedule, TARGET)
    durations = [[int(end - start) for start, end in row] for row in order.spans]
    tasks = tuple(
        tuple((stage, m, WORDS[kind], us) for (stage, kind, m), us in zip(row, times, strict=True))
        for row, times in zip(order.rows, durations, strict=True)
    )
    ranks, stages, count = len(tasks), len(order.placement), len(order.microbatches)
    title = f"A JaxPP schedule: {plural(rank=ranks, stage=stages, microbatch=count)}; latencies in µs."
    data: dict[str, Any] = {"PLACEMENT": order.placement, "SPLIT_BACKWARD": order.split}
    data |= {"MICROBATCHES": count, "TASKS": tasks}
    notes = (
        f"{plural(rank=ranks, stage=stages)} ({describe(order.placement)}), {plural(microbatch=count)}; for JaxPP 0.9.2; "
        "not run in JaxPP itself",
        "use: treduce(function, batch, schedule=schedule), with as many microbatches and a mesh of as many ranks",
        *order.notes("JaxPP takes microbatches in the order of the batch", "its"),
    )
    return Export(python_file(title, data, CODE), notes, order.facts(), [[list(task) for task in row] for row in tasks])
