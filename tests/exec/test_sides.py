"""Side inputs run: gradients of the unsplit model, the bytes on each hop, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from profiler.dataflow import flow
from profiler.roofline import estimate
from zbsolve import BadInput, Problem, Profile, Step, pipeline, solve
from zbsolve.build import with_exchange, with_sharding
from zbsolve.cli import main
from zbsolve.exec.handlers import Part
from zbsolve.exec.one_device import DeviceCopies, OneDevice
from zbsolve.exec.sides import SideInputs
from zbsolve.exec.transport.format import Format
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.interchange.exports import export
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.models.sides import Carried, called
from zbsolve.partition.layer import Given
from zbsolve.util.errors import RunFailed

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import random_schedule, run_here, worst_difference
from ..support.side_steps import MICROBATCHES, doubled, step_of, trial_of
from ..support.trials import too_far

# Bytes of a microbatch: the decoder's hidden states, the encoder's, these with a gate, ids.
HIDDEN, ENCODER, MEMORY, WORDS = 2 * 4 * 16 * 8, 2 * 6 * 16 * 8, 2 * (6 + 1) * 16 * 8, 2 * 4 * 8
SKIPS = [2 * 16 * length * 8 for length in (16, 8, 4)]
CASES: dict[str, tuple[dict[str, Any], dict[str, list[int]]]] = {
    # The encoder on rank 0: memory goes to both others by itself, and the row carries the decoder's words alone.
    "encoder on a rank": (
        {"model": "encoder_decoder", "placement": (0, 1, 2), "counts": (5, 3, 2), "fused": False},
        {
            "0→1 F": [WORDS, MEMORY],
            "0→2 F": [MEMORY],
            "1→2 F": [HIDDEN],
            "1→0 B": [0, MEMORY],
            "2→0 B": [MEMORY],
            "2→1 B": [HIDDEN],
        },
    ),
    # The encoder ends on rank 1, whose decoder block takes it there. The words skip to it in a message of their own.
    "encoder over two ranks": (
        {
            "model": "encoder_decoder",
            "placement": (0, 1, 2),
            "counts": (4, 3, 3),
            "fused": True,
            "recompute": "all",
        },
        {"0→1 F": [WORDS, ENCODER], "1→2 F": [HIDDEN, MEMORY], "1→0 B": [ENCODER], "2→1 B": [HIDDEN, MEMORY]},
    ),
    # Two stages a rank: each rank gets memory once, whatever takes it there; rank 0 has it.
    "interleaved": (
        {"model": "encoder_decoder", "placement": (0, 1, 2, 0, 1, 2), "counts": (5, 1, 1, 1, 1, 1), "fused": False},
        {
            "0→1 F": [WORDS, HIDDEN, MEMORY],
            "1→2 F": [HIDDEN, HIDDEN],
            "0→2 F": [MEMORY],
            "2→0 F": [HIDDEN],
            "1→0 B": [0, HIDDEN, MEMORY],
            "2→1 B": [HIDDEN, HIDDEN],
            "2→0 B": [MEMORY],
            "0→2 B": [HIDDEN],
        },
    ),
    # Towers on ranks of their own: between them goes nothing, and the joined layers alone get the image.
    "two towers": (
        {"model": "two_towers", "placement": (0, 1, 2), "counts": (4, 3, 3), "fused": True},
        {"0→2 F": [ENCODER], "1→2 F": [HIDDEN], "2→0 B": [ENCODER], "2→1 B": [HIDDEN]},
    ),
    # The image tower ends and the text tower begins in stage 1; both ranks that join them get the image from there.
    "towers that share ranks": (
        {
            "model": "two_towers",
            "placement": (0, 1, 0, 2),
            "counts": (3, 3, 2, 2),
            "fused": False,
            "recompute": [1],
        },
        {
            "0→1 F": [ENCODER],
            "1→0 F": [HIDDEN, ENCODER],
            "0→2 F": [HIDDEN],
            "1→2 F": [ENCODER],
            "1→0 B": [ENCODER],
            "0→1 B": [HIDDEN, ENCODER],
            "2→0 B": [HIDDEN],
            "2→1 B": [ENCODER],
        },
    ),
    # A head with a loss of its own, on a rank of its own beside the main head's.
    "two heads": (
        {"model": "two_heads", "placement": (0, 1, 2), "counts": (4, 2, 1), "fused": False},
        {"0→1 F": [ENCODER], "0→2 F": [ENCODER], "1→0 B": [ENCODER], "2→0 B": [ENCODER]},
    ),
    "a U-Net in a row": (
        {"model": "u_net", "placement": (0, 1, 2), "counts": (4, 2, 2), "fused": True},
        {
            "0→1 F": [SKIPS[2]],
            "0→2 F": [SKIPS[0] + SKIPS[1]],
            "1→2 F": [SKIPS[2]],
            "1→0 B": [SKIPS[2]],
            "2→0 B": [SKIPS[0] + SKIPS[1]],
            "2→1 B": [SKIPS[2]],
        },
    ),
    "the same, passed along": (
        {"model": "u_net_along", "placement": (0, 1, 2), "counts": (4, 2, 2), "fused": True},
        {way: [SKIPS[2] + SKIPS[0] + SKIPS[1]] for way in ("0→1 F", "1→2 F", "1→0 B", "2→1 B")},
    ),
    # In a V the longest skip stays on rank 0, and the shortest on rank 2; one goes from rank 1 to rank 0.
    "a U-Net in a V": (
        {"model": "u_net", "placement": (0, 1, 2, 2, 0), "counts": (3, 1, 1, 1, 2), "fused": False},
        {
            "0→1 F": [SKIPS[1]],
            "1→2 F": [SKIPS[2]],
            "1→0 F": [SKIPS[1]],
            "2→0 F": [SKIPS[2]],
            "1→0 B": [SKIPS[1]],
            "2→1 B": [SKIPS[2]],
            "0→1 B": [SKIPS[1]],
            "0→2 B": [SKIPS[2]],
        },
    ),
    # Skips that end in their stage do not go on with its output.
    "all of a U-Net on a rank": (
        {"model": "u_net_in_front", "placement": (0, 1, 2), "counts": (8, 1, 1), "fused": False},
        {way: [SKIPS[0]] for way in ("0→1 F", "1→2 F", "1→0 B", "2→1 B")},
    ),
    "the V, passed along": (
        {"model": "u_net_along", "placement": (0, 1, 2, 2, 0), "counts": (3, 1, 1, 1, 2), "fused": True},
        {
            "0→1 F": [SKIPS[0] + SKIPS[1]],
            "1→2 F": [SKIPS[0] + SKIPS[1] + SKIPS[2]],
            "2→0 F": [SKIPS[0] + SKIPS[1] + SKIPS[2]],
            "1→0 B": [SKIPS[0] + SKIPS[1]],
            "2→1 B": [SKIPS[0] + SKIPS[1] + SKIPS[2]],
            "0→2 B": [SKIPS[0] + SKIPS[1] + SKIPS[2]],
        },
    ),
}


def ran(rank: int, cases: list[dict[str, Any]]) -> list[Any]:
    """Of each case: how far a step is from the unsplit model, and an evaluation; and bytes that this rank has sent for one
    microbatch: "source→destination F" or "B" → how many in each message, sorted."""
    found = []
    for case in cases:
        model = doubled(case["model"])
        problem = step_of(model, case["placement"], case["counts"], case["fused"], recompute=case.get("recompute", ()))
        trial, sent = trial_of(model, problem, order=case["seed"]), Counter[tuple[str, int]]()
        layers = model.build if case["builder"] else nn.Sequential(*model.build())
        pipe = trial.pipeline(layers=layers, split=case.get("split", "layers"))
        send = Mailbox.send

        def counted(box: Any, message: Any, value: Any, sent: Any = sent, send: Any = send) -> None:
            if message.part == 1:
                way = f"{message.source}→{message.destination} {'B' if message.gradient else 'F'}"
                sent[way, Format.of(value).nbytes] += 1
            send(box, message, value)

        with mock.patch.object(Mailbox, "send", counted):
            row = trial.ran(pipe)
        ways = sorted({way for way, _ in sent})
        bytes_of = {way: sorted(size for (one, size), n in sent.items() if one == way for _ in range(n)) for way in ways}
        found.append([row | {"evaluated": trial.evaluated(pipe, [trial.batch(0, 0)])}, bytes_of])
    return found


def beside(rank: int, _: None) -> dict[str, Any]:
    """Two pipelines of two ranks, in each way that they can be beside each other, against the whole batch."""

    def shard(stage: nn.Module, mesh: Any) -> None:
        for layer in stage.children():
            fully_shard(layer, mesh=mesh["dp"])

    def spread(stage: nn.Module, mesh: Any) -> None:
        for layer in stage.children():
            if hasattr(layer, "mlp"):
                parallelize_module(layer, mesh["tp"], {"mlp": ColwiseParallel(output_layouts=Replicate())})

    ways: dict[str, tuple[tuple[str, str], Any, Any]] = {
        "data": (("pp", "dp"), None, None),
        "data, passes C": (("pp", "dp"), None, partial(with_exchange, time=2, replicas=True)),
        "shards": (("pp", "dp"), shard, None),
        "shards, passes AG and RS": (("pp", "dp"), shard, partial(with_sharding, gather=5, reduce=7, gathers=2)),
        "tensors": (("tp", "pp"), spread, None),
    }
    found = {}
    for number, (way, (names, parallelize, put_in)) in enumerate(ways.items()):
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        for placement, counts, fused in (((0, 1), (5, 5), False), ((0, 1, 1, 0), (3, 2, 3, 2), True)):
            model = doubled("encoder_decoder")
            problem = step_of(model, placement, counts, fused)
            options = {"mesh": mesh, "parallelize": parallelize, "seed": 5}
            trial = trial_of(model, put_in(problem) if put_in else problem, order=number, options=options)
            found[f"{way}, {placement}"] = trial.ran(trial.pipeline())
    return found


def test_bytes_of_the_page() -> None:
    """docs/side-inputs.md: kB that go forward in one microbatch of the U-Net, with side inputs and passed along."""
    names = ("a U-Net in a row", "the same, passed along", "a U-Net in a V", "the V, passed along")
    sums = [sum(sum(sizes) for way, sizes in CASES[name][1].items() if way.endswith("F")) for name in names]
    assert sums == [8_192, 14_336, 6_144, 20_480]


@pytest.mark.slow
def test_gradients_and_bytes_on_the_wire() -> None:
    cases = [{**case, "seed": n, "builder": n % 2 == 0} for n, (case, _) in enumerate(CASES.values())]
    for case in cases[1:5:3]:  # a graph takes a second on each rank
        case["split"] = "graph"
    ranks = on_ranks(3, f"{__name__}:ran", cases)
    for number, (name, (_, right)) in enumerate(CASES.items()):
        sent: dict[str, list[int]] = {}
        for rank in ranks:
            row, mine = rank[number]
            assert max(row["gradient"], row["loss"], row["evaluated"]) < 1e-12, name
            assert row["left"] == 0, name
            sent |= mine
        assert sent == right, name


@pytest.mark.slow
def test_gradients_beside_other_pipelines() -> None:
    """Replicas, FSDP2 and tensor ranks, with passes that sum, gather and reduce and without."""
    ranks = on_ranks(4, f"{__name__}:beside", None)
    assert [len(rows) for rows in ranks] == [10] * 4
    assert too_far(ranks, 1e-12) == {}


@pytest.mark.parametrize("model", ["encoder_decoder", "u_net", "two_towers", "two_heads", "spectra"])
@pytest.mark.parametrize("seed", range(8))
def test_gradients_on_any_placement_in_any_order(model: str, seed: int) -> None:
    places = [(0, 1), (0, 1, 2, 3), (0, 1, 1, 0), (0, 1, 0, 1), (0, 1, 2, 2, 1, 0), ((0, 1, 2), (2, 1, 0)), (0, 0, 1, 0)]
    placement: Any = places[seed % len(places)]
    stages = len(placement[0]) if isinstance(placement[0], tuple) else len(placement)
    try:
        made = doubled(model)
        counts = [len(made.layers) // stages + (s < len(made.layers) % stages) for s in range(stages)]
        again = ((), "all", [stages - 1], "0:1,1:1")[seed % 4]  # of part of two stages: side inputs go through the parts
        problem = step_of(made, placement, counts, seed % 2 == 0, recompute=again)
        assert worst_difference(random_schedule(problem, seed), made) < 1e-12
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_pass_has_all_its_inputs_when_the_last_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message of the row comes at 1, one beside it at 2."""
    take = DeviceCopies.take
    monkeypatch.setattr(DeviceCopies, "take", lambda self, m: (take(self, m)[0], 2 if m.beside else 1))
    try:
        model = doubled("encoder_decoder")
        one = OneDevice(model, random_schedule(step_of(model, (0, 1, 2), (5, 3, 2), True)))
        batches = [model.batch(m, 0) for m in one.microbatches]
        one.step(*(dict(enumerate(column)) for column in zip(*batches, strict=True)))
    finally:
        torch.set_default_dtype(torch.float32)
    names = [action.name for interpreter in one.interpreters for action in interpreter.program.actions]
    came = dict(zip(names, (at for interpreter in one.interpreters for at in interpreter.record.arrived), strict=True))
    passes = ("0F0", "1F0", "2F0", "2BW0", "1BW0", "0BW0")
    assert [came[name] for name in passes] == [0, 2, 2, 0, 1, 2]


@pytest.mark.slow
@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("split", "words"), [("graph", "--ranks 3 --fused"), ("layers", "--ranks 2 --placement vee --recompute all")]
)
def test_from_the_command_line(split: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A profile, a schedule and a checked run; bytes that ranks hold are those that were predicted."""
    spec, paths = "tests.support.side_models:encoder_decoder", [str(tmp_path / name) for name in ("p", "s", "t")]
    assert main(["profile", spec, "--estimate", "h100", "-o", paths[0]]) == 0
    assert main(["solve", paths[0], *words.split(), "--microbatches", "4", "--effort", "0.1", "-o", paths[1]]) == 0
    how = ["--steps", "2", "--warmup", "0", "--check", "-o", paths[2]]
    assert main(["run", paths[1], "--model", spec, "--local", "--split", split, *how]) == 0
    assert "check: right" in capsys.readouterr().out
    trace = json.loads(Path(paths[2]).read_text())
    assert trace["peaks"][0] == pytest.approx(trace["facts"]["predicted_peaks"], rel=0.1)


def test_a_profile_knows_them() -> None:
    """Bytes in float32: ids of 2 · 4 · 8, memory of 2 · 6 · 16 · 4, and a row more. What layers keep does not count them."""
    profile = estimate("tests.support.side_models:encoder_decoder", "h100")
    assert profile.layers[0].gives == (Given("words", 64, gradient=False, kept=64),)  # the batch's
    assert profile.layers[4].gives == (Given("memory", 768), Given("gate", 128, kept=128))  # the sigmoid's own
    assert profile.layers[4].takes == ("words",)
    assert [layer.takes for layer in profile.layers[5:]] == [(), *[("memory", "gate")] * 3, ()]
    assert [layer.output_bytes for layer in profile.layers[3:6]] == [768, 64, 512]
    assert profile.facts["no_vocabulary"] == "side inputs do not go with a sharded vocabulary yet"
    again = Profile.from_json(json.loads(json.dumps(profile.to_json())))
    assert again.layers == profile.layers


@pytest.mark.parametrize("again", [(), "all"])
@pytest.mark.parametrize(
    ("model", "more"), [("u_net", 0), ("two_towers", 0), ("encoder_decoder", WORDS), ("two_heads", 768), ("spectra", 2304)]
)
def test_bytes_inside_a_stage_are_predicted(model: str, more: int, again: Any) -> None:
    """But for losses of 4 bytes. `more` is counted and not there: what takers do not keep, what goes along the row as well,
    and words of the batch that an embedding takes behind the first layer."""
    spec = f"tests.support.side_models:{model}"
    problem = Step(1, 1, fused=True, recompute=again).problem(estimate(spec, "h100"))
    own = load(spec, 0)
    one, (x, target) = OneDevice(own, solve(problem, effort=0.01)), own.batch(0, 0)
    for _ in range(2):  # the second one has gradients
        (memory,) = one.step({0: x}, {0: target}, memory=True).memory
    assert max(memory.predicted) == pytest.approx(memory.peak + more, abs=16)


def refusal(layers: list[nn.Module], problem: Problem) -> str:
    """What is said where model and schedule do not fit; "" where the step runs."""
    own = doubled("encoder_decoder")
    model = replace(own, layers=tuple(partial(deepcopy, layer) for layer in layers))
    try:
        run_here(random_schedule(problem), model)
    except (BadInput, RunFailed) as error:
        return str(error)
    finally:
        torch.set_default_dtype(torch.float32)
    return ""


def test_what_model_and_schedule_do_not_have_in_common_is_named() -> None:
    """A model without a message, a message without a model, and gradients that come and should not, or the other way."""
    model = doubled("encoder_decoder")
    good = step_of(model, (0, 1), (5, 5), True)
    bare = pipeline([10] * 2, BW=[20] * 2, microbatches=MICROBATCHES, layers=(5, 5))
    back = good.edges.carrying("side gradient")
    silent = replace(good, edges=good.edges.only(np.flatnonzero(~back)))
    frozen = model.build()
    frozen[3] = nn.Sequential(*frozen[3:4])
    for layer in frozen[:5]:
        layer.requires_grad_(False)
    hooked = model.build()
    hooked[6].register_forward_pre_hook(lambda layer, given: given[1].register_hook(torch.neg) and None)
    assert refusal(model.build(), good) == ""
    for layers, problem, why in (
        (
            model.build(),
            bare,
            "schedule: it has no message of side input 'memory', from stage 0 to stage 1 on rank 1: profile the",
        ),
        (
            hooked,
            good,
            "a layer hooks one of several tensors, where a stage sees a part of its gradient: clone it",
        ),
        (
            [nn.Linear(4, 4)] * 10,
            good,
            "it has a side input that the model has not, from stage 0 to stage 1 on rank 1: profile",
        ),
        (
            model.build(),
            silent,
            "the schedule has no gradient of 'gate' from rank 1, and the model needs one",
        ),
        (frozen, good, "the schedule has a gradient of 'gate' from rank 1, and the model needs none"),
    ):
        assert why in refusal(layers, problem)
    late, number = model.build(), model.build()
    late[2].takes, number[1].gives = "memory", 3  # type: ignore[assignment]
    assert refusal(late, good) == "layer 2: takes 'memory', and layer 4, which gives it, does not come before"
    assert refusal(number, good) == "layer 1: 'gives' is a int: the names of side inputs are needed"


def beginning(begins: Any) -> Model:
    """The two towers, of which the second one `begins`."""
    model = doubled("two_towers")
    layers = model.build()
    layers[4].begins = begins
    return replace(model, layers=tuple(partial(deepcopy, layer) for layer in layers))


def test_where_rows_begin_model_and_schedule_agree() -> None:
    row, graph = (step_of(beginning(begins), (0, 1), (4, 6), True) for begins in (False, True))
    for begins, problem, why in (
        (True, row, "schedule: stage 1 begins no row, and layer 4, its first, does: profile the model and solve again"),
        (False, graph, "schedule: stage 1 begins a row of its own, and layer 4, its first, does not: profile"),
        ("yes", graph, "layer 4: 'begins' is a str: True, where it begins a row of its own"),
    ):
        assert why in refusal(beginning(begins).build(), problem)


def test_other_engines_have_none() -> None:
    schedule = solve(Step(3, 3, fused=True, partition=(5, 3, 2)).problem(estimate(f"{__name__}:tiny", "h100")), effort=0.05)
    for target in ("torch-csv", "megatron", "deepspeed"):
        with pytest.raises(BadInput, match="has no side inputs"):
            export(schedule, target)


def test_other_engines_have_one_row() -> None:
    """The image stays on rank 0, so no side input goes between ranks."""
    problem = step_of(beginning(True), (0, 1, 0, 1), (4, 3, 2, 1), True)
    torch.set_default_dtype(torch.float32)
    for target in ("torch-csv", "megatron"):
        with pytest.raises(BadInput, match=r"stage 1: it begins a row of its own, and .* has stages in one row only"):
            export(solve(problem, effort=0.05), target)


def test_a_profile_knows_rows() -> None:
    """Of the image tower's end nothing goes along the row, and the text tower gets the batch."""
    profile = estimate("tests.support.side_models:two_towers", "h100")
    assert [layer.begins for layer in profile.layers] == [i == 4 for i in range(10)]
    assert profile.layers[3].gives == (Given("image", 768),)
    assert [layer.output_bytes for layer in profile.layers[2:6]] == [768, 0, 512, 512]
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))).layers == profile.layers
    heads = estimate("tests.support.side_models:two_heads", "h100")
    assert [layer.takes for layer in heads.layers[4:]] == [("targets",), ("targets",), ("hidden",)]


def tiny() -> Any:
    """For `module:function`."""
    from ..support.side_models import encoder_decoder

    return encoder_decoder()


def test_what_a_part_does_not_go_with_has_a_line() -> None:
    assert SideInputs.no_capture != Part.no_capture
    assert SideInputs.no_ahead != Part.no_ahead


class Wrong(nn.Module):
    """Gives what it does not return."""

    gives = ("a", "b")

    def forward(self, x: Tensor) -> Any:
        return x, x


def test_a_layer_that_does_not_do_what_it_says_is_named() -> None:
    with pytest.raises(BadInput, match="Wrong: 'gives' says that it returns its output and after it 'a', 'b', as a tuple"):
        called(Wrong(), torch.ones(1))
    taker = nn.Linear(1, 1)
    taker.takes = "c"  # type: ignore[assignment]
    with pytest.raises(BadInput, match="Linear: takes 'c', which no layer before it gives"):
        called(taker, Carried(torch.ones(1), {"a": torch.ones(1)}))


def test_a_layer_may_change_what_it_gives() -> None:
    layer = nn.Identity()
    assert not isinstance(called(layer, torch.ones(1)), Carried)
    layer.takes = names = ["a"]  # type: ignore[assignment]
    with pytest.raises(BadInput, match="takes 'a'"):
        called(layer, torch.ones(1))
    names[0] = "b"
    with pytest.raises(BadInput, match="takes 'b'"):
        called(layer, torch.ones(1))


def forgotten() -> Any:
    """A skip that nobody takes."""
    from ..support.side_models import u_net

    layers, sample, loss = u_net()
    return layers[:-1], (sample[0], sample[1][..., :8]), loss


def unknown() -> Any:
    """A layer that takes what nobody gives."""
    from ..support.side_models import u_net

    layers, sample, loss = u_net()
    layers[5].takes = ("skip9",)
    return layers, sample, loss


def alone() -> Any:
    """A tower that gives nothing to anybody."""
    from ..support.side_models import two_towers

    layers, sample, loss = two_towers()
    return [layers[0], *layers[4:7], layers[9]], sample, loss


def taken() -> Any:
    """A layer gives what is the batch's."""
    from ..support.side_models import two_towers

    layers, sample, loss = two_towers()
    layers[3].gives = "targets"
    return layers, sample, loss


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("alone", "layer 1: begins a row, and nothing that layers 0 to 0 give is taken after it"),
        ("taken", "layer 3: gives 'targets', which is the batch's: take another name"),
        ("forgotten", "layer 2: gives 'skip0', and no layer takes it"),
        ("unknown", "layer 5: takes 'skip9', and no layer gives it"),
    ],
)
def test_a_profile_names_what_does_not_fit(name: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        flow(load(f"{__name__}:{name}"))
