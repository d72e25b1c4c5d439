"""Times: samples and their spread, host beside device, what disturbs, what fails, and what is kept then."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler import measure
from profiler.dataflow import flow
from profiler.measurement import DISTURBED, warnings
from profiler.stage_rounds import PassTimer, batches, rotated, rounds, stages_of
from profiler.timing import Bench, Measuring, host_times, time_layers, wanted
from zbsolve import BadInput
from zbsolve.cli import main
from zbsolve.exec.backward.stage import Stage
from zbsolve.models.by_name import load
from zbsolve.profile.profile import Layer
from zbsolve.util.columns import median_error
from zbsolve.util.errors import is_out_of_memory

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
FAILS = """
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
class Large(nn.Module):
    '''Runs out of memory as soon as it is run for real.'''
    def __init__(self, fake_too=False):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        if x.device.type == "cpu" and not isinstance(x, FakeTensor):
            raise torch.OutOfMemoryError("tried to allocate 1 TiB")
        return self.a(x)
class Once(nn.Module):
    '''Runs out of memory in company, and not alone.'''
    calls = 0
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        if x.device.type == "cpu" and not isinstance(x, FakeTensor):
            Once.calls += 1
            if Once.calls == 1:
                raise MemoryError
        return self.a(x)
class Late(Large):
    def forward(self, x):
        if x.device.type == "cpu" and not isinstance(x, FakeTensor):
            raise ValueError("no such number")
        return self.a(x)
def large():
    return [nn.Linear(4, 4), nn.ReLU(), Large(), nn.Linear(4, 4)], torch.randn(2, 4)
def once():
    return [nn.Linear(4, 4), Once(), nn.Linear(4, 4)], torch.randn(2, 4)
def late():
    return [nn.Linear(4, 4), Late()], torch.randn(2, 4)
"""


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "failing_models.py").write_text(FAILS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("one_link")
def test_samples_are_kept_for_every_kind_and_the_update() -> None:
    profile = measure("moe-tiny", seconds=0.05)
    block = profile.layers[1]
    assert min(block.X, block.F) > 0
    assert block.U > 0
    assert len(profile.samples["block0/U"]) == 5
    assert 0 < profile.facts["host_us"]["block0/F"] < 1e6
    assert profile.facts["alone"] is False
    assert profile.facts["states"] == "adam"
    assert isinstance(profile.facts["warnings"], list)


def test_rounds_pass_through_the_layers_as_the_executor_does() -> None:
    model, cpu = load("gpt-tiny"), torch.device("cpu")
    turns = rounds([stages_of(model, [0, 1, 9])], batches(model, cpu), PassTimer(cpu), recompute=True)
    split, fused, recomputed = next(turns), next(turns), next(turns)
    order = [0, 1, 9, 0, 1, 9]
    assert [(i, kind) for i, kind, _, _ in split] == [
        *[(i, "F") for i in order],
        *[(i, kind) for _ in range(2) for i, kind in ((9, "B"), (1, "B"), (0, "B"), (0, "W"), (1, "W"), (9, "W"))],
    ]
    assert [(i, kind) for i, kind, _, _ in fused] == [(i, "BW") for i in reversed(order)]
    assert [(i, kind) for i, kind, _, _ in recomputed] == [(i, "X") for i in reversed(order)]
    assert all(device == host > 0 for _, _, device, host in split)


class Touches(PassTimer):
    """Notes which stage each pass runs on."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.passes: list[tuple[str, Stage]] = []

    def run(self, layer: int, kind: str, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        self.passes.append((kind, call.__self__))  # type: ignore[attr-defined]
        return super().run(layer, kind, call, *given, **named)


def test_copies_take_turns_until_a_cache_is_cold() -> None:
    """Between two passes of one layer (W follows its B at once) others touch at least as many bytes as the cache has."""
    model = load("mlp-tiny")
    inputs = flow(model).inputs
    cache = 100_000
    sets = rotated(model, [0, 1, 7], inputs, CPU, cache)
    size = sum(p.nbytes for stage in sets[0] for p in stage.parameters()) + sum(inputs[i].nbytes for i in (0, 1, 7))
    assert len(sets) == -(-2 * cache // size) > 5
    assert len({id(p) for stages in sets for stage in stages for p in stage.parameters()}) == 12 * len(sets)
    watch = Touches()
    turns = rounds(sets, batches(model, CPU), watch, recompute=True)
    for _ in range(6):
        assert len({i for i, *_ in next(turns)}) == 3
    last: dict[int, int] = {}
    touched = 0
    for kind, stage in watch.passes:
        before = last.get(id(stage))
        assert kind in ("B", "W") or before is None or touched - before >= cache
        touched += sum(p.nbytes for p in stage.parameters())
        last[id(stage)] = touched
    # Large layers evict themselves, and without a cache to empty nothing is copied.
    assert len(rotated(model, [0, 1, 7], inputs, CPU, size // 2)) == 1
    assert len(rotated(model, [0, 1, 7], inputs, CPU, 0)) == 1
    tied = load("gpt-tiny-tied")
    for first, *_, head in rotated(tied, [0, 1, 9], flow(tied).inputs, CPU, 4_000_000):
        assert first.layers[0].token.weight is head.layers[0].output.weight


@pytest.mark.usefixtures("one_link")
def test_copies_and_clocks_are_part_of_what_is_measured() -> None:
    model = load("mlp-tiny")
    clocks = iter([1980, 1410] + [None] * 1000)
    bench = Bench(CPU, 0.3, 50_000, lambda: next(clocks))
    timed, stages = time_layers(Measuring(model, flow(model), bench, [0, 1, 7]), torch.optim.SGD)
    assert timed.copies > 2
    assert len(timed.samples[1, "F"]) % timed.copies == 0
    assert len(timed.samples[1, "U"]) == 5
    assert timed.clocks == [1980, 1410]
    assert len(stages) == 3
    assert "moved between 1,410 and 1,980 MHz" in warnings([], {}, {}, [], 0.0, "cuda", timed.clocks)[-1]
    assert warnings([], {}, {}, [], 0.0, "cuda", [1980, 1950]) == []
    assert measure("mlp-tiny", seconds=0.05).facts["cache_bytes"] == 0


def test_host_time_is_operations_times_what_one_costs(failing: Path) -> None:
    model = load("gpt-tiny")
    host = host_times(model, flow(model), [0, 1, 9])
    assert {kind for _, kind in host} == {"F", "B", "W", "BW"}
    # Three times as many operations in a block's backward as in the embedding's forward, at the least.
    assert host[1, "BW"] > 3 * host[0, "F"] > 0
    own = load("failing_models:once")
    assert host_times(own, flow(own), [0, 1, 2])


def test_spread_is_a_notch() -> None:
    assert median_error([10.0] * 9) == 0
    assert median_error([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(1.57 * 2 / 5**0.5 / 10)
    assert median_error([0.0, 0.0]) == 0


def test_warnings_say_what_to_know() -> None:
    good = [Layer("a", 10, 10, 10, 20, 0, 0, 0, 0)]
    assert warnings(good, {"a/F": [10.0]}, {"a/F": 2.0}, [5.0] * 8, 0.0, "cpu") == []
    (split,) = warnings([Layer("a", 10, 20, 12, 20, 0, 0, 0, 0)], {}, {}, [], 0.0, "cpu")
    assert split.startswith("(B + W) / BW is 1.60")
    (unsplit,) = warnings([Layer("a", 10, 20, 0.1, 20, 0, 0, 0, 0)], {}, {}, [], 0.0, "cpu")
    assert unsplit.startswith("W does next to nothing")
    (host,) = warnings(good, {"a/F": [10.0], "a/B": [50.0]}, {"a/F": 6.0, "a/B": 6.0}, [], 0.0, "cpu")
    assert "in 1 of 2 kinds of pass, most in a/F (60%)" in host
    assert not warnings(good, {"a/F": [10.0]}, {"a/F": 6.0}, [], 0.0, "cuda")
    (late,) = warnings(good, {"a/F": [10.0]}, {"a/F": 12.0}, [], 0.0, "cuda")
    assert "launching takes as long as computing" in late
    clock, other = warnings(good, {}, {}, [10.0] * 4 + [12.0] * 4, 0.3, "cpu")
    assert "took 20% more time" in clock
    assert "30% of the time" in other
    assert clock.startswith(DISTURBED)
    assert other.startswith(DISTURBED)
    assert not late.startswith(DISTURBED)


def test_out_of_memory_keeps_what_was_measured(failing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(failing / "p.json")
    assert main(["profile", "failing_models:large", "-o", out, "--seconds", "0.05"]) == 1
    error = capsys.readouterr().err.replace("\r\x1b[K", "")
    assert error.endswith(
        "model 'failing_models:large': out of memory: F of layer 2 (2.Large), by itself; what was measured before is in "
        f"{out}.partial\n"
    )
    assert not Path(out).exists()
    kept = json.loads(Path(f"{out}.partial").read_text())["samples"]
    assert {name.partition("/")[0] for name in kept} == {"0.Linear", "1.ReLU"}
    assert all(kept[f"0.Linear/{kind}"] for kind in ("F", "B", "W", "BW", "U"))


@pytest.mark.usefixtures("one_link")
def test_layers_that_do_not_fit_together_are_measured_one_by_one(failing: Path) -> None:
    profile = measure("failing_models:once", seconds=0.05)
    assert profile.facts["alone"] is True
    assert all(layer.F > 0 for layer in profile.layers)
    assert profile.layers[1].held_until_W == 2 * 4 * 4


def test_what_fails_late_names_its_pass(failing: Path) -> None:
    with pytest.raises(BadInput, match=r"model 'failing_models:late': F of layer 1 \(1.Late\): .*no such number"):
        measure("failing_models:late", seconds=0.05)
    with pytest.raises(BadInput, match=r"model 'failing_models:late': F of layer 1 \(1.Late\): .*no such number"):
        measure("failing_models:late", seconds=0.05, busy_processes=1)
    with pytest.raises(BadInput, match="device 'tpu': one of auto, cuda, cpu"):
        measure("mlp-tiny", device="tpu")
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpu_is_timed_by_its_events() -> None:
    profile = measure("gpt-1.5b@layers=2,batch=1", seconds=2.0, device="cuda")
    assert profile.host is not None
    assert profile.host.ranks == torch.cuda.device_count()
    assert profile.capacity
    assert profile.layers[1].F > 0
    assert len(profile.samples["block0/F host"]) == len(profile.samples["block0/F"])
    assert profile.facts["cache_bytes"] > 1 << 20
    assert profile.facts["copies"] == 1  # half a GB of parameters evicts itself
    small = measure("gpt-tiny", seconds=1.0, device="cuda")
    assert small.facts["copies"] > 1


@pytest.mark.parametrize(
    ("each", "seconds", "rounds"),
    [(0.1, 10.0, 100), (0.1, 0.05, 9), (2.0, 5.0, 9), (3.0, 5.0, 9), (10.0, 5.0, 3), (40.0, 5.0, 3), (40.0, 300.0, 8)],
)
def test_long_rounds_are_fewer(each: float, seconds: float, rounds: int) -> None:
    """Nine rounds of a large model on a CPU take many minutes: one with each kind of pass is the least then."""
    done = 0
    while wanted(done, each * (done + 1e-9), seconds):
        done += 1
    assert done == rounds
