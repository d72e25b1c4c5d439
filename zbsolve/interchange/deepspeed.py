"""DeepSpeed: a `PipeSchedule` with explicit steps a stage, and a `PipelineModule` with the schedule's layers
(`deepspeed/runtime/pipe/{schedule,engine,module}.py`, 0.19.8).

Its messages block both ranks, and it keeps only one received gradient. Messages are therefore placed between passes so that
ranks do not deadlock and no gradient is overwritten; a note says what that costs. A microbatch has the same buffer from its
first instruction to its last.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from ..planner.engines import target
from ..schedule import Schedule
from ..util.text import format_time, plural
from .alternatives import compared
from .exports import Export, Options
from .foreign_order import python_file
from .messages import Event, Rows, blocking
from .order import Order, order_for

TARGET = target("deepspeed")
WORDS = {
    ("run", "F"): "ForwardPass",
    ("run", "BW"): "BackwardPass",
    ("send", "F"): "SendActivation",
    ("receive", "F"): "RecvActivation",
    ("send", "BW"): "SendGrad",
    ("receive", "BW"): "RecvGrad",
}
Instruction = tuple[str, int]  # its name in deepspeed.runtime.pipe.schedule, the buffer


def write(schedule: Schedule, options: Options) -> Export:
    """A Python module that puts the schedule in DeepSpeed's place. Raises Refused, BadInput, Deadlock."""
    order = order_for(schedule, TARGET)
    events = blocking(order)
    rows = tuple(tuple(_with_buffers(row, rank in (0, len(events) - 1))) for rank, row in enumerate(events))
    buffers = tuple(1 + max(buffer for _, buffer in row) for row in rows)
    layers = schedule.problem.layers
    parts = (0, *accumulate(layers)) if layers else None
    ranks, count = len(rows), len(order.microbatches)
    title = f"A DeepSpeed schedule: {plural(stage=ranks, microbatch=count)}."
    data: dict[str, Any] = {"MICRO_BATCHES": count, "BUFFERS": buffers, "PARTS": parts, "STEPS": rows}
    notes = (
        f"{plural(rank=ranks, microbatch=count)}; for DeepSpeed 0.19.8",
        "use: import the file before deepspeed.initialize, make the model as its ZbsolvePipelineModule, and set "
        f"gradient_accumulation_steps to {count}",
        _cost(schedule, events),
        *(() if parts else ("the schedule does not say how many layers its stages have: DeepSpeed shares them out",)),
        *order.notes("DeepSpeed takes microbatches in the order of the batch", "its"),
    )
    facts = {**order.facts(), "parts": None if parts is None else list(parts), "buffers": list(buffers)}
    return Export(python_file(title, data, TARGET.name), notes, facts, [[list(cell) for cell in row] for row in rows])


def _with_buffers(row: list[Event], loads: bool) -> Iterator[Instruction]:
    """The row's instructions. A microbatch has the first free buffer until its last event. loads: a batch before each F."""
    last = {event.cell.microbatch: i for i, event in enumerate(row)}
    held: dict[int, int] = {}
    for i, event in enumerate(row):
        m = event.cell.microbatch
        if m not in held:
            held[m] = next(n for n in range(len(held) + 1) if n not in held.values())
        if loads and (event.word, event.cell.kind) == ("run", "F"):
            yield "LoadMicroBatch", held[m]
        yield WORDS[event.word, event.cell.kind], held[m]
        if last[m] == i:
            del held[m]


def step_time(order: Order) -> float:
    """The objective in DeepSpeed, where messages block both ranks, µs."""
    return _value(order.schedule, blocking(order))


def _value(schedule: Schedule, events: Rows) -> float:
    windows = [(row[0].start, row[-1].end) for row in events]
    if schedule.problem.objective == "span":
        return max(end - start for start, end in windows)
    return max(end for _, end in windows) - min(start for start, _ in windows)


def _cost(schedule: Schedule, events: Rows) -> str:
    """A note on how much blocking messages lengthen the step."""
    blocked, free = _value(schedule, events), schedule.timeline().value
    return (
        f"DeepSpeed's messages block both ranks: by the schedule's times a step then takes {format_time(blocked)}, "
        f"{compared(blocked, free)} than with messages beside passes"
    )
