"""What tests/exec/test_sides.py runs on gloo ranks: models with side inputs, every message counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from zbsolve import Problem, pipeline
from zbsolve.build import with_exchange, with_sharding, with_side_inputs
from zbsolve.exec.transport.format import Format
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.models.sides import names_of
from zbsolve.partition.layer import Given, Layer, begun_stages
from zbsolve.partition.stage_memory import side_inputs

from .exec_tools import batch_of
from .trials import Trial

MICROBATCHES = 4


def doubled(name: str) -> Model:
    """A model of `side_models` in float64, whose layers are made anew whenever they are built."""
    torch.set_default_dtype(torch.float64)
    model = load(f"tests.support.side_models:{name}", 0)
    return replace(model, layers=tuple(partial(deepcopy, build()) for build in model.layers))


def step_of(model: Model, placement: Sequence[int], counts: Sequence[int], fused: bool, **how: Any) -> Problem:
    """A step with the side inputs of the model; whole numbers have no gradient."""
    layers = []
    for i, layer in enumerate(model.build()):
        gives, takes, begins = names_of(layer, i)
        given = tuple(Given(name, 8, gradient=name != "words") for name in gives)
        layers.append(Layer(str(i), 1, 1, 1, 1, 0, 0, 0, 0, gives=given, takes=takes, begins=begins))
    times = {"BW": [20] * len(counts)} if fused else {"B": [10] * len(counts), "W": [10] * len(counts)}
    where = {"placement": tuple(placement), "microbatches": MICROBATCHES, "comm": 3, "layers": tuple(counts), "X": 10}
    plain = pipeline([10] * len(counts), **times, **where | how)
    return with_side_inputs(plain, *side_inputs(layers, counts), begins=begun_stages(layers, counts))


def trial_of(model: Model, problem: Problem, **how: Any) -> Trial:
    """Steps of a model by name, whose pipelines beside each other have batches of their own."""
    how |= {"layers": model.build, "loss": model.loss}
    return Trial(problem=problem, batch=lambda place, step: batch_of(model, MICROBATCHES, place), **how)


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
