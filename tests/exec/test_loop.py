"""The rest of a training loop, on gloo ranks: clipping, loss scaling, batches that do not split, evaluation."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_jobs_loop import TRAININGS, TRIALS
from ..support.exec_ranks import on_ranks
from ..support.trials import too_far

pytestmark = pytest.mark.slow

Jobs = dict[str, list[Any]]


JOBS = "tests.support.exec_jobs_loop"
PLAIN = ("clipped", "nonfinite", "warned", "wrong_sizes", "refusals", "own_random", "evaluated", "wrong_evaluations")
MORE = {
    "tried": ("tried", f"{JOBS}:TRIALS"),
    "evaluating": ("between_steps", True),
    "training alone": ("between_steps", False),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    """What each job gave on each of two ranks, in one launch."""
    jobs = {name: (name, None) for name in PLAIN} | MORE | {"trained": ("trained", str(tmp_path_factory.mktemp("none")))}
    ranks = on_ranks(2, JOBS, list(jobs.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(jobs)}


def test_clipping_is_that_of_one_process(two: Jobs) -> None:
    first, second = two["clipped"]
    assert [one["norm"] for one in first] == [one["norm"] for one in second]
    for one in (*first, *second):
        assert one["norm"] == pytest.approx(one["right"], rel=1e-12)
        assert one["worst"] < 1e-12


def test_a_nan_anywhere_is_seen_everywhere_and_lbfgs_is_refused(two: Jobs) -> None:
    for rank in two["nonfinite"]:
        assert rank["nan"] == [True, True]
        assert rank["said"] == [
            "clip_grad_norm_: the norm of the gradients is nan",
            "clip_grad_norm_: max_norm 1 and norm_type -1 must be positive",
            "LBFGS: it steps by products of all gradients, and a rank has its own: take another optimizer",
        ]


def test_torch_clipping_is_warned_of_once_and_nothing_else(two: Jobs) -> None:
    for rank in two["warned"]:
        (said,) = rank.pop("torch's")
        assert said.startswith("exec_jobs_loop.py: ")  # where the user's line is
        assert "pipeline.clip_grad_norm_(max_norm)" in said
        assert rank == {name: [] for name in ("optimizer", "value", "scaled", "unscaled", "ours", "again")}


def test_every_row_counts_alike_also_in_microbatches_of_sizes(two: Jobs) -> None:
    assert [rank.keys() for rank in two["tried"]] == [TRIALS.keys()] * 2
    assert too_far(two["tried"], 1e-12) == {}
    split, even, _ = two["wrong_sizes"][0]
    assert "(7, 8) does not split into microbatches of 1,3,2 rows" in split
    assert "have other rows than the schedule's sizes: 2 of 1, 2 of 3, 2 of 2" in even
    assert {rank[2] for rank in two["wrong_sizes"]} == {"step: uneven: the schedule says how large microbatches are: 1,3,2"}


def test_all_ranks_decide_of_a_scaled_step(two: Jobs) -> None:
    """Losses are not scaled, with and without post-validation; a scaler unscales in float32."""
    assert too_far(two["trained"], 1e-6) == {}
    for name in TRAININGS:
        scales = [row[-1] for row in two["trained"][0][name]["seen"]]
        assert scales[2] == scales[1] / 2  # the inf on rank 1 halved it on all
        assert len(set(scales)) > 2


def test_what_makes_no_sense_is_refused(two: Jobs) -> None:
    for rank in two["refusals"]:
        alone, lacking, split, empty, copied = rank
        assert "GradScaler looks for inf on each rank alone: take torch.distributed.fsdp" in alone
        assert "its process group lacks rank" in lacking
        assert "does not split into 4 microbatches of equal size: pass uneven=True, or a list of microbatches" in split
        assert "has no rows" in empty
        assert copied == "a Pipeline cannot be copied: copy its `module` (as AveragedModel(pipeline.module) does)"


def test_a_step_leaves_the_loop_its_random_numbers(two: Jobs) -> None:
    assert two["own_random"] == [True, True]


def test_evaluation_is_that_of_one_process(two: Jobs) -> None:
    """On a tied parameter, a V shape, chunks and both directions, for any number of rows."""
    assert len(two["evaluated"][0]) == 20
    for one in (*two["evaluated"][0], *two["evaluated"][1]):
        assert one["loss"][0] == pytest.approx(one["loss"][1], rel=1e-12)
        assert one["there"]
        assert max(one["outputs"]) < 1e-12
        assert one["left"] < 200  # bytes: an activation of one row has 1,024
        assert one["live"] == 0
        assert not one["grad"]
        assert not one.get("touched")
        assert one.get("listed", [[2, 8], [1, 5]]) == [[2, 8], [1, 5]]
    assert len(two["evaluated"][0][0]["outputs"]) + len(two["evaluated"][1][0]["outputs"]) == 3


def test_evaluation_changes_no_bit_of_training(two: Jobs) -> None:
    """Dropout, running statistics, gradients that wait for their optimizer, and steps that are validated late."""
    found, right = two["evaluating"], two["training alone"]
    for one, other in zip(found, right, strict=True):
        assert one["losses"] == other["losses"]
        assert one["bits"] == other["bits"]
        assert one["training"]
        assert one["seen"][::2] == one["seen"][1::2]  # nothing random
    assert found[0]["seen"] == found[1]["seen"]


def test_all_ranks_refuse_an_evaluation_together(two: Jobs) -> None:
    first, second = two["wrong_evaluations"]
    said = [
        "inputs: needed here",
        "inputs and targets: 2 and 4 microbatches: they must be as many",
        "inputs: give the whole batch, as a tensor or as a list of microbatches",
        "microbatches: at least 1 is needed, got 0",
        "True",  # and then one that works
    ]
    assert first == said
    assert second == [f"rank 0: {said[0]}", said[1], f"rank 0: {said[2]}", f"rank 0: {said[3]}", said[4]]
