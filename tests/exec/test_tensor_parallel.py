"""Tensor and sequence parallelism inside stages: both splits give eager's gradients, and W has all matrices."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow

PLANS = ("tensor", "sequence", "distributed")
# The graph of the sequence's plan: in a pipeline, below, and what it is like.
JOBS = [
    (how, split, (split == "layers") == (how == "tensor"))
    for how in PLANS
    for split in ("layers", "graph")
    if (how, split) != ("sequence", "graph")
]


@pytest.fixture(scope="module")
def two() -> list[list[Any]]:
    """What each job gave on each of two ranks."""
    jobs = [("without_pipeline", JOBS), ("graphs", None), ("handed_on", "layers"), ("handed_on", "graph")]
    return on_ranks(2, "tests.support.exec_jobs_tensor", jobs)


def test_gradients_are_those_of_eager_mode_and_of_one_process(two: list[list[Any]]) -> None:
    for found in two:
        for job, one in zip(JOBS, found[0], strict=True):
            assert max(one["eager"], one["plain"]) < 1e-12, job
            assert one["elsewhere"] == [], job
            assert (one["partial"] > 0) == (job[0] != "tensor"), job  # the norms' under sequence parallelism


def test_W_has_every_matrix_and_needs_no_other_rank(two: list[list[Any]]) -> None:
    for found in two:
        for job, one in zip(JOBS, found[0], strict=True):
            assert one["left"] == one["matrices"] == 14, job
            assert one["moved"] > 3, job
            if job[0] == "tensor" or job[1] == "layers":  # else the graph of the words' layer, which has no B, gathers there
                assert one["collectives"] == 0, job


def test_equal_blocks_share_graphs_and_collectives_are_in_F_and_B(two: list[list[Any]]) -> None:
    for found in two:
        one = found[1]
        assert one["same"]
        assert not one["other"]
        assert one["products"] == 7
        assert min(one["collectives"][kind] for kind in "FB") > 0
        assert one["collectives"]["W"] == 0


def test_distributed_tensors_are_handed_on_with_others(two: list[list[Any]]) -> None:
    for found in two:
        for one in found[2:]:
            assert max(one["inputs"], one["weights"]) < 1e-13
            assert one["kinds"] == ["DTensor", "DTensor"]


def test_a_pipeline_of_tensor_parallel_stages_is_right() -> None:
    jobs = [("tensor", "layers"), ("sequence", "graph")]
    for found in on_ranks(4, "tests.support.exec_jobs_tensor:with_pipeline", jobs):
        for job, one in zip(jobs, found, strict=True):
            assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-12), job
            assert max(one["eager"], one["plain"]) < 1e-12, job
            assert one["elsewhere"] == [], job
