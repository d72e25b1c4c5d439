"""Offload in the graph: what lies where and when, what is refused; files, texts and digests with pools."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Problem, Schedule, pipeline, verify
from zbsolve.build import Host, with_offload, with_recompute, with_updates
from zbsolve.greedy.lists.list_scheduler import deepest_first, list_schedule
from zbsolve.problem import Edge, Pass, Pool


def step(**options: Any) -> Problem:
    return pipeline(3, 4, 2, placement=(0, 1), microbatches=2, held_until_B=2, held_until_W=4, **options)


def arcs(problem: Problem) -> dict[tuple[str, str], tuple[int, int]]:
    """(before, after) → (bytes, pool), of edges with bytes."""
    e, names = problem.edges, problem.names
    columns = zip(e.before.tolist(), e.after.tolist(), e.bytes.tolist(), e.pool.tolist(), strict=True)
    return {(names[a], names[b]): (size, pool) for a, b, size, pool in columns if size}


def test_bytes_are_on_the_device_until_out_in_the_host_and_back_for_their_users() -> None:
    problem = with_offload(step(), [5, 6], 8, fraction=[1, 0.5], which=[[True, False], [False, True]], host=Host(100))
    rest = {("0F1", "0B1"): (2, 0), ("0F1", "0W1"): (4, 0), ("1F0", "1B0"): (2, 0), ("1F0", "1W0"): (4, 0)}
    first = {("0F0", "0O0"): (6, 0), ("0O0", "0R0"): (6, 1), ("0R0", "0B0"): (2, 0), ("0R0", "0W0"): (4, 0)}
    half = {("1F1", "1O1"): (3, 0), ("1O1", "1R1"): (3, 1), ("1R1", "1B1"): (1, 0), ("1R1", "1W1"): (2, 0)}
    assert arcs(problem) == {**rest, **first, **half, ("1F1", "1B1"): (1, 0), ("1F1", "1W1"): (2, 0)}
    rows = {one.name: one for one in problem.passes}
    assert [(rows[name].duration, rows[name].streams) for name in ("0O0", "0R0", "1O1", "1R1")] == [
        (5, ("d2h:0",)),
        (8, ("h2d:0",)),
        (3, ("d2h:1",)),
        (4, ("h2d:1",)),
    ]
    assert problem.pools == (Pool("host:0", 100),)


def test_a_bus_and_a_host_are_shared_as_the_machine_says() -> None:
    four = pipeline(3, 4, 2, placement=(0, 1, 2, 3), microbatches=1, held_until_W=4)
    problem = with_offload(four, 5, 5, host=Host(9, ranks=2, shared_bus=2))
    assert problem.pools == (Pool("host:0", 9), Pool("host:1", 9))
    assert [name for name in problem.streams if not name.startswith("compute")] == ["bus:0", "bus:1"]
    assert [len(problem.edges_in(pool)) for pool in range(6)] == [2, 2, 2, 2, 2, 2]
    assert [problem.pool_name(pool) for pool in (0, 4)] == ["rank 0", "host:0"]


def test_memory_of_one_microbatch_by_hand() -> None:
    """F from 0 to 3, O to 8, R to 16 and then B, W: six bytes on the device but between O's end and R's start."""
    problem = with_offload(pipeline(3, 4, 2, placement=(0,), microbatches=1, held_until_W=6), 5, 8)
    timeline = list_schedule(problem, deepest_first(problem)).timeline()
    assert {name: timeline[name] for name in problem.names} == {
        "0F0": (0, 3),
        "0O0": (3, 8),
        "0R0": (8, 16),
        "0B0": (16, 20),
        "0W0": (20, 22),
    }
    assert (timeline.peak_bytes, timeline.pool_peaks) == ((6,), (6,))
    shift = np.array([10 * (kind in "RBW") for kind in problem.passes.kind_names])
    late = replace(timeline, start=timeline.start + shift, end=timeline.end + shift)
    times, held = late.memory(0)
    at = {time: int(held[np.searchsorted(times, time, side="right") - 1]) for time in (2, 7, 8, 17, 18, 31, 32)}
    assert at == {2: 6, 7: 6, 8: 0, 17: 0, 18: 6, 31: 6, 32: 0}
    times, held = late.memory(1)
    at = {time: int(held[np.searchsorted(times, time, side="right") - 1]) for time in (2, 3, 25, 26)}
    assert at == {2: 0, 3: 6, 25: 6, 26: 0}


@pytest.mark.parametrize(("capacity", "host", "fits"), [(6, 12, ""), (6, 11, "host:0"), (5, 12, "rank 0")])
def test_the_verifier_holds_devices_and_pools_to_their_capacity(capacity: int, host: int, fits: str) -> None:
    one = pipeline(3, 4, 2, placement=(0,), microbatches=2, held_until_W=6)
    problem = with_offload(replace(one, capacity=(capacity,)), 0, 0, host=Host(host))
    order = {
        "compute:0": ("0F0", "0F1", "0B0", "0W0", "0B1", "0W1"),
        "d2h:0": ("0O0", "0O1"),
        "h2d:0": ("0R0", "0R1"),
    }
    syncs = (("0O0", "0F1"), ("0F1", "0O1"), ("0O1", "0R0"), ("0W0", "0R1"))
    found = verify(problem, Schedule(problem, order, syncs))
    assert [violation.rule for violation in found] == (["memory"] if fits else [])
    assert not fits or str(found[0]).startswith(f"memory: {fits} holds")


def test_files_keep_pools_and_files_without_stay_as_they_were(tmp_path: Path) -> None:
    problem = with_offload(step(capacity=8), 5, 6, host=Host(20))
    schedule = list_schedule(problem, deepest_first(problem))
    schedule.save(tmp_path / "one.json")
    again = Schedule.load(tmp_path / "one.json").problem
    assert again == problem
    assert again.pools == problem.pools
    assert again.edges.pool.tolist() == problem.edges.pool.tolist()
    assert "pools" not in step().to_json()
    assert "pool" not in step().to_json()["edges"]
    others = [replace(problem, pools=(Pool("host:0", limit),)) for limit in (19, None)]
    assert len({one.digest for one in (problem, step(capacity=8), *others)}) == 4


def test_recompute_leaves_only_its_input_to_offload() -> None:
    problem = with_offload(with_recompute(step(), held_input=1), 5, 5)
    assert {pair: size for pair, (size, _) in arcs(problem).items() if pair[0][1:2] in "OR" and pair[1].endswith("0")} == {
        (f"{s}{a}0", f"{s}{b}0"): 1 for s in (0, 1) for a, b in (("O", "R"), ("R", "B"))
    }


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"fraction": 1.5}, "fraction of stage 0 is 1.5, not from 0 to 1"),
        ({"fraction": [0.5, float("nan")]}, "fraction of stage 1 is nan"),
        ({"fraction": [1, 1, 1]}, "not one for each of 2 stages"),
        ({"fraction": "half"}, "fraction: not numbers"),
        ({"which": [1, 0]}, "which: booleans of shape"),
        ({"host": Host(-1)}, "its capacity is negative"),
        ({"host": Host(ranks=0)}, "0 ranks a node"),
        ({"host": Host(shared_bus=3)}, "3 of 2 ranks share a bus"),
        ({"fraction": 0.01}, "stage 0: the fraction 0.01 of the . bytes that its F keeps for a later pass is less than one"),
    ],
)
def test_what_makes_no_sense_is_refused(said: dict[str, Any], text: str) -> None:
    with pytest.raises(BadInput, match=text):
        with_offload(step(), 5, 5, **said)


def test_it_is_put_in_once_and_before_updates() -> None:
    with pytest.raises(BadInput, match="offload already"):
        with_offload(with_offload(step(), 5, 5), 5, 5)
    with pytest.raises(BadInput, match="updates already: put offload in before"):
        with_offload(with_updates(step(), 1, every=1, delay=1), 5, 5)


def test_pools_have_names_of_their_own_and_edges_name_them() -> None:
    orders = {"compute:0": ("0F0",), "compute:1": ("0B0",)}
    two = [Pass("F", 0, 0, 0, 1), Pass("B", 0, 0, 1, 1)]
    edges = [Edge("0F0", "0B0", bytes=3, pool="host")]
    problem = Problem.of(two, edges, pools=[Pool("host", 2)])
    assert problem.taken.tolist() == [0, 0]
    assert problem.moved(2)[0].tolist() == [3, 0]
    assert [one.rule for one in verify(problem, Schedule(problem, orders))] == ["memory"]
    for pools, text in (([], "unknown pool 'host'"), ([Pool("host"), Pool("host")], "is no name of its own")):
        with pytest.raises(BadInput, match=text):
            Problem.of(two, edges, pools=pools)
