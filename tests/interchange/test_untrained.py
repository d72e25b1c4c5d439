"""Engines get backwards of stages in front that train nothing: of no time, in an order that they can run."""

from __future__ import annotations

import pytest

from zbsolve import BadInput, pipeline, preset, solve, verify
from zbsolve.interchange.order import order_for, with_front
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.planner.engines import target


def test_engines_run_the_whole_step() -> None:
    problem = pipeline([4] * 4, BW=[0, 0, 8, 8], comm=1, microbatches=6, untrained=2)
    schedule = preset("1f1b", problem)
    assert torch_order(schedule).rows[0][-1] == "0B5"
    for name in ("torch-csv", "deepspeed", "megatron"):
        assert sum(map(len, order_for(schedule, target(name)).rows)) == 2 * 4 * 6
    assert with_front(schedule).timeline().makespan == schedule.timeline().makespan


def test_a_step_of_forwards_alone_is_refused() -> None:
    with pytest.raises(BadInput, match="there is F"):
        torch_order(solve(pipeline([4, 4], microbatches=3), effort=0.1))


@pytest.mark.parametrize("placement", ["single", "loop", "vee"])
@pytest.mark.parametrize("untrained", [1, 2, 3])
def test_every_order_holds_with_them(placement: str, untrained: int) -> None:
    step = pipeline([3, 5, 2, 4], [2] * 4, [3] * 4, placement=placement, comm=2, microbatches=5, untrained=untrained)
    for seed in range(3):
        schedule = solve(step, effort=0.05, seed=seed)
        whole = with_front(schedule)
        assert len(whole.problem.passes) == 3 * 4 * 5
        assert verify(whole.problem, whole) == ()
        assert whole.timeline().makespan == schedule.timeline().makespan
