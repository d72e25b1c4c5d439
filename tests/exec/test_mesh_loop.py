"""The whole training loop on meshes, against one process: clipping, accumulation, schedules of learning rates, evaluation,
checkpoints that other meshes load."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow

JOBS: list[tuple[dict[str, int], str, list[dict[str, int]]]] = [
    ({"pp": 2, "tp": 2}, "sequence", [{"pp": 4, "tp": 1}, {"pp": 2, "dp": 2}, {"pp": 1, "dp": 2, "tp": 2}]),
    ({"dp": 2, "pp": 2}, "tensor", [{"pp": 2, "tp": 2}]),
    ({"pp": 1, "dp": 2, "tp": 2}, "tensor", [{"pp": 4}]),
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    jobs = [("loops", [folder, JOBS]), ("scaled", None), ("validated_late", None), ("given_all", None)]
    return on_ranks(4, "tests.support.exec_jobs_mesh_loop", jobs)


def test_losses_norms_and_weights_are_those_of_one_process(four: list[list[Any]]) -> None:
    for found in four:
        for job, one in zip(JOBS, found[0], strict=True):
            assert max(one["seen"], one["weights"]) < 1e-9, job
            assert one["norms"] == four[0][0][JOBS.index(job)]["norms"]  # the same bits on all ranks
            assert max(one["norms"]) > 0.2  # it did clip


def test_a_checkpoint_goes_on_to_the_same_bits_and_on_other_meshes(four: list[list[Any]]) -> None:
    for found in four:
        for job, one in zip(JOBS, found[0], strict=True):
            assert one["same"] == [True, True], job
            assert len(one["elsewhere"]) == len(job[2])
            assert max(max(pair) for pair in one["elsewhere"]) < 1e-9, job


def test_an_inf_on_one_rank_skips_the_step_of_all(four: list[list[Any]]) -> None:
    for found in four:
        assert found[1]["weights"] < 1e-6  # a scaler unscales in float32
        assert found[1]["scale"] == 2.0**15
        assert found[1]["said"].startswith("scaler: its process group lacks rank")


def test_late_validation_is_clip_and_step(four: list[list[Any]]) -> None:
    assert [found[2] for found in four] == [{"same": True, "clipped": True}] * 4


def test_forwards_and_whole_state_dicts(four: list[list[Any]]) -> None:
    assert max(max(found[3].values()) for found in four) < 1e-12
