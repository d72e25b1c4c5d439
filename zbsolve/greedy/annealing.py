"""Simulated annealing over target starts: of single passes, or of patterns that repeat. Each trial is judged by the schedule
that decoding makes of it, which is always legal.

A repeated building block must be legal as it is. In a pattern, microbatches only have the same target offsets (or take
several rows of offsets in turn), and decoding repairs overlaps and memory. So there are few unknowns (an offset for each
lane, and the period), and each move shifts the whole steady state. Afterwards shifts of single passes improve the ramps."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..problem import Ints
from ..util.kernels import kernel, subkernel
from .arrays.microbatch import MicrobatchGraph, reversed_graph
from .decoding import Decoded, DecodeRule, decode, decode_fast, repeat_rows

# --- Justification: shift all passes late, then early again (Valls, Ballestín and Quintanilla, 2005); it shortens ramps ---


FILL_ALL = DecodeRule(0, 0, 2)


def justified(g: MicrobatchGraph, start: Ints, rule: DecodeRule) -> Decoded | None:
    """The schedule after all passes were shifted late, and then early again by `rule`; None if one of both does not fit the
    memory. start: µs, shape (lanes, microbatches)."""
    back = reversed_graph(g)
    late = decode(back, _mirrored(g, start), FILL_ALL)
    return None if late is None else decode(g, _mirrored(back, late.start), rule)


def _mirrored(g: MicrobatchGraph, start: Ints) -> Ints:
    """Starts of the time-reversed problem, shape (lanes, microbatches): what ends last starts first."""
    end = start + g.duration[:, None]
    times: Ints = (end.max() - end)[::-1, ::-1]
    return np.ascontiguousarray(times)


# --- Single starts ---


class Annealing(NamedTuple):
    """Options of an annealing. shifts: by which a move may shift target starts, µs. target: the value at which to stop, µs.
    rounds: the number of trials. heat: the temperature at first, µs. seed: of random numbers. ended: shape (1,), not 0 once
    the annealing should stop (see `Clock`); used if layers move."""

    shifts: Ints
    target: int
    rounds: int
    heat: float
    seed: int
    ended: Ints = np.zeros(1, np.int64)


@subkernel
def total_length(g: MicrobatchGraph, start: Ints) -> int:
    """The sum over ranks of the last end, for the span less the first start, µs. It breaks ties between schedules of equal
    value in annealing. start: µs, shape (lanes, microbatches)."""
    total = 0
    for rank in range(len(g.capacity)):
        first, last = 1 << 60, 0
        for h in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            lane = g.rank_lanes[h]
            first = min(first, start[lane, 0])
            last = max(last, start[lane, -1] + g.duration[lane])
        total += last - (first if g.span else 0)
    return total


@subkernel
def _shift(g: MicrobatchGraph, target: Ints, shifts: Ints) -> None:
    """Shift some target starts, in place: of one lane, of a rank, of its sinks, or of all lanes from one on; in one
    microbatch, in some in a row, or in all from one on."""
    lanes, m = target.shape
    step = shifts[np.random.randint(len(shifts))]
    if np.random.randint(2) == 0:
        step = -step
    if np.random.randint(3) == 0:
        step *= 1 + np.random.randint(4)
    a = np.random.randint(m)
    how = np.random.randint(4)
    z = a + 1
    if how == 1:
        z = min(m, a + 1 + np.random.randint(4))
    elif how == 2:
        z = m
    elif how == 3:
        a, z = 0, a + 1
    lane = np.random.randint(lanes)
    what = np.random.randint(6)
    if what <= 2:
        target[lane, a:z] += step
    elif what == 3:
        target[lane:, a:z] += step
    else:
        rank = g.rank[lane]
        for h in range(g.rank_lane_first[rank], g.rank_lane_first[rank + 1]):
            if what == 4 or g.sink[g.rank_lanes[h]] == 1:
                target[g.rank_lanes[h], a:z] += step


class Layers(NamedTuple):
    """The layers behind a graph's lanes, to move layers between stages. counts: layers of each stage; empty: they do not
    move. stage, row: of each lane; row 0 is F, 1 is B or BW, 2 is W. time[row, a]: µs of the layers before a. held[k, a]:
    bytes of the layers before a, after F, after B, and always. room: bytes of each rank for all these. beside: µs of each
    lane beside its layers. alone: only layers move, and each trial uses the first targets."""

    counts: Ints
    stage: Ints
    row: Ints
    time: Ints
    held: Ints
    room: Ints
    beside: Ints
    alone: bool


_NONE, _NO_TABLE = np.empty(0, np.int64), np.empty((0, 0), np.int64)
NO_LAYERS = Layers(_NONE, _NONE, _NONE, _NO_TABLE, _NO_TABLE, _NONE, _NONE, alone=False)
LAYER_SHARE = 0.4  # of trials move layers


@subkernel
def _weigh(g: MicrobatchGraph, layers: Layers) -> None:
    """Write times and bytes of lanes into the graph, for the present `layers.counts`."""
    ends = np.zeros(len(layers.counts) + 1, np.int64)
    ends[1:] = np.cumsum(layers.counts)
    g.capacity[:] = layers.room
    for lane in range(len(layers.row)):
        a, b, row = ends[layers.stage[lane]], ends[layers.stage[lane] + 1], layers.row[lane]
        g.duration[lane] = layers.time[row, b] - layers.time[row, a] + layers.beside[lane]
        before, after = layers.held[0, b] - layers.held[0, a], layers.held[1, b] - layers.held[1, a]
        g.taken[lane] = before if row == 0 else max(0, after - before) if row == 1 else 0
        g.freed[lane] = 0 if row == 0 else max(0, before - after) if row == 1 else after
        if row == 0:
            g.capacity[g.rank[lane]] -= layers.held[2, b] - layers.held[2, a]


@subkernel
def _move_layers(counts: Ints, ranks: int) -> None:
    """Move up to three layers, once or twice, in place: to a neighbouring stage, `ranks` stages away, or to any stage."""
    for _ in range(1 + np.random.randint(2)):
        giver, step = np.random.randint(len(counts)), 1 if np.random.randint(2) == 0 else -1
        how, many = np.random.randint(3), 1 if np.random.randint(3) > 0 else 1 + np.random.randint(3)
        taker = (giver + step * (1 if how == 0 else ranks)) % len(counts)
        if how == 2:
            taker = np.random.randint(len(counts))
        if giver != taker and counts[giver] > many:
            counts[giver] -= many
            counts[taker] += many


@kernel
def _anneal_targets(
    g: MicrobatchGraph, begin: Decoded, annealing: Annealing, layers: Layers
) -> tuple[int, Ints, Ints, DecodeRule]:
    """`anneal_targets`, compiled: value, start, order and rule of the best schedule, whose layers are then in
    `layers.counts`. The value is −1 if the start does not fit the memory."""
    np.random.seed(annealing.seed)
    rounds, cool = annealing.rounds, max(annealing.heat / 50, 1e-3)
    heat = max(annealing.heat, cool)
    share = 8.0 * len(g.capacity)
    rule, movable = begin.rule, len(layers.counts) > 1
    counts, split = layers.counts.copy(), layers.counts.copy()
    if movable:
        _weigh(g, layers)
    value, now, order = decode_fast(g, begin.start, rule)
    top = (value, now, order, rule)
    if value < 0:
        return top
    cost = value + total_length(g, now) / share
    best = cost
    if layers.alone:
        now = begin.start.copy()
    target = now.copy()
    for turn in range(rounds):
        if top[0] <= annealing.target or annealing.ended[0] != 0:
            break
        target[:] = now
        trial = rule
        if np.random.randint(40) == 0:
            trial = DecodeRule(np.random.randint(3), np.random.randint(0, 17), 1 + np.random.randint(2))
        moved = movable and (layers.alone or np.random.random() < LAYER_SHARE)
        if moved:
            _move_layers(layers.counts, len(g.capacity))
            _weigh(g, layers)
        if not moved or (not layers.alone and np.random.randint(3) == 0):
            for _ in range(1 + np.random.randint(2)):
                _shift(g, target, annealing.shifts)
        most = cost - heat * (cool / heat) ** (turn / rounds) * np.log(1 - np.random.random())  # Metropolis, drawn ahead
        value, start, order = decode_fast(g, target, trial, most - g.microbatches * g.duration.sum() / share)
        new = value + total_length(g, start) / share if value >= 0 else np.inf
        if new <= most:
            cost, rule = new, trial
            counts[:] = layers.counts
            if not layers.alone:
                now = start
            if new < best:
                best, top = new, (value, start, order, trial)
                split[:] = counts
        elif moved:
            layers.counts[:] = counts
            _weigh(g, layers)
    layers.counts[:] = split
    return top


def anneal_targets(g: MicrobatchGraph, begin: Decoded, annealing: Annealing, layers: Layers = NO_LAYERS) -> Decoded:
    """The best schedule that annealing over target starts finds from `begin`; `begin` itself if none is better. If `layers`
    are given, they move too: then the graph and `layers.counts` are changed, and the schedule is for the latter."""
    value, start, order, rule = _anneal_targets(g, begin, annealing, layers)
    return begin if value < 0 or value > begin.value else Decoded(int(value), start, order, DecodeRule(*rule))


# --- Patterns ---


class Pattern(NamedTuple):
    """Target offsets, µs, shape (k, lanes): microbatch j takes row j mod k, and starts j periods (µs) later. rule: by which
    it is decoded."""

    offset: Ints
    period: int
    rule: DecodeRule


@subkernel
def _bend(g: MicrobatchGraph, offset: Ints, step: int) -> None:
    """Shift offsets by `step` µs, in place: of one lane, of all from one on (equally or increasingly), of some in a row, or
    of sinks; in all rows or in one."""
    rows, lanes = offset.shape
    first, last = 0, rows
    if rows > 1 and np.random.randint(2) == 0:
        first = np.random.randint(rows)
        last = first + 1
    kind = np.random.randint(8)
    a = np.random.randint(lanes)
    z = min(lanes, a + 2 + np.random.randint(len(g.capacity)))
    for row in offset[first:last]:
        if kind <= 1:
            row[a] += step
        elif kind <= 3:
            row[(0 if kind == 3 and last - first < rows else a) :] += step
        elif kind == 4:
            for lane in range(a, lanes):
                row[lane] += step * (min(lane, z) - a) // (z - a)
        elif kind == 5:
            row[a:z] += step
        else:
            for lane in range(lanes):
                if g.sink[lane] == 1 and (kind == 6 or g.rank[lane] == g.rank[a]):
                    row[lane] += step


@kernel
def _anneal_pattern(
    g: MicrobatchGraph, begin: Pattern, rules: Ints, annealing: Annealing, best: Ints
) -> tuple[int, Ints, Ints, int]:
    """`anneal_pattern`, compiled: value (−1: no trial fits the memory), start, order and period of the best pattern.

    Its offsets are written to `best`, shape (k, lanes). rules: shape (n, 3), a `DecodeRule` in each row. The last row
    becomes the best pattern's rule; at first it is that of `begin`.
    """
    np.random.seed(annealing.seed)
    shifts, rounds, share = annealing.shifts, annealing.rounds, 8.0 * len(g.capacity)
    current, offset = begin.offset.copy(), begin.offset.copy()
    period, rule = begin.period, begin.rule
    target = np.empty((len(g.rank), g.microbatches), np.int64)
    top = (-1, target, np.empty(0, np.int64), period)
    cost = best_cost = np.inf
    for turn in range(rounds):
        if 0 <= top[0] <= annealing.target:
            break
        offset[:] = current
        trial, shifted = rule, period
        for _ in range(0 if turn == 0 else 1 + np.random.randint(2)):
            step = shifts[np.random.randint(len(shifts))]
            if np.random.randint(2) == 0:
                step = max(1, step // (1 + np.random.randint(16)))
            if np.random.randint(2) == 0:
                step = -step
            kind = np.random.randint(10)
            if kind == 0:
                shifted = max(0, shifted + step // 4)
            elif kind == 1:
                row = rules[np.random.randint(len(rules))]
                trial = DecodeRule(row[0], row[1], row[2])
            else:
                _bend(g, offset, step)
        repeat_rows(offset, shifted, target)
        value, start, order = decode_fast(g, target, trial)
        if value < 0:
            continue
        new = value + total_length(g, start) / share
        if new <= cost or np.random.random() < np.exp((cost - new) / (annealing.heat * (1.0 - turn / rounds))):
            cost, period, rule = new, shifted, trial
            current[:] = offset
            if new < best_cost:
                best_cost, top = new, (value, start, order, shifted)
                best[:] = offset
                rules[-1, 0], rules[-1, 1], rules[-1, 2] = trial
    return top


def anneal_pattern(
    g: MicrobatchGraph, begin: Pattern, rules: tuple[DecodeRule, ...], annealing: Annealing
) -> tuple[Pattern, Decoded] | None:
    """The best pattern that annealing finds from `begin`, and its decoded schedule; None if no trial fits the memory. rules:
    further rules to decode with."""
    offset = begin.offset.copy()
    tried = np.array([*rules, begin.rule], np.int64)
    value, start, order, period = _anneal_pattern(g, begin, tried, annealing, offset)
    if value < 0:
        return None
    rule = DecodeRule(*tried[-1].tolist())
    return Pattern(offset, int(period), rule), Decoded(int(value), start, order, rule)
