"""Estimates of steps, which say what is looked at first."""

from __future__ import annotations

from zbsolve.planner import CLUSTERS, Layout, shape_by_name
from zbsolve.planner.bounds.space_bounds import cheap_bounds
from zbsolve.planner.layout import FULL_OFFLOAD, SHARDED, VEE, table_of
from zbsolve.planner.race.estimates import estimated_steps, large_steps, needless_offload

V = Layout(dp=8, pp=8, chunks=2, placement=VEE, count=64, zero=1, vocabulary=SHARDED)  # of 64 devices


def test_a_v_in_slices_is_estimated_to_keep_what_fits() -> None:
    """On eight ranks with room for 3.5 microbatches a V in two slices is among the best layouts: a search finds a step 2 %
    above its bound. Whole microbatches do not fit as known schedules have them."""
    model, cluster = shape_by_name("gpt-39.1b"), CLUSTERS["a100"]
    bounds = cheap_bounds(model, table_of([V, V._replace(slices=2)]), cluster, cluster.memory)
    whole, sliced = estimated_steps(bounds, cluster.memory) / bounds.step
    assert whole > 1.2
    assert sliced < 1.05


def test_offload_is_needless_where_known_schedules_fit() -> None:
    model, cluster = shape_by_name("gpt-18.4b"), CLUSTERS["a100"]
    table = table_of([V, V._replace(offload=FULL_OFFLOAD)])
    bounds = cheap_bounds(model, table, cluster, cluster.memory)
    assert needless_offload(bounds, cluster.memory).tolist() == [False, True]
    assert needless_offload(bounds, 48 << 30).tolist() == [False, False]


def test_steps_of_many_passes_are_large() -> None:
    """A V on 64 ranks in slices has a fifth of a million; one exchange of all shards a slice makes more."""
    many = Layout(dp=32, tp=2, pp=64, chunks=2, placement=VEE, count=128, slices=4)
    fewer = many._replace(slices=2)
    assert large_steps(table_of([V, many, fewer, fewer._replace(vocabulary=SHARDED)])).tolist() == [False, True, False, True]
