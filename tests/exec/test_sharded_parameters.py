"""Sharded parameters (FSDP2): two pipelines of two ranks each, and the gradients of the whole batch in one process."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_jobs_sharded import TRIALS
from ..support.exec_ranks import jobs_on
from ..support.trials import too_far

pytestmark = pytest.mark.slow

JOBS = ["gradients", "clipped", "mixed", "refused", "memories", "emulated", "private_names"]
ALL_OR_NONE = "is not sharded, but layer {} is: call fully_shard on every layer of a stage, or on none"
OWN_MESH = "stages of the same pipeline: give fully_shard a mesh of the ranks with this stage"


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return jobs_on(4, "tests.support.exec_jobs_sharded", dict.fromkeys(JOBS) | {"trainings": folder})


def test_gradients_are_those_of_the_whole_batch(four: dict[str, list[Any]]) -> None:
    """Shards of unequal size, frozen and unused parameters, dropout, tied ones, replicas; whatever schedule and split."""
    assert too_far(four["gradients"], 1e-12) == {}
    for rank, found in enumerate(four["gradients"]):
        assert found.keys() == TRIALS.keys()
        assert all(one["sharded"] for one in found.values())
        assert (found["replicas"]["place"], found["tied"]["place"]) == (rank, rank % 2)


def test_optimizers_and_scalers_see_the_mean(four: dict[str, list[Any]]) -> None:
    assert too_far(four["trainings"], 1e-10) == {}
    assert [one["sharded"] for rank in four["trainings"] for one in rank.values()] == [True] * 8


def test_clipping_is_by_the_norm_of_the_whole_model(four: dict[str, list[Any]]) -> None:
    for rank in four["clipped"]:
        assert rank["norm"] == pytest.approx(rank["right"], rel=1e-12)
        assert rank["worst"] <= 1e-12


def test_mixed_precision_adds_up_in_the_reduction_type(four: dict[str, list[Any]]) -> None:
    """Adding up in bfloat16 would be off by 2⁻⁹ or so."""
    assert max(max(rank) for rank in four["mixed"]) <= 1e-4


def test_what_does_not_fit_is_one_line(four: dict[str, list[Any]]) -> None:
    """Ranks 0 and 1 have stage 0 of the two pipelines, ranks 2 and 3 have stage 1."""
    for rank, said in enumerate(four["refused"]):
        s, first, here = rank // 2, rank // 2 * 2, "0, 1" if rank < 2 else "2, 3"
        where = f"rank {s}, stage {s}: layer"
        some, two_ways, world, replicas, late, shapes, as_one = said
        assert some == f"{where} {first + 1}'s never {ALL_OR_NONE.format(first)}"
        assert two_ways == f"{where} {first + 1} is sharded over ranks 0, 1, 2, 3, but layer {first} over ranks {here}"
        assert world.startswith(f"{where} {first} is sharded over ranks 0, 1, 2, 3, but rank ")
        assert world.endswith(OWN_MESH)
        assert replicas.startswith(f"{where} {first} is sharded by FSDP, and replicas would average its gradients again")
        assert as_one == f"{where} {first}: fully_shard wrapped several modules as one: call it on each of them"
        assert late.startswith("PostValidated: parameters are sharded by FSDP")
        assert shapes.endswith(
            f"stage 1: it is sharded with rank {3 if rank in (0, 2) else 2}, whose schedule, layers or mesh differ"
        )


def test_memory_has_what_passes_gather_and_reduce(four: dict[str, list[Any]]) -> None:
    for rank in four["memories"]:
        for one in rank:
            assert one["peak"] == pytest.approx(one["predicted"], rel=0.03)
            assert one["peak"] >= 2 * one["weight"]


def test_passes_beside_computing_take_their_devices_time(four: dict[str, list[Any]]) -> None:
    """Who waits for a gather begins when it has ended on its device."""
    for rank in four["emulated"]:
        assert len(rank) == 20
        for share, early in rank:
            assert share == pytest.approx(1.0)
            assert early <= 0


def test_private_names_of_fsdp(four: dict[str, list[Any]]) -> None:
    assert four["private_names"] == [[]] * 4
