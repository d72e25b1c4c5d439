"""ColossalAI's zero-bubble V: one list of `ScheduledNode`s a rank (`colossalai/pipeline/schedule/v_schedule.py`, 0.5.0).

Chunk 0 goes from the first rank to the last, and chunk 1 back to the first. A fused backward is a B followed by its W. The
executor (`ZeroBubbleVPipeScheduler`) takes buffers first in, first out, and does not use `minibatch`.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from ..planner.engines import target
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import COUNT, checked
from ..util.text import plural
from .exports import Export, Options
from .foreign_order import ForeignOrder, Node, Words, order_of_nodes, python_file, stages_of
from .messages import Event, posted
from .order import Order, order_for

TARGET = target("colossalai")
FIELDS = ("type", "chunk", "stage", "minibatch", "start_time", "completion_time")  # of a ScheduledNode
WORDS = {"F": ("F",), "B": ("B",), "W": ("W",), "BW": ("B", "W")}
READ = Words(("F", "B", "W"), ("SEND_FORWARD", "RECV_FORWARD", "SEND_BACKWARD", "RECV_BACKWARD"))


def write(schedule: Schedule, options: Options) -> Export:
    """The nodes as JSON (a list of objects a rank) or as a Python module. Raises Refused, BadInput, Deadlock."""
    order = order_for(schedule, TARGET)
    rows = nodes(order)
    ranks, count = len(rows), len(order.microbatches)
    if options.json:
        body = [[dict(zip(FIELDS, node, strict=True), rollback=False) for node in row] for row in rows]
        text = json.dumps(body, separators=(",", ":")) + "\n"
    else:
        title = f"ColossalAI's nodes of a schedule: {plural(rank=ranks)}, 2 chunks a rank, {plural(microbatch=count)}."
        text = python_file(title, {"NODES": rows}, TARGET.name)
    notes = (
        f"{plural(rank=ranks)}, 2 chunks a rank, {plural(microbatch=count)}; for ColossalAI 0.5.0",
        f'set: HybridParallelPlugin(pp_size={ranks}, pp_style="zbv", num_model_chunks=2, num_microbatches={count}, '
        f"scheduler_nodes=scheduler_nodes{_layers(order)}",
        *order.notes("ColossalAI takes microbatches in the order of the batch", "its"),
    )
    return Export(text, notes, order.facts(), [[list(node) for node in row] for row in rows])


class NodeForm(msgspec.Struct):
    """A ScheduledNode in a file, as far as an order needs it; `stage` is the rank."""

    type: str
    chunk: COUNT
    stage: COUNT
    minibatch: COUNT


def read(body: Any, where: str, placement: str | None = None) -> ForeignOrder:
    """The order in node lists, one for each rank. placement: by name; None: a V. Raises BadInput."""
    rows = checked(body, list[list[NodeForm]], where)
    for rank, row in enumerate(rows):
        wrong = next((i for i, node in enumerate(row) if node.stage != rank), None)
        if wrong is not None:
            raise BadInput(f"{where}: rank {rank}, node {wrong}: field 'stage' is {row[wrong].stage}, which is another rank")
    chunks = 1 + max((node.chunk for row in rows for node in row), default=0)
    cells = [[Node(node.type, node.chunk, node.minibatch) for node in row] for row in rows]
    stage_of = stages_of(placement or f"vee{chunks}", len(rows), where)
    return order_of_nodes(cells, READ, stage_of, "ColossalAI node lists", where)


def nodes(order: Order) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Each rank's nodes, in FIELDS."""
    chunks = order.chunks
    return tuple(
        tuple(node for event in row for node in _nodes(event, rank, chunks)) for rank, row in enumerate(posted(order))
    )


def _nodes(event: Event, rank: int, chunks: tuple[int, ...]) -> list[tuple[Any, ...]]:
    stage, kind, m = event.cell
    if event.word == "run":
        words = WORDS[kind]
    else:
        words = (f"{'SEND' if event.word == 'send' else 'RECV'}_{'FORWARD' if kind == 'F' else 'BACKWARD'}",)
    return [(word, chunks[stage], rank, m, int(event.start), int(event.end)) for word in words]


def _layers(order: Order) -> str:
    """The argument that shares layers out: ColossalAI counts transformer layers only."""
    layers = list(order.schedule.problem.layers)
    if not layers or not layers[0] or not layers[-1]:
        return ")"
    layers[0], layers[-1] = layers[0] - 1, layers[-1] - 1
    return f", num_layers_per_stage={layers}), where the first layer is the embedding and the last the head"
