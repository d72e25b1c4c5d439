"""Several ranks on one device: streams, partitions, and whole steps on streams that take turns."""

import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zbsolve import BadInput, Schedule, Trace, verify
from zbsolve.cli import main
from zbsolve.exec.one_device.green_contexts import GreenContexts, sms_a_part, split_device
from zbsolve.exec.one_device.pipeline import OneDevice
from zbsolve.exec.one_device.streams import Turns
from zbsolve.exec.transport.failure import RunFailed
from zbsolve.models.presets import GptSizes, gpt, mlp

from ..support.exec_tools import a_problem, random_schedule, worst_difference


def test_turns_keep_the_order_of_a_stream_and_wait_for_others() -> None:
    done: list[str] = []
    streams = Turns(2, pick=max)  # always the last stream that can go on
    streams.begin()
    first = streams.launch(0, lambda: done.append("a"))
    streams.launch(0, lambda: done.append("b"))
    waiting = streams.launch(1, lambda: done.append("c"), after=[first])
    streams.launch(1, lambda: done.append("d"))
    assert not done  # nothing runs before finish
    streams.finish()
    assert done == ["a", "c", "d", "b"]
    assert 0 <= streams.span(first)[0] <= streams.span(first)[1] <= streams.span(waiting)[0]


def test_streams_that_wait_for_each_other_are_found() -> None:
    streams, other = Turns(2), Turns(1)
    streams.launch(1, lambda: None, after=[other.launch(0, lambda: None)])
    with pytest.raises(RunFailed, match=r"ranks \[1\] wait"):
        streams.finish()


@pytest.mark.parametrize(
    ("sms", "ranks", "least", "multiple", "size"),
    [(132, 2, 8, 8, 64), (132, 4, 8, 8, 32), (132, 8, 8, 8, 16), (108, 4, 4, 2, 26), (132, 16, 8, 8, 8)],
)
def test_parts_of_a_device(sms: int, ranks: int, least: int, multiple: int, size: int) -> None:
    assert sms_a_part(sms, ranks, least, multiple) == size


def test_too_many_parts() -> None:
    with pytest.raises(BadInput, match="20 SMs do not make 4 parts of at least 8"):
        sms_a_part(20, 4, 8, 8)


class Driver:
    """Stands in for cuda.bindings.driver: keeps the calls; `refuses` names one that fails."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, refuses: str = "", **sm: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = refuses
        self.whole = SimpleNamespace(sm=SimpleNamespace(smCount=132, **sm))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.refuses:
                return (999,)
            if name == "cuDevSmResourceSplitByCount":
                groups, _, _, size = arguments
                return 0, [SimpleNamespace(sm=SimpleNamespace(smCount=size)) for _ in range(groups)], groups, None
            made = {"cuInit": (), "cuDeviceGetDevResource": (self.whole,)}
            return 0, *made.get(name, (len(self.calls),))

        return call


@pytest.mark.parametrize("sm", [{}, {"minSmPartitionSize": 8, "smCoscheduledAlignment": 8}])
def test_the_device_is_split_once(sm: dict[str, int]) -> None:
    driver = Driver(**sm)
    contexts, handles, sms = split_device(driver, ranks=4, device=0, major=9)
    assert sms == (32,) * 4
    assert len(set(contexts)) == len(set(handles)) == 4
    assert [call[0] for call in driver.calls].count("cuDevSmResourceSplitByCount") == 1
    created = [call[1] for call in driver.calls if call[0] == "cuGreenCtxStreamCreate"]
    assert created == contexts


def test_what_the_driver_refuses_is_said() -> None:
    with pytest.raises(RunFailed, match="cuGreenCtxCreate: 999"):
        split_device(Driver(refuses="cuGreenCtxCreate"), ranks=2, device=0, major=9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_is_said() -> None:
    with pytest.raises(BadInput, match="torch sees no CUDA device"):
        GreenContexts(2)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_order_streams_take_gradients_are_the_unsplit_models(seed: int) -> None:
    rng = random.Random(seed)
    placement = rng.choice([(0, 1), (0, 1, 1, 0), (0, 1, 2, 3), (0, 2, 1, 3, 0), (0, 1, 2, 0, 1, 2)])
    schedule = random_schedule(a_problem(placement, microbatches=4, fused=seed % 2 == 1), seed)
    assert worst_difference(schedule, mlp(0), pick=rng.choice) < 1e-5


def test_a_message_that_nobody_waited_for_would_be_noticed() -> None:
    """The dependency logic matters: without it some order of the streams takes a message before it is there."""

    class Careless(Turns):
        def launch(self, rank: int, work: Any, after: Any = ()) -> Any:
            return super().launch(rank, work)

    schedule, model = random_schedule(a_problem((0, 1), 3)), mlp(0)
    one = OneDevice(model, schedule, Careless(2, pick=max))
    batches = {m: model.batch(m, 0) for m in one.microbatches}
    with pytest.raises(RunFailed, match="rank 1, pass 1F"):
        one.step({m: x for m, (x, _) in batches.items()}, {m: y for m, (_, y) in batches.items()})


def test_a_parameter_tied_across_ranks_has_one_value_and_one_gradient() -> None:
    model = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=True)
    schedule = random_schedule(a_problem((0, 1), 2, layers=4))
    assert worst_difference(schedule, model) < 1e-5
    one = OneDevice(model, schedule, Turns(2))
    first, last = (one.layers[layer].get_parameter(name) for layer, name in model.tied[0])
    assert first is not last
    assert torch.equal(first, last)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    problem = a_problem((0, 1, 1, 0), 4)
    schedule, path, out = random_schedule(problem, 3), str(tmp_path / "s.json"), str(tmp_path / "t.json")
    schedule.save(path)
    run = ["run", path, "--model", "mlp-tiny", "--one-device", "cpu", "--steps", "3", "--warmup", "1"]
    assert main([*run, "--check", "-o", out]) == 0
    assert "check: right" in capsys.readouterr().out
    trace = Trace.load(out)
    assert trace.facts["backend"] == "one device"
    assert len(trace.steps) == len(trace.losses) == 3
    assert len(trace.peaks[0]) == 2
    assert min(trace.peaks[0]) > 0
    before, after = problem.edges.before, problem.edges.after
    for step, ready in zip(trace.steps, trace.ready, strict=True):
        assert not [v for v in verify(problem, schedule, step) if v.rule != "dependency"]  # its links took no time
        assert (step.start[after] >= step.end[before]).all()
        assert (step.start >= ready).all()
    assert main(["compare", path, out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == problem.digest
    assert main([*run, "--emulate", "schedule"]) == 2
    assert "emulated times need a process for each rank" in capsys.readouterr().err


def test_the_benchmark_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.one_device import BENCHMARK

    small = ["--ranks", "2", "--microbatches", "4", "--steps", "2", "--seconds", "1"]
    BENCHMARK.main(["--device", "cpu", "--model", "mlp-tiny", *small, "--output", str(tmp_path)])
    body = json.loads((tmp_path / "one_device.json").read_text())["results"]
    assert set(body["times"]) == {"F", "B", "W", "BW"}
    for name, row in body["rows"].items():
        trace = Trace.load(tmp_path / f"one_device-{name}.trace.json")
        assert row["predicted"] == Schedule.load(tmp_path / f"one_device-{name}.json").timeline().makespan
        assert len(row["steps"]) == len(trace.steps) == 2
    assert "taking turns" in capsys.readouterr().out


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_a_real_gpu_are_disjoint_and_overlap_in_time(ranks: int) -> None:
    pytest.importorskip("cuda.bindings")
    streams = GreenContexts(ranks)
    assert len(set(streams.sms)) == 1
    assert sum(streams.sms) <= torch.cuda.get_device_properties(0).multi_processor_count
    x = torch.randn(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(50):
            x @ x

    for _ in range(2):  # the first time loads kernels
        streams.begin()
        launches = [streams.launch(rank, work) for rank in range(ranks)]
        last = streams.launch(0, work, after=[launches[-1]])
        streams.finish()
    spans = [streams.span(launch) for launch in launches]
    assert max(start for start, _ in spans) < min(end for _, end in spans)
    assert streams.span(last)[0] >= spans[-1][1]


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("placement", [(0, 1, 2, 3), (0, 1, 1, 0)])
def test_gradients_on_the_parts_of_a_real_gpu(placement: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings")
    schedule, path, out = random_schedule(a_problem(placement, 4), 1), str(tmp_path / "s.json"), str(tmp_path / "t.json")
    schedule.save(path)
    assert main(["run", path, "--model", "mlp-tiny", "--one-device", "cuda", "--check", "-o", out]) == 0
    step = Trace.load(out).median()
    edges = schedule.problem.edges
    assert (step.start[edges.after] >= step.end[edges.before] - 1).all()  # events are exact to half a µs
