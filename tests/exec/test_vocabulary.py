"""Sharded vocabularies on gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zbsolve.exec.awaits import begins_and_ends
from zbsolve.exec.handlers.table import passes_where

from ..support.exec_jobs_vocabulary import CASES
from ..support.exec_ranks import on_ranks
from ..support.exec_tools import random_schedule
from ..support.vocabulary_problems import random_vocabulary

LIMITS = {"float32": 1e-6, "autocast": 5e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What three ranks tried in one launch."""
    names, folder = [one.name for one in CASES if one.split == "layers"], str(tmp_path_factory.mktemp("checkpoints"))
    return on_ranks(3, "tests.support.exec_jobs_vocabulary:all_of", {"names": names, "folder": folder}, timeout=240.0)


@pytest.mark.parametrize("seed", range(12))
def test_a_rank_that_waits_for_others_in_a_collective_begins_it_last(seed: int) -> None:
    """Else it would wait, in its stream's order, for ranks that come to it after passes that wait for this rank."""
    problem = replace(random_vocabulary(seed, 3, 4), capacity=None)
    schedule = random_schedule(problem, seed, in_order=True)
    (begin, end), p, e = begins_and_ends(schedule), problem.passes, problem.edges
    joins, timeline = np.flatnonzero(passes_where(problem, "joins")), schedule.timeline()
    assert len(joins)
    for row in joins.tolist():
        group = joins[(p.kind[joins] == p.kind[row]) & (p.microbatch[joins] == p.microbatch[row])]
        before = e.before[e.after == row]
        assert timeline.end[before].max(initial=0) <= begin[row] <= timeline.start[row]
        assert end[row] == timeline.end[group].max()
        if (p.rank[before] != p.rank[row]).any():
            assert begin[row] == begin[group].max()


def too_far(differences: dict[str, float]) -> dict[str, float]:
    return {name: worst for name, worst in differences.items() if not worst <= LIMITS.get(name, 1e-12)}


def test_loss_and_gradients_are_those_of_the_unsplit_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["cases"]) >= 12
        assert not too_far(rank["cases"])


def test_evaluations_give_the_loss_of_the_unsplit_model(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert len(rank["evaluated"]) == 8
        assert not too_far(rank["evaluated"])


@pytest.mark.slow
def test_graphs_split_what_is_left_of_the_ends() -> None:
    names = [one.name for one in CASES if one.split != "layers"]
    for rank in on_ranks(3, "tests.support.exec_jobs_vocabulary:cases", names, timeout=240.0):
        assert rank.keys() == set(names)
        assert not too_far(rank)


def test_checkpoints_go_on_with_and_without_shards(found: list[dict[str, Any]]) -> None:
    for rank in found:
        steps = rank["checkpoints"]
        if "two" in steps:
            assert steps["two"][:2] == pytest.approx(steps["three"][2:], rel=1e-12)
            assert steps["again"] == pytest.approx(steps["two"][2:], rel=1e-12)
            assert steps["again norm"] == pytest.approx(steps["two norm"], rel=1e-12)


def test_state_dicts_have_the_whole_models_keys(found: list[dict[str, Any]]) -> None:
    first, *_, last = (rank["checkpoints"] for rank in found)
    assert {"0.position.weight", "0.token.weight", "3.output.weight", "3.output.bias"} <= set(first["keys"])
    assert {"0.token.weight", "3.norm.weight", "3.output.weight"} <= set(last["keys"])
    assert first["shape"] == [11]
    assert first["loaded"]
    assert last["loaded"]


def test_what_shards_cannot_do_is_refused_by_name(found: list[dict[str, Any]]) -> None:
    said = found[0]["refused"]
    assert said["forward"].startswith("forward: the vocabulary is sharded")
    assert said["tied"].startswith("layer 3: its output.weight is sharded over the vocabulary, but tied to layer 0's token")
    assert said["words"] == "vocabulary: 3 shards of 2 words: there must be 1 to 2"
    assert said["loss"].startswith("loss: torch.nn.functional.mse_loss")
    assert said["validated"].startswith("PostValidated: the vocabulary is sharded")
