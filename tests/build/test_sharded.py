"""Sharded parameters in the graph: what waits for a gather, what holds its bytes, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zbsolve import BadInput, Infeasible, Schedule, pipeline, verify
from zbsolve.build import with_exchange, with_recompute, with_sharding, with_updates
from zbsolve.problem import Problem
from zbsolve.problem.placement import mirror

from ..support.exec_tools import random_schedule


def arcs(problem: Problem, *kinds: str) -> dict[tuple[str, str], int]:
    """(before, after) → bytes, of edges from or to these kinds."""
    e, names, rows = problem.edges, problem.names, set(problem.rows(*kinds).tolist())
    columns = zip(e.before.tolist(), e.after.tolist(), e.bytes.tolist(), strict=True)
    return {(names[a], names[b]): size for a, b, size in columns if a in rows or b in rows}


def step(microbatches: int = 4, **options) -> Problem:
    return pipeline(3, 4, 2, placement=(0, 1), microbatches=microbatches, held_until_W=1, **options)


def test_one_gather_a_step() -> None:
    """Parameters are there from the gather to the last W, gradients from the first B to the reduction's end."""
    problem = with_sharding(step(2), [5, 6], 7, parameter_bytes=[10, 11], gradient_bytes=20)
    assert arcs(problem, "AG", "RS") == {
        **{(f"{s}AG0", f"{s}F{i}"): 0 for s in (0, 1) for i in (0, 1)},
        **{(f"{s}AG0", f"{s}W1"): 10 + s for s in (0, 1)},
        **{(f"{s}B0", f"{s}RS0"): 20 for s in (0, 1)},
        **{(f"{s}W{i}", f"{s}RS0"): 0 for s in (0, 1) for i in (0, 1)},
    }
    rows = {one.name: one for one in problem.passes}
    assert [rows[name].duration for name in ("0AG0", "1AG0", "0RS0")] == [5, 6, 7]
    assert rows["1AG0"].streams == rows["1RS0"].streams == ("comm:1",)
    assert problem.microbatches == 2
    assert problem.work == 18


def test_groups_of_microbatches_have_gathers_of_their_own() -> None:
    problem = with_sharding(step(), 5, 7, parameter_bytes=10, gathers=[1, 2])
    assert arcs(problem, "AG", "AGB") == {
        **{("0AG0", f"0F{i}"): 0 for i in range(4)},
        ("0AG0", "0W3"): 10,
        **{(f"1AG{i // 2}", f"1F{i}"): 10 * (i % 2) for i in range(4)},
        **{(f"1AGB{i // 2}", f"1B{i}"): 0 for i in range(4)},
        ("1AGB0", "1W1"): 10,
        ("1AGB1", "1W3"): 10,
    }


def test_recomputed_and_fused_backwards_wait_for_their_gather() -> None:
    plain = pipeline(3, BW=4, placement=(0,), microbatches=2, held_until_B=4)
    problem = with_sharding(with_recompute(plain, held_input=1), 5, 7, parameter_bytes=10, gradient_bytes=3, gathers=2)
    assert arcs(problem, "AGB") == {(f"0AGB{i}", f"0{kind}{i}"): 10 * (kind == "BW") for i in (0, 1) for kind in ("X", "BW")}
    assert arcs(problem, "RS") == {("0BW0", "0RS0"): 3, ("0BW1", "0RS0"): 0}


@pytest.mark.parametrize(
    ("order", "wrong"),
    [
        ("0F0 0F1 0F2 0F3 0BW0 0BW1 0BW2 0BW3", ""),
        ("0F2 0F3 0F0 0F1 0BW2 0BW3 0BW0 0BW1", "0BW2 0BW0"),  # the second group first: gradients are there sooner
        ("0F1 0F0 0F2 0F3 0BW0 0BW1 0BW2 0BW3", "0F0 0F1"),
        ("0F0 0F1 0F2 0F3 0BW0 0BW1 0BW3 0BW2", "0BW2 0BW3"),
    ],
)
def test_bytes_go_with_the_last_pass_of_a_group_by_number(order: str, wrong: str) -> None:
    """What was gathered goes with the last F, or BW, of its two microbatches by number, and so does the count."""
    plain = pipeline(3, BW=4, placement=(0,), microbatches=4, held_until_B=4, capacity=[60])
    for gradient_bytes, held in ((1, plain), (0, plain), (1, replace(plain, capacity=None))):
        problem = with_sharding(held, 5, 7, parameter_bytes=10, gradient_bytes=gradient_bytes, gathers=2)
        sides = {"comm:0": ("0AG0", "0AGB0", "0AG1", "0AGB1", "0RS0")}
        if order.startswith("0F2"):
            sides = {"comm:0": ("0AG1", "0AG0", "0AGB1", "0AGB0", "0RS0")}
        found = [v.passes for v in verify(problem, Schedule(problem, {"compute:0": tuple(order.split()), **sides}))]
        counted = held.capacity and wrong and (gradient_bytes or wrong != "0BW2 0BW0")
        assert found == ([tuple(wrong.split())] if counted else [])


def test_two_directions_and_what_ends_the_step() -> None:
    """Each rank of a stage gathers for its own microbatches; the sum over its ranks waits for the reductions of all."""
    plain = with_exchange(pipeline(3, 4, 2, placement=mirror(2), microbatches=4), 9)
    problem = with_sharding(plain, 5, 7, parameter_bytes=10, gathers=2)
    found = arcs(problem, "AG")
    assert {b for a, b in found if a == "0AG0"} == {"0F0"}
    assert {b for a, b in found if a == "0AG1"} == {"0F1"}
    assert {b for a, b in found if a == "0AG3"} == {"0F3"}
    assert {(a, b) for a, b in arcs(problem, "RS") if "C" in b} == {
        (f"{s}RS{i}", f"{s}C{j}") for s in (0, 1) for i in (0, 1) for j in (0, 1)
    }
    updated = with_sharding(with_updates(step(), 2, every=4, delay=1), 5, 7)
    assert ("1RS0", "1U0") in arcs(updated, "RS")
    for one in (problem, updated):
        assert verify(one, random_schedule(one)) == ()


def test_wrong_use_is_named() -> None:
    with pytest.raises(BadInput, match=r"sharding: reduce\[1\]: -1 is negative"):
        with_sharding(step(), 5, [1, -1])
    with pytest.raises(BadInput, match="sharding: gathers: 0: parameters are gathered once at least"):
        with_sharding(step(), 5, 7, gathers=0)
    with pytest.raises(BadInput, match="stage 0 has 4 microbatches, which do not make 5 groups on rank 0"):
        with_sharding(step(), 5, 7, gathers=5)
    sliced = pipeline([10, 10], [10, 10], [5, 5], microbatches=2, slices=2)
    with pytest.raises(BadInput, match="sharding: the problem has slices already: they exclude each other"):
        with_sharding(sliced, 1, 1, gathers=2)
    with pytest.raises(BadInput, match="the problem is sharded already"):
        with_sharding(with_sharding(step(), 5, 7), 5, 7)
    with pytest.raises(BadInput, match="an update after each 2 of 4 microbatches"):
        with_sharding(with_updates(step(), 2, every=2, delay=1), 5, 7)
    with pytest.raises(BadInput, match="recompute: the problem has sharding already: put recompute in before"):
        with_recompute(with_sharding(step(), 5, 7))
    with pytest.raises(Infeasible, match="rank 1 needs 14 bytes for gathered parameters, gradients"):
        with_sharding(step(capacity=[14, 13]), 5, 7, parameter_bytes=10, gradient_bytes=3)
