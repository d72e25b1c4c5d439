"""Models that hand on several tensors: profiled, estimated, solved, run and checked against the unsplit model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map

from profiler.dataflow import example, flow
from profiler.measurement import measure
from profiler.roofline import estimate
from profiler.stage_rounds import alone, batches, of_two_kinds
from profiler.timing import Bench, Measuring, time_layers
from zbsolve import BadInput, Profile, solve
from zbsolve.exec import Pipeline, check
from zbsolve.exec.handlers import Data
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.exec.run.launch import run_local
from zbsolve.exec.transport.format import Format
from zbsolve.interchange.torch_csv import torch_order
from zbsolve.layer import Layer
from zbsolve.models.by_name import load

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule

HERE = "tests.support.many_models:"
NAMES = ["unet", "encoder_decoder", "views"]
SIZES = ("output_bytes", "output_kept", "input_unneeded", "held_until_B", "held_until_W", "held_from_B", "parameter_bytes")


def sizes(layers: tuple[Layer, ...]) -> list[list[int]]:
    return [[getattr(one, name) for name in SIZES] for one in layers]


def test_bytes_between_layers_are_those_of_all_tensors() -> None:
    words, width, pair = 2 * 7, 8, 2 * 5
    each = 4 * words * width + words + 8 * words + 4 * pair * width + 4 * words + 4  # memory keep at decoder bias unused
    through = flow(load(f"{HERE}encoder_decoder"))
    assert [one.nbytes for one in through.inputs] == [8 * (words + pair), *[each] * 5]
    # What gets a gradient: memory, the decoder's state, the unused mean.
    assert [one.gradient.nbytes for one in through.inputs] == [0, *[4 * words * width + 4 * pair * width + 4] * 5]
    assert through.prints[1] == through.prints[2]
    value = example(through.inputs[1], torch.randn)
    assert Format.of(value) == through.inputs[1]
    assert value["nothing"] is None
    skips = [4 * 256, 6 * 64, 8 * 16]  # numbers of one of two pictures
    for behind, form in enumerate(flow(load(f"{HERE}unet")).inputs[1:4], 1):
        assert form.nbytes == 2 * 4 * (skips[behind - 1] // 4 + sum(skips[:behind]))


@pytest.mark.usefixtures("one_link")
@pytest.mark.slow
def test_a_profile_and_an_estimate_count_the_same_bytes() -> None:
    for name in NAMES:
        guess = estimate(f"{HERE}{name}", "h100")
        model = load(f"{HERE}{name}")
        assert [one.output_bytes for one in guess.layers[:-1]] == [one.nbytes for one in flow(model).inputs[1:]]
        if name == "unet":
            measured = measure(f"{HERE}{name}", seconds=0.01)
            assert sizes(measured.layers) == sizes(guess.layers)
            assert not any(measured.facts["left_after_W"].values())  # type: ignore[attr-defined]


def test_layers_are_measured_one_by_one_where_memory_does_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = iter([torch.OutOfMemoryError("out of memory")])

    def updates(*given: Any) -> list[Any]:
        for error in turns:
            raise error
        return []

    monkeypatch.setattr("profiler.timing.updates", updates)
    model = load(f"{HERE}encoder_decoder")
    bench = Bench(torch.device("cpu"), 0.01)
    timed, stages = time_layers(Measuring(model, flow(model), bench, [0, 1, 3, 5]), torch.optim.SGD)
    assert timed.alone
    assert not stages
    assert {i for i, _ in timed.samples} == {0, 1, 3, 5}


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("name", "split", "placement", "ranks"),
    [
        ("unet", "layers", "single", 2),
        ("unet", "graph", "vee", 1),
        ("encoder_decoder", "layers", "vee", 1),
        ("encoder_decoder", "graph", "single", 2),
    ],
)
@pytest.mark.slow
def test_a_run_is_checked_against_the_unsplit_model(name: str, split: str, placement: str, ranks: int) -> None:
    profile = estimate(f"{HERE}{name}", "h100")
    schedule = solve(profile.problem(ranks, 4, placement), effort=0.02)
    trace = run_local(schedule, profile.model, steps=1, warmup=0, check=True, split=split)
    assert trace.facts["check"]["passed"]
    assert trace.facts["check"]["tensors"] > 5
    assert torch_order(schedule).csv


@pytest.mark.slow
def test_one_device_runs_such_models() -> None:
    for name in NAMES:
        schedule = solve(estimate(f"{HERE}{name}", "h100").problem(2, 4), effort=0.02)
        trace = run_on_one_device(schedule, f"{HERE}{name}", Options(steps=1, warmup=0, check=True))
        assert trace.facts["check"]["passed"]


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(("name", "fused"), [*((name, False) for name in NAMES), ("asides", True)])
def test_the_executor_holds_what_was_predicted(name: str, fused: bool) -> None:
    profile: Profile = estimate(f"{HERE}{name}", "h100")
    schedule = solve(profile.problem(1, 4, fused=fused), effort=0.02)
    trace = run_local(schedule, profile.model, steps=1, warmup=0)
    predicted = max(trace.facts["predicted_held"].values())
    assert trace.peaks[0][0] == pytest.approx(predicted, rel=0.03)


def message_bytes(rank: int, names: list[str]) -> list[list[int]]:
    """Bytes of this rank's messages in a step of each model on two ranks: of an activation that came, and of a gradient."""
    found = []
    for name in names:
        model = load(f"{HERE}{name}")
        schedule = random_schedule(a_problem((0, 1), 2, layers=len(model.layers)))
        runner = Pipeline(model.build, schedule, loss=model.loss)
        runner.step(*map(list, zip(*(model.batch(m, 0) for m in range(2)), strict=True)))
        came = [message for messages in runner.program.incoming.values() for message in messages]
        assert len(came) == 2
        sizes = [{runner.mailbox.size(one) for one in came if one.gradient == gradient} for gradient in (False, True)]
        found.append([max(one, default=0) for one in sizes])
    return found


def test_messages_have_the_bytes_of_the_profile() -> None:
    first, second = on_ranks(2, f"{__name__}:message_bytes", NAMES)
    for name, (down, up), (back, there) in zip(NAMES, first, second, strict=True):
        through = flow(load(f"{HERE}{name}"))
        cut = len(through.inputs) // 2
        nobodys = 4 if name == "encoder_decoder" else 0  # a number that no layer looks at gets no gradient
        assert (down, up) == (0, through.inputs[cut].gradient.nbytes - nobodys)
        assert (back, there) == (through.inputs[cut].nbytes, 0)


def test_what_cannot_be_handed_on_names_its_layer() -> None:
    for name, text in {
        "set_in_it": r"layer 1 \(1.Odd\) gives {x: float32 \(2, 4\), more: a set}: has a set: what can be handed on are ",
        "deaf": r"layer 1 \(1.Deaf\) lets no gradient back to the layers before it",
    }.items():
        with pytest.raises(BadInput, match=text):
            flow(load(f"{HERE}{name}"))


def test_a_loss_of_pytrees_that_is_no_mean_is_told() -> None:
    pairs = {m: ({"x": torch.randn(4, 3)}, (torch.randn(4, 3), torch.ones(4))) for m in range(2)}
    data = Data({m: x for m, (x, _) in pairs.items()}, {m: y for m, (_, y) in pairs.items()})

    def mean(output: Any, target: Any) -> torch.Tensor:
        return ((output["x"] - target[0]).square().mean(1) * target[1]).mean()

    def roots(output: Any, target: Any) -> torch.Tensor:
        return mean(output, target).sqrt()

    assert check.row_counts([torch.nn.Identity()], data, mean) == (False, 1)
    uneven = check.row_counts([torch.nn.Identity()], data, roots)
    assert uneven is not None
    assert uneven.uneven > 1.1


def test_a_profile_is_of_microbatches_with_the_shapes_of_the_first() -> None:
    model, cpu = load("mlp-tiny"), torch.device("cpu")
    assert not of_two_kinds(model)
    plain = model.batch
    two = replace(model, batch=lambda m, step: tree_map(lambda x: x[: 1 + (m + step) % 2], plain(m, step)))
    assert of_two_kinds(two)
    last = len(model.layers) - 1
    for feed in (batches(two, cpu), alone(two, last, flow(two), cpu)):
        assert {tuple(len(x) for x in feed(m, step)) for m in range(3) for step in range(3)} == {(1, 1)}
    assert torch.equal(batches(two, cpu)(2, 0)[0], plain(2, 0)[0][:1])
