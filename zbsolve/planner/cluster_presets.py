"""Clusters by name, from data sheets and assumed shares of them: all of it estimated."""

from __future__ import annotations

import os
from pathlib import Path

from ..layer import Link
from ..util.errors import BadInput
from ..util.text import did_you_mean
from .cluster import Cluster

# Assumptions, not measurements: the priors of `constants.fit`, which replaces them by what measured steps say.
EFFICIENCY = 0.75
TRAFFIC = 1.4
LAUNCH_US = 300.0  # some 30 kernels of a layer's forward, 10 µs each
HOST_US, CONSTANT_US, LATENCY_US = 1500.0, 50_000.0, 30.0
INSIDE_SHARE, BETWEEN_SHARE = 0.6, 0.8  # of a data sheet's bandwidth that collectives reach
ASSUMED = (
    f"data sheet; assumed: matrix products at {EFFICIENCY:.0%} of peak, collectives at {INSIDE_SHARE:.0%} of the bandwidth "
    f"inside a node and {BETWEEN_SHARE:.0%} of it between nodes, {LATENCY_US:g} µs each"
)


def _node(name: str, tflops: float, hbm: float, memory: float, inside: float, between: float, sheet: str) -> Cluster:
    """Nodes of 8 devices. hbm, inside, between: GB/s of a device's memory, of a device to its node in one direction, of a
    node's network in one direction. memory: GB of 10⁹ bytes. sheet: where the numbers are printed."""
    beyond = between * 1e3 * BETWEEN_SHARE
    return Cluster(
        name,
        f"estimated: {ASSUMED}. {sheet}",
        peak=tflops * 1e12,
        hbm=hbm * 1e3,
        memory=int(memory * 1e9),
        node=8,
        inside=Link(LATENCY_US, inside * 1e3 * INSIDE_SHARE),
        between=Link(LATENCY_US, beyond),
        messages=beyond,
        efficiency=EFFICIENCY,
        launch=LAUNCH_US,
        traffic=TRAFFIC,
        host=HOST_US,
        constant=CONSTANT_US,
    )


CLUSTERS = {
    cluster.name: cluster
    for cluster in (
        _node(
            *("a100", 312, 2039, 80, 300, 100),
            "NVIDIA A100 datasheet, SXM 80 GB: BFLOAT16 312, 2,039 GB/s, NVLink 600 GB/s both directions; four cards of 200 "
            "Gbit/s a node (DGX A100 has eight)",
        ),
        _node(
            *("h100", 989.4, 3350, 80, 450, 400),
            "NVIDIA H100 datasheet, SXM: BFLOAT16 1,979 with sparsity, half of it dense, 80 GB, 3.35 TB/s, NVLink 900 GB/s "
            "both directions; DGX H100: eight cards of 400 Gbit/s",
        ),
        _node(
            *("h200", 989.4, 4800, 141, 450, 400),
            "NVIDIA H200 datasheet, SXM: BFLOAT16 1,979 with sparsity, half of it dense, 141 GB, 4.8 TB/s, NVLink 900 GB/s "
            "both directions; DGX H200: eight cards of 400 Gbit/s",
        ),
        _node(
            *("b200", 2250, 8000, 180, 900, 400),
            "NVIDIA DGX B200 datasheet, an eighth of it: BFLOAT16 4.5 PFLOP/s with sparsity, half of it dense, 180 GB, 8 "
            "TB/s, NVLink 1.8 TB/s both directions; eight cards of 400 Gbit/s",
        ),
        _node(
            *("mi300x", 1307.4, 5300, 192, 448, 400),
            "AMD Instinct MI300X datasheet: bfloat16 1,307.4, 192 GB, 5.3 TB/s, seven Infinity Fabric links of 128 GB/s "
            "both directions; eight cards of 400 Gbit/s a node",
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
    """A preset. Raises BadInput with near names."""
    if name in CLUSTERS:
        return CLUSTERS[name]
    raise BadInput(f"cluster '{name}': unknown{did_you_mean(name, CLUSTERS)} (clusters: {', '.join(CLUSTERS)}, or a file)")
