"""A run that is watched: what is slow is said, a search in another process, all ranks switch between two steps."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zbsolve import Schedule, Trace, pipeline, preset, verify
from zbsolve.build import Work, with_work
from zbsolve.cli import main
from zbsolve.exec import Pipeline, Watch
from zbsolve.exec.emulate import Times
from zbsolve.exec.loop import watching
from zbsolve.exec.loop.watching import Search
from zbsolve.exec.run.job import Options, run_rank
from zbsolve.search.today import order_again
from zbsolve.show.comparison import compare, switch_lines
from zbsolve.util.errors import LostRank, RunFailed

from ..support.exec_ranks import jobs_on
from ..support.exec_tools import devices_alone, refusal, toy, worst
from ..support.trials import Trial


def orders(ranks: int, us: int = 3000, microbatches: int = 4) -> tuple[Schedule, Schedule]:
    """All forwards first; and ZB-H1."""
    times = {"B": [us] * ranks, "W": [us] * ranks}
    problem = pipeline([us] * ranks, **times, microbatches=microbatches, layers=[1] * ranks)
    first = {f"compute:{r}": tuple(f"{r}{kind}{m}" for kind in "FBW" for m in range(microbatches)) for r in range(ranks)}
    return Schedule(problem, first), preset("zb-h1", problem)


class Found:
    """A search that is over at once, with ZB-H1."""

    def __init__(self, given: Schedule, seconds: float) -> None:
        self.given, self.ended = given, True

    def found(self) -> Schedule:
        return Schedule(self.given.problem, preset("zb-h1", self.given.problem).order)

    def close(self) -> None:
        """Nothing runs."""


def watched(rank: int, argument: None) -> dict[str, Any]:
    """Four ranks of which rank 1 takes three times as long; looks after 3 and 6 steps; what was seen, and the gradients."""
    given, _ = orders(4)
    times = Times.of(given, "schedule")
    slow = {name: us * (1 + 2 * (name[0] == "1")) for name, us in times.passes.items()}
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    trial = Trial(problem=given, layers=toy, batch=lambda place, step: (x.chunk(4), x.flip(0).chunk(4)))
    runner = trial.pipeline(emulate=times)
    runner.hooks.emulated.length = {name: us * 1000 for name, us in slow.items()}
    said, off, steps = [], [], []
    with mock.patch.object(watching, "Search", Found), devices_alone():
        watch = Watch(runner, every=3, steps=2)
        for _ in range(9):
            runner.module.zero_grad()
            result = runner.step(x, x.flip(0))
            steps.append(result.timeline.makespan)
            trial.add_gradients(whole := trial.unsplit(4), 0, runner)
            off.append(worst(runner, whole))
            said.append(watch(result))
    told = [None if one is None else [[s.what for s in one.slow], one.before, one.after, str(one)] for one in said]
    return {"said": told, "off": max(off), "steps": steps, "order": list(runner.schedule.order["compute:1"])}


def any_gain(watch: Watch) -> Watch:
    """It switches, whatever real passes take."""
    watch.gain = -math.inf
    return watch


def one_of_two(rank: int) -> Pipeline:
    """Pipelines of two ranks, all forwards first."""
    groups = [[dist.new_group([2 * i, 2 * i + 1]) for i in range(2)], [dist.new_group([i, 2 + i]) for i in range(2)]]
    group, beside = groups[0][rank // 2], groups[1][rank % 2]
    return Pipeline(toy, orders(2, 30)[0], loss=nn.functional.mse_loss, group=group, replicas=beside)


def replicas(rank: int, argument: None) -> dict[str, Any]:
    """Two pipelines of two ranks switch together; gradients before and after, and the orders."""
    runner = one_of_two(rank)
    x, found = torch.linspace(-1, 1, 32).reshape(8, 4) + rank // 2, []
    with mock.patch.object(watching, "Search", Found):
        watch = any_gain(Watch(runner, every=1, steps=1))
        for _ in range(3):
            runner.module.zero_grad()
            watch(runner.step(x, x.flip(0)))
            runner.wait_gradients()
            found.append([p.grad.clone() for p in runner.parameters()])
    same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[0], found[-1], strict=True))
    return {"same": same, "order": list(runner.schedule.order["compute:0"])}


def refused(rank: int, argument: None) -> list[str]:
    """Other passes, another order on one rank, numbers that make no sense."""
    given, other = orders(4, 30)
    runner = Pipeline(toy, given, loss=nn.functional.mse_loss)
    more = preset("zb-h1", pipeline([30] * 4, B=[30] * 4, W=[30] * 4, microbatches=5, layers=[1] * 4))
    lines = [
        refusal(lambda: runner.switch(more)),
        refusal(lambda: runner.switch(replace(other, problem=replace(other.problem, sizes=(1, 2, 3, 2))))),
        refusal(lambda: runner.switch(other if rank == 2 else given)),
        refusal(lambda: Watch(runner, every=2, steps=3)),
    ]
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    before = runner.step(x, x.flip(0))  # still runs
    runner.switch(other)
    steps = [before, runner.step(x, x.flip(0), memory=True)]
    trace = runner.trace(steps, steps[-1].memory, {})
    kept = trace is None or (trace.ran(0), trace.ran(1)) == (given.order, other.order)
    return [*lines, str(kept and [one.step for one in getattr(trace, "switches", ())])]


def whole_job(rank: int, argument: None) -> dict[str, Any] | None:
    """`run --watch 3` of four ranks: what rank 0's trace says."""
    given, _ = orders(4)
    with mock.patch.object(watching, "Search", Found), devices_alone():
        trace = run_rank(given, "mlp-4", Options(steps=8, warmup=1, emulate="schedule", look=3), lambda name: None)
    if not isinstance(trace, Trace):
        return None
    makespans = [step.makespan for step in trace.steps]
    found = {"before": makespans[:6], "later": makespans[6:], "looks": trace.facts["looks"], "told": switch_lines(trace)}
    kept = Trace.from_json(json.loads(json.dumps(trace.to_json()))).planned(6).order == trace.ran(7)
    return found | {"said": compare(given, trace).later, "file": kept}


def some_ranks(rank: int, argument: None) -> str:
    """Only rank 1 has work beside the step, so only there the order may not change: what is said of it."""
    given, _ = orders(2, 30)
    problem = with_work(given.problem, Work(1, 10, after=1))
    alone = {"compute:1": (*given.order["compute:1"], "1J0")}
    schedule = Schedule(problem, {**given.order, **alone})
    runner = Pipeline(toy, schedule, loss=nn.functional.mse_loss, work=lambda *piece: None)
    watch, x = any_gain(Watch(runner, every=1, steps=1)), torch.linspace(-1, 1, 32).reshape(8, 4)
    said = [watch(runner.step(x, x.flip(0))) for _ in range(2)]
    return "" if rank else said[-1].why


def fails(rank: int, argument: None) -> str:
    """Rank 0 cannot say what is slow: what all ranks say."""
    given, _ = orders(2, 30)
    group, x = dist.new_group([0, 1]), torch.linspace(-1, 1, 32).reshape(8, 4)
    runner = Pipeline(toy, given, loss=nn.functional.mse_loss, group=group)
    watch = Watch(runner, every=1, steps=1)
    with mock.patch.object(watching, "slow_parts", side_effect=OSError("no room")):
        return refusal(lambda: watch(runner.step(x, x.flip(0))), RunFailed)


def one_pipeline(rank: int, argument: None) -> str:
    """One of two pipelines switches to another order than the other."""
    runner = one_of_two(rank)
    return refusal(lambda: runner.switch(orders(2, 30)[int(rank < 2)]))


def test_the_memory_stays_that_of_the_order() -> None:
    """All forwards first holds 4 microbatches on every rank, so any order of ZB-H1's memory may be found: it and its bound
    are 4 · 9 + 3 · 3 ms."""
    given, h1 = orders(4)
    found = order_again(given, 100.0)  # its bound ends it long before
    assert verify(given.problem, found) == ()
    assert found.timeline().makespan == h1.timeline().makespan == 45_000 < given.timeline().makespan


@pytest.mark.slow
def test_a_search_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives way to all others, so here, where the machine may be busy, it is told not to."""
    monkeypatch.setattr(watching, "AGAIN", f"import os; os.nice = id; {watching.AGAIN}")
    given, h1 = orders(4)
    search = Search(given, 300.0)
    while not search.ended:
        time.sleep(0.05)
    found = search.found()
    assert found is not None
    assert found.timeline().makespan == h1.timeline().makespan
    assert Search(given, 1.0).found() is None  # it is ended before it has found anything


@pytest.mark.slow
def test_ranks_switch_together() -> None:
    found = jobs_on(4, __name__, {"watched": None, "replicas": None, "refused": None})
    first = found["watched"][0]
    looks = [i for i, one in enumerate(first["said"]) if one is not None]
    assert looks == [2, 5, 8]
    what, before, after, _ = first["said"][5]
    assert "rank 1" in what
    assert after < before
    assert "rank 1" in first["said"][8][0]  # beside what was planned first, not what it now takes
    assert len({*first["steps"][:6]}) == len({*first["steps"][6:]}) == 1
    assert first["steps"][6] < first["steps"][0]
    for one in found["watched"]:
        assert one["off"] < 1e-6
        assert one["order"][:5] != ["1F0", "1F1", "1F2", "1F3", "1B0"]
    assert all(one["said"] == [None] * 9 for one in found["watched"][1:])
    assert all(one["same"] for one in found["replicas"])
    assert len({str(one["order"]) for one in found["replicas"]}) == 1
    assert found["replicas"][0]["order"][:5] != ["0F0", "0F1", "0F2", "0F3", "0B0"]
    for other, sized, odd, wrong, _ in found["refused"]:
        assert sized == other == "switch: another order of the same passes is needed, on the same ranks, with the same edges"
        assert odd.startswith("rank 2 has another schedule than rank 0")
        assert wrong.startswith("Watch: every 2, steps 3")
    assert [one[-1] for one in found["refused"]] == ["[1]", "[]", "[]", "[]"]  # from its second step on


@pytest.mark.slow
def test_the_command_watches() -> None:
    """The trace says from which step on the other order ran, and so do `run` and `compare`."""
    first, *others = jobs_on(4, __name__, {"whole_job": None})["whole_job"]
    assert others == [None] * 3
    assert [(one["steps"], one["after"] is None) for one in first["looks"]] == [(3, True), (6, False)]
    assert first["told"] == list(first["said"])
    assert first["told"][0] == "after 6 steps another order ran: 2 steps, median 45.00 ms in place of 54.00 ms (-16.7%)"
    given, h1 = (one.timeline().makespan for one in orders(4))
    assert (first["before"], first["later"]) == ([given] * 6, [h1] * 2)
    assert first["file"]


@pytest.mark.parametrize("said", ["x", "nan,nan", "5,6", "5,", "-3"])
def test_numbers_of_steps_that_make_no_sense(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "schedule.json", "--model", "mlp-4", "--local", f"--watch={said}"]) == 2
    assert f"--watch '{said}': nan, a whole number, or both: nan,3" in capsys.readouterr().err


@pytest.mark.slow
def test_all_ranks_hear_of_what_one_cannot() -> None:
    found = jobs_on(2, __name__, {"some_ranks": None, "fails": None})
    assert found["some_ranks"] == ["rank 1: not with work", ""]
    assert all(one.startswith("rank 0, watching: OSError: no room") for one in found["fails"])
    (alike,) = {*jobs_on(4, __name__, {"one_pipeline": None})["one_pipeline"]}
    assert alike == "replicas: pipeline 1 has another schedule than pipeline 0"


def test_a_rank_that_waits_in_vain_for_the_order_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
        )

    monkeypatch.setattr("torch.distributed.broadcast_object_list", late)
    with pytest.raises(LostRank, match=r"^nothing for 5 s$"):
        watching._everywhere(SimpleNamespace(rank=1, replicas=None, group="all"), b"")
