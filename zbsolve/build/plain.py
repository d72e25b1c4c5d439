"""`pipeline`: costs → `Problem`, the plain step. What else a step may have is a builder Problem → Problem beside this one
(`recompute`, `all_to_all`, `exchange`, `updates`); together they are the one place that knows which pass waits for which,
and which holds what memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from .. import placement as placements
from ..problem import Problem
from ..tables import KINDS, Edges, Ints, Passes, coded
from ..util.errors import BadInput, Infeasible
from ..util.text import exact_bytes
from .all_to_all import with_all_to_all
from .exchange import with_exchange
from .numbers import Numbers, whole_numbers
from .recompute import Recompute, least_room, recomputed_stages, with_recompute

MAX_PASSES = 1_000_000  # stages times microbatches: three million passes, which take 3 GB
MAX_TIME = 2**60  # µs of all passes together, so that sums are whole numbers of 64 bits
Placement = placements.Spot | str | None
Routes = tuple[tuple[int, ...], ...]
LinkTimes = float | Sequence[float] | Mapping[tuple[int, int], float]


class Held(NamedTuple):
    """Bytes a stage, shape (stages,) each: that F takes and B frees, that F takes and W frees, that B takes and W frees."""

    until_b: Ints
    until_w: Ints
    from_b: Ints


def pipeline(
    F: Numbers,
    B: Numbers | None = None,
    W: Numbers | None = None,
    BW: Numbers | None = None,
    *,
    placement: Placement = None,
    microbatches: int,
    comm: LinkTimes = 0,
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
    microbatches take in turn (or `mirror`), so that a stage lives on several ranks. comm: µs between two ranks, one number,
    one a stage boundary, or {(from rank, to rank): µs}; none inside a rank. held_until_B, held_until_W: bytes a stage
    that F takes at its start, freed at the end of B and of W; held_from_B: that B takes at its start, freed at the end of
    W (of no account with BW). capacity: bytes a rank, or one number for all. layers, source: notes (see `Problem`).
    AF, AB: see `with_all_to_all`; recompute, X, held_input: see `with_recompute`; exchange: see `with_exchange`.

    Times are whole µs: a fraction is rounded, and refused where that changes it by more than 0.1 %. Raises BadInput
    for values that make no sense and Infeasible where one microbatch alone does not fit a rank.
    """
    routes = _routes(F, placement)
    stages, ranks = len(routes[0]), max(routes[0]) + 1
    times = _times(F, B, W, BW, stages)
    again = whole_numbers(F if X is None else X, "X", stages)
    around = [whole_numbers(AF, "AF", stages), whole_numbers(AF if AB is None else AB, "AB", stages)]
    _check_size(microbatches, [*times.values(), again, *around])
    inputs, dropping = whole_numbers(held_input, "held_input", stages), recomputed_stages(recompute, stages)
    bytes_held = {"held_until_B": held_until_B, "held_until_W": held_until_W, "held_from_B": held_from_B}
    held = Held(*(whole_numbers(size, name, stages) for name, size in bytes_held.items()))
    held = held if "W" in times else held._replace(from_b=0 * held.from_b)
    limits = None if capacity is None else whole_numbers(capacity, "capacity", ranks)
    for route in routes[:microbatches]:
        _check_fits(least_room(route, held.until_b + held.until_w, held.from_b, dropping, inputs), limits)
    turn = np.arange(microbatches) % len(routes)
    lags = [np.stack(way, axis=1)[:, turn] for way in zip(*(_lags(comm, route) for route in routes), strict=True)]
    passes, edges = _passes(times, np.array(routes).T[:, turn]), _edges(tuple(times), lags, held)
    step = Problem(passes, edges, None if limits is None else tuple(limits.tolist()), objective, tuple(layers), source)
    step = with_recompute(step, dropping.tolist(), X=again, held_input=inputs)
    step = with_all_to_all(step, *around)
    return step if exchange is None else with_exchange(step, exchange)


def _times(F: Numbers, B: Numbers | None, W: Numbers | None, BW: Numbers | None, stages: int) -> dict[str, Ints]:
    """Kind → µs a stage, in the order of a microbatch's passes."""
    if (BW is None) == (B is None):
        raise BadInput("pipeline: give either B (and W), or BW")
    if BW is not None and W is not None:
        raise BadInput("pipeline: W makes no sense beside a fused BW")
    given = {"F": F, "B": B, "W": W, "BW": BW}
    return {kind: whole_numbers(time, kind, stages) for kind, time in given.items() if time is not None}


def _check_size(microbatches: int, times: Sequence[Ints]) -> None:
    """Raise BadInput for no microbatch, or more than zbsolve handles."""
    if not isinstance(microbatches, int | np.integer) or microbatches < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {microbatches}")
    stages = len(times[0])
    if microbatches * stages > MAX_PASSES:
        raise BadInput(
            f"microbatches: {microbatches} of {stages} stages are more than zbsolve handles ({MAX_PASSES} in all)"
        )
    if sum(float(one.sum()) for one in times) * microbatches > MAX_TIME:
        raise BadInput("pipeline: the times of all passes add up to more than zbsolve can count")


def _routes(F: Numbers, placement: Placement) -> Routes:
    count = len(F) if isinstance(F, Sequence | np.ndarray) else None
    if count == 0:
        raise BadInput("F: no stages")
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


def _lags(comm: LinkTimes, ranks_of: Sequence[int]) -> tuple[Ints, Ints]:
    """Lag of the forward and of the backward message over each of the stages − 1 boundaries, µs."""
    hops = list(zip(ranks_of, ranks_of[1:], strict=False))
    away = np.array([a != b for a, b in hops], bool)
    if isinstance(comm, Mapping):

        def lag(a: int, b: int) -> float:
            if a != b and (a, b) not in comm:
                raise BadInput(f"comm: no time for the link from rank {a} to rank {b}")
            return comm[a, b] if a != b else 0

        return (
            whole_numbers([lag(a, b) for a, b in hops], "comm", len(hops)),
            whole_numbers([lag(b, a) for a, b in hops], "comm", len(hops)),
        )
    both = np.where(away, whole_numbers(comm, "comm", len(hops)), 0) if hops else np.zeros(0, np.int64)
    return both, both


def _check_fits(need: Ints, limits: Ints | None) -> None:
    """Raise Infeasible where a rank has less than one microbatch needs."""
    if limits is None:
        return
    for rank in np.flatnonzero(need > limits):
        need_and_room = f"needs {exact_bytes(need[rank])} for one microbatch, but has {exact_bytes(limits[rank])}"
        raise Infeasible(f"capacity: rank {rank} {need_and_room}: no schedule exists")


def _passes(times: Mapping[str, Ints], rank: Ints) -> Passes:
    """Rows ordered by kind, then stage, then microbatch; `rank[s, i]` runs stage s of microbatch i."""
    stages, m = rank.shape
    count, where = len(times) * stages * m, np.tile(rank.ravel(), len(times))
    return Passes(
        kind=coded(np.repeat(list(times), stages * m), KINDS, "kind"),
        stage=np.tile(np.repeat(np.arange(stages), m), len(times)),
        microbatch=np.tile(np.arange(m), len(times) * stages),
        slice=np.zeros(count, np.int64),
        rank=where,
        duration=np.concatenate([np.repeat(time, m) for time in times.values()]),
        streams=where,
        stream_sets=tuple((f"compute:{r}",) for r in range(int(rank.max()) + 1)),
    )


def _edges(kinds: tuple[str, ...], lags: Sequence[Ints], held: Held) -> Edges:
    """F down the stages, B up again, F before its B, B before its W; what F keeps is freed by B and by W, what B keeps
    by W. lags: µs of the messages down and up over each boundary of each microbatch, shape (stages − 1, microbatches)."""
    stages, m = len(held.until_b), lags[0].shape[1]
    rows = np.arange(len(kinds) * stages * m).reshape(len(kinds), stages, m)
    F, B, W = rows[0], rows[1], rows[2:].reshape(-1)  # the third kind is W, where there is one
    split = len(W) > 0
    freed_by_b = held.until_b if split else held.until_b + held.until_w
    edges = (
        Edges.of(F[:-1].ravel(), F[1:].ravel(), lag=lags[0].ravel(), carries="activation")
        + Edges.of(B[1:].ravel(), B[:-1].ravel(), lag=lags[1].ravel(), carries="gradient")
        + Edges.of(F.ravel(), B.ravel(), bytes=np.repeat(freed_by_b, m))
    )
    if not split:
        return edges
    kept = Edges.of(B.ravel(), W, bytes=np.repeat(held.from_b, m))
    return edges + kept + Edges.of(F.ravel(), W, bytes=np.repeat(held.until_w, m))
