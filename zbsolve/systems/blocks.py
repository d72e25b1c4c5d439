"""Building blocks (arXiv 2405.15362): when one microbatch's passes run, in slots of one pass each, repeated every period.

Squeezing and re-ordering the ramps (section 3.3 there) happen at unit times, within the memory that the block itself needs,
so an order depends on p and m alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph, with_mean_microbatches
from ..greedy.decoding import Decoded, DecodeRule, decode, repeated_targets, to_schedule
from ..problem import Problem
from ..schedule import Schedule
from ..tables import Ints
from ..util.errors import BadInput

RAMPS = (DecodeRule(early=1), DecodeRule(early=2))


class Block(NamedTuple):
    """slots: by kind and stage, when one microbatch's pass starts; F, B and W take one slot, BW two. period: slots between
    microbatches. room: chunks whose activations each rank may hold."""

    slots: Mapping[tuple[str, int], int]
    period: int
    room: Sequence[int]


def repeated(problem: Problem, name: str, block: Block) -> Schedule:
    """The block repeated, squeezed and its ramps re-ordered. Raises BadInput where microbatches differ."""
    graph, found = squeezed(problem, name, block)
    return to_schedule(problem, graph, found.order)


def squeezed(problem: Problem, name: str, block: Block, wait: int = 0) -> tuple[MicrobatchGraph, Decoded]:
    """The graph of one microbatch of the problem, and the block's schedule at unit times. wait: slots that the last stage's
    backward starts behind its forward's end, at least. Raises BadInput where microbatches differ."""
    graph = microbatch_graph(with_mean_microbatches(_unit_times(problem, wait)))
    if graph is None:
        raise BadInput(f"{name}: microbatches differ in what they wait for")
    passes, first = problem.passes, graph.passes[:, 0]
    graph = graph._replace(
        taken=passes.are("F")[first].astype(np.int64),
        freed=passes.are("W", "BW")[first].astype(np.int64),
        capacity=np.array(block.room, np.int64),
        span=False,
    )
    offset = np.array([block.slots[passes.kind_names[row], int(passes.stage[row])] for row in first], np.int64)
    # Of the two ways to fill ramps (see `DecodeRule`) the shorter one; both hold the memory.
    decoded = [decode(graph, repeated_targets(graph, offset, block.period), rule) for rule in RAMPS]
    return graph, min((one for one in decoded if one is not None), key=lambda one: one.value)


def _unit_times(problem: Problem, wait: int) -> Problem:
    """The problem with passes of length 1 (BW 2), and no lags but `wait`, from the last F to the last backward."""
    p, e, last = problem.passes, problem.edges, problem.stages - 1
    turns = p.are("F")[e.before] & p.are("B", "BW")[e.after] & (p.stage[e.before] == last) & (p.stage[e.after] == last)
    duration: Ints = 1 + p.are("BW").astype(np.int64)
    edges = replace(e, lag=np.where(turns, wait, 0), sent=np.zeros_like(e.sent))
    return replace(problem, passes=replace(p, duration=duration), edges=edges)
