"""Checkpoints and clipping where a rank lacks an optimizer that others have, or has nothing to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.exec_ranks import on_ranks
from ..support.trials import too_far

pytestmark = pytest.mark.slow
JOBS = "tests.support.exec_jobs_lacking"


Jobs = dict[str, list[Any]]


def of_two_optimizers(folder: Path, ranks: int, resume: bool, *without: str) -> tuple[str, dict[str, Any]]:
    return "two_optimizers", {"ranks": ranks, "folder": str(folder), "resume": resume, "without": without}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def two(folder: Path) -> Jobs:
    """What each job gave on each of two ranks, in one launch."""
    jobs = {
        "saved": of_two_optimizers(folder, 2, False),
        "again": of_two_optimizers(folder, 2, True),
        "left": of_two_optimizers(folder, 2, True, "matrices"),
        "nothing": ("nothing_trained", str(folder)),
        "none": ("no_optimizer", None),
        "tied": ("tied_parameters", None),
    }
    ranks = on_ranks(2, JOBS, list(jobs.values()))
    return {name: [rank[i] for rank in ranks] for i, name in enumerate(jobs)}


def test_each_rank_saves_and_loads_the_optimizers_that_it_has(two: Jobs, folder: Path) -> None:
    saved, again, left = two["saved"], two["again"], two["left"]
    assert [one["names"] for one in saved] == [["vectors"], ["vectors", "matrices"]]
    assert [one["losses"] for one in again] == [one["losses"] for one in saved]
    assert [one["said"] for one in again] == [[], []]  # rank 0 leaves nothing that another rank loads
    ((alone,),) = on_ranks(1, JOBS, [of_two_optimizers(folder, 1, True)])
    assert alone["losses"] == pytest.approx(saved[0]["losses"], rel=1e-11)
    assert left[0]["said"][0].endswith("it has 'matrices' too, which is not loaded")
    assert left[0]["losses"] != saved[0]["losses"]


def test_clipping_where_a_rank_trains_nothing(two: Jobs) -> None:
    """Its optimizer has its frozen parameters, or it has none; gradients are clipped before the step or validated late."""
    front, back = two["nothing"]
    assert too_far([front, back], 1e-11) == {}
    for name, one in front.items():
        other, count = back[name], 2 if "again" in name else 4
        assert one["seen"] == other["seen"]
        assert len({row[0] for row in one["seen"]}) == count
        assert other["said"] == []
        (said,) = one["said"]
        assert said.startswith("rank 0 trains none of its parameters. Of trained ones alone there is no optimizer to make")
    assert len(front) == 8


def test_a_rank_that_trains_needs_an_optimizer(two: Jobs) -> None:
    assert two["none"] == [
        f"PostValidated: rank {rank} trains parameters, so it needs an optimizer, not None" for rank in range(2)
    ]


def test_a_tied_parameter_has_the_gradient_of_all_ranks_that_use_it(two: Jobs) -> None:
    """None where no rank does; and a sum waits for a tied stage without a pass C. Bits are the first rank's."""
    ranks = two["tied"]
    assert too_far(ranks, 1e-15) == {}
    assert [rank["gradients"]["bits"] for rank in ranks] == [[0], [0]]
    assert [rank["gradients"]["made"] for rank in ranks] == [[f"{i}.large", f"{i}.row"] for i in range(2)]
