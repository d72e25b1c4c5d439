"""Estimates of steps, which say what is looked at first."""

from __future__ import annotations

import pytest

from zbsolve import preset
from zbsolve.planner import CLUSTERS, Layout, shape_by_name
from zbsolve.planner.bounds.space_bounds import cheap_bounds
from zbsolve.planner.candidate import unsolved
from zbsolve.planner.estimates import estimated_steps, large_steps, needless_copies, room_on_a_rank
from zbsolve.planner.layout import FULL, FULL_OFFLOAD, LOOP, NONE, SHARDED, SINGLE, VEE, table_of

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
    assert needless_copies(bounds, cluster.memory).tolist() == [False, True]
    assert needless_copies(bounds, 48 << 30).tolist() == [False, False]


def test_steps_of_many_passes_are_large() -> None:
    """A V on 64 ranks in slices has a fifth of a million; one exchange of all shards a slice makes more."""
    many = Layout(dp=32, tp=2, pp=64, chunks=2, placement=VEE, count=128, slices=4)
    fewer = many._replace(slices=2)
    table, cluster = table_of([V, many, fewer, fewer._replace(vocabulary=SHARDED)]), CLUSTERS["a100"]
    bounds = cheap_bounds(shape_by_name("gpt-18.4b"), table, cluster, cluster.memory)
    assert large_steps(bounds).tolist() == [False, True, False, True]


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize(
    ("chunks", "placement", "order", "recompute"),
    [
        (1, SINGLE, "1f1b", NONE),
        (1, SINGLE, "1f1b", FULL),
        (2, LOOP, "interleaved", FULL),
        (2, VEE, "1f1b-v", FULL),
        (5, LOOP, "interleaved", FULL),
    ],
)
def test_the_room_is_that_of_the_step_which_is_solved(
    chunks: int, placement: int, order: str, recompute: int, zero: int
) -> None:
    """Llama 3 70B on 256 H100s: beside activations the fullest rank has states, what is gathered and not reduced, messages,
    and what a pass takes, with ZeRO 3 a block's parameters and gradients too."""
    model, cluster = shape_by_name("llama3-70b"), CLUSTERS["h100"]
    layout = Layout(8, 4, 8, chunks, placement, 1, 16, recompute, 1, zero)
    bounds = cheap_bounds(model, table_of([layout]), cluster, cluster.memory)
    (step,) = unsolved(model, layout, cluster, 1 << 50, (True,))
    memory = step.solved(preset(order, step.problem)).memory()
    kept = bounds.costs.kept.moment[0] * model.layers / 8 / chunks  # of a stage's microbatch
    room = (cluster.memory - sum(memory.values()) + memory["activations"]) / kept
    assert float(room_on_a_rank(bounds, cluster.memory)[0]) == pytest.approx(room, rel=0.04, abs=1)
