"""Paced blocks: schedules where passes on side streams hold memory, from one microbatch's passes on all streams.

An order of the compute streams says little where copies and gathers hold memory on streams of their own: forwards that run
ahead of the copies behind them fill the device. Here every stream is a rank of its own for the modulo scheduling of
`building_block`, so copies have their place in the period too, and all passes start at the block's pace: none runs ahead.
Blocks that fit into every pool come first (`period_search`). What others hold is known when they are repeated, and little
where copies keep pace. Syncs keep the order of takes and frees of that timeline, while passes start as early as these allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ...problem import Problem
from ...schedule import Schedule
from ...timeline import Timeline
from ..arrays.microbatch import MicrobatchGraph, microbatch_graph, rank_work
from ..side_stream import in_time_order, with_side_streams, without_side_streams
from .building_block import BuildingBlock
from .memory_packing import least_period, pools_of
from .packing import packed_fit
from .period_search import block_length, blocks_in_memory, ways

# Periods, over the work of the busiest stream, in groups; so many of a group are tried. None is all work: what is late would
# stay late.
PACES = (tuple(np.linspace(1.005, 1.06, 12)), tuple(np.linspace(1.08, 1.2, 4)), (1.35,), (1.6,), (2.0,), (2.6,))
TRIED = 4
BEST = 2  # blocks that fit of which schedules are made
NEARLY = 1.3  # of a device's capacity


def paced_graph(problem: Problem) -> MicrobatchGraph | None:
    """The graph of one microbatch where each stream is a rank of its own and nothing is held; None where microbatches are
    not alike or a pass occupies several streams. Passes that belong to no microbatch are left out."""
    rows = np.flatnonzero(problem.in_microbatch)
    kept = problem if len(rows) == len(problem.passes) else problem.only(rows)
    sets = kept.passes.stream_sets
    number = {stream: at for at, stream in enumerate(kept.streams)}
    if any(len(streams) != 1 for streams in sets):
        return None
    rank = np.array([number.get(streams[0], 0) for streams in sets])[kept.passes.streams]
    alone = tuple((f"compute:{at}",) for at in range(len(number)))
    passes = replace(kept.passes, rank=rank, streams=rank, stream_sets=alone)
    nothing = np.zeros_like(kept.edges.bytes)
    edges = replace(kept.edges, bytes=nothing, pool=nothing)
    found = microbatch_graph(replace(kept, passes=passes, edges=edges, capacity=None, pools=(), messages=None))
    return None if found is None else found._replace(passes=rows[found.passes])


def paced_blocks(g: MicrobatchGraph, paces: tuple[float, ...]) -> list[BuildingBlock]:
    """A packed block of each period, `paces` times the work of the busiest stream, where there is one; the block that takes
    least for the whole step comes first."""
    found, work = [], max(1, int(rank_work(g).max()))
    for period in sorted({int(work * pace) for pace in paces}):
        offset = np.zeros(len(g.duration), np.int64)
        if packed_fit(g, offset.copy(), period, offset) == 0:
            found.append(BuildingBlock(offset - offset.min(), period))
    return sorted(found, key=lambda one: one.period * (g.microbatches - 1) + block_length(g, one))


def paced_schedules(problem: Problem, best: Callable[[], float], rounds: int = 0) -> Iterator[Schedule]:
    """Schedules of paced blocks: of those that fit, the shortest first; then of longer and longer periods until one is
    better than all by then, and others near that one. The latter may break the capacity; those that take far too much on
    devices are left out. best: asked again and again, the value by now, µs. rounds: of annealing for each period. Ends at
    once where no block can be made."""
    g = paced_graph(problem)
    if g is None:
        return
    for block in blocks_in_memory(g, pools_of(problem, g), rounds)[:BEST]:
        if block.period * (g.microbatches - 1) < best():
            yield in_time_order(problem, _timeline(problem, g, block))
    for paces in PACES:
        before = best()
        for block in paced_blocks(g, paces)[:TRIED]:
            timeline = _timeline(problem, g, block)
            if block.period * (g.microbatches - 1) >= best() or not _may_fit(problem, timeline):
                break
            value = best()
            yield _schedule(problem, timeline)
            if best() == value:
                break
        if best() < before:
            return


def try_each_way(problem: Problem) -> None:
    """One block of each way to make one, so that its kernels are compiled: `paced_schedules` needs some only on hard
    problems."""
    g = paced_graph(problem)
    assert g is not None
    pools = pools_of(problem, g)
    for make in ways(g, pools, 1):
        make(least_period(g, pools))


def _timeline(problem: Problem, g: MicrobatchGraph, block: BuildingBlock) -> Timeline:
    """The block repeated, µs; passes of no microbatch behind all that they wait for."""
    p, e = problem.passes, problem.edges
    start = np.zeros(len(p), np.int64)
    start[g.passes] = block.offset[:, None] + block.period * np.arange(g.microbatches)
    rest = np.flatnonzero(~problem.in_microbatch[e.after])
    np.maximum.at(start, e.after[rest], start[e.before[rest]] + p.duration[e.before[rest]] + e.lag[rest])
    return Timeline(problem, start, start + p.duration)


def _may_fit(problem: Problem, timeline: Timeline) -> bool:
    """Whether the devices have nearly room where each pass on a side stream takes its memory only before its first user:
    syncs put off what is a little too early."""
    if problem.capacity is None:
        return True
    p, e, start = problem.passes, problem.edges, timeline.start.copy()
    until = np.full(len(p), timeline.end.max())
    np.minimum.at(until, e.before, timeline.start[e.after] - e.lag)
    taking = problem.side_stream[problem.taken[problem.side_stream] > 0]
    start[taking] = np.maximum(start[taking], until[taking] - p.duration[taking])
    late = replace(timeline, start=start, end=np.maximum(timeline.end, start + p.duration))
    return bool((np.array(late.peak_bytes) <= NEARLY * np.array(problem.capacity)).all())


def _schedule(problem: Problem, timeline: Timeline) -> Schedule:
    plain = without_side_streams(problem)
    rows = np.setdiff1d(np.arange(len(problem.passes)), problem.side_stream)
    order = {stream: own[np.argsort(timeline.start[rows[own]], kind="stable")] for stream, own in plain.members.items()}
    return with_side_streams(problem, Schedule.of(plain, order), timeline)
