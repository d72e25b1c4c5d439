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
    return Export(
        python_file(title, data, TARGET.name), notes, order.facts(), [[list(task) for task in row] for row in tasks]
    )
