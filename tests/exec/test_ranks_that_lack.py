"""Checkpoints and clipping where a rank lacks an optimizer that others have, or has nothing to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.exec_ranks import on_ranks
from ..support.trials import too_far

pytestmark = pytest.mark.slow
JOBS = "tests.support.exec_jobs_lacking"


def two(ranks: int, folder: Path, *, resume: bool, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    argument = {"ranks": ranks, "folder": str(folder), "resume": resume, "without": without}
    return on_ranks(ranks, f"{JOBS}:two_optimizers", argument)


def test_each_rank_saves_and_loads_the_optimizers_that_it_has(tmp_path: Path) -> None:
    saved = two(2, tmp_path, resume=False)
    assert [one["names"] for one in saved] == [["vectors"], ["vectors", "matrices"]]
    again = two(2, tmp_path, resume=True)
    assert [one["losses"] for one in again] == [one["losses"] for one in saved]
    assert [one["said"] for one in again] == [[], []]  # rank 0 leaves nothing that another rank loads
    (alone,) = two(1, tmp_path, resume=True)
    assert alone["losses"] == pytest.approx(saved[0]["losses"], rel=1e-11)
    left = two(2, tmp_path, resume=True, without=("matrices",))
    assert left[0]["said"][0].endswith("it has 'matrices' too, which is not loaded")
    assert left[0]["losses"] != saved[0]["losses"]


def test_clipping_where_a_rank_trains_nothing(tmp_path: Path) -> None:
    """Its optimizer has its frozen parameters, or it has none; gradients are clipped before the step or validated late."""
    front, back = ranks = on_ranks(2, f"{JOBS}:nothing_trained", str(tmp_path))
    assert too_far(ranks, 1e-11) == {}
    for name, one in front.items():
        other, count = back[name], 2 if "again" in name else 4
        assert one["seen"] == other["seen"]
        assert len({row[0] for row in one["seen"]}) == count
        assert other["said"] == []
        (said,) = one["said"]
        assert said.startswith("rank 0 trains none of its parameters. Of trained ones alone there is no optimizer to make")
    assert len(front) == 8


def test_a_rank_that_trains_needs_an_optimizer() -> None:
    said = on_ranks(2, f"{JOBS}:no_optimizer")
    assert said == [f"PostValidated: rank {rank} trains parameters, so it needs an optimizer, not None" for rank in range(2)]


def test_a_tied_parameter_has_the_gradient_of_all_ranks_that_use_it() -> None:
    """None where no rank does; and a sum waits for a tied stage without a pass C. Bits are the first rank's."""
    ranks = on_ranks(2, f"{JOBS}:tied_parameters")
    assert too_far(ranks, 1e-15) == {}
    assert [rank["gradients"]["bits"] for rank in ranks] == [[0], [0]]
    assert [rank["gradients"]["made"] for rank in ranks] == [[f"{i}.large", f"{i}.row"] for i in range(2)]
