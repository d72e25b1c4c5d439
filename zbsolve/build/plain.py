"""`pipeline`: from costs to the `Problem` of a plain step. Everything else that a step may have is added by a builder
Problem → Problem in this package. Only builders know which pass waits for which, and which holds what memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..kinds import ALL_TO_ALL, KINDS
from ..problem import Problem
from ..problem import placement as placements
from ..problem.tables import Edges, Ints, Passes
from ..util.columns import coded
from ..util.errors import BadInput
from .attention_costs import AttentionExchange
from .attention_exchange import with_attention_exchange
from .numbers import Numbers, Table, check_apart, check_room, whole_numbers, whole_table
from .recompute import Recompute, least_room, recomputed_stages, with_recompute
from .slices import of_slices, with_slices
from .untrained import without_backward
from .updates import with_exchange


def with_all_to_all(problem: Problem, AF: Numbers, AB: Numbers | None = None) -> Problem:
    """`problem` with the all-to-alls of expert parallelism as passes beside computing.

    AF: µs a stage of `<stage>AF<microbatch>` after each F; no pass where it is 0.
    AB: µs a stage of `<stage>AB<microbatch>` after each B or BW; None: as AF.

    What waited for the F or B of another stage waits for its all-to-all; so does the last stage's own backward, but not W.
    Raises BadInput, also for a stage that recomputes: its X would have to repeat AF.
    """
    check_apart(problem, ALL_TO_ALL)
    passes, edges, stages = problem.passes, problem.edges, problem.stages
    forward = whole_numbers(AF, "AF", stages)
    backward = whole_numbers(AF if AB is None else AB, "AB", stages)
    for stage in np.unique(passes.stage[problem.rows("X")]).tolist():
        if forward[stage]:
            raise BadInput(f"recompute: stage {stage} has an all-to-all AF, which its X would have to repeat: not modelled")
    is_f, backs = passes.are("F"), passes.are("B", "BW")
    times = np.where(is_f, forward[passes.stage], np.where(backs, backward[passes.stage], 0))
    own = np.flatnonzero(times)
    if not len(own):
        return problem
    table = passes.like(own, np.where(is_f[own], "AF", "AB"), "comm", times[own])
    place = np.full(len(passes), -1, np.int64)  # F or B → its all-to-all
    place[own] = len(passes) + np.arange(len(own))
    before, after = edges.before, edges.after
    output = (place[before] >= 0) & (passes.kind[before] == passes.kind[after])  # to the F or B of another stage
    # From the last stage's F to its backward, which waits for AF, too.
    turn = np.flatnonzero(is_f[before] & backs[after] & (passes.stage[before] == stages - 1))
    turn = turn[place[before[turn]] >= 0]
    # No other stage takes the results of the last stage's AF and the first stage's AB.
    down, up = is_f[own] & (passes.stage[own] < stages - 1), backs[own] & (passes.stage[own] > 0)
    handed = Edges.of(own, place[own], carries=np.where(down, "activation", np.where(up, "gradient", "")))
    moved = replace(edges, before=np.where(output, place[before], before))
    return replace(problem, passes=table, edges=moved + handed + Edges.of(place[before[turn]], after[turn]))


MAX_PASSES = 1_000_000  # stages times microbatches: three million passes, which take 3 GB
Placement = placements.Spot | str | None
Routes = tuple[tuple[int, ...], ...]
LinkTimes = Table | Mapping[tuple[int, int], float]


class Held(NamedTuple):
    """Bytes, shape (stages, microbatches) each. until_b, until_w: F takes them, and B or W frees them. from_b: B to W."""

    until_b: Ints
    until_w: Ints
    from_b: Ints


def pipeline(
    F: Table,
    B: Table | None = None,
    W: Table | None = None,
    BW: Table | None = None,
    *,
    placement: Placement = None,
    microbatches: int,
    comm: LinkTimes = 0,
    blocking: bool = False,
    AF: Numbers = 0,
    AB: Numbers | None = None,
    exchange: Numbers | None = None,
    recompute: Recompute = (),
    X: Table | None = None,
    held_input: Table = 0,
    held_until_B: Table = 0,
    held_until_W: Table = 0,
    held_from_B: Table = 0,
    capacity: Sequence[float] | float | None = None,
    objective: str = "makespan",
    layers: Sequence[int] = (),
    source: str = "",
    slices: int = 1,
    held_keys: Table = 0,
    held_gradients: Table = 0,
    attention_exchange: AttentionExchange | None = None,
    untrained: int = 0,
) -> Problem:
    """One training step of a synchronous pipeline.

    F, B, W: µs a stage (forward, input gradient, weight gradient), or one number where `placement` says how many stages
        there are.
    BW: µs a stage of a fused backward, in place of B and W. Without any of the three: a step of forwards alone.
    placement: stage → rank, a tuple, or `single`, `loop`, `vee`, which follow from the number of stages. Several tuples, or
        `mirror`: routes that microbatches take in turn, so that a stage is on several ranks.
    microbatches: how many.
    comm: µs between two ranks, one number, one a stage boundary, or {(from rank, to rank): µs}; none inside a rank.
    blocking: whether a message occupies its sender's compute stream. Then the message is the end of the pass that made it: F
        takes F + comm, and its bytes are held until it is sent (`Edge.sent`). Not with all-to-alls.
    AF, AB: µs a stage of all-to-alls, see `with_all_to_all`.
    exchange: µs a stage of summing gradients, see `with_exchange`.
    recompute, X, held_input: see `with_recompute`.
    held_until_B, held_until_W: bytes a stage that F takes at its start, freed at the end of B and of W.
    held_from_B: bytes a stage that B takes at its start, freed at the end of W; unused with BW.
    capacity: bytes a rank, or one number for all; None: unlimited.
    objective: "makespan" or "span".
    layers, source: notes, see `Problem`.
    slices: parts of each microbatch's sequence, see `with_slices`. Times and bytes are then those of a slice: one number a
        stage, or a row of one a slice (or of one for each slice of each microbatch).
    held_keys, held_gradients: bytes a stage of keys and values of slices, see `with_slices`.
    attention_exchange: costs of attention that ranks compute for each other, see `with_attention_exchange`.
    untrained: how many stages in front train nothing, see `without_backward`. Times of a backward do not count there, nor do
        bytes that it would free.

    Where microbatches differ, F, B, W, BW, X, comm and bytes are tables: a row a stage (or boundary), with one number a
    microbatch or one for all. Times are whole µs: fractions are rounded, but refused where that changes them by more than
    0.1 %.

    Raises BadInput for values that make no sense, and Infeasible where one microbatch alone does not fit a rank.
    """
    routes = _routes(F, placement)
    untrained = int(whole_numbers(untrained, "untrained", 1)[0])
    given = {kind: time for kind, time in (("F", F), ("B", B), ("W", W), ("BW", BW), ("X", X)) if time is not None}
    given |= {"held_until_B": held_until_B, "held_until_W": held_until_W}
    given |= {"held_from_B": held_from_B, "held_input": held_input}
    tables = {name: of_slices(table, slices, microbatches) for name, table in given.items()}
    comm, microbatches = of_slices(comm, slices, microbatches), microbatches * slices
    stages, shape = len(routes[0]), _shape(routes, microbatches)
    if not {"B", "W", "BW"} & tables.keys():
        untrained, tables["BW"] = stages, 0

    times, held = _times(tables, shape), _held(tables, shape, untrained)
    around = [whole_numbers(AF, "AF", stages), whole_numbers(AF if AB is None else AB, "AB", stages)]
    dropping = {stage: count for stage, count in recomputed_stages(recompute, stages).items() if stage >= untrained}
    again, inputs = (whole_table(tables.get(name, 0), name, *shape) for name in ("X", "held_input"))
    limits = None if capacity is None else whole_numbers(capacity, "capacity", max(routes[0]) + 1)
    _check_room(routes, held, np.array(list(dropping), np.int64), inputs.min(axis=1), limits)
    if blocking and any(array.any() for array in around):
        raise BadInput("blocking: AF and AB are all-to-alls on a separate stream, after which messages block no sender")

    notes = () if isinstance(layers, Sequence) and not layers else whole_numbers(layers, "layers", stages).tolist()
    passes, edges = _plain(times, held, _messages(comm, routes, microbatches), blocking, routes)
    step = Problem(passes, edges, None if limits is None else tuple(limits.tolist()), objective, tuple(notes), source)
    step = with_recompute(step, dropping, X=None if X is None else again, held_input=inputs)
    step = without_backward(with_all_to_all(step, *around), untrained)
    step = step if exchange is None else with_exchange(step, exchange)
    step = step if slices == 1 else with_slices(step, slices, held_keys=held_keys, held_gradients=held_gradients)
    return step if attention_exchange is None else with_attention_exchange(step, attention_exchange)


def _shape(routes: Routes, microbatches: int) -> tuple[int, int]:
    """Shape (stages, microbatches) of tables. Raises BadInput for a number of microbatches that makes no sense."""
    stages = len(routes[0])
    if not isinstance(microbatches, int | np.integer) or microbatches < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {microbatches}")
    if microbatches * stages > MAX_PASSES:
        raise BadInput(f"microbatches: {microbatches} of {stages} stages: more than zbsolve handles ({MAX_PASSES} in all)")
    return stages, microbatches


def _times(tables: Mapping[str, Table], shape: tuple[int, int]) -> dict[str, Ints]:
    """Kind → µs, `shape` (stages, microbatches), in the order of a microbatch's passes."""
    if ("BW" in tables) == ("B" in tables):
        raise BadInput("pipeline: give either B (and W), or BW")
    if {"BW", "W"} <= tables.keys():
        raise BadInput("pipeline: W makes no sense beside a fused BW")
    return {kind: whole_table(tables[kind], kind, *shape) for kind in ("F", "B", "W", "BW") if kind in tables}


def _held(tables: Mapping[str, Table], shape: tuple[int, int], untrained: int) -> Held:
    """The bytes that passes hold; none in the stages that train nothing, and none from B on unless there is a W."""
    names = ("held_until_B", "held_until_W", "held_from_B")
    until_b, until_w, from_b = (whole_table(tables[name], name, *shape) for name in names)
    trained = np.arange(shape[0])[:, None] >= untrained
    return Held(until_b * trained, until_w * trained, from_b * (trained & ("W" in tables)))


def _routes(F: Table, placement: Placement) -> Routes:
    """The rank of each stage, for each route; F tells how many stages a named placement has. Raises BadInput."""
    count = len(F) if isinstance(F, Sequence | np.ndarray) else None
    if F is None or isinstance(F, str) or count == 0:
        raise BadInput(f"F: {F!r}: µs are needed, a list with one a stage, or one number")
    if placement is None:
        placement = "single"
    if isinstance(placement, str):
        if count is None:
            what = "a placement that names the ranks" if placement == "single" else "F as a list, one a stage"
            raise BadInput(f"pipeline: placement '{placement}' with F as one number: give {what}")
        shape = placement.rstrip("0123456789")
        chunks = int(placement[len(shape) :] or 2) if shape in placements.NAMES and shape != "single" else 1
        if chunks < 1 or count % chunks:
            raise BadInput(f"placement '{placement}': {count} stages do not make {chunks} chunks a rank")
        if shape in (*placements.NAMES, "mirror"):
            return placements.parse_routes(placement, count // chunks)
        return (placements.parse(placement),)
    routes = placements.check_routes(placement)
    if count is not None and count != len(routes[0]):
        raise BadInput(f"placement: names {len(routes[0])} stages, but F has {count}")
    return routes


def _messages(comm: LinkTimes, routes: Routes, microbatches: int) -> list[Ints]:
    """µs of the messages down and up over each boundary, shape (stages − 1, microbatches) each."""
    ways = [_of_route(comm, route, microbatches) for route in routes]
    number = np.arange(microbatches)  # they alternate between the routes
    return [np.stack(way)[number % len(routes), :, number].T for way in zip(*ways, strict=True)]


def _of_route(comm: LinkTimes, ranks_of: Sequence[int], microbatches: int) -> tuple[Ints, Ints]:
    """The messages if all microbatches take one route."""
    hops = list(zip(ranks_of, ranks_of[1:], strict=False))
    away = np.array([a != b for a, b in hops], bool)
    if isinstance(comm, Mapping):

        def lag(a: int, b: int) -> float:
            if a != b and (a, b) not in comm:
                raise BadInput(f"comm: no time for the link from rank {a} to rank {b}")
            return comm[a, b] if a != b else 0

        down, up = [lag(a, b) for a, b in hops], [lag(b, a) for a, b in hops]
        return whole_table(down, "comm", len(hops), microbatches), whole_table(up, "comm", len(hops), microbatches)
    none = np.zeros((0, microbatches), np.int64)
    both = np.where(away[:, None], whole_table(comm, "comm", len(hops), microbatches), 0) if hops else none
    return both, both


def _check_room(routes: Routes, held: Held, dropping: Ints, inputs: Ints, limits: Ints | None) -> None:
    """Raise Infeasible where a microbatch alone does not fit a rank. dropping: stages; inputs: bytes of every stage."""
    for turn, route in enumerate(routes[: held.until_b.shape[1]]):
        table = np.concatenate(held)[:, turn :: len(routes)]
        table = table[:, :1] if (table == table[:, :1]).all() else np.unique(table, axis=1)  # check equal columns once
        for column in table.T:
            until_b, until_w, from_b = np.split(column, len(held))
            check_room(least_room(route, until_b + until_w, from_b, dropping, inputs), limits)


def _plain(
    times: dict[str, Ints], held: Held, messages: Sequence[Ints], blocking: bool, routes: Routes
) -> tuple[Passes, Edges]:
    """The passes of a step that keeps everything, by kind, then stage, then microbatch, and its edges. messages: µs down and
    up, which are lags, or ends of passes where they block."""
    none, (kind, back, *_) = [0 * message for message in messages], tuple(times)
    lags, sent = (none, messages) if blocking else (messages, none)
    down, up = np.pad(sent[0], ((0, 1), (0, 0))), np.pad(sent[1], ((1, 0), (0, 0)))  # F sends to the next stage, B back
    times = times | {kind: times[kind] + down, back: times[back] + up}
    stages, m = times[kind].shape
    rank = np.tile(np.array(routes).T[:, np.arange(m) % len(routes)].ravel(), len(times))
    passes = Passes(
        kind=coded(np.repeat(list(times), stages * m), KINDS, "kind"),
        stage=np.tile(np.repeat(np.arange(stages), m), len(times)),
        microbatch=np.tile(np.arange(m), len(times) * stages),
        slice=np.zeros(len(rank), np.int64),
        rank=rank,
        duration=np.concatenate([time.ravel() for time in times.values()]),
        streams=rank,
        stream_sets=tuple((f"compute:{r}",) for r in range(int(rank.max()) + 1)),
    )
    return passes, _edges(tuple(times), lags, sent, held)


def _edges(kinds: tuple[str, ...], lags: Sequence[Ints], sent: Sequence[Ints], held: Held) -> Edges:
    """F down the stages, B up again, F before its B, B before its W; B and W free what F keeps, and W what B keeps.
    lags, sent: µs of messages down and up over boundaries, after passes and as their ends: (stages − 1, microbatches)."""
    stages, m = held.until_b.shape
    rows = np.arange(len(kinds) * stages * m).reshape(len(kinds), stages, m)
    F, B, W = rows[0], rows[1], rows[2:].reshape(-1)  # the third kind is W, where there is one
    split = len(W) > 0
    freed_by_b = held.until_b if split else held.until_b + held.until_w
    (down, up), (sent_down, sent_up) = ([array.ravel() for array in both] for both in (lags, sent))
    edges = (
        Edges.of(F[:-1].ravel(), F[1:].ravel(), lag=down, carries="activation", sent=sent_down)
        + Edges.of(B[1:].ravel(), B[:-1].ravel(), lag=up, carries="gradient", sent=sent_up)
        + Edges.of(F.ravel(), B.ravel(), bytes=freed_by_b.ravel())
    )
    if not split:
        return edges
    kept = Edges.of(B.ravel(), W, bytes=held.from_b.ravel())
    return edges + kept + Edges.of(F.ravel(), W, bytes=held.until_w.ravel())
