"""Microbatches that differ: bounds against exact optima, what certificates assume, and rules that must step aside."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from zbsolve import BadInput, Edge, Infeasible, NotFound, Pass, Problem, Schedule, pipeline, preset, solve, updates, verify
from zbsolve.build import with_exchange, with_sharding
from zbsolve.cli import main
from zbsolve.greedy.arrays.microbatch import microbatch_graph, with_mean_microbatches
from zbsolve.greedy.blocks.block_search import block_schedules
from zbsolve.ilp.bounds import necessary_arcs
from zbsolve.ilp.bounds.bound import IN_ORDER, Bound
from zbsolve.ilp.bounds.closed_forms import all_closed_forms
from zbsolve.ilp.bounds.necessary_arcs import necessary_arcs_of
from zbsolve.ilp.cp import solve_cp
from zbsolve.ilp.milp import solve_milp
from zbsolve.ilp.proof_check import recheck
from zbsolve.ilp.ranks.end_losses import Answer, refute
from zbsolve.ilp.ranks.induction import refute_by_induction
from zbsolve.ilp.ranks.lanes import lanes_of
from zbsolve.ilp.steady.rounds import rounds_of
from zbsolve.problem.tables import Edges
from zbsolve.search.certify import certificate_of
from zbsolve.show.pictures.drawing import to_svg
from zbsolve.show.pictures.schedule import comparison_drawing
from zbsolve.show.schedule_comparison import compare_schedules
from zbsolve.show.schedule_comparison_text import verdict_line
from zbsolve.util.clock import Clock

from ..support.exact import optimum
from ..support.exhaustive import optimum as exhaustive_optimum
from ..support.problems import SMALL, uneven_microbatches

STATES = 100_000  # partial orders, more than any of these takes


# 118: the last microbatches hold so little that nothing waits for them, which a shift of memory arcs has to know of.
@pytest.mark.parametrize("seed", [*range(40), 118])
def test_no_bound_is_above_the_optimum(seed):
    problem = uneven_microbatches(seed)
    best = optimum(problem)
    if best is None:
        pytest.skip("no order fits the memory")
    assert [bound for bound in all_closed_forms(problem) if bound.value > best] == []
    for size, lean in itertools.product(range(1, problem.ranks + 1), (False, True)):
        for ranks in itertools.permutations(range(problem.ranks), size):
            lanes = lanes_of(problem, ranks, lean)
            if lanes is not None:
                assert refute(lanes, best, 64, STATES)[0] is not Answer.REFUTED
                assert refute_by_induction(lanes, best + 1, STATES)[0] is not Answer.REFUTED


@pytest.mark.parametrize("seed", [*range(100, 112), *range(113, 118)])
def test_solve_finds_and_proves_the_optimum(seed):
    problem = uneven_microbatches(seed)
    best = optimum(problem)
    try:
        schedule = solve(problem, effort=0.6, prefer=None)
    except (Infeasible, NotFound):
        assert best is None
        return
    certificate = schedule.certificate
    assert verify(problem, schedule) == ()
    assert certificate.value == best >= certificate.bound
    assert certificate.bound == best or problem.objective == "span"
    assert certificate.proof.endswith(IN_ORDER) == (not problem.alike and certificate.bound > problem.work)


def small(first: int, most: int) -> Problem:
    """A problem of at most so many passes whose microbatches differ, with the makespan as objective."""
    found = (uneven_microbatches(seed) for seed in range(first, 999))
    return next(p for p in found if len(p.passes) <= most and not p.alike and p.objective == "makespan")


@pytest.mark.parametrize("first", [0, 20, 40, 60])
def test_the_oracles_agree(first):
    problem = small(first, 12)
    assert optimum(problem) == exhaustive_optimum(problem, lanes=True)


@pytest.mark.parametrize("first", [0, 30])
def test_exact_models_agree(first):
    problem = small(first, 18)
    assert solve_cp(problem, None, 0, 30.0).bound == solve_milp(problem, None, 0, 30.0).bound == optimum(problem)


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 6])
def test_bounds_hold_beside_what_side_streams_hold(seed):
    problem = small(20 * seed, 18)
    room = None if problem.capacity is None else tuple(one + 9 for one in problem.capacity)
    sharded = with_sharding(replace(problem, capacity=room), 3, 2, parameter_bytes=2, gradient_bytes=1, gathers=2)
    found = solve_cp(sharded, None, 0, 30.0)
    best = found.schedule.timeline().value
    assert verify(sharded, found.schedule) == ()
    assert found.bound == best >= max(bound.value for bound in all_closed_forms(sharded))


def test_memory_arcs_count_microbatches_that_hold_little():
    """Two of the large microbatches fit at once, and of the small ones all: 0F4 does not wait for 0BW2."""
    problem = pipeline([1], BW=[1], microbatches=6, held_until_W=[[10, 10, 10, 1, 1, 1]], capacity=[20])
    arcs = necessary_arcs_of(problem)
    f, bw = (arcs.lane[problem.index[name]] for name in ("0F0", "0BW0"))
    order = ("0F0", "0F1", "0BW0", "0BW1", "0F2", "0F3", "0F4", "0F5", "0BW2", "0BW3", "0BW4", "0BW5")
    assert verify(problem, Schedule(problem, {"compute:0": order})) == ()
    assert arcs.shift[bw, f] == 4  # not 2: 0BW2 comes before no F


def test_what_side_streams_hold_counts_only_where_all_passes_of_a_lane_take_memory():
    """0Q0 holds its byte while 0F0 takes one, but not while 0F1 runs, which takes none: it may start before 0B0."""
    streams = {"O": "d2h:0", "F": "compute:0", "B": "compute:0"}
    passes = [Pass(kind, 0, i, 0, 1, streams=(stream,)) for i in (0, 1) for kind, stream in streams.items()]
    edges = [Edge("0O0", "0F0", bytes=1), Edge("0F0", "0B0", lag=3, bytes=1), Edge("0O1", "0F1", bytes=2)]
    problem = Problem.of(passes, edges, capacity=[3])
    assert max(bound.value for bound in all_closed_forms(problem)) <= optimum(problem) == 7


def test_order_by_microbatch_is_assumed_where_they_differ():
    """A short microbatch first fills the second rank sooner: the best order of all is none by microbatch."""
    problem = pipeline([[9, 1], [1, 1]], BW=[[1, 1], [1, 9]], microbatches=2)
    assert exhaustive_optimum(problem, lanes=False) < exhaustive_optimum(problem, lanes=True)
    schedule = solve(problem, effort=0.2)
    assert schedule.certificate.bound == schedule.certificate.value == exhaustive_optimum(problem, lanes=True)
    assert schedule.certificate.proof.endswith(IN_ORDER)
    listed = problem.only(np.arange(len(problem.passes))[::-1])
    assert solve(listed, effort=0.2).certificate.bound == schedule.certificate.bound  # however the table lists them
    assert verdict_line(compare_schedules([("this", schedule)])).endswith("no order of its passes by microbatch is shorter")
    assert "proven optimal: no order by microbatch is shorter" in to_svg(comparison_drawing([("this", schedule)]))
    assert recheck(problem, Bound(schedule.certificate.bound, "", schedule.certificate.relaxation), 5.0).proof.endswith(
        IN_ORDER
    )


def test_order_by_microbatch_is_assumed_where_gathers_are_for_some_of_them():
    """Stage 1 first runs the two microbatches of the second gather: 17 µs, where no order by number takes less than 18."""
    step = pipeline([1, 1], placement=(0, 1), microbatches=3)
    problem = replace(with_sharding(step, [1, 8], 1, parameter_bytes=3, gathers=[1, 2]), capacity=(3, 6))
    order = {"compute:0": "0F0 0F1 0F2", "compute:1": "1F1 1F2 1F0", "comm:0": "0AG0", "comm:1": "1AG1 1AG0"}
    shorter = Schedule(problem, {stream: row.split() for stream, row in order.items()})
    assert verify(problem, shorter) == ()
    assert (problem.alike, shorter.timeline().value) == (True, 17)
    certificate = solve(problem, effort=0.2).certificate
    assert certificate.value == certificate.bound == 18
    assert certificate.proof.endswith(IN_ORDER)
    assert certificate_of(shorter, Bound(18, ""), "").bound == problem.work
    assert [one.ordered for one in (step, with_exchange(step, 1, replicas=True), problem)] == [False, False, True]
    later = replace(step, edges=step.edges + Edges.of(*(step.rows("F", stage=s)[[2 - s]] for s in (0, 1))))
    sums = Problem.of([Pass("C", 0, i, 0, i + 1) for i in range(2)], [])
    assert (later.alike, later.ordered, sums.alike, sums.ordered) == (True, True, True, True)


def test_an_order_against_the_microbatches_has_no_bound_but_work(tmp_path, capsys):
    problem = pipeline([[9, 1], [1, 1]], BW=[[1, 1], [1, 9]], microbatches=2)
    order = {"compute:0": ("0F1", "0F0", "0BW1", "0BW0"), "compute:1": ("1F1", "1BW1", "1F0", "1BW0")}
    schedule = Schedule(problem, order)
    assert verify(problem, schedule) == ()
    bound = max(all_closed_forms(problem), key=lambda one: one.value)
    stated = certificate_of(schedule, bound, "hint")
    assert stated.bound == problem.work
    lower = certificate_of(schedule, Bound(problem.work + 1, bound.proof, bound.kind, bound.ranks), "hint")
    assert lower.bound == problem.work
    found = solve(problem, effort=0.1, hint=schedule)
    assert found.certificate.value <= schedule.timeline().value
    path = str(tmp_path / "schedule.json")
    schedule.certified(stated).save(path)
    assert main(["check", path, "--bound"]) == 0
    better = solve(problem, effort=0.1).certificate
    forged = Schedule(problem, {**order, "compute:1": ("1F1", "1F0", "1BW0", "1BW1")})
    value = int(forged.timeline().value)
    assert value >= better.bound > problem.work
    made = certificate_of(solve(problem, effort=0.1), bound, "x")
    fake = type(made)(
        made.objective,
        value,
        *[getattr(made, name) for name in ("bound", "relaxation", "ranks", "proof")],
        "x",
        0.0,
        0,
        problem.digest,
    )
    forged.certified(fake).save(path)
    assert main(["check", path, "--bound"]) == 1
    assert "0F1 runs before 0F0" in capsys.readouterr().out


def test_alike_is_what_every_plain_problem_is():
    assert all(problem.alike for problem in SMALL.values())
    assert updates(pipeline(2, BW=3, placement=(0, 1), microbatches=4, held_until_W=1), every=2, time=1, delay=2).alike
    rows = {"F": [2, 2], "BW": [3, 3], "microbatches": 3}
    assert pipeline(**rows, comm=2, blocking=True).alike
    assert pipeline([[2, 2, 2], 2], BW=[3, 3], microbatches=3).alike
    for given in (
        {"F": [[2, 2, 3], 2]},
        {"BW": [3, [3, 4, 3]]},
        {"comm": [[1, 1, 2]]},
        {"comm": [[1, 1, 2]], "blocking": True},
        {"held_until_W": [[1, 2, 1], 1]},
        {"placement": ((0, 1), (1, 0)), "comm": [[1, 1, 2]]},
    ):
        assert not pipeline(**{**rows, **given}).alike


def test_a_problem_with_an_edge_at_one_microbatch_is_not_alike():
    whole = pipeline([2, 2], BW=[3, 3], microbatches=3)
    assert not whole.only(np.arange(1, len(whole.passes))).alike  # without 0F0
    without = whole.edges.only(np.arange(1, len(whole.edges)))
    assert not type(whole)(whole.passes, without).alike


def test_building_blocks_take_mean_microbatches():
    problem = pipeline([2, 4], [4, 4], [2, 2], comm=1, microbatches=6, held_until_W=2, capacity=[6, 6]).scaled(
        [1, 2, 1, 0.5, 1, 1.5]
    )
    assert microbatch_graph(problem) is None
    mean = microbatch_graph(with_mean_microbatches(problem))
    assert sorted(mean.duration.tolist()) == [2, 2, 2, 5, 5, 5]
    found = list(block_schedules(problem, Clock(10.0, 0.3), 0.3))
    assert found
    assert all(verify(problem, schedule) == () for schedule in found)


def test_a_mean_microbatch_holds_the_most():
    problem = pipeline([2], BW=[4], microbatches=3, held_until_W=[[1, 5, 3]], comm=0)
    mean = with_mean_microbatches(problem)
    assert mean.alike
    assert set(mean.edges.bytes.tolist()) == {5}
    alike = pipeline([2], BW=[4], microbatches=3)
    assert with_mean_microbatches(alike) is alike


@pytest.mark.parametrize("name", ["1f1b-v", "zb-v", "v-half", "v-min", "1f1b", "zb-h1", "interleaved", "dualpipe-v"])
def test_named_schedules_are_there_where_microbatches_differ(name):
    placement = {"1f1b": "single", "zb-h1": "single", "interleaved": "loop"}.get(name, "vee")
    stages = 4 if placement == "single" else 8
    backward = {"BW": [2] * stages} if name in ("1f1b-v", "1f1b", "interleaved") else {"B": [1] * stages, "W": [1] * stages}
    problem = pipeline([1] * stages, **backward, placement=placement, microbatches=8).scaled([1, 2, 3, 1, 1, 2, 1, 1])
    assert verify(problem, preset(name, problem)) == ()


def test_a_period_is_of_rounds_that_are_alike():
    """A message that differs in an early round alone was not seen."""
    early = pipeline([2, 2], BW=[3, 3], microbatches=6, comm=[[9, 1, 1, 1, 1, 1]])
    with pytest.raises(BadInput, match="period: rounds are not alike: edge 0F0 → 1F0 has another lag"):
        rounds_of(early)
    with pytest.raises(BadInput, match="another bytes"):
        rounds_of(pipeline([2, 2], BW=[3, 3], microbatches=6, held_until_W=[[9, 1, 1, 1, 1, 1], 1]))
    with pytest.raises(BadInput, match="not alike"):
        rounds_of(pipeline([2, 2], BW=[3, 3], microbatches=3).scaled([1, 1, 2]))


@pytest.mark.parametrize("seed", [2, 5, 8])
def test_bounds_hold_where_lanes_are_too_many_to_compare(seed, monkeypatch):
    """Then the graph alone is walked."""
    monkeypatch.setattr(necessary_arcs, "MAX_ORDERED_LANES", 1)
    problem = small(20 * seed, 19)
    assert necessary_arcs_of(problem).shift.size == 0
    assert 0 < max(bound.value for bound in all_closed_forms(problem)) <= solve_cp(problem, None, 0, 30.0).bound
