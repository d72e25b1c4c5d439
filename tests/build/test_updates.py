"""Updates in the graph, versions of weights as lifespans: PipeDream and 2BW."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, Schedule, pipeline, solve, updates, verify
from zbsolve.problem import Problem
from zbsolve.problem.tables import Edges
from zbsolve.systems import preset

from ..support.exhaustive import optimum


def step(p: int, m: int, held: int = 0, split: bool = False, **options) -> Problem:
    backward = {"B": 4, "W": 2} if split else {"BW": 6}
    return pipeline(3, **backward, placement=tuple(range(p)), microbatches=m, held_until_W=held, **options)


def edges(problem: Problem) -> set[tuple[str, str, int]]:
    e, names = problem.edges, problem.names
    return {(names[a], names[b], size) for a, b, size in zip(e.before, e.after, e.bytes.tolist(), strict=True)}


def test_2bw_delays_every_update_by_one():
    """arXiv 2006.09503, section 3.1: microbatch k (from 1) uses version max(⌊(k − 1)/m⌋ − 1, 0)."""
    found = edges(updates(step(2, 8), 1, every=2, delay=2, parameter_bytes=10))
    for k in range(8):
        version = max(k // 2 - 1, 0)
        waits = {a for a, b, _ in found if b == f"0F{k}" and "U" in a}
        assert waits == ({f"0U{version - 1}"} if version else set())
    assert {(a, b) for a, b, size in found if size == 10 and a[0] == "0"} == {
        ("0F0", "0BW3"),  # version 0: groups 0 and 1
        ("0U0", "0BW5"),
        ("0U1", "0BW7"),
    }


@pytest.mark.parametrize("p", [1, 2, 4, 6])
def test_pipedream_stashes_p_minus_r_versions(p):
    """arXiv 1806.03377, section 3.3: rank r holds p − r versions, and no bubble in the steady state."""
    m = 4 * p
    problem = updates(step(p, m), 1, every=1, delay=[p - s for s in range(p)], parameter_bytes=1)
    schedule = preset("pipedream", problem)
    assert verify(problem, schedule) == ()
    timeline = schedule.timeline()
    assert timeline.peak_bytes == tuple(p - r for r in range(p))
    ends = [timeline[f"0U{k}"][1] for k in range(m)]
    assert {b - a for a, b in zip(ends[p:], ends[p + 1 :], strict=False)} == {3 + 6 + 1}


@pytest.mark.parametrize("p", [2, 4])
def test_2bw_holds_two_versions_without_a_bubble(p):
    """arXiv 2006.09503: two versions, at least p microbatches an update, and at most p microbatches' activations."""
    m = 2 * p
    problem = updates(step(p, 5 * m, held=1), 7, every=m, delay=2, parameter_bytes=1000)
    schedule = preset("pipedream", problem)
    assert verify(problem, schedule) == ()
    peaks = schedule.timeline().peak_bytes
    assert [peak // 1000 for peak in peaks] == [2] * p
    assert max(peak % 1000 for peak in peaks) <= p
    ends = [schedule.timeline()[f"0U{t}"][1] for t in range(5)]
    assert {b - a for a, b in zip(ends[1:-1], ends[2:], strict=False)} == {m * 9 + 7}


def test_delay_one_is_training_step_by_step():
    one = preset("1f1b", step(3, 4)).timeline().makespan
    flushed, delayed = (updates(step(3, 12), 5, every=4, delay=delay) for delay in (1, 2))
    with pytest.raises(BadInput, match="pipedream: pass 0F4 would wait for 0U0 for ever"):
        preset("pipedream", flushed)
    found = solve(flushed, effort=0.1)
    assert found.timeline().makespan == found.certificate.bound == 3 * (one + 5)
    assert found.certificate.bound > preset("pipedream", delayed).timeline().makespan


def test_split_backward_updates_after_its_last_weight_gradient():
    problem = updates(step(2, 4, split=True), 1, every=2, delay=2)
    assert {(a, b) for a, b, _ in edges(problem) if b == "1U1"} == {("1W2", "1U1"), ("1W3", "1U1"), ("1U0", "1U1")}


def test_solvers_know_nothing_of_updates_and_prove_them():
    problem = updates(pipeline([2, 1], BW=[3, 2], microbatches=3), 1, every=1, delay=[2, 1], parameter_bytes=1)
    problem = Problem(problem.passes, problem.edges, (2, 1), problem.objective)
    best = optimum(problem)
    for method in ("auto", "cp", "milp"):
        found = solve(problem, method=method, seconds=20)
        assert (found.certificate.value, found.certificate.bound) == (best, best), method
    assert verify(problem, solve(problem, method="greedy")) == ()


def test_wrong_use_is_named():
    with pytest.raises(BadInput, match="5 microbatches do not make groups of 2"):
        updates(step(2, 5), 1, every=2, delay=1)
    with pytest.raises(BadInput, match="delay 0"):
        updates(step(2, 4), 1, every=2, delay=0)
    with pytest.raises(BadInput, match="updates: stage 0 makes no gradients, so it has nothing to update"):
        updates(step(2, 4, untrained=1), 1, every=2, delay=1)
    with pytest.raises(BadInput, match="updates: delay: 3 values, 2 are needed"):
        updates(step(2, 4), 1, every=2, delay=[1, 2, 3])
    with pytest.raises(BadInput, match="a stage lives on several ranks"):
        updates(pipeline(1, BW=1, placement=((0, 1), (1, 0)), microbatches=2), 1, every=1, delay=1)
    with pytest.raises(BadInput, match="pipedream: needs a problem with updates U"):
        preset("pipedream", step(2, 4))


def test_bytes_between_microbatches_go_by_number_with_updates_alone() -> None:
    """The first version of the weights is held from the first forward to the last backward that uses it, by number: an order
    that has another one last is refused. Without updates the same edge is about its two passes: then they hold 5 bytes while
    they run, whichever microbatch is first, which 5 bytes of memory allow and 4 do not."""
    order = Schedule(pipeline(3, BW=4, placement=(0,), microbatches=2), {"compute:0": ("0F1", "0F0", "0BW1", "0BW0")})
    found = updates(replace(order.problem, capacity=(90,)), 1, every=1, delay=2, parameter_bytes=5)
    late = Schedule(found, {"compute:0": ("0F1", "0F0", "0BW0", "0BW1", "0U0", "0U1")})
    assert [one.passes for one in verify(found, late)] == [("0F1", "0F0")]
    plain = order.problem
    held = plain.edges + Edges.of(plain.rows("F")[:1], plain.rows("BW")[1:], bytes=5)
    for room, wrong in ((5, []), (4, [("0F0",)])):
        own = replace(plain, edges=held, capacity=(room,))
        assert [one.passes for one in verify(own, Schedule(own, order.order))] == wrong
