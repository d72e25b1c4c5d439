"""Clusters: data sheets, files, and what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import Layer, Link, Profile
from zbsolve.cli import main
from zbsolve.planner import CLUSTERS, Cluster, cluster_by_name, with_links_of
from zbsolve.planner.cluster import BETWEEN_SHARE, INSIDE_SHARE
from zbsolve.util.errors import BadInput

TYPED: dict[str, Any] = {
    "zbsolve": "cluster",
    "version": 1,
    "peak": 312e12,
    "hbm": "2039GB/s",
    "memory": "80GiB",
    "node": 8,
    "inside": {"latency": "30us", "bandwidth": "300GB/s"},
    "between": {"latency": 40, "bandwidth": "800Gbit/s"},
    "messages": "100GB/s",
    "efficiency": 0.7,
    "launch": "0.3ms",
    "traffic": 1.2,
    "host": "1ms",
    "constant": "50ms",
}


@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=list(CLUSTERS))
def test_presets_are_the_data_sheets_and_say_so(cluster: Cluster, tmp_path: Path) -> None:
    devices = pytest.importorskip("profiler.devices").DEVICES
    assert cluster.source.startswith("estimated: ")
    one = devices[cluster.name]  # the profiler's estimates are by the same sheets
    assert (cluster.peak, cluster.hbm, cluster.memory) == (one.half * 1e12, one.bandwidth * 1e3, one.memory * 1e9)
    assert cluster.node == one.node[0]
    links = 7 if cluster.name == "mi300x" else 1  # a collective has all of them, a message one
    cards = 4 if cluster.name == "a100" else 8  # of the measured cluster, not of a DGX
    assert cluster.inside.bytes_per_us == links * one.link * 1e3 * INSIDE_SHARE
    assert cluster.between.bytes_per_us == cards * one.network * 1e3 * BETWEEN_SHARE
    copies = pytest.importorskip("profiler.devices").host_link(one)
    assert cluster.copies == Link(copies.latency, copies.d2h_both)
    assert cluster.host_memory == (None if copies.memory is None else copies.memory // cluster.node)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_typed_cluster_may_say_units(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(TYPED))
    cluster = Cluster.load(path)
    assert (cluster.source, cluster.memory, cluster.hbm, cluster.launch) == ("given", 80 * 2**30, 2_039_000, 300)
    assert (cluster.inside.latency, cluster.between.bytes_per_us, cluster.overlap) == (30, 100_000, 0)
    assert replace(cluster, name="x").title == "x (given)"
    assert (cluster.copies, cluster.host_memory) == (None, None)
    host = {"copies": {"latency": "10us", "bandwidth": "20GB/s"}, "host_memory": "200GB"}
    path.write_text(json.dumps({**TYPED, **host}))
    cluster = Cluster.load(path)
    assert (cluster.copies, cluster.host_memory) == (Link(10, 20_000), 200 * 10**9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"between": None}, "field 'between' is missing"),
        ({"inside": {"latency": 3}}, "inside: field 'bandwidth' is missing"),
        ({"inside": {"latency": 3, "bandwidth": "fast"}}, "inside: field 'bandwidth' 'fast': not a bandwidth"),
        ({"inside": {"latency": 3, "bandwidth": "0GB/s"}}, "inside: field 'bandwidth' is 0"),
        ({"peak": 0}, "field 'peak' is 0"),
        ({"node": 0}, "field 'node' is 0"),
        ({"memory": 0}, "field 'memory' is 0"),
        ({"overlap": 2}, "field 'overlap' is 2"),
        ({"host": "soon"}, "field 'host' 'soon': not a time"),
        ({"copies": {"latency": 3}}, "copies: field 'bandwidth' is missing"),
        ({"host_memory": 0}, "field 'host_memory' is 0"),
        ({"source": "heard"}, "field 'source' is 'heard'"),
        ({"speed": 3}, "field 'speed' is unknown"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(change: dict[str, Any], said: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps({name: one for name, one in {**TYPED, **change}.items() if one is not None}))
    with pytest.raises(BadInput) as error:
        Cluster.load(path)
    assert f"{path}: {said}" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_misspelt_name_has_a_hint() -> None:
    assert cluster_by_name("h100") is CLUSTERS["h100"]
    with pytest.raises(BadInput, match="cluster 'h10': unknown; did you mean h100"):
        cluster_by_name("h10")


def test_links_of_a_profile(tmp_path: Path) -> None:
    """By the largest all-reduce inside a node and beyond one; a ring's time is what was measured."""
    rows = [
        {"kind": "all_reduce", "ranks": ranks, "nodes": nodes, "latency": 10.0 * ranks, "bytes_per_us": 1e3 / ranks}
        for ranks, nodes in ((2, 1), (8, 1), (16, 2))
    ]
    other = {**rows[1], "kind": "broadcast", "ranks": 64, "nodes": 8}
    layer = Layer("l", 1.0, 1.0, 1.0, 2.0, 1, 1, 1, 1)
    profile = Profile("measured", "m", (layer,), Link(5.0, 77.0), 4.0, None, {"collectives": [*rows, other]}, {})
    base = CLUSTERS["a100"]
    found = with_links_of(profile, base)
    links = {"inside": Link(80.0, 14 / 8 * 125.0), "between": Link(160.0, 30 / 16 * 62.5), "messages": 77.0}
    assert found == replace(base, source=found.source, error=None, **links)  # nobody held other links against steps
    assert "inside nodes (8 ranks) and between nodes (16 ranks) measured; else estimated: " in found.source
    path, kept = tmp_path / "p.json", tmp_path / "c.json"
    profile.save(path)
    assert main(["plan", "--cluster", f"a100,{path}", "-o", str(kept)]) == 0
    assert Cluster.load(kept) == found
    one = with_links_of(replace(profile, facts={"collectives": rows[2:]}), base)
    assert (one.inside, one.between) == (base.inside, found.between)
    for facts, said in (
        ({}, "p.json: facts: 'collectives' is missing: profile under torchrun writes it"),
        ({"collectives": [other]}, "p.json: facts: 'collectives' has no all_reduce"),
        ({"collectives": [{**rows[0], "bytes_per_us": 0}]}, "'bytes_per_us'"),
    ):
        with pytest.raises(BadInput, match=said):
            with_links_of(replace(profile, facts=facts), base, "p.json")
