"""Clusters: data sheets, files, and what is wrong with one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve.planner import CLUSTERS, Cluster, cluster_by_name
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
    if cluster.name in devices:  # the profiler's estimates are by the same sheets
        one = devices[cluster.name]
        assert (cluster.peak, cluster.hbm, cluster.memory) == (one.half * 1e12, one.bandwidth * 1e3, one.memory * 1e9)
        assert cluster.node == one.node[0]
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def test_a_typed_cluster_may_say_units(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(TYPED))
    cluster = Cluster.load(path)
    assert (cluster.source, cluster.memory, cluster.hbm, cluster.launch) == ("given", 80 * 2**30, 2_039_000, 300)
    assert (cluster.inside.latency, cluster.between.bytes_per_us, cluster.overlap) == (30, 100_000, 0)
    assert replace(cluster, name="x").title == "x (given)"


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
