"""Clusters by name, from data sheets and assumed shares of them: all of it estimated."""

from __future__ import annotations

import os
from pathlib import Path

from ...layer import Link
from ...util.errors import BadInput
from ...util.text import did_you_mean
from .cluster import Cluster

# Assumptions, not measurements: the priors of `constants.fit`, which replaces them by what measured steps say.
EFFICIENCY = 0.75
TRAFFIC = 1.4
LAUNCH_US = 300.0  # some 30 kernels of a layer's forward, 10 µs each
HOST_US, CONSTANT_US, LATENCY_US = 1500.0, 50_000.0, 30.0
COPY_US = 10.0
HOST_BOTH_SHARE, HOST_MEMORY_SHARE = 0.65, 0.8  # of PCIe each way while both run, and of a node's memory, as profiles assume
INSIDE_SHARE, BETWEEN_SHARE = 0.6, 0.8  # of a data sheet's bandwidth that collectives reach
ASSUMED = (
    f"data sheet; assumed: matrix products at {EFFICIENCY:.0%} of peak, collectives at {INSIDE_SHARE:.0%} of the bandwidth "
    f"inside a node and {BETWEEN_SHARE:.0%} of it between nodes, {LATENCY_US:g} µs each; "
    f"copies at {HOST_BOTH_SHARE:.0%} of PCIe each way at once, {COPY_US:g} µs each, into a device's part of "
    f"{HOST_MEMORY_SHARE:.0%} of host memory"
)


def _node(
    name: str,
    tflops: float,
    hbm: float,
    memory: tuple[float, float | None],
    links: tuple[float, float, float],
    sheet: str,
    error: float | None = None,
) -> Cluster:
    """Nodes of 8 devices. hbm: GB/s of a device's memory. memory: GB of 10⁹ bytes, of a device and of a node's host (None:
    no limit). links: GB/s in one direction, of a device to its node, of a node's network, of a device to host memory. sheet:
    where the numbers are printed. error: see `Cluster`."""
    (own, room), (inside, between, pcie) = memory, links
    beyond = between * 1e3 * BETWEEN_SHARE
    return Cluster(
        name,
        f"estimated: {ASSUMED}. {sheet}",
        peak=tflops * 1e12,
        hbm=hbm * 1e3,
        memory=int(own * 1e9),
        node=8,
        inside=Link(LATENCY_US, inside * 1e3 * INSIDE_SHARE),
        between=Link(LATENCY_US, beyond),
        messages=beyond,
        efficiency=EFFICIENCY,
        launch=LAUNCH_US,
        traffic=TRAFFIC,
        host=HOST_US,
        constant=CONSTANT_US,
        error=error,
        copies=Link(COPY_US, pcie * 1e3 * HOST_BOTH_SHARE),
        host_memory=None if room is None else int(room * 1e9 * HOST_MEMORY_SHARE / 8),
    )


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        _node(
            *("a100", 312, 2039),
            (80, 2000),
            (300, 100, 32),
            "NVIDIA A100 datasheet, SXM 80 GB: BFLOAT16 312, 2,039 GB/s, NVLink 600 GB/s and PCIe Gen4 64 GB/s both "
            "directions; four cards of 200 Gbit/s a node (DGX A100 has eight); DGX A100 640 GB: 2 TB system memory; the "
            "eight steps of 2205.05198, Table 5, take 7 to 17 % longer by it than measured",
            error=0.105,
        ),
        _node(
            *("h100", 989.4, 3350),
            (80, 2000),
            (450, 400, 64),
            "NVIDIA H100 datasheet, SXM: BFLOAT16 1,979 with sparsity, half of it dense, 80 GB, 3.35 TB/s, NVLink 900 GB/s "
            "and PCIe Gen5 128 GB/s both directions; DGX H100: eight cards of 400 Gbit/s, 2 TB system memory",
        ),
        _node(
            *("h200", 989.4, 4800),
            (141, 2000),
            (450, 400, 64),
            "NVIDIA H200 datasheet, SXM: BFLOAT16 1,979 with sparsity, half of it dense, 141 GB, 4.8 TB/s, NVLink 900 GB/s "
            "and PCIe Gen5 128 GB/s both directions; DGX H200: eight cards of 400 Gbit/s, 2 TB system memory",
        ),
        _node(
            *("b200", 2250, 8000),
            (180, 2000),
            (900, 400, 64),
            "NVIDIA DGX B200 datasheet, an eighth of it: BFLOAT16 4.5 PFLOP/s with sparsity, half of it dense, 180 GB, 8 "
            "TB/s, NVLink 1.8 TB/s and PCIe Gen5 128 GB/s both directions; eight cards of 400 Gbit/s, 2 TB system memory",
        ),
        _node(
            *("mi300x", 1307.4, 5300),
            (192, None),
            (448, 400, 64),
            "AMD Instinct MI300X datasheet: bfloat16 1,307.4, 192 GB, 5.3 TB/s, seven Infinity Fabric links of 128 GB/s "
            "and PCIe Gen5 128 GB/s both directions; eight cards of 400 Gbit/s a node; host memory without a limit",
        ),
    )
}


def cluster_of(said: Cluster | str | os.PathLike[str]) -> Cluster:
    """A cluster as it is, a preset's name, or a cluster file. Raises BadInput."""
    if isinstance(said, Cluster):
        return said
    name = os.fspath(said)
    known = name in CLUSTERS or not (Path(name).exists() or name.endswith(".json"))
    return cluster_by_name(name) if known else Cluster.load(name)


def cluster_by_name(name: str) -> Cluster:
    """A preset, from `name`. Raises BadInput with near names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    raise BadInput(f"cluster '{name}': unknown{did_you_mean(name, CLUSTERS)} (clusters: {', '.join(CLUSTERS)}, or a file)")
