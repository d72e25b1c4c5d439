"""CrossPipe's schedules: an object with a list of tasks a rank, and how large each microbatch is."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

import msgspec

from ..util.errors import BadInput
from ..util.files import COUNT, checked
from .foreign_order import ForeignOrder
from .node_lists import Node, Words, order_of_nodes, stages_of

READ = Words(("F", "B", "W", "BW"), ())


class TaskForm(msgspec.Struct):
    """A task in a file, as far as an order needs it; `device_id` is the rank."""

    task_type: str
    device_id: COUNT
    microbatch_id: COUNT
    chunk_id: COUNT = 0


class ScheduleForm(msgspec.Struct):
    """A file."""

    schedule: list[list[TaskForm]]
    microbatch_sizes: list[Annotated[float, msgspec.Meta(gt=0)]] = []


def read(body: Any, where: str, placement: str | None = None) -> ForeignOrder:
    """The order that the tasks say; without a W in the file a B is the whole backward. Raises BadInput, also where several
    chunks need a `placement` and none is named."""
    form = checked(body, ScheduleForm, where)
    rows, sizes = form.schedule, form.microbatch_sizes
    for rank, row in enumerate(rows):
        wrong = next((i for i, task in enumerate(row) if task.device_id != rank), None)
        if wrong is not None:
            raise BadInput(f"{where}: rank {rank}, node {wrong}: field 'device_id' is {row[wrong].device_id}, another rank")
    if placement is None and any(task.chunk_id for row in rows for task in row):
        raise BadInput(f"{where}: field 'chunk_id': chunks may be a loop or a vee: say --placement")
    words = {} if any(task.task_type == "W" for row in rows for task in row) else {"B": "BW"}
    found = [[Node(words.get(one.task_type, one.task_type), one.chunk_id, one.microbatch_id) for one in row] for row in rows]
    stage_of = stages_of(placement or "single", len(rows), where)
    order = order_of_nodes(found, READ, stage_of, "CrossPipe node lists", where)
    if sizes and len(sizes) != order.microbatches:
        raise BadInput(f"{where}: field 'microbatch_sizes' has {len(sizes)} numbers for {order.microbatches} microbatches")
    return replace(order, factors=tuple(len(sizes) * size / sum(sizes) for size in sizes))
