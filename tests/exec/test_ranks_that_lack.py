"""Checkpoints and clipping where a rank lacks an optimizer that others have, or has nothing to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ..support.exec_ranks import on_ranks

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


@pytest.mark.parametrize("validated", [False, True])
@pytest.mark.parametrize("how", ["frozen", "none"])
def test_clipping_where_a_rank_trains_nothing(how: str, validated: bool, tmp_path: Path) -> None:
    argument = {"how": how, "validated": validated, "folder": str(tmp_path)}
    front, back = on_ranks(2, f"{JOBS}:nothing_trained", argument)
    assert front["losses"] == back["losses"] == pytest.approx(front["right"], rel=1e-11)
    assert len(set(front["losses"])) == 4
    assert back["said"] == []
    (said,) = front["said"]
    assert said.startswith("rank 0 trains none of its parameters. Of trained ones alone there is no optimizer to make here")


def test_a_rank_that_trains_needs_an_optimizer() -> None:
    said = on_ranks(2, f"{JOBS}:no_optimizer")
    assert said == [f"PostValidated: rank {rank} trains parameters, so it needs an optimizer, not None" for rank in range(2)]


def test_a_shared_parameter_has_a_gradient_where_any_rank_uses_it() -> None:
    for rank in on_ranks(2, f"{JOBS}:tied_gradients"):
        assert rank["small"] is None
        assert rank["large"] is not None
        assert rank["large"] <= 1e-15
        assert rank["bits"] == 0  # the first rank's


def test_a_sum_waits_for_a_tied_stage_without_a_pass_c() -> None:
    """2W1 comes behind 0C1, which would sum the gradient before it."""
    first = ["0F0", "1F1", "1B1", "0B0", "0W0", "1W1"]
    second = ["0F1", "1F0", "2F0", "2B0", "1B0", "2F1", "2B1", "0B1", "1W0", "0W1", "2W0", "2W1"]
    order = {"compute:0": first, "compute:1": second, "comm:0": ["0C0", "1C0"], "comm:1": ["0C1", "1C1"]}
    assert max(on_ranks(2, f"{JOBS}:tied_beyond_sums", order)) <= 1e-15
