"""torch-csv: an order for torch.distributed.pipelining. Nothing here imports torch. A repeated schedule is written line by
line, with at most two ranks' orders in memory.

The file is the compute-only CSV that torch.distributed.pipelining reads (`_PipelineScheduleRuntime._load_csv`, torch
2.11 and newer): a line for each rank, a cell for each pass. Some words have other meanings there, and this module translates
them: zbsolve's `B` (input gradient) is torch's `I`, and its `BW` is torch's `B`; `F` and `W` mean the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from ..long_steps.check import violations
from ..long_steps.repeated import RepeatedSchedule, counted
from ..planner.engines import Target, target
from ..problem.tables import Ints
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.text import plural
from .exports import Export, LongExport, Options
from .order import Cell, Order, Refused, backwards, needs, order_for

LETTERS = {"F": "F", "B": "I", "W": "W", "BW": "B"}
# Words that torch's runtime adds to an order (`_dump_csv`, format compute_comms). They follow from the passes; readers skip
# them.
COMMUNICATION = ("SEND_F", "RECV_F", "SEND_B", "RECV_B", "UNSHARD", "RESHARD", "REDUCE_GRAD")
OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")  # a forward and a backward in one cell; they are read as two passes
TARGET = target("torch-csv")


@dataclass(frozen=True)
class TorchOrder:
    """An order for torch's pipeline runtime. overtaken: a line for each pair of ranks whose messages are not used in the
    order in which they are sent. count: number of microbatches, if all are like the first and `order` has only that one."""

    order: Order
    overtaken: tuple[str, ...]
    count: int | None = None

    @property
    def rows(self) -> tuple[tuple[str, ...], ...]:
        """Each rank's cells, in torch's words."""
        return tuple(tuple(f"{s}{LETTERS[kind]}{m}" for s, kind, m in row) for row in self.order.rows)

    @property
    def placement(self) -> tuple[int, ...]:
        """Stage → rank."""
        return self.order.placement

    @property
    def microbatches(self) -> tuple[int, ...]:
        """Torch's microbatch i (the i-th part of a batch) is the schedule's `microbatches[i]`."""
        return self.order.microbatches if self.count is None else tuple(range(self.count))

    @property
    def relabelled(self) -> bool:
        """Does any microbatch have another number in torch?"""
        return self.order.relabelled

    @property
    def csv(self) -> str:
        """The file's text."""
        return "".join(map(csv_line, self.rows))

    def check_defer_recv(self) -> None:
        """Raise BadInput if messages would be mixed up with torch's `defer_pp_recv=True`."""
        if self.overtaken:
            raise BadInput(f"schedule: torch's defer_pp_recv=True would mix messages up: {self.overtaken[0]}")

    def facts(self) -> dict[str, object]:
        """The same as `notes` for programs."""
        return {**self.order.facts(), "microbatches": list(self.microbatches), "overtaken": list(self.overtaken)}

    def notes(self) -> tuple[str, ...]:
        """Notes for the file's user, a line each."""
        stages, count = len(self.placement), len(self.microbatches)
        lines = [
            f"{plural(rank=len(self.rows), stage=stages, microbatch=count)}; for torch 2.11 or newer, format compute_only",
            *self.order.notes("torch's last stage must run its forwards in order", "torch's"),
        ]
        if target("torchtitan").place(self.placement):
            lines.append("torchtitan reads it too: --to torchtitan says its flags")
        if self.overtaken:
            lines.append(f"never with torch's defer_pp_recv=True, which would mix messages up: {self.overtaken[0]}")
        return tuple(lines)


def torch_order(schedule: Schedule, *, defer_recv: bool = False, engine: Target = TARGET) -> TorchOrder:
    """A schedule as an order for torch's runtime, for any placement.

    schedule: the schedule to run.
    defer_recv: for a runtime made with `defer_pp_recv=True`.
    engine: the target that uses torch's runtime.

    Raises BadInput, naming the pass or edge, for an invalid schedule, for what the runtime cannot express, and for messages
    that it would mix up; Deadlock if it would wait forever.
    """
    order = order_for(schedule, engine)
    made = TorchOrder(order, _overtaken(order))
    if defer_recv:
        made.check_defer_recv()
    return made


def csv_line(cells: Iterable[str]) -> str:
    """A rank's line."""
    return ",".join(cells) + "\n"


def write(schedule: Schedule, options: Options) -> Export:
    """The CSV of a schedule. Raises as `torch_order`."""
    made = torch_order(schedule, defer_recv=options.defer_recv)
    return replace(described(made, options), text=made.csv, rows=[list(row) for row in made.rows])


def described(made: TorchOrder, options: Options) -> Export:
    """The export of an order without the file's text: its notes and facts."""
    return Export("", made.notes(), made.facts())


def _overtaken(order: Order) -> tuple[str, ...]:
    """A line a pair of ranks whose messages are not used in the order in which they are sent, in the schedule's numbers."""
    sent: dict[tuple[int, int], list[Cell]] = {}
    used: dict[tuple[int, int], list[Cell]] = {}
    placement, backward = order.placement, backwards(order.rows)
    for rank, row in enumerate(order.rows):
        for cell in row:
            target = cell.stage + {"F": 1, "B": -1}.get(cell.kind[0], 0)
            if cell.kind != "W" and 0 <= target < len(placement) and placement[target] != rank:
                sent.setdefault((rank, placement[target]), []).append(cell)
            for need in needs(cell, backward, len(placement) - 1):
                if placement[need.stage] != rank:
                    used.setdefault((placement[need.stage], rank), []).append(need)
    lines = []
    for (a, b), messages in sorted(sent.items()):
        pair = next(((x, y) for x, y in zip(messages, used[a, b], strict=True) if x != y), None)
        if pair is not None:
            first, early = (order.ours(cell).name for cell in pair)
            lines.append(f"rank {a} sends rank {b} {first} before {early}, but {early} is used first")
    return tuple(lines)


Links = dict[tuple[int, int], dict[int, int]]  # (source, destination) → lane that is used there → lane that is sent


def write_long(
    long: RepeatedSchedule, target: Target, options: Options, described: Callable[[TorchOrder, Options], Export]
) -> LongExport:
    """The CSV of a repeated schedule, line by line. described: makes its notes and facts. Raises as `torch_order`."""
    if wrong := violations(long):
        raise BadInput(f"schedule: {wrong[0]}")
    first = order_for(long.first(), target)
    order = TorchOrder(first, _overtaken_by_rank(long, _links(long, first)), long.microbatches)
    if options.defer_recv:
        order.check_defer_recv()
    return LongExport(described(order, options), _lines(long))


def _lines(long: RepeatedSchedule) -> Iterator[str]:
    """The file's lines, a rank each."""
    p = long.one.passes
    heads = [f"{stage}{LETTERS[kind]}" for stage, kind in zip(p.stage.tolist(), p.kind_names, strict=True)]
    for rank in range(long.one.ranks):
        lanes, microbatches = (column.tolist() for column in long.rank_order(rank))
        yield csv_line(f"{heads[lane]}{at}" for lane, at in zip(lanes, microbatches, strict=True))


def _links(long: RepeatedSchedule, first: Order) -> Links:
    """The messages between ranks. Raises Refused if torch waits for a pass for which the step does not."""
    e, rank, names = long.one.edges, long.one.passes.rank, long.one.names
    edges, links = set(zip(e.before.tolist(), e.after.tolist(), strict=True)), Links()
    backward = backwards(first.rows)
    for cell in (cell for row in first.rows for cell in row):
        after = long.one.index[cell.name]
        for need in needs(cell, backward, len(first.placement) - 1):
            before = long.one.index[need.name]
            if (before, after) not in edges:
                raise Refused(f"pass {names[after]}: torch lets it wait for {names[before]}, the schedule does not")
            if rank[before] != rank[after]:
                links.setdefault((int(rank[before]), int(rank[after])), {})[after] = before
    return links


def _overtaken_by_rank(long: RepeatedSchedule, links: Links) -> tuple[str, ...]:
    """The same as `_overtaken`, for a repeated schedule. A lane (the passes of one stage and kind) runs in order, so it is
    enough to compare the lanes of messages in the orders in which they are sent and used."""
    lines = []
    for (a, b), sent_of in sorted(links.items()):
        source = np.full(len(long.one.passes), -1, np.int64)
        source[list(sent_of)] = list(sent_of.values())
        sends = np.isin(np.arange(len(source)), source)
        sent, used = long.lanes_of(a), source[long.lanes_of(b)]
        sent, used = sent[sends[sent]], used[used >= 0]
        wrong = np.flatnonzero(sent != used)
        if len(wrong):
            first, early = (_name(long, row, int(wrong[0])) for row in (sent, used))
            lines.append(f"rank {a} sends rank {b} {first} before {early}, but {early} is used first")
    return tuple(lines)


def _name(long: RepeatedSchedule, lanes: Ints, place: int) -> str:
    return long.name_of(int(lanes[place]), int(counted(lanes[: place + 1])[-1]))
