"""Sharded vocabularies on gloo ranks."""

from __future__ import annotations

import pytest

from ..support.exec_jobs_vocabulary import CASES
from ..support.exec_ranks import on_ranks

LIMITS = {"float32": 1e-6, "autocast": 5e-2}


def tried(names: list[str]) -> None:
    for rank in on_ranks(3, "tests.support.exec_jobs_vocabulary:cases", names, timeout=120.0):
        wrong = {name: worst for name, worst in rank.items() if not worst <= LIMITS.get(name, 1e-12)}
        assert not wrong
        assert list(rank) == names


def test_loss_and_gradients_are_those_of_the_unsplit_model() -> None:
    tried([one.name for one in CASES if one.split == "layers"])


@pytest.mark.slow
def test_graphs_split_what_is_left_of_the_ends() -> None:
    tried([one.name for one in CASES if one.split != "layers"])
