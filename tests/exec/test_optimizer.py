"""Optimizer steps that wait for nobody: the same bits as with a barrier, and no rank does wait."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve import BadInput, pipeline
from zbsolve.exec.ahead import Cut, lengths
from zbsolve.exec.base.program import Message
from zbsolve.exec.lowering import lower
from zbsolve.exec.post_validation import OptimizerSnapshot
from zbsolve.systems import preset

from ..support.exec_jobs_optimizer import OPTIMIZERS, STEPS
from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import a_problem, random_schedule

pytestmark = pytest.mark.slow

TWO, THREE = ["adam", "several"], ["momentum"]


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    jobs = {"as_with_a_barrier": TWO, "norms": None, "several_inside": None}
    return jobs_on(2, "tests.support.exec_jobs_optimizer", jobs)


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return jobs_on(3, "tests.support.exec_jobs_optimizer", {"as_with_a_barrier": THREE, "nobody_waits": None})


def the_same(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in ranks:
        for one in rank:
            found, right = one["became"]
            assert found == right, one["name"]
            assert {"clipped", "skipped", "stepped"} == set(right)
            assert len(right) == STEPS
            assert one["same"], one["name"]
            assert one["tensors"] > 20
    for i, runs in enumerate(zip(*ranks, strict=True)):
        if i % 4 < 3:  # some rank did step on what it knew, and took it back (of copies, one rank may know all)
            assert sum(one["amended"] for one in runs) > 0


def test_bit_by_bit_as_with_a_barrier_on_two_ranks(two: dict[str, list[Any]]) -> None:
    the_same(two["as_with_a_barrier"])


def test_bit_by_bit_as_with_a_barrier_on_three_ranks(three: dict[str, list[Any]]) -> None:
    the_same(three["as_with_a_barrier"])


def test_no_rank_waits_for_another(three: dict[str, list[Any]]) -> None:
    """Each rank in turn held its step back until the others had made theirs, and rank 0 was in its next step."""
    assert three["nobody_waits"] == [[0, 0], [2, 0], [2, 0]]


def test_the_norm_counts_each_parameter_once(two: dict[str, list[Any]]) -> None:
    for rank in two["norms"]:
        assert rank["norm"] == pytest.approx(rank["right"], rel=1e-6)
        assert rank["clipped"]
        assert rank["copies"] == pytest.approx(3, rel=0.01)


def test_several_optimizers_update_inside_a_step(two: dict[str, list[Any]]) -> None:
    """Picked by the names that parameters have in the whole model, as one process does."""
    for rank in two["several_inside"]:
        assert rank["named"]
        assert rank["away"] <= 1e-12
        assert "a parameter is in two of the optimizers" in rank["twice"]
        assert "PostValidated: a torch optimizer or a list of them is needed, not " in rank["none"]
        assert rank["first"] == ""
        assert "this pipeline has one; give it several optimizers as a list" in rank["second"]


def test_gradients_that_are_gone_too_early_are_an_error() -> None:
    assert "clear them by PostValidated.zero_grad" in on_ranks(1, "tests.support.exec_jobs_optimizer:misused")[0]


def test_what_runs_before_the_cut_needs_nothing_from_behind_it() -> None:
    rng = random.Random(1)
    for seed in range(60):
        ranks = rng.randint(1, 4)
        spot = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 4)))]
        rng.shuffle(spot)
        times = {"B": [10] * len(spot), "W": [10] * len(spot)}
        problem = pipeline([10] * len(spot), **times, placement=tuple(spot), microbatches=rng.randint(1, 6), comm=3)
        programs = lower(random_schedule(problem, seed))
        most = lengths(programs)
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}
        assert most[spot[0]] > 0
        for rank, program in enumerate(programs):
            cut = Cut.of(programs, rank)
            before, behind = cut.program.actions[: cut.length], cut.program.actions[cut.length :]
            taken = [a.takes for a in before if isinstance(a.takes, Message)]
            assert all(a.kind == "F" for a in before)
            assert all(m.before in made for m in taken)
            assert all(m.before in made for a in before for m in a.posts)
            assert [a.name for a in cut.program.actions] == [a.name for a in program.actions]
            for source, sent in program.incoming.items():
                posts = [m for a in cut.program.actions for m in a.posts if m.source == source]
                assert posts == list(sent)
                assert {m.before for m in sent[: cut.counts[source]]} == {m.before for m in sent} & made
            assert behind


def test_a_zero_bubble_schedule_runs_all_its_warm_up_ahead() -> None:
    programs = lower(preset("zb-h2", a_problem((0, 1, 2, 3), 8)))
    assert lengths(programs) == (7, 5, 3, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_taken_back_exactly(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    optimizer = OPTIMIZERS[name](layer.parameters())

    def look() -> list[Any]:
        state = optimizer.state_dict()
        values = [v for one in state["state"].values() for v in one.values()]
        values += [v for group in state["param_groups"] for v in group.values() if not isinstance(v, list)]
        return [t.clone() if isinstance(t, torch.Tensor) else t for t in (*layer.parameters(), *values)]

    def same(a: list[Any], b: list[Any]) -> bool:
        pairs = zip(a, b, strict=True)
        return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)

    for _ in range(3):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        start = look()
        before = OptimizerSnapshot(optimizer)
        before.keep()
        before.step()
        stepped = look()
        assert not same(start, stepped)
        before.amend(again=False)
        assert same(start, look())
        again = OptimizerSnapshot(optimizer)
        again.keep()
        again.step()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate / 2  # as a schedule of learning rates does
        again.amend(again=True)
        assert optimizer.param_groups[0]["lr"] == rate / 2
        optimizer.param_groups[0]["lr"] = rate
        assert same(stepped, look())


def test_post_validated_is_an_optimizer_of_torch() -> None:
    """Groups and state are those of the optimizer inside, also after it was loaded."""
    (found,) = on_ranks(1, "tests.support.exec_jobs_optimizer:an_optimizer")
    assert found["kind"]
    assert found["shared"] == [True, True]
    assert found["groups"] == 2
    assert "a step with a closure would run the model by itself" in found["closure"]


def test_nothing_to_validate_is_refused() -> None:
    from zbsolve.exec import PostValidated

    optimizer: Any = None
    with pytest.raises(BadInput, match="neither max_norm nor skip_nonfinite"):
        PostValidated(optimizer, optimizer, skip_nonfinite=False)
    with pytest.raises(BadInput, match="max_norm -1 must be positive"):
        PostValidated(optimizer, optimizer, max_norm=-1)
