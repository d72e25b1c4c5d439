"""Memory: what layers keep, by hand, under fake tensors, on a GPU, and against what the executor then counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler.dataflow import fake_mode, flow
from profiler.memory import AllocatedBytes, LayerMemory, _metered, held, held_by
from profiler.stage_rounds import PassTimer, alone, rotated, rounds, stages_of
from zbsolve import HostLink, Profile, Step, pipeline, solve
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.values import tensors_of
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.run.launch import run_local
from zbsolve.models.by_name import load
from zbsolve.partition.layer import Layer, Link, without_backwards
from zbsolve.partition.stage_memory import StageMemory
from zbsolve.schedule.handover import lacking, most_waiting
from zbsolve.systems import preset

pytestmark = pytest.mark.slow

SMALL = """
import torch
from torch import nn
def linears():
    return [nn.Linear(64, 64) for _ in range(6)], torch.randn(8, 64)
def mixed():
    layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 8)]
    return layers, torch.randn(8, 64)
"""
ROW = 8 * 64 * 4  # bytes of one activation of these


def layers_of(spec: str, fake: bool = False) -> list[LayerMemory]:
    model = load(spec)
    if not fake:
        return held(model, stages_of(model, range(len(model.layers))))
    mode = fake_mode()
    with mode:
        return held(model, stages_of(model, range(len(model.layers))))


def profile_of(spec: str) -> Profile:
    rows = [Layer(f"layer{i}", 10, 10, 10, 20, parameter_bytes=0, **one.costs()) for i, one in enumerate(layers_of(spec))]
    return Profile("measured", spec, tuple(rows), Link(1.0, 1000.0), 4.0, None, {}, {})


def test_a_linear_layer_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small_models.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    first, middle, *_, last = layers_of("small_models:linears")
    # The batch itself is no activation; B leaves the output gradient beside the input until W.
    assert (first.after_F, first.after_B, first.after_W) == (0, ROW, 0)
    assert (middle.after_F, middle.after_B, middle.after_W) == (ROW, 2 * ROW, 0)
    assert middle.costs() == {
        "held_until_B": 0,
        "held_until_W": ROW,
        "held_from_B": ROW,
        "output_bytes": ROW,
        "output_kept": 0,
        "input_unneeded": 0,
        "transient": middle.transient,
        "frozen_bytes": 0,
        "buffer_bytes": 0,
    }
    assert last.output == 0
    kinds = layers_of("small_models:mixed")
    assert [sum(one.kept) for one in kinds] == [0, ROW, 0, ROW, 0, 0]
    assert [sum(one.unneeded) for one in kinds] == [0, ROW, 0, ROW, ROW, 0]


def test_a_tensor_between_two_layers_counts_once() -> None:
    keeps = Layer("a", 1, 1, 1, 2, 100, 0, 0, 50, output_kept=50)
    needs = Layer("b", 1, 1, 1, 2, 70, 30, 0, 50, held_from_B=40, input_unneeded=0)
    assert StageMemory((keeps, needs)).held([2]) == {"held_until_B": [80], "held_until_W": [70], "held_from_B": [0]}
    apart = StageMemory((keeps, needs)).held([1, 1])
    assert apart == {"held_until_B": [100, 30], "held_until_W": [0, 70], "held_from_B": [0, 0]}
    needs_more = Layer("b", 1, 1, 1, 2, 0, 30, 0, 50, held_from_B=40)
    assert StageMemory((needs_more,)).held([1]) == {"held_until_B": [0], "held_until_W": [30], "held_from_B": [40]}


def test_a_stage_behind_what_trains_nothing_keeps_its_input() -> None:
    """The frozen layer drops the output that the next one needs: it counts once, and not never."""
    frozen = Layer("a", 1, 0, 0, 0, 40, 0, 0, 50, output_kept=40)
    needs = Layer("b", 1, 1, 1, 2, 30, 50, 0, 50)
    assert StageMemory(without_backwards((frozen, needs), 1)).after_f(0, 2) == 80


class Dropping(nn.Linear):
    """Computes something of its output, and gives that up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        nn.functional.linear(y, self.weight)
        return y


def test_what_a_forward_gives_up_is_not_kept() -> None:
    """Without a graph that lives nobody keeps the output."""
    for layer, kept in ((Dropping(64, 64), 0), (nn.Sequential(nn.Linear(64, 64), nn.Tanh()), ROW)):
        assert held_by(Stage([layer], 1), torch.randn(8, 64, requires_grad=True), None).kept == (kept,)


def test_what_b_takes_counts_from_b_to_w() -> None:
    problem = pipeline([1], [1], [1], microbatches=2, held_until_B=5, held_until_W=3, held_from_B=4, placement=(0,))
    assert problem.taken.tolist() == [8, 8, 4, 4, 0, 0]
    assert problem.freed.tolist() == [0, 0, 5, 5, 7, 7]
    fused = pipeline([1], BW=[2], microbatches=2, held_until_B=5, held_until_W=3, held_from_B=4, placement=(0,))
    assert fused.taken.tolist() == [8, 8, 0, 0]


@pytest.mark.parametrize("spec", ["gpt-tiny", "moe-tiny", "mlp-tiny"])
def test_fake_tensors_say_what_real_ones_do(spec: str) -> None:
    assert layers_of(spec) == layers_of(spec, fake=True)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("spec", ["small_models:linears", "small_models:mixed", "gpt-tiny"])
def test_the_executor_holds_what_was_predicted(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After every pass of one rank, to three parts in a hundred; ranks with neighbours hold messages too."""
    (tmp_path / "small_models.py").write_text(SMALL)
    monkeypatch.chdir(tmp_path)
    schedule = solve(profile_of(spec).problem(1, 4), effort=0.02)
    trace = run_local(schedule, spec, steps=1, warmup=0)
    predicted = trace.facts["predicted_held"]
    largest = max(predicted.values())
    assert trace.peaks[0][0] == pytest.approx(largest, rel=0.03)
    for name, row in schedule.problem.index.items():
        assert trace.held[row] == pytest.approx(predicted[name], abs=0.03 * largest), name


def test_what_is_beside_activations_by_hand() -> None:
    rows = tuple(Layer(f"{i}", 1, 1, 1, 2, 30, 20, 100, 10, transient=[5, 9, 7, 3][i]) for i in range(4))
    routes = ((0, 1, 1, 0),)
    # Two messages at every cut; the largest transient of a rank; parameters that layers share once a rank.
    assert StageMemory(rows, 4.0, ()).of_ranks((1, 1, 1, 1), routes) == ((800.0, 800.0), (5 + 2 * 20, 9 + 4 * 20))
    assert StageMemory(rows, 4.0, ((60, (0, 3)),)).of_ranks((1, 1, 1, 1), routes)[0] == (4.0 * (200 - 60), 800.0)
    assert StageMemory(rows, 4.0, ((60, (0, 3)),)).of_ranks((2, 2), ((0, 1),)) == ((800.0, 800.0), (9 + 20, 7 + 20))
    # A stage that recomputes makes in F what it does not keep.
    assert StageMemory(rows, 4.0, ()).of_ranks((2, 2), ((0, 1),), again=(0, 2))[1] == (9 + 20, 7 + 50 + 20)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("ranks", "placement"), [(2, "single"), (4, "single"), (2, "vee")])
def test_a_rank_takes_what_was_planned_inside_passes_too(ranks: int, placement: str) -> None:
    """The most bytes at any moment, messages and the insides of passes among them, against plan and reserve."""
    profile = replace(profile_of("gpt-tiny"), capacity=10**9)
    schedule = solve(profile.problem(ranks, 8, placement), effort=0.05)
    trace = run_local(schedule, "gpt-tiny", steps=1, warmup=0)
    assert schedule.problem.capacity is not None
    for rank, most in enumerate(trace.facts["transient_peaks"]):
        planned = schedule.timeline().peak_bytes[rank] + 10**9 - schedule.problem.capacity[rank]
        assert 0.97 * planned < most < 1.03 * planned


@pytest.mark.usefixtures("forked")
def test_the_memory_given_is_what_a_rank_takes() -> None:
    """At the least memory in which 1F1B fits, no rank takes more, whatever it does inside passes."""
    profile = profile_of("gpt-tiny")
    loose = preset("1f1b", replace(profile, capacity=10**9).problem(2, 4))
    assert loose.problem.capacity is not None
    left = zip(loose.timeline().peak_bytes, loose.problem.capacity, strict=True)
    limit = max(10**9 - room + peak for peak, room in left)
    tight = profile.problem(2, 4, memory=limit)
    assert tight.capacity is not None
    assert min(room - peak for room, peak in zip(tight.capacity, loose.timeline().peak_bytes, strict=True)) == 0
    trace = run_local(preset("1f1b", tight), "gpt-tiny", steps=1, warmup=0)
    assert 0.95 * limit < max(trace.facts["transient_peaks"]) <= limit


@pytest.mark.usefixtures("forked")
def test_messages_that_wait_take_what_was_predicted_and_have_room() -> None:
    """Without room for them, most of 20 messages wait on rank 1, more than fit there. With it, a run stays within the step's
    own memory, enforced, and its gradients are right."""
    profile = replace(profile_of("gpt-tiny"), host=HostLink(0, 300_000, 300_000, 300_000, 300_000, 2**33, 2))
    step, memory = Step(2, 20, "vee", memory="43.6MiB", offload="half"), round(43.6 * 2**20)
    problem = step.problem(profile)
    assert problem.messages is not None
    fixed, _ = step.costs(profile).memory.of_ranks(problem.layers, step.routes)
    blind = replace(solve(replace(problem, messages=None), effort=0.1, prefer=None), problem=problem)
    assert 20 * problem.messages.sizes[0] >= most_waiting(blind)[1] > 2 * problem.messages.reserved[1]
    assert lacking(blind)[1] > 0
    trace = run_local(blind, "gpt-tiny", steps=1, warmup=1)  # the warm-up is counted: it knows all formats
    assert trace.peaks[0] == pytest.approx(trace.facts["predicted_peaks"], rel=0.03)
    for name, row in problem.index.items():  # after every pass, to a message: none is there that was sent or not posted
        assert abs(trace.held[row] - trace.facts["predicted_held"][name]) < problem.messages.sizes[0] / 2, name
    assert trace.peaks[0][1] > 1.05 * blind.timeline().peak_bytes[1]
    for rank, most in enumerate(trace.facts["transient_peaks"]):
        assert most == pytest.approx(memory - fixed[rank] + lacking(blind)[rank], rel=0.1)
    found = solve(problem, effort=0.02, prefer=None)
    limit = int(memory - min(fixed))
    trace = run_local(found, "gpt-tiny", steps=1, warmup=0, memory_limit=limit, check=True)
    assert trace.facts["check"]["passed"] is True
    assert all(most <= memory - own for most, own in zip(trace.facts["transient_peaks"], fixed, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_allocator_says_what_storages_do() -> None:
    stage = Stage([nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()], 1)
    for p in stage.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(512, 1024, device="cuda")
    _metered(stage, x, x, AllocatedBytes())  # libraries take their own memory with their first call
    found = _metered(stage, x, x, AllocatedBytes())
    row, whole = 512 * 1024 * 4, 2**20  # whole: torch gives out a block whole where less than that would be left of it
    assert 0 <= found.after_F - (1 + 4 + 4) * row < 3 * whole  # input, and GELU's input and output
    assert 0 <= found.after_B - (1 + 4 + 4 + 1) * row < 4 * whole
    assert found.after_W == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("spec", "layer"), [("gpt-1.5b@layers=1,batch=1", 1), ("llama3-8b@layers=1,length=1024", 1), ("llama3-8b@layers=1", 2)]
)
def test_predicted_activations_are_what_the_allocator_counts(spec: str, layer: int) -> None:
    """What storages live, as the executor counts them, beside what torch's allocator gave out, after F and after B."""
    model, device = load(spec), torch.device("cuda", 0)
    through = flow(model)
    stage, feed = rotated(model, [layer], through.inputs, device, 0)[0][0], alone(model, layer, through, device)
    next(rounds([[stage]], feed, PassTimer(device)))  # libraries take their own memory with their first call
    x, target = feed(0, 0)
    allocated = held_by(stage, x, target)
    own = [t for one in stage.layers for t in (*one.parameters(), *one.buffers())]
    counted = _metered(
        stage, x, target, LiveBytes([*own, *(t.grad for t in own if t.grad is not None), *tensors_of(target)])
    )
    assert counted.after_F == pytest.approx(allocated.after_F, rel=0.03)
    assert counted.after_B == pytest.approx(allocated.after_B, rel=0.03)
    assert counted.after_W == allocated.after_W == 0
