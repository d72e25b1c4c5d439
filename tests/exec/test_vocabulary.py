"""Sharded vocabularies on gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Schedule, pipeline, solve, verify
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.exec.awaits import begins_and_ends
from zbsolve.exec.base.program import Action, Message, Program
from zbsolve.exec.lowering import lower
from zbsolve.kinds import TABLE

from ..support.exec_jobs_vocabulary import GRAPHS, TRIALS
from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import random_schedule
from ..support.trials import TRIED, too_far
from ..support.vocabulary_problems import random_vocabulary

pytestmark = pytest.mark.slow

LIMITS = {"float32": 1e-6, "autocast": 5e-2}
JOBS = "tests.support.exec_jobs_vocabulary"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three ranks tried in one launch."""
    jobs = {"tried": f"{JOBS}:TRIALS", "refused": None, "evaluated": None}
    return jobs_on(3, JOBS, {**jobs, "checkpoints": str(tmp_path_factory.mktemp("checkpoints"))})


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_begin_a_collective_when_the_last_can(seed: int) -> None:
    """Else it would wait, in its stream's order, for ranks that come to it after passes that wait for this rank."""
    problem = replace(random_vocabulary(seed, 3, 4), capacity=None)
    schedule = random_schedule(problem, seed, in_order=True)
    (begin, end), p, e = begins_and_ends(schedule), problem.passes, problem.edges
    joins, timeline = np.flatnonzero(problem.passes.that(together=True)), schedule.timeline()
    assert len(joins)
    for row in joins.tolist():
        group = joins[(p.kind[joins] == p.kind[row]) & (p.microbatch[joins] == p.microbatch[row])]
        before = e.before[e.after == row]
        assert timeline.end[before].max(initial=0) <= begin[row] <= timeline.end[group].max()
        assert end[row] == timeline.end[group].max()
        assert begin[row] == begin[group].max()


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_ranks_begin_collectives_in_one_order_and_none_waits_for_ever(first: int) -> None:
    """Whatever their kinds, in ample memory and in tight one, by any search: one communicator has one order on all ranks."""
    for seed in range(first, first + 8):
        problem = random_vocabulary(seed, 3, 4)
        schedules = [solve(problem, effort=0.05, prefer=None)]
        if problem.capacity is None:
            schedules.append(random_schedule(problem, seed, in_order=True))
        for schedule in schedules:
            assert finished(lower(schedule))


def test_ranks_that_disagree_are_named() -> None:
    """Rank 0 begins the broadcast of microbatch 1 before the barrier of microbatch 0, rank 1 behind it. One communicator a
    kind allowed that."""
    step = pipeline(1, 2, placement=(0, 1), microbatches=2)
    problem = with_vocabulary(step, Vocabulary(1, 1))
    good = random_schedule(problem, 0, in_order=True)
    orders = {"comm:0": "2VB0 2VB1 2VR0 2VR1", "comm:1": "3VB0 3VR0 3VB1 3VR1"}
    schedule = Schedule(problem, {**good.order, **{stream: tuple(one.split()) for stream, one in orders.items()}})
    (said,) = verify(problem, schedule)
    assert said.rule == "deadlock"
    assert "wait for each other in collectives" in said.text
    with pytest.raises(BadInput, match="wait for each other in collectives"):
        lower(schedule)


def finished(programs: Sequence[Program]) -> bool:
    """Whether all ranks come to their ends where each does its actions in order, waits for messages and for all that it may
    wait for, and the collectives of all ranks go one after the other, each begun by all before it ends."""
    at, over, done = [0] * len(programs), 0, set[str]()
    begun: list[list[Action]] = [[] for _ in programs]
    while True:
        before = sum(at) + over
        for rank, program in enumerate(programs):
            for action in program.actions[at[rank] :]:
                needs = {one.name for one in action.awaits if TABLE[one.kind].together}
                needs |= {action.takes.before} if isinstance(action.takes, Message) else set()
                if not needs <= done:
                    break
                at[rank] += 1
                if TABLE[action.kind].together:
                    begun[rank].append(action)
                else:
                    done.add(action.name)
        while all(len(mine) > over for mine in begun):
            together = [mine[over] for mine in begun]
            assert len({(one.kind, one.part) for one in together}) == 1
            done |= {one.name for one in together}
            over += 1
        if sum(at) + over == before:
            return at == [len(program.actions) for program in programs]


def test_loss_and_gradients_are_those_of_the_unsplit_model(found: dict[str, list[Any]]) -> None:
    assert [rank.keys() for rank in found["tried"]] == [TRIALS.keys()] * 3
    assert too_far(found["tried"], 1e-12, **LIMITS) == {}


def test_evaluations_give_the_loss_of_the_unsplit_model(found: dict[str, list[Any]]) -> None:
    for rank in found["evaluated"]:
        assert len(rank) == 8
        assert max(rank.values()) <= 1e-12


def test_graphs_split_what_is_left_of_the_ends() -> None:
    ranks = on_ranks(3, TRIED, f"{JOBS}:GRAPHS")
    assert [rank.keys() for rank in ranks] == [GRAPHS.keys()] * 3
    assert too_far(ranks, 1e-12) == {}


def test_checkpoints_go_on_with_and_without_shards(found: dict[str, list[Any]]) -> None:
    for steps in found["checkpoints"]:
        if "two" in steps:
            assert steps["two"][:2] == pytest.approx(steps["three"][2:], rel=1e-12)
            assert steps["again"] == pytest.approx(steps["two"][2:], rel=1e-12)
            assert steps["again norm"] == pytest.approx(steps["two norm"], rel=1e-12)


def test_state_dicts_have_the_whole_models_keys(found: dict[str, list[Any]]) -> None:
    first, *_, last = found["checkpoints"]
    assert {"0.position.weight", "0.token.weight", "3.output.weight", "3.output.bias"} <= set(first["keys"])
    assert {"0.token.weight", "3.norm.weight", "3.output.weight"} <= set(last["keys"])
    assert first["shape"] == [11]
    assert first["loaded"]
    assert last["loaded"]


def test_what_shards_cannot_do_is_refused_by_name(found: dict[str, list[Any]]) -> None:
    said = found["refused"][0]
    assert said["forward"].startswith("forward: the vocabulary is sharded")
    assert said["tied"].startswith("layer 3: its output.weight is sharded over the vocabulary, but tied to layer 0's token")
    assert said["words"] == "vocabulary: 3 shards of 2 words: there must be 1 to 2"
    assert said["loss"].startswith("loss: torch.nn.functional.mse_loss")
    assert said["validated"].startswith("PostValidated: the vocabulary is sharded")
