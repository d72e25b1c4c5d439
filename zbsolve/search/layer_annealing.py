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
    """What layers take and hold, whatever stages they are on: whole µs and bytes of all before one."""
    passes, memory = schedule.problem.passes, costs.memory
    first, ends = graph.passes[:, 0], np.arange(1, len(costs.layers) + 1)
    rows = (("F",), ("BW",) if costs.fused else ("B",), () if costs.fused else ("W",))
    time = [[sum(getattr(layer, name) for name in names) for layer in costs.layers] for names in rows]
    after_b = np.zeros(len(ends)) if costs.fused else memory.after_b(0, ends)
    totals = np.cumsum(time, axis=1), [memory.after_f(0, ends), after_b, memory.fixed((0, ends))]
    micros, held = (np.pad(np.rint(np.array(one)).astype(np.int64), ((0, 0), (1, 0))) for one in totals)
    cuts = np.array(layer_cuts(schedule.problem.layers))
    own = np.diff(held[2][cuts])
    room = graph.capacity + np.bincount(costs.routes[0], own).astype(np.int64)
    kind = np.where(passes.are("F"), 0, np.where(passes.are("W"), 2, 1))[first]
    counts, stage = np.array(schedule.problem.layers), passes.stage[first].astype(np.int64)
    beside = graph.duration - (micros[kind, cuts[stage + 1]] - micros[kind, cuts[stage]])
    return Layers(counts, stage, kind, micros, held, room, beside, alone=False)
