"""Builders: costs → `Problem`. The one place that knows which pass waits for which, and which holds what memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from . import placement as placements
from .errors import BadInput, Infeasible
from .graphs_alltoall import comm_streams, with_all_to_all
from .graphs_recompute import Recompute, chosen, least_room, with_recompute
from .problem import KINDS, Edges, Ints, Passes, Problem
from .text import exact_bytes

MOST = 1_000_000  # stages times microbatches: three million passes, which take 3 GB
LARGEST = 2**52  # µs or bytes; and a whole step stays below 2**60, so that sums are whole numbers of 64 bits
Numbers = Sequence[float] | float
Placement = placements.Spot | str | None
Routes = tuple[tuple[int, ...], ...]
Links = float | Sequence[float] | Mapping[tuple[int, int], float]


def pipeline(
    F: Numbers,
    B: Numbers | None = None,
    W: Numbers | None = None,
    BW: Numbers | None = None,
    *,
    placement: Placement = None,
    microbatches: int,
    comm: Links = 0,
    AF: Numbers = 0,
    AB: Numbers | None = None,
    exchange: Numbers | None = None,
    recompute: Recompute = (),
    X: Numbers | None = None,
    held_input: Numbers = 0,
    held_until_B: Numbers = 0,
    held_until_W: Numbers = 0,
    held_from_B: Numbers = 0,
    capacity: Sequence[float] | float | None = None,
    objective: str = "makespan",
    layers: Sequence[int] = (),
    source: str = "",
) -> Problem:
    """One training step of a synchronous pipeline.

    F, B, W: µs a stage (forward, input gradient, weight gradient); a single number where all stages are alike and
    `placement` is a tuple. BW in place of B and W: one fused backward. placement: a tuple stage → rank, or `single`,
    `loop`, `vee` (the number of ranks then follows from the number of stages), or several such tuples: routes that the
    microbatches take in turn (or `mirror`), so that a stage lives on several ranks. AF, AB: µs a stage of the all-to-all
    (expert parallelism) after F and after the backward, passes on a stream of their own (AB None: as AF; see
    `graphs_alltoall`). exchange: µs a stage of the gradient
    exchange between the ranks that it lives on, a pass C on each after all their gradients, on a stream of its own; None:
    not part of the problem. comm: µs between two ranks, one number,
    one a stage boundary, or {(from rank, to rank): µs}; none inside a rank. held_until_B, held_until_W: bytes a stage
    that F takes at its start, freed at the end of B and of W; held_from_B: that B takes at its start, freed at the end of
    W (output gradients that wait for W; of no account with BW). recompute: the stages ("all", "0,2", or numbers) whose F
    keeps only its input, held_input bytes of those, and whose pass X (µs a stage; None: as F) makes the rest again before
    B: see `graphs_recompute`. capacity: bytes a rank, or one number for all.
    layers, source: notes kept with the problem (see `Problem`).

    Times are whole µs: a fraction is rounded, and refused where that changes it by more than 0.1 %. Raises BadInput
    for values that make no sense and Infeasible where one microbatch alone does not fit a rank.
    """
    if isinstance(F, Sequence | np.ndarray) and len(F) == 0:
        raise BadInput("F: no stages")
    routes = _routes(F, placement)
    stages, ranks = len(routes[0]), max(routes[0]) + 1
    if not isinstance(microbatches, int | np.integer) or microbatches < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {microbatches}")
    if microbatches * stages > MOST:
        raise BadInput(f"microbatches: {microbatches} of {stages} stages are more than zbsolve handles ({MOST} in all)")
    if (BW is None) == (B is None):
        raise BadInput("pipeline: give either B (and W), or BW")
    if BW is not None and W is not None:
        raise BadInput("pipeline: W makes no sense beside a fused BW")
    backward = "B" if BW is None else "BW"
    times = {"F": _whole(F, "F", stages), backward: _whole(B if BW is None else BW, backward, stages)}
    if W is not None:
        times["W"] = _whole(W, "W", stages)
    again = _whole(F if X is None else X, "X", stages)
    around = _whole(AF, "AF", stages), _whole(AF if AB is None else AB, "AB", stages)
    inputs, dropping = _whole(held_input, "held_input", stages), chosen(recompute, stages)
    for stage in dropping[around[0][dropping] > 0].tolist():
        raise BadInput(f"recompute: stage {stage} has an all-to-all AF, which its X would have to repeat: not modelled")
    if sum(float(one.sum()) for one in (*times.values(), again, *around)) * microbatches > 2**60:
        raise BadInput("pipeline: the times of all passes add up to more than zbsolve can count")
    kinds = tuple(times)
    held_b, held_w = _whole(held_until_B, "held_until_B", stages), _whole(held_until_W, "held_until_W", stages)
    from_b = _whole(held_from_B, "held_from_B", stages) * (W is not None)
    limits = None if capacity is None else _whole(capacity, "capacity", ranks)
    turn = np.arange(microbatches) % len(routes)
    if limits is not None:
        for route in routes[:microbatches]:
            _fits(least_room(route, held_b + held_w, from_b, dropping, inputs, ranks), limits)
    rank = np.array(routes).T[:, turn]
    passes = _pass_table(kinds, times, rank)
    both = [np.stack(way, axis=1)[:, turn] for way in zip(*(_lags(comm, route) for route in routes), strict=True)]
    edges = _pipeline_edges(kinds, (both[0], both[1]), held_b, held_w, from_b)
    last = np.flatnonzero(passes.kind == passes.kind[-1])
    if len(dropping):
        passes, edges = with_recompute(passes, edges, dropping, again, inputs)
    if any(one.any() for one in around):
        passes, edges = with_all_to_all(passes, edges, *around)
    if exchange is not None:
        passes, edges = _exchanges(passes, edges, rank, _whole(exchange, "exchange", stages), last)
    bounds = None if limits is None else tuple(limits.tolist())
    return Problem(passes, edges, bounds, objective, tuple(layers), source)


def _routes(F: Numbers, placement: Placement) -> Routes:
    count = len(F) if isinstance(F, Sequence | np.ndarray) else None
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


def _whole(values: Any, what: str, count: int) -> Ints:
    """`count` whole numbers. Raises BadInput naming `what` and the position."""
    row = np.array(values, dtype=object).ravel()
    if np.ndim(values) == 0:
        row = np.full(count, values, dtype=object)
    if len(row) != count:
        raise BadInput(f"{what}: {len(row)} values, {count} are needed")
    result = np.zeros(count, np.int64)
    for i, value in enumerate(row):
        try:
            exact = float(value)
            result[i] = round(exact)
        except OverflowError:
            raise BadInput(f"{what}[{i}]: larger than {LARGEST}") from None
        except (TypeError, ValueError):
            raise BadInput(f"{what}[{i}]: not a number: {value!r}") from None
        if exact < 0:
            raise BadInput(f"{what}[{i}]: {value} is negative")
        if exact > LARGEST:
            raise BadInput(f"{what}[{i}]: {value} is larger than {LARGEST}")
        if abs(exact - result[i]) > 1e-3 * exact:
            raise BadInput(f"{what}[{i}]: {value} is not whole; give whole µs and bytes (for example 1000 times as many)")
    return result


def _lags(comm: Links, ranks_of: Sequence[int]) -> tuple[Ints, Ints]:
    """Lag of the forward and of the backward message over each of the stages − 1 boundaries, µs."""
    hops = list(zip(ranks_of, ranks_of[1:], strict=False))
    away = np.array([a != b for a, b in hops], bool)
    if isinstance(comm, Mapping):

        def lag(a: int, b: int) -> float:
            if a != b and (a, b) not in comm:
                raise BadInput(f"comm: no time for the link from rank {a} to rank {b}")
            return comm[a, b] if a != b else 0

        return (
            _whole([lag(a, b) for a, b in hops], "comm", len(hops)),
            _whole([lag(b, a) for a, b in hops], "comm", len(hops)),
        )
    both = np.where(away, _whole(comm, "comm", len(hops)), 0) if hops else np.zeros(0, np.int64)
    return both, both


def _fits(need: Ints, limits: Ints) -> None:
    """Raise Infeasible where a rank has less than one microbatch needs."""
    for rank in np.flatnonzero(need > limits):
        need_and_room = f"needs {exact_bytes(need[rank])} for one microbatch, but has {exact_bytes(limits[rank])}"
        raise Infeasible(f"capacity: rank {rank} {need_and_room}: no schedule exists")


def _pass_table(kinds: tuple[str, ...], times: Mapping[str, Ints], rank: Ints) -> Passes:
    """Rows ordered by kind, then stage, then microbatch; `rank[s, i]` runs stage s of microbatch i."""
    stages, m = rank.shape
    count, where = len(kinds) * stages * m, np.tile(rank.ravel(), len(kinds))
    return Passes(
        kind=np.repeat([KINDS.index(k) for k in kinds], stages * m).astype(np.int64),
        stage=np.tile(np.repeat(np.arange(stages), m), len(kinds)),
        microbatch=np.tile(np.arange(m), len(kinds) * stages),
        slice=np.zeros(count, np.int64),
        rank=where,
        duration=np.concatenate([np.repeat(times[k], m) for k in kinds]),
        streams=where,
        stream_sets=tuple((f"compute:{r}",) for r in range(int(rank.max()) + 1)),
    )


def _pipeline_edges(kinds: tuple[str, ...], lags: tuple[Ints, Ints], held_b: Ints, held_w: Ints, from_b: Ints) -> Edges:
    """F down the stages, B up again, F before its B, B before its W; what F keeps is freed by B and by W, what B keeps
    by W."""
    stages, m = len(held_b), lags[0].shape[1]
    grid = np.arange(len(kinds) * stages * m).reshape(len(kinds), stages, m)
    F, B = grid[0], grid[1]
    zero = np.zeros((stages, m), np.int64)
    split = len(kinds) == 3
    held_by_b = held_b[:, None] + zero if split else (held_b + held_w)[:, None] + zero
    parts = [
        (F[:-1], F[1:], lags[0], zero[1:]),
        (B[1:], B[:-1], lags[1], zero[1:]),
        (F, B, zero, held_by_b),
    ]
    if split:
        parts += [(B, grid[2], zero, from_b[:, None] + zero), (F, grid[2], zero, held_w[:, None] + zero)]
    return Edges(*(np.concatenate([part[i].ravel() for part in parts]).astype(np.int64) for i in range(4)))


def _exchanges(passes: Passes, edges: Edges, rank: Ints, times: Ints, gradients: Ints) -> tuple[Passes, Edges]:
    """With a pass C on every rank of a stage that lives on several: `<stage>C<place among its ranks>`, on `comm:<rank>`.
    It waits for the stage's last gradients on all of them: those of the rows `gradients`."""
    homes = [(stage, np.unique(row)) for stage, row in enumerate(rank)]
    rows = [(stage, place, home) for stage, here in homes if len(here) > 1 for place, home in enumerate(here.tolist())]
    if not rows:
        return passes, edges
    stage, place, home = np.array(rows, np.int64).T
    more = {
        "kind": np.full(len(rows), KINDS.index("C")),
        "stage": stage,
        "microbatch": place,
        "slice": np.zeros(len(rows), np.int64),
        "rank": home,
        "duration": times[stage],
        "streams": comm_streams(passes)[1] + home,
    }
    columns = {what: np.concatenate([getattr(passes, what), column]) for what, column in more.items()}
    sets, _ = comm_streams(passes)
    pairs = [(i, len(passes) + n) for n, s in enumerate(stage) for i in gradients[passes.stage[gradients] == s]]
    before, after = np.array(pairs, np.int64).T
    none = np.zeros(len(pairs), np.int64)
    parts = zip((edges.before, edges.after, edges.lag, edges.bytes), (before, after, none, none), strict=True)
    return Passes(**columns, stream_sets=sets), Edges(*(np.concatenate(pair) for pair in parts))
