"""Passes as CUDA graphs: what is run, replayed and left as it is; measured ones on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from profiler import measure
from profiler.stage_rounds import PassTimer, batches, built, rounds, stages_of
from profiler.timing import CapturedStage, replayed
from zbsolve import BadInput
from zbsolve.exec.backward.stage import Stage
from zbsolve.models.by_name import load

CPU = torch.device("cpu")


class Graph:
    """Stands for a CUDA graph: what is captured runs, and replays are counted."""

    replays = 0

    def capture_begin(self, pool: Any) -> None:
        assert pool == "pool"

    def capture_end(self) -> None: ...

    def replay(self) -> None:
        Graph.replays += 1


class Stream:
    device = CPU

    def wait_stream(self, other: Any) -> None: ...


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a CPU look like a GPU that captures."""

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        yield

    Graph.replays = 0
    for name, value in {
        "CUDAGraph": Graph,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": on,
        "graph_pool_handle": lambda: "pool",
        "synchronize": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.usefixtures("graphs")
def test_captured_passes_are_replayed_in_the_same_turns() -> None:
    model, feed = load("gpt-tiny"), batches(load("gpt-tiny"), CPU)
    sets = [stages_of(model, [0, 1, 9])]
    before = rounds(sets, feed, PassTimer(CPU), recompute=True)
    order = [[row[:2] for row in next(before)] for _ in range(3)]
    replaying, missing = replayed(sets, feed)
    assert missing == {}
    assert not any(stage.live for stage in sets[0])
    turns = rounds(replaying, feed, PassTimer(CPU), recompute=True)
    assert [[row[:2] for row in next(turns)] for _ in range(3)] == order
    # Three layers, two microbatches: F, B, W; F, BW; F, X, B, W.
    assert Graph.replays == 3 * 2 * (3 + 2 + 4)


@pytest.mark.usefixtures("graphs")
def test_what_cannot_be_captured_runs_as_it_is_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    recompute, ran, ended = Stage.recompute, set[Stage](), list[Any]()

    def refuse(stage: Stage, microbatch: int) -> None:
        if stage in ran:  # it ran eagerly before
            raise RuntimeError("operation not permitted when stream is capturing")
        ran.add(stage)
        recompute(stage, microbatch)

    model, feed = load("gpt-tiny"), batches(load("gpt-tiny"), CPU)
    sets = [stages_of(model, [0, 1, 9])]
    with monkeypatch.context() as patched:
        patched.setattr(Stage, "recompute", refuse)
        patched.setattr("profiler.timing.end_pool", lambda device, pool: ended.append(pool))
        replaying, missing = replayed(sets, feed)
    assert missing.keys() == {(i, "X") for i in (0, 1, 9)}
    assert ended == ["pool"] * 3  # torch 2.11's allocator would give no memory back
    assert "not permitted when stream is capturing" in missing[1, "X"]
    turns = rounds(replaying, feed, PassTimer(CPU), recompute=True)
    for _ in range(3):
        next(turns)
    assert Graph.replays == 3 * 2 * (3 + 2)
    assert isinstance(replaying[0][0], CapturedStage)


def test_layers_are_made_on_the_device() -> None:
    model = load("llama3-8b@layers=1,batch=1,length=4096")
    layers = built(model, [1], torch.device("meta"))
    assert {p.device.type for p in layers[0].parameters()} == {"meta"}


def test_only_a_gpu_captures() -> None:
    with pytest.raises(BadInput, match="--capture is for passes on a GPU"):
        measure("mlp-tiny", device="cpu", capture=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_captured_passes_are_not_bound_by_the_host() -> None:
    profile = measure("gpt-1.5b@layers=2,batch=1", seconds=2.0, device="cuda", capture=True)
    assert profile.facts["captured"] is True
    assert profile.facts["not_captured"] == {}
    for kind in ("F", "B", "W", "BW", "X"):
        replayed, eager = (profile.samples[f"block0/{kind}{behind}"] for behind in ("", " eager"))
        assert 0 < min(replayed) <= 1.05 * min(eager)
    assert not any("host-bound" in line for line in profile.facts["warnings"])
