"""A profile's step with offload: what goes to host memory, how long copies take, what fits, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, HostLink, Infeasible, Problem, Profile, Step, solve, verify
from zbsolve.features.offload import copy_ratio
from zbsolve.partition.layer import Layer, Link

# Four stages of 300 bytes until B and 100 until W; 400 bytes are 50 µs out and 80 back, 42 and 52 while nothing else copies.
LAYERS = tuple(Layer(f"l{i}", 30, 40, 20, 60, 300, 100, 0, 8) for i in range(4))
HOST = HostLink(2.0, 10.0, 8.0, 400 / 48, 400 / 78)
PROFILE = Profile("estimated: by hand", "small", LAYERS, Link(1.0, 100.0), 4.0, None, {}, {}, host=HOST)


def offloaded(problem: Problem) -> dict[str, int]:
    """Name of each O → bytes that it sends to the host."""
    p, e = problem.passes, problem.edges
    rows = np.flatnonzero(p.are("O")[e.before] & (e.pool > 0))
    return {problem.names[e.before[i]]: int(e.bytes[i]) for i in rows}


def of_first(problem: Problem) -> dict[int, int]:
    """Stage → bytes that go to the host of microbatch 0."""
    return {int(name[0]): size for name, size in offloaded(problem).items() if name.endswith("O0")}


def test_copies_take_the_time_of_both_directions_at_once() -> None:
    problem = PROFILE.problem(4, 2, offload="full")
    rows = {one.name: one.duration for one in problem.passes}
    assert (rows["0O0"], rows["3R1"]) == (50, 80)
    bus = replace(PROFILE, host=replace(HOST, shared_bus=2)).problem(4, 2, offload="full")
    rows = {one.name: one for one in bus.passes}
    assert [(rows[name].duration, rows[name].streams) for name in ("1O0", "2R1")] == [(42, ("bus:0",)), (52, ("bus:1",))]
    half = PROFILE.problem(4, 2, offload="0:0.5")
    rows = {one.name: one.duration for one in half.passes}
    assert (rows["0O0"], rows["0R0"]) == (26, 41)  # the latency is whole
    slow = replace(PROFILE, rank_factors=(1.0, 2.0, 1.0, 1.0)).problem(4, 2, offload="full")
    rows = {one.name: one.duration for one in slow.passes}
    assert (rows["1F0"], rows["1O0"]) == (60, 50)  # its copies are not slower


@pytest.mark.parametrize(
    ("placement", "ranks", "offload", "found"),
    [
        ("single", 4, "full", {0: 400, 1: 400, 2: 400, 3: 400}),
        ("single", 4, "none", {}),
        ("single", 4, "half", {0: 200, 1: 200, 2: 200, 3: 200}),
        ("vee", 2, "half", {0: 400, 1: 400}),
        ("loop", 2, "half", {0: 400, 1: 400}),
        ("loop4", 1, "half", {0: 400, 1: 400}),
        ((0, 1, 1, 1), 2, "half", {0: 200, 1: 400, 2: 400}),
        ("mirror", 4, "half", {0: 400, 1: 400}),
        ("single", 4, "0:0.5, 2:1", {0: 200, 2: 400}),
        ("single", 4, (0, 0.25, 0, 1), {1: 100, 3: 400}),
        ("single", 4, (True, False, False, True), {0: 400, 3: 400}),
        ("single", 4, (0, 0, 0, 0), {}),
    ],
)
def test_what_is_offloaded(placement: Any, ranks: int, offload: Any, found: dict[int, int]) -> None:
    assert of_first(PROFILE.problem(ranks, 2, placement, offload=offload)) == found
    assert of_first(Step(ranks, 2, placement, offload=offload).problem(PROFILE)) == found


def test_single_microbatches_from_a_table() -> None:
    table = ((True, False), (False, False), (False, False), (False, True))
    assert offloaded(PROFILE.problem(4, 2, offload=table)) == {"0O0": 400, "3O1": 400}


def test_what_recomputes_offloads_its_input_alone_and_what_keeps_nothing_is_left_out() -> None:
    problem = PROFILE.problem(4, 2, recompute="0,1", offload="full")
    assert of_first(problem) == {1: 8, 2: 400, 3: 400}
    with pytest.raises(BadInput, match="offload: stage 0 keeps nothing from its F that a later pass frees"):
        PROFILE.problem(4, 2, recompute="0,1", offload="0:1")
    empty = replace(PROFILE, layers=tuple(replace(one, held_until_B=0, held_until_W=0) for one in LAYERS))
    with pytest.raises(BadInput, match="offload: no stage keeps anything"):
        empty.problem(4, 2, offload="half")


def test_it_goes_with_all_to_alls_and_sharding() -> None:
    layers = tuple(replace(one, all_to_all=5.0, parameter_bytes=100) for one in LAYERS)
    problem = replace(PROFILE, layers=layers).problem(4, 2, shards=2, offload="full")
    assert {"AF", "AB", "O", "R", "AG", "RS"} <= set(problem.passes.kinds)
    schedule = solve(problem, effort=0.1)
    assert not verify(problem, schedule)


def test_a_step_that_only_fits_with_offload() -> None:
    """Two stages a rank: one microbatch alone holds both of its stages' bytes, but not at once where they are offloaded."""
    room = 500 + 2 * 16  # and messages
    with pytest.raises(Infeasible, match="capacity: rank 0 needs 800 bytes for one microbatch"):
        PROFILE.problem(2, 4, "vee", memory=room)
    problem = PROFILE.problem(2, 4, "vee", memory=room, offload="full")
    schedule = solve(problem, effort=0.1)
    assert not verify(problem, schedule)
    assert max(schedule.timeline().peak_bytes) <= 500
    with pytest.raises(Infeasible, match=r"rank 0 needs 600 bytes for one microbatch, but has 500 bytes, also with this"):
        PROFILE.problem(2, 4, "vee", memory=room, offload=(0.5, 0.5, 0.5, 0.5))
    with pytest.raises(Infeasible, match="also with this offload: no schedule exists; a rank has what parameters"):
        PROFILE.problem(2, 4, "vee", memory=300, offload="full")


def test_a_fraction_a_stage_of_some_microbatches() -> None:
    rows = ((0.5, 0.0), (0.0, 0.0), (0.0, 1.0), (1.0, 1.0))
    problem = PROFILE.problem(4, 2, offload=rows)
    assert sorted(name for name in problem.names if "O" in name) == ["0O0", "2O1", "3O0", "3O1"]
    half, whole = (PROFILE.problem(4, 2, offload=one) for one in ("0:0.5", "2:1"))
    for other, name in ((half, "0O0"), (whole, "2O1")):
        times = [one.passes.duration[one.index[name]] for one in (problem, other)]
        assert times[0] == times[1]


@pytest.mark.parametrize(
    ("change", "offload", "error", "line"),
    [
        ({"host": None}, "full", BadInput, "the profile knows no host link: give its field 'host'"),
        ({}, "most", BadInput, "offload 'most': none, full, half, or fractions such as 0:0.5,1:1"),
        ({}, "0:0.5,4:1", BadInput, r"offload: there is no stage 4 \(they are 0 to 3\)"),
        ({}, "0:1,0:1", BadInput, "offload: stage 0 is named twice"),
        ({}, "1:1.5", BadInput, "offload: fraction of stage 1 is 1.5, not from 0 to 1"),
        ({}, "1:-1", BadInput, "offload: fraction of stage 1 is -1, not from 0 to 1"),
        ({}, "1:nan", BadInput, "offload: fraction of stage 1 is nan, not from 0 to 1"),
        ({}, (1, 1), BadInput, r"offload: fraction: shape \(2,\), not one for each of 4 stages"),
        ({}, ((0.5, 1),) * 4, BadInput, "offload: stage 0 has several fractions: one a stage, and 0 for"),
        ({}, ((0.5,),) * 4, BadInput, r"offload: shape \(4, 1\), not \(4, 2\): a row a stage"),
        ({}, ((True,),) * 4, BadInput, "offload: which: booleans of shape"),
        ({}, ((True,), (True, False)), BadInput, "offload: a name, or fractions or booleans of"),
        (
            {"host": replace(HOST, memory=399)},
            "full",
            Infeasible,
            "offload: host memory 'host:0' needs 400 bytes for one microbatch, but has 399 bytes: no schedule exists$",
        ),
    ],
)
def test_wrong_use_is_named(change: dict[str, Any], offload: Any, error: type[Exception], line: str) -> None:
    with pytest.raises(error, match=line):
        replace(PROFILE, **change).problem(4, 2, offload=offload)


def test_host_links_in_files(tmp_path: Path) -> None:
    for host in (HOST, replace(HOST, memory=10**9, ranks=2, shared_bus=2)):
        replace(PROFILE, host=host).save(tmp_path / "p.json")
        assert Profile.load(tmp_path / "p.json").host == host
    replace(PROFILE, host=None).save(tmp_path / "q.json")
    assert '"host"' not in (tmp_path / "q.json").read_text()
    body = json.loads((tmp_path / "q.json").read_text())
    body["host"] = {"d2h": "15GB/s", "h2d": "12GB/s", "h2d_both": "10GB/s", "latency": "9us", "memory": "512GiB", "ranks": 8}
    assert typed(tmp_path, body) == HostLink(9.0, 15_000.0, 12_000.0, 15_000.0, 10_000.0, 512 * 2**30, 8)
    assert typed(tmp_path, {**body, "host": {"d2h": 5}}) == HostLink(0.0, 5.0, 5.0, 5.0, 5.0)


def typed(folder: Path, body: Any) -> HostLink | None:
    """The host link of a profile's file with this body."""
    (folder / "p.json").write_text(json.dumps(body))
    return Profile.load(folder / "p.json").host


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ({}, "host.*d2h"),
        ({"d2h": 0}, "p.json: host: bandwidth 'd2h' is 0 bytes a µs: more than 0 is needed"),
        ({"d2h": "0GB/s"}, "p.json: host: bandwidth 'd2h' is 0 bytes a µs"),
        ({"d2h": -1}, "p.json: .*host.*d2h"),
        ({"d2h": "-1GB/s"}, "p.json: host: field 'd2h' '-1GB/s': a bandwidth may not be negative"),
        ({"d2h": 1, "h2d_both": 0}, "p.json: host: bandwidth 'h2d_both' is 0"),
        ({"d2h": 1, "ranks": 0}, "p.json: host: 0 ranks a node"),
        ({"d2h": 1, "ranks": 3, "shared_bus": 2}, "p.json: host: 2 ranks share a bus, but a node has 3"),
        ({"d2h": 1, "memory": "much"}, "p.json: host: field 'memory' 'much'"),
        ({"d2h": 1, "latency": "-3us"}, "p.json: host: field 'latency'"),
        ({"d2h": 1, "rate": 3}, "p.json: host: field 'rate' is unknown \\(one of latency, d2h, h2d,"),
    ],
)
def test_wrong_host_links_are_named(tmp_path: Path, said: dict[str, Any], line: str) -> None:
    PROFILE.save(tmp_path / "p.json")
    body = {**json.loads((tmp_path / "p.json").read_text()), "host": said}
    with pytest.raises(BadInput, match=line):
        typed(tmp_path, body)


def test_k_is_the_papers() -> None:
    """PipeOffload: k = 10 / (3(6h + s)) · B_compute / B_copy, for 20 bsh bytes of a layer of bsh(72h + 12s) FLOPs and one
    stream for both directions. Figure 1, 220 TFLOP/s and 15 GB/s, its column of s = 4k; for longer sequences the figure
    prints less than its formula gives."""
    s, figure = 4096, {4096: 1.70, 5120: 1.40, 6144: 1.19, 7168: 1.03, 8192: 0.92, 10240: 0.74}
    for h, printed in figure.items():
        k = 10 / (3 * (6 * h + s)) * 220e12 / 15e9
        assert k == pytest.approx(printed, abs=0.01)
        work = s * h * (72 * h + 12 * s) / 220e6  # µs
        layer = Layer("block", work / 3, work / 3, work / 3, 2 * work / 3, 20 * s * h, 0, 0, 8)
        host = HostLink(0.0, 15_000.0, 15_000.0, 15_000.0, 15_000.0, shared_bus=1)
        profile = replace(PROFILE, layers=(layer,) * 8, host=host)
        assert copy_ratio(Step(4, 8, "vee", offload="half"), profile) == pytest.approx(k, rel=1e-3)
        two = replace(profile, host=replace(host, shared_bus=2))
        assert copy_ratio(Step(4, 8, "vee"), two) == pytest.approx(2 * k, rel=1e-3)
        both = replace(profile, host=replace(host, shared_bus=0))
        assert copy_ratio(Step(4, 8, "vee"), both) == pytest.approx(k / 2, rel=1e-3)
    assert copy_ratio(Step(4, 8), replace(PROFILE, host=None)) is None
    empty = replace(PROFILE, layers=tuple(replace(one, held_until_B=0, held_until_W=0) for one in LAYERS))
    assert copy_ratio(Step(4, 8), empty) is None
