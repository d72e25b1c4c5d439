"""Primus's pipeline: one list of `SchedulerNode`s a rank (`primus/core/pipeline_parallel/scheduler`, August 2026).

The launcher finds algorithms by name, so the Python file replaces the class of one of them. Every message has a different
`time_step`: Primus issues messages with equal ones, or with none, together in an order of its own, which can deadlock.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from ..planner.engines import target
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import COUNT, checked
from ..util.text import plural
from .exports import Export, Options
from .foreign_order import ForeignOrder, Node, StageOf, Words, order_of_nodes, python_file, stages_of
from .messages import Event, posted
from .order import Order, order_for

TARGET = target("primus")
WORDS = {("send", True): "SF", ("receive", True): "RF", ("send", False): "SB", ("receive", False): "RB"}
READ = Words(("F", "B", "W", "BW"), tuple(WORDS.values()))
# Placement → the algorithm of Primus that the file replaces. It must have the same chunks and, for a split backward, be one
# for which Primus defers weight gradients.
STANDS_FOR = {"single": "1f1b", "loop": "1f1b-interleaved", "vee": "zbv-formatted"}
SPLIT_STANDS_FOR = STANDS_FOR | {"single": "zero-bubble"}


def write(schedule: Schedule, options: Options) -> Export:
    """The nodes as JSON, or a Python module that replaces an algorithm of Primus. Raises Refused, BadInput, Deadlock."""
    order = order_for(schedule, TARGET)
    rows, place = nodes(order), TARGET.place(order.placement) or ""
    algorithm = (SPLIT_STANDS_FOR if order.split else STANDS_FOR)[place]
    ranks, chunks, count = len(rows), len(order.placement) // len(rows), len(order.microbatches)
    if options.json:
        text = json.dumps([[_named(*node) for node in row] for row in rows], separators=(",", ":")) + "\n"
    else:
        title = f"A schedule for Primus's pipeline: {plural(rank=ranks, stage=ranks * chunks, microbatch=count)}."
        data = {"ALGORITHM": algorithm, "SHAPE": (ranks, chunks, count), "NODES": rows}
        text = python_file(title, data, TARGET.name)
    vpp = f", {chunks} virtual stages a rank" if chunks > 1 else ""
    notes = (
        f"{plural(rank=ranks, stage=ranks * chunks, microbatch=count)}; for Primus of August 2026; not run in Primus itself",
        f"set: patch_primus_pipeline: true, pp_algorithm: {algorithm}, pipeline_model_parallel_size: {ranks}{vpp}; "
        "import the file before training starts",
        *order.notes("Primus takes microbatches in the order of the batch", "its"),
    )
    facts = {**order.facts(), "pp_algorithm": algorithm}
    return Export(text, notes, facts, [[list(node) for node in row] for row in rows])


class MessageForm(msgspec.Struct):
    """The `args` of a send, as far as an order needs them."""

    to_pp_rank: COUNT | None = None
    send_to_chunk: COUNT | None = None


class NodeForm(msgspec.Struct):
    """A SchedulerNode in a file, as far as an order needs it."""

    func_type: str
    mini_batch: COUNT
    chunk: COUNT
    args: MessageForm | None = None


def read(body: Any, where: str, placement: str | None = None) -> ForeignOrder:
    """The order in node lists, a rank each. Chunks' stages follow from sent activations or `placement`. Raises BadInput."""
    rows = checked(body, list[list[NodeForm]], where)
    cells = [[Node(node.func_type.removeprefix("FuncType."), node.chunk, node.mini_batch) for node in row] for row in rows]
    stage_of = _sent_to(rows, where) if placement is None else stages_of(placement, len(rows), where)
    return order_of_nodes(cells, READ, stage_of, "Primus node lists", where)


def _sent_to(rows: Sequence[Sequence[NodeForm]], where: str) -> StageOf:
    """(rank, chunk) → stage, along the activations that are sent; without any, a rank is a stage. Raises BadInput."""
    following: dict[tuple[int, int], tuple[int, int]] = {}
    for rank, row in enumerate(rows):
        for i, node in enumerate(row):
            if node.func_type.removeprefix("FuncType.") != "SF":
                continue
            if node.args is None or node.args.to_pp_rank is None or node.args.send_to_chunk is None:
                raise BadInput(f"{where}: rank {rank}, node {i}: an SF without 'to_pp_rank' and 'send_to_chunk' in its args")
            target = (node.args.to_pp_rank, node.args.send_to_chunk)
            if following.setdefault((rank, node.chunk), target) != target:
                raise BadInput(f"{where}: rank {rank}, node {i}: chunk {node.chunk} sends to two chunks")
    if not following:
        if any(node.chunk for row in rows for node in row):
            raise BadInput(f"{where}: it sends no activations (SF), so chunks may be a loop or a vee: say --placement")
        return stages_of("single", len(rows), where)
    place = next(iter(sorted(set(following) - set(following.values()))), None)
    line = []
    while place is not None and place not in line:
        line.append(place)
        place = following.get(place)
    left = set(following) - set(line)
    if left or place is not None:
        raise BadInput(f"{where}: the activations that are sent (SF) do not make one line through all chunks")
    return {place: stage for stage, place in enumerate(line)}


def nodes(order: Order) -> tuple[tuple[tuple[Any, ...], ...], ...]:
    """Each rank's nodes: word, microbatch, chunk, and for a message (from rank, to rank, the other chunk, time step)."""
    chunks = order.chunks
    return tuple(tuple(_node(event, chunks) for event in row) for row in posted(order, local=True))


def _node(event: Event, chunks: tuple[int, ...]) -> tuple[Any, ...]:
    stage, kind, m = event.cell
    if event.message is None:
        return kind, m, chunks[stage]
    message = event.message
    other = message.after if event.word == "send" else message.before
    word = WORDS[event.word, message.forward]
    return word, m, chunks[stage], (message.sender, message.receiver, chunks[other.stage], event.turn)


def _named(word: str, mini_batch: int, chunk: int, args: tuple[int, ...] | None = None) -> dict[str, Any]:
    """A node as an object with the names of SchedulerNode."""
    other = "send_to_chunk" if word[0] == "S" else "recv_from_chunk"
    names = ("from_pp_rank", "to_pp_rank", other, "time_step")
    named = None if args is None else dict(zip(names, args, strict=True))
    return {"func_type": word, "mini_batch": mini_batch, "chunk": chunk, "args": named}
