"""What is trained may change between steps, as in usual fine-tuning; what cannot change is said in one line."""

from __future__ import annotations

import pytest

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow
JOBS = "tests.support.exec_jobs_unfrozen"


@pytest.mark.parametrize(("placement", "split"), [((0, 1), "layers"), ((0, 1), "graph"), ((0, 0), "layers")])
def test_layers_are_frozen_and_unfrozen_between_steps(placement: tuple[int, ...], split: str) -> None:
    argument = {"placement": placement, "split": split}
    assert max(on_ranks(1 + max(placement), f"{JOBS}:phases", argument)) < 1e-12


@pytest.mark.parametrize(
    ("how", "rank", "text"),
    [
        ("middle", 1, "needs a gradient, unlike before: requires_grad of 2.weight and 3 more changed; make a new Pipeline"),
        ("data", 0, "needs no gradient, unlike before: whether it does depends on the data or on other ranks' parameters"),
        (
            "no_grad",
            0,
            "step: torch makes no gradients here (no_grad, inference_mode): call evaluate or forward in its place",
        ),
        ("inference_mode", 0, "step: torch makes no gradients here (no_grad, inference_mode): call evaluate or forward"),
    ],
)
def test_what_a_step_cannot_do_is_one_line(how: str, rank: int, text: str) -> None:
    said = on_ranks(3, f"{JOBS}:refused", how)
    assert text in said[rank]
    assert all(one and "\n" not in one for one in said)
