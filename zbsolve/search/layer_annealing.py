"""Layers moved together with the order (`greedy.annealing`), from a schedule of one split to a shorter one of another.

A split that is looked at alone has to be solved well before it shows what it is worth. Here a trial costs one decoding:
first only layers move, and ranks take passes as they did; then starts move too. Each turn goes on from the best, with less
heat.
"""

from __future__ import annotations

import numpy as np

from ..greedy.annealing import Annealing, Layers, anneal_targets
from ..greedy.arrays.microbatch import MicrobatchGraph, microbatch_graph
from ..greedy.blocks.block_arms import SECONDS_PER_DECODED_PASS
from ..greedy.blocks.building_block import shift_lengths
from ..greedy.decoding import decode, to_schedule
from ..layer import layer_cuts
from ..partition.stage_costs import StageCosts
from ..schedule import Schedule
from ..util.clock import Clock

TURNS = ((True, 1.0), (False, 1.0), (False, 0.5), (False, 0.3))  # layers alone; heat, in times of a layer


def moved_layers(
    schedule: Schedule, costs: StageCosts, target: int, clock: Clock, seed: int
) -> tuple[tuple[int, ...], Schedule] | None:
    """Layers of each stage, and a schedule of the same step as `schedule` whose order makes a shorter step with them; None
    where none is found. costs: of the step; target: µs at which to stop."""
    problem = schedule.problem
    graph = microbatch_graph(problem)
    if graph is None:
        return None
    graph = graph._replace(**{name: getattr(graph, name).copy() for name in ("duration", "taken", "freed", "capacity")})
    layers = _layers_of(graph, schedule, costs)
    found = decode(graph, np.asarray(schedule.timeline().start, np.int64)[graph.passes])
    one, shifts = layers.time[:, -1].sum() / layers.counts.sum(), shift_lengths(graph)
    cost = problem.microbatches * len(graph.rank) * SECONDS_PER_DECODED_PASS
    for turn, (alone, heat) in enumerate(TURNS):
        if found is None or found.value <= target or clock.left <= 0:
            break
        rounds, at = max(1, int(clock.left / (len(TURNS) - turn) / cost)), clock.used
        how = Annealing(shifts, target, rounds, heat * one, seed + turn)
        found = anneal_targets(graph, found, how, layers._replace(alone=alone))
        clock.spend(rounds * cost)
        cost = cost if clock.counted else max(1e-7, (clock.used - at) / rounds)
    if found is None or found.value >= schedule.timeline().value:
        return None
    return tuple(layers.counts.tolist()), to_schedule(problem, graph, found.order)


def _layers_of(graph: MicrobatchGraph, schedule: Schedule, costs: StageCosts) -> Layers:
    """What layers take and hold, whatever stages they are on."""
    problem, first = schedule.problem, graph.passes[:, 0]
    counts, cuts, stage = np.array(problem.layers), np.array(layer_cuts(problem.layers)), problem.passes.stage[first]
    time, held = costs.layer_totals
    row = np.unique(problem.passes.kind[first], return_inverse=True)[1]
    room = graph.capacity + np.bincount(costs.routes[0], np.diff(held[2][cuts])).astype(np.int64)
    beside = graph.duration - (time[row, cuts[stage + 1]] - time[row, cuts[stage]])
    return Layers(counts, stage.astype(np.int64), row.ravel(), time, held, room, beside, alone=False)
