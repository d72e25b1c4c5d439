"""The rest of a training loop, on gloo ranks: clipping, loss scaling, batches that do not split."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow

Jobs = dict[str, list[Any]]


@pytest.fixture(scope="module")
def two() -> Jobs:
    """What each job gave on each of two ranks."""
    jobs = {
        "clipped": None,
        "nonfinite": None,
        "warned": None,
        "uneven": None,
        "scaled": False,
        "refusals": None,
        "own_random": None,
    }
    found = on_ranks(2, "tests.support.exec_jobs_loop:several", list(jobs.items()))
    return {name: [one[i] for one in found] for i, name in enumerate(jobs)}


def test_clipping_is_that_of_one_process(two: Jobs) -> None:
    first, second = two["clipped"]
    assert [one["norm"] for one in first] == [one["norm"] for one in second]
    for one in (*first, *second):
        assert one["norm"] == pytest.approx(one["right"], rel=1e-12)
        assert one["worst"] < 1e-12


def test_a_nan_anywhere_is_seen_everywhere(two: Jobs) -> None:
    for rank in two["nonfinite"]:
        assert rank["nan"] == [True, True]
        assert rank["said"] == [
            "clip_grad_norm_: the norm of the gradients is nan",
            "clip_grad_norm_: max_norm 1 and norm_type -1 must be positive",
        ]


def test_torch_clipping_is_warned_of_once_and_nothing_else(two: Jobs) -> None:
    for rank in two["warned"]:
        (said,) = rank.pop("torch's")
        assert said.startswith("exec_jobs_loop.py: ")  # where the user's line is
        assert "pipeline.clip_grad_norm_(max_norm)" in said
        assert rank == {name: [] for name in ("optimizer", "value", "scaled", "unscaled", "ours", "again")}


def test_every_row_counts_alike(two: Jobs) -> None:
    assert len(two["uneven"][0]) == 16
    for one in (*two["uneven"][0], *two["uneven"][1]):
        assert one["loss"] == pytest.approx(one["right"], rel=1e-12)
        assert one["worst"] < 1e-12


def as_one_process(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["losses"] == pytest.approx(rank["right"], rel=1e-6)  # so they are not scaled
        assert rank["worst"] < 1e-6
        for ours, right, norm, right_norm in rank["scales"]:
            assert ours == right
            assert norm == pytest.approx(right_norm, rel=1e-6, nan_ok=True)
    scales = [row[0] for row in ranks[0]["scales"]]
    assert scales[2] == scales[1] / 2  # the inf on rank 1 halved it on all
    assert len(set(scales)) > 2


def test_all_ranks_decide_of_a_scaled_step(two: Jobs) -> None:
    as_one_process(two["scaled"])


def test_loss_scaling_with_post_validation() -> None:
    as_one_process(on_ranks(2, "tests.support.exec_jobs_loop:scaled", True))


def test_what_makes_no_sense_is_refused(two: Jobs) -> None:
    for rank in two["refusals"]:
        alone, lacking, split, empty = rank
        assert "GradScaler looks for inf on each rank alone: take torch.distributed.fsdp" in alone
        assert "its process group lacks rank" in lacking
        assert "does not split into 4 microbatches of equal size: pass uneven=True, or a list of microbatches" in split
        assert "has no rows" in empty


def test_a_step_leaves_the_loop_its_random_numbers(two: Jobs) -> None:
    assert two["own_random"] == [True, True]
