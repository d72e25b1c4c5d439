"""What the tests of training loops on meshes run on gloo ranks (see `exec_ranks`): each compares with one process."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.base.values import full
from zbsolve.exec.check import difference

from .exec_tools import refusal
from .tensor_parallel import WORDS, loss, model, parallel

BLOCKS, MICROBATCHES, ROWS, STEPS, SAVED = 2, 2, 2, 2, 1
MAX_NORM = 0.2
Sizes = dict[str, int]


def rows(step: int, part: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, or a part of it."""
    words = torch.randint(WORDS, (MICROBATCHES * ROWS * 2, 9), generator=torch.Generator().manual_seed(step))
    return words[part, :-1], words[part, 1:]


def own(runner: Pipeline, step: int) -> tuple[Tensor, Tensor]:
    """This coordinate's part of the batch."""
    assert runner.mesh is not None
    each = len(rows(step)[0]) // runner.mesh.places
    return rows(step, slice(runner.place * each, (runner.place + 1) * each))


def order(ranks: int) -> Schedule:
    """1F1B with a split backward on so many ranks."""
    layers = BLOCKS + 2
    counts = [layers // ranks + (r < layers % ranks) for r in range(ranks)]
    times = [100 * n for n in counts]
    return preset("zb-h1", pipeline(F=times, B=times, W=times, microbatches=MICROBATCHES, layers=counts))


def runner_on(sizes: Sizes, how: str) -> Pipeline:
    """A pipeline on a mesh of these sizes, whose stages are tensor-parallel along tp and sharded along fsdp's dimension."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    def parallelize(stage: nn.Module, whole: Any) -> None:
        layers = list(stage.children())
        if "tp" in sizes:
            parallel(layers, whole["tp"], how)
        if "dp_shard" in sizes:
            from torch.distributed.fsdp import fully_shard

            for layer in layers:
                fully_shard(layer, mesh=whole["dp_shard"])

    layers = nn.ModuleList(model(BLOCKS))
    return Pipeline(layers, order(sizes["pp"]), loss=loss, mesh=mesh, parallelize=parallelize)


class Loop:
    """AdamW, clipping, a schedule of learning rates, two steps an update; what it sees."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.AdamW(parameters, 0.05)
        self.rates = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.seen: list[list[float]] = []


def trained_alone(steps: int = STEPS) -> tuple[nn.Sequential, list[list[float]]]:
    """One process: its losses, norms and evaluations."""
    whole = nn.Sequential(*model(BLOCKS))
    loop = Loop(whole.parameters())
    for step in range(steps):
        losses = []
        for part in range(2):
            value = loss(whole(rows(2 * step + part)[0]), rows(2 * step + part)[1])
            value.backward()
            losses.append(float(value))
        norm = float(clip_grad_norm_(whole.parameters(), MAX_NORM))
        loop.optimizer.step()
        loop.rates.step()
        loop.optimizer.zero_grad()
        with torch.no_grad():
            held_out = float(loss(whole(rows(99)[0]), rows(99)[1]))
        loop.seen.append([*losses, norm, held_out])
    return whole, loop.seen


def went_on(runner: Pipeline, loop: Loop, until: int) -> None:
    """Train to so many updates."""
    assert runner.mesh is not None
    while runner.steps < 2 * until:
        losses = []
        for _ in range(2):
            value = torch.tensor(runner.step(*own(runner, runner.steps)).loss, dtype=torch.float64)
            if runner.mesh.replicas is not None:
                dist.all_reduce(value, group=runner.mesh.replicas)
            losses.append(float(value) / runner.mesh.places)
        norm = float(runner.clip_grad_norm_(MAX_NORM))
        loop.optimizer.step()
        loop.rates.step()
        loop.optimizer.zero_grad()
        loop.seen.append([*losses, norm, runner.evaluate(*own(runner, 99))])


def far(found: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> float:
    """The largest relative difference."""
    pairs = [(a, b) for row, other in zip(found, right, strict=True) for a, b in zip(row, other, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def apart(runner: Pipeline, whole: nn.Module) -> float:
    """The largest relative difference of weights."""
    return max(difference(full(p.detach()), whole.get_parameter(name).detach()) for name, p in runner.named_parameters())


def bits(runner: Pipeline) -> list[float]:
    """What tells this rank's weights apart."""
    return [float(full(p.detach()).double().sum()) for p in runner.parameters()]


def loops(rank: int, argument: list[Any]) -> list[dict[str, Any]]:
    """(mesh, plan, other meshes) → training against one process; going on from its checkpoint on that mesh and on others."""
    warnings.simplefilter("ignore")
    folder, jobs = argument
    whole, right = trained_alone()
    found = []
    for number, (sizes, how, others) in enumerate(jobs):
        runner, path = runner_on(sizes, how), Path(folder) / str(number)
        loop = Loop(runner.parameters())
        went_on(runner, loop, SAVED)
        runner.save(path, optimizer=loop.optimizer, rates=loop.rates)
        went_on(runner, loop, STEPS)
        again = runner_on(sizes, how)
        second = Loop(again.parameters())
        again.load(path, optimizer=second.optimizer, rates=second.rates)
        went_on(again, second, STEPS)
        one = {
            "seen": far(loop.seen, right),
            "weights": apart(runner, whole),
            "same": [second.seen == loop.seen[SAVED:], bits(again) == bits(runner)],
            "norms": [row[2] for row in loop.seen],
            "elsewhere": [],
        }
        for other in others:
            moved = runner_on(other, how)
            third = Loop(moved.parameters())
            moved.load(path, optimizer=third.optimizer, rates=third.rates)
            went_on(moved, third, STEPS)
            one["elsewhere"].append([far(third.seen, right[SAVED:]), apart(moved, whole)])
        found.append(one)
    return found


def scaled(rank: int, _: None) -> dict[str, Any]:
    """Loss scaling, with an inf on one rank of the mesh alone: every rank skips that step."""
    warnings.simplefilter("ignore")
    runner = runner_on({"pp": 2, "tp": 2}, "sequence")
    optimizer = torch.optim.SGD(runner.parameters(), 0.1)
    scaler, whole = ShardedGradScaler("cpu", 2.0**16), nn.Sequential(*model(BLOCKS))
    plain = torch.optim.SGD(whole.parameters(), 0.1)
    for step in range(3):
        runner.step(*own(runner, step), scaler=scaler)
        if step == 1 and rank == 2:
            next(runner.parameters()).grad.to_local().view(-1)[0] = math.inf  # type: ignore[union-attr]
        if step != 1:
            loss(whole(rows(step)[0]), rows(step)[1]).backward()
            plain.step()
            plain.zero_grad()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    alone = dist.new_group([rank], use_local_synchronization=True)
    said = refusal(lambda: runner.step(*own(runner, 0), scaler=ShardedGradScaler("cpu", process_group=alone)))
    return {"weights": apart(runner, whole), "scale": scaler.get_scale(), "said": said}


def validated_late(rank: int, _: None) -> dict[str, Any]:
    """PostValidated on a mesh with clipping, against clip and step."""
    warnings.simplefilter("ignore")
    found, norms = [], list[float]()
    for late in (False, True):
        runner = runner_on({"pp": 2, "tp": 2}, "sequence")
        inner = torch.optim.AdamW(runner.parameters(), 0.05)
        optimizer: Any = PostValidated(runner, inner, max_norm=MAX_NORM) if late else inner
        losses = []
        for step in range(3):
            losses.append(runner.step(*own(runner, step)))
            if not late:
                norms.append(float(runner.clip_grad_norm_(MAX_NORM)))
            optimizer.step()
            optimizer.zero_grad()
        runner.finish()
        found.append([[one.loss for one in losses], bits(runner)])
    return {"same": found[0] == found[1], "clipped": max(norms) > MAX_NORM}


def given_all(rank: int, _: None) -> dict[str, Any]:
    """Forward alone, and the whole model's weights given to a part of it."""
    warnings.simplefilter("ignore")
    runner, whole = runner_on({"pp": 2, "tp": 2}, "sequence"), nn.Sequential(*model(BLOCKS))
    for p in whole.parameters():
        p.data.mul_(1.5)
    runner.load_state_dict(whole.state_dict())
    y = runner.forward(rows(0)[0], everywhere=True)
    return {"output": difference(full(y), whole(rows(0)[0]).detach()), "weights": apart(runner, whole)}


def llama(rank: int, lines: list[str]) -> list[dict[str, float]]:
    """What the example reports of all steps, run with one line of options after the other; its process group is there."""
    from examples import train_llama

    warnings.simplefilter("ignore")
    said = []
    for words in map(str.split, lines):
        there = mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT)
        with there, mock.patch.object(sys, "argv", ["train_llama.py", *words]):
            train_llama.main()
        dist.barrier()  # the first rank writes
        said += json.loads(Path(words[words.index("--json") + 1]).read_text())
    return said
