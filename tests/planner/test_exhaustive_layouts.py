"""Bounds of layouts of the cost model, with everything that a layout may have, against exhaustive search over partitions and
schedules."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from zbsolve import Infeasible, Link
from zbsolve.planner import CLUSTERS, Cluster, Layout, Shape, layout_profile
from zbsolve.planner.bounds.layout_rules import NEVER, pipeline_bounds
from zbsolve.planner.candidate import step_of
from zbsolve.planner.costs.rank_costs import costs_of, least_bytes
from zbsolve.planner.layout import NO_OFFLOAD, SHARDED, table_of
from zbsolve.planner.space import layouts

from ..support.exact_streams import optimum
from ..support.partitions import partitions

A100 = CLUSTERS["a100"]
SEEDS = 14  # layouts of each
MUCH = 10  # times the least memory that a layout needs


def random_layout(what: str, seed: int) -> tuple[Shape, Cluster, Layout, tuple[int, int]]:
    """A small model, a cluster on which now launches, now products, now copies or exchanges take long, a layout of few
    passes that has what is asked for, and bytes a device: below the least that any needs, and above."""
    rng = np.random.default_rng(seed)
    sizes = 256 * int(rng.integers(1, 5)), 8, int(rng.integers(1, 4)), int(rng.choice([256, 4096]))
    shape = replace(Shape.gpt(*sizes, int(rng.choice([1024, 51_200]))), tied=bool(seed % 2), gradients=2 + seed % 3)
    launch, host, share = float(rng.choice([0, 3, 300])), float(rng.choice([0, 0, 1500])), rng.choice([0.02, 0.1, 0.3, 1])
    assert A100.copies is not None
    copies = Link(float(rng.choice([0, 10])), A100.copies.bytes_per_us * share)
    replicas = 2 if what in ("replicas", "gathers") else 1
    slower = float(rng.choice([0.003, 0.03, 0.3, 1])) if replicas > 1 else 1.0
    inside = Link(A100.inside.latency, slower * A100.inside.bytes_per_us)
    cluster = replace(A100, launch=launch, host=host, copies=copies, inside=inside)
    table = layouts(shape, 2 * replicas, replicas * int(rng.choice([1, 2])), cluster)
    has = {"offload": table.offload != NO_OFFLOAD, "vocabulary": table.vocabulary == SHARDED, "slices": table.slices > 1}
    has["replicas"] = (table.dp == replicas) & (table.zero < 3) & (table.slices == 1) & ~table.gathers_by_stage
    has["gathers"] = table.gathers_by_stage
    size = table.count * table.slices * table.stages * (1 + (table.vocabulary == SHARDED)) * (1 + (table.offload > 0))
    size = replicas * size  # passes C, or AG and RS
    able = np.flatnonzero(has[what] & (table.pp == 2) & (size <= (12 if what == "gathers" else 8)))
    layout = table.row(int(rng.choice(able)))
    least = int(least_bytes(costs_of(shape, table_of([layout]), cluster), table_of([layout]))[0])
    return shape, cluster, layout, (least - 1, int(least * rng.choice([1.02, 1.1, 1.3, MUCH])))


def least_value(shape: Shape, cluster: Cluster, layout: Layout, memory: int, fused: bool) -> float:
    """The optimum over all partitions and all orders of all streams; infinite where nothing fits."""
    profile, best = layout_profile(shape, layout, cluster), np.inf
    for counts in partitions(shape.stages, layout.stages):
        try:
            found = optimum(step_of(layout, memory, counts, fused).problem(profile))
        except Infeasible:
            continue
        best = min(best, np.inf if found is None else found)
    return best


@pytest.mark.parametrize("what", ["offload", "vocabulary", "slices", "replicas", "gathers"])
@pytest.mark.slow
def test_no_partition_and_no_schedule_is_below_the_bound(what: str) -> None:
    near = 0
    for seed in range(SEEDS):
        shape, cluster, layout, (little, memory) = random_layout(what, seed)
        table = table_of([layout])
        costs = costs_of(shape, table, cluster)
        assert pipeline_bounds(costs, table, little)[0][0] == NEVER
        assert np.isinf(least_value(shape, cluster, layout, little, fused=True))
        bound = int(pipeline_bounds(costs, table, memory)[0][0])
        few = layout.vocabulary != SHARDED and layout.count * layout.slices * layout.stages <= 4
        best = least_value(shape, cluster, layout, memory, fused=seed % 2 == 0 or not few)
        assert (bound == NEVER) <= np.isinf(best)
        assert bound <= best
        near += np.isfinite(best) and bound >= 0.9 * best
    assert near >= SEEDS // 3  # bounds that are always loose prove little
