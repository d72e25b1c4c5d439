"""The CSV that torch's runtime reads, of a repeated schedule: a line at a time, with two ranks' orders in memory at most.

All microbatches are alike, so what the first one shows of edges, kinds and placement holds for all. What needs the whole
order is that ranks do not wait for each other, which `long_steps.check` proves for what torch waits for too, and in which
order messages are used, which each pair of ranks shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..long_steps.check import violations
from ..long_steps.repeated import RepeatedSchedule, counted
from ..planner.engines import Target
from ..tables import Ints
from ..util.errors import BadInput
from .exported import Export, LongExport, Options
from .order import Order, Refused, backwards, needs, order_for
from .torch_csv import LETTERS, TorchOrder, csv_line

Links = dict[tuple[int, int], dict[int, int]]  # (source, destination) → lane that is used there → lane that is sent


def write_long(
    long: RepeatedSchedule, target: Target, options: Options, described: Callable[[TorchOrder, Options], Export]
) -> LongExport:
    """The CSV of a repeated schedule for a target that reads it, a line at a time. described: what is to be known of an
    order there. Raises as `torch_csv.torch_order`."""
    if found := violations(long):
        raise BadInput(f"schedule: {found[0]}")
    first = order_for(long.first(), target)
    order = TorchOrder(first, _overtaken(long, _links(long, first)), long.microbatches)
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
    """What ranks send each other. Raises Refused where torch waits for what the step does not."""
    e, rank, names = long.one.edges, long.one.passes.rank, long.one.names
    edges, found = set(zip(e.before.tolist(), e.after.tolist(), strict=True)), Links()
    backward = backwards(first.rows)
    for cell in (cell for row in first.rows for cell in row):
        after = long.one.index[cell.name]
        for need in needs(cell, backward, len(first.placement) - 1):
            before = long.one.index[need.name]
            if (before, after) not in edges:
                raise Refused(f"pass {names[after]}: torch lets it wait for {names[before]}, the schedule does not")
            if rank[before] != rank[after]:
                found.setdefault((int(rank[before]), int(rank[after])), {})[after] = before
    return found


def _overtaken(long: RepeatedSchedule, links: Links) -> tuple[str, ...]:
    """As `torch_csv` says it: pairs of ranks where what is sent first is not used first. Lanes run in order, so the lanes of
    messages, sent and used, are compared."""
    found = []
    for (a, b), sent_of in sorted(links.items()):
        source = np.full(len(long.one.passes), -1, np.int64)
        source[list(sent_of)] = list(sent_of.values())
        sends = np.isin(np.arange(len(source)), source)
        sent, used = long.lanes_of(a), source[long.lanes_of(b)]
        sent, used = sent[sends[sent]], used[used >= 0]
        wrong = np.flatnonzero(sent != used)
        if len(wrong):
            first, early = (_name(long, row, int(wrong[0])) for row in (sent, used))
            found.append(f"rank {a} sends rank {b} {first} before {early}, but {early} is used first")
    return tuple(found)


def _name(long: RepeatedSchedule, lanes: Ints, place: int) -> str:
    """The name of the pass at a place of an order."""
    return long.name_of(int(lanes[place]), int(counted(lanes[: place + 1])[-1]))
