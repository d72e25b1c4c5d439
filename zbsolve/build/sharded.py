"""Sharded parameters (FSDP, ZeRO-3: arXiv 1910.02054, section 5; arXiv 2304.11277) inside the graph.

Each rank of a data-parallel group holds a part of a stage's parameters. A pass `AG` gathers the parameters before the
stage uses them, and a pass `RS` sums the stage's gradients and leaves a part of the sum on each. Both run on `comm:<rank>`,
beside computing. Gathered parameters, and gradients that are not reduced yet, are bytes on edges, so the schedule
decides how long they are held.

Every other coordinate of the mesh runs the same schedule. It has one order for `comm:<rank>`, so all members of a group
call their collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ..kinds import SHARDING
from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..util.errors import BadInput, Infeasible
from ..util.text import exact_bytes
from .numbers import Numbers, check_apart, whole_numbers
from .untrained import untrained_stages


class _Costs(NamedTuple):
    """The numbers for each stage, shape (stages,) each, as `with_sharding` takes them."""

    gather: Ints
    reduce: Ints
    parameter_bytes: Ints
    gradient_bytes: Ints
    gathers: Ints


class _Home(NamedTuple):
    """One stage on one of its ranks: place: of the rank among these; homes: their number; and its passes that use the
    weights, by group of microbatches and in order: forwards; X, B and BW; W or BW, which compute the last gradients."""

    stage: int
    rank: int
    place: int
    homes: int
    forwards: list[Ints]
    backwards: list[Ints]
    gradients: list[Ints]

    @property
    def trained(self) -> bool:
        """Has the stage backwards? (The first stages have none if they train nothing.)"""
        return any(map(len, self.gradients))


class _Row(NamedTuple):
    """One pass to add: kind, stage, number, rank, µs; users: the passes that wait for a gather, or that a reduction waits
    for; end: the one of these with which its bytes end, or begin; size: these bytes."""

    kind: str
    stage: int
    number: int
    rank: int
    duration: int
    users: Ints
    end: int
    size: int


def with_sharding(
    problem: Problem,
    gather: Numbers,
    reduce: Numbers,
    *,
    parameter_bytes: Numbers = 0,
    gradient_bytes: Numbers = 0,
    gathers: Numbers = 1,
) -> Problem:
    """`problem` with the parameters of each stage sharded over a data-parallel group (FSDP, ZeRO-3).

    gather, reduce: µs a stage of its all-gather and of its reduce-scatter.
    parameter_bytes: bytes a stage of its parameters when they are gathered.
    gradient_bytes: bytes a stage of its gradients before they are reduced.
    gathers: how often a stage's forwards gather, one number or one a stage.

    gathers = 1: `<stage>AG0` gathers before the first F, and the parameters stay until the last pass that uses them ends.
    gathers = g > 1: microbatches are divided into g groups in order. `<stage>AG<group>` gathers for a group's forwards, and
    `<stage>AGB<group>` for its backwards (X, B, W or BW). Gathered parameters are freed when the last of these ends.
    A stage that trains nothing frees them with its last F, or the group's, and reduces nothing.
    Gradients take `gradient_bytes` from the start of the first pass that computes some (B or BW) to the end of `<stage>RS0`,
    which waits for all W (or BW). If a stage is on r ranks (routes), pass k of the rank at place q among them has the
    number k·r + q, and a pass C waits for all RS of its stage. An update U waits for the RS of its stage.

    Apply it last. Raises BadInput for numbers that make no sense, where the problem is sharded already, and where it has
    several updates a stage; Infeasible where a rank cannot hold its stages' gathered parameters and one microbatch.
    """
    kinds = problem.passes.kinds
    check_apart(problem, SHARDING)
    if "RS" in kinds:
        raise BadInput("sharding: the problem is sharded already")
    if "U" in kinds and problem.round != problem.microbatches:
        raise BadInput(
            f"sharding: the problem has an update after each {problem.round} of {problem.microbatches} microbatches: what "
            "was gathered before an update is old; only one update a step is modelled"
        )
    costs_of = zip(_Costs._fields, (gather, reduce, parameter_bytes, gradient_bytes, gathers), strict=True)
    costs = _Costs(*(whole_numbers(numbers, f"sharding: {name}", problem.stages) for name, numbers in costs_of))
    if costs.gathers.min() < 1:
        raise BadInput(f"sharding: gathers: {costs.gathers.min()}: parameters are gathered once at least")
    homes = [
        _home(problem, stage, place, int(costs.gathers[stage]))
        for stage, ranks in enumerate(problem.stage_ranks)
        for place in range(len(ranks))
    ]
    _check_fits(problem, costs, homes)
    trained = [home for home in homes if home.trained]
    rows = [row for home in homes for row in _gathers(home, costs)] + [_reduction(problem, home, costs) for home in trained]
    sharded = _with_rows(problem, rows)
    return replace(sharded, edges=sharded.edges + _ends_of_step(sharded))


def _with_rows(problem: Problem, rows: Sequence[_Row]) -> Problem:
    """The problem with these passes and their edges."""
    columns = {name: np.array([getattr(row, name) for row in rows], np.int64) for name in ("stage", "rank", "duration")}
    numbers = np.array([row.number for row in rows], np.int64)
    passes = problem.passes.more([row.kind for row in rows], "comm", microbatch=numbers, **columns)
    own = np.repeat(len(problem.passes) + np.arange(len(rows)), [len(row.users) for row in rows])
    users = np.concatenate([row.users for row in rows])
    held = np.concatenate([np.where(row.users == row.end, row.size, 0) for row in rows])
    reducing = passes.are("RS")[own]
    edges = Edges.of(np.where(reducing, users, own), np.where(reducing, own, users), bytes=held)
    return replace(problem, passes=passes, edges=problem.edges + edges)


def _home(problem: Problem, stage: int, place: int, groups: int) -> _Home:
    """A stage on one of its ranks, its microbatches there in `groups` groups. Raises BadInput where there are fewer."""
    rank, p = problem.stage_ranks[stage][place], problem.passes
    forwards, backwards, gradients = (
        rows[np.argsort(p.microbatch[rows], kind="stable")]
        for rows in (problem.rows(*kinds, stage=stage, rank=rank) for kinds in (("F",), ("X", "B", "BW"), ("W", "BW")))
    )
    count = len(forwards)
    if count < groups or (not len(gradients) and stage >= untrained_stages(problem)):
        why = "no backward" if count >= groups else f"{count} microbatches, which do not make {groups} groups"
        raise BadInput(f"sharding: stage {stage} has {why} on rank {rank}")
    cuts = p.microbatch[forwards[[at * count // groups for at in range(1, groups)]]]

    def grouped(rows: Ints) -> list[Ints]:
        return np.split(rows, np.searchsorted(p.microbatch[rows], cuts))

    homes = len(problem.stage_ranks[stage])
    return _Home(stage, rank, place, homes, grouped(forwards), grouped(backwards), grouped(gradients))


def _gathers(home: _Home, costs: _Costs) -> Iterator[_Row]:
    """The gathers of a stage on a rank: one for all, or two a group."""
    duration, size = int(costs.gather[home.stage]), int(costs.parameter_bytes[home.stage])
    groups = zip(home.forwards, home.backwards, home.gradients, strict=True)
    for group, (forwards, backwards, gradients) in enumerate(groups):
        number, last = group * home.homes + home.place, gradients[-1:]
        users = np.concatenate([forwards, last]) if len(home.forwards) == 1 else forwards
        yield _Row("AG", home.stage, number, home.rank, duration, users, int(users[-1]), size)
        if home.trained and len(home.forwards) > 1:
            users = np.union1d(backwards, last)
            yield _Row("AGB", home.stage, number, home.rank, duration, users, int(last[0]), size)


def _reduction(problem: Problem, home: _Home, costs: _Costs) -> _Row:
    """The one reduction of a stage's gradients on a rank."""
    first = next(row for rows in home.backwards for row in rows.tolist() if problem.passes[row].kind != "X")
    users = np.union1d(np.concatenate(home.gradients), [first])
    stage = home.stage
    return _Row("RS", stage, home.place, home.rank, int(costs.reduce[stage]), users, first, int(costs.gradient_bytes[stage]))


def _ends_of_step(problem: Problem) -> Edges:
    """Sums over a stage's ranks and its update wait for its reductions."""
    stage, reductions = problem.passes.stage, problem.rows("RS")
    pairs = [(int(i), int(j)) for j in problem.rows("C", "U") for i in reductions[stage[reductions] == stage[j]]]
    before, after = np.array(pairs, np.int64).reshape(-1, 2).T
    return Edges.of(before, after)


def _check_fits(problem: Problem, costs: _Costs, homes: list[_Home]) -> None:
    """Raise Infeasible where a rank cannot run the first B of its last stage in any order. It needs the parameters of all
    stages that gather once (in any case of the last one), the last one's gradients, and what its own F keeps."""
    if problem.capacity is None:
        return
    for rank, room in enumerate(problem.capacity):
        own = [home for home in homes if home.rank == rank]
        if not own:
            continue
        last, first = own[-1].stage, own[-1].forwards[0][0]
        before = [home.stage for home in own[:-1] if len(home.forwards) == 1 and len(problem.routes) == 1 and home.trained]
        held = problem.edges.bytes[(problem.edges.before == first) & ~problem.passes.are("X")[problem.edges.after]]
        gradients = costs.gradient_bytes[last] * own[-1].trained
        need = int(costs.parameter_bytes[[*before, last]].sum() + gradients + held.sum())
        if need > room:
            raise Infeasible(
                f"sharding: rank {rank} needs {exact_bytes(need)} for gathered parameters, gradients and one microbatch of "
                f"stage {last}, but has {exact_bytes(room)}"
            )


def regathered(problem: Problem, uses: Sequence[Ints]) -> Problem:
    """A sharded problem with other gathers.

    uses: for each gather, rows of passes of one stage on one rank in order. All of them wait for it, and what it gathers is
        freed when the last of them ends. Gathers are numbered `<stage>AG<k>` in the given order.
    """
    p, gathers = problem.passes, problem.rows("AG", "AGB")
    known = {(int(p.stage[i]), int(p.rank[i])): (int(p.duration[i]), int(problem.taken[i])) for i in gathers}
    keep = np.setdiff1d(np.arange(len(p)), gathers)
    place = np.full(len(p), -1, np.int64)
    place[keep] = np.arange(len(keep))
    base, numbers, rows = problem.only(keep), dict[int, int](), list[_Row]()
    for use in uses:
        stage, rank = int(p.stage[use[0]]), int(p.rank[use[0]])
        if (stage, rank) not in known:
            raise BadInput(f"gathers: stage {stage} gathers nothing on rank {rank}")
        duration, size = known[stage, rank]
        numbers[stage] = numbers.get(stage, -1) + 1
        rows.append(_Row("AG", stage, numbers[stage], rank, duration, place[use], int(place[use[-1]]), size))
    return _with_rows(base, rows)
