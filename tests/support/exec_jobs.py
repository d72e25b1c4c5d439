"""What the tests run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import hashlib
import shutil
import tempfile
import warnings
from collections import OrderedDict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from profiler.memory import held
from profiler.stage_rounds import stages_of
from zbsolve import pipeline
from zbsolve.exec import Pipeline
from zbsolve.exec.memory import LiveBytes
from zbsolve.models.presets import GptSizes, gpt, mlp
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.systems import preset

from .exec_tools import a_problem, batch_of, metered, random_schedule, refusal, split_layers


def toy(numbers: list[int]) -> list[nn.Module]:
    """Tiny layers, the same ones wherever they are built."""
    made = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    return made


def example(rank: int, steps: int) -> list[float]:
    """The losses of the example's training in double precision, interrupted on the way."""
    from examples.train_gpt import pipelined

    torch.set_default_dtype(torch.float64)  # rounding grows with every step of AdamW
    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    folder = f"{names[0]}/checkpoint"
    first = pipelined(steps // 2, checkpoint=folder)[:-1]
    rest = pipelined(steps, checkpoint=folder)
    torch.set_default_dtype(torch.float32)
    dist.barrier()
    shutil.rmtree(str(names[0]), ignore_errors=True)
    return [*first, *rest]


def twice(rank: int, steps: int) -> list[str]:
    """The digests of this rank's parameters after the same training, two times."""
    digests = []
    for _ in range(2):
        model = mlp(0)
        runner = Pipeline(model.build, random_schedule(a_problem((0, 1, 1, 0), 4), 3), loss=model.loss)
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.01)
        for step in range(steps):
            runner.step(*batch_of(model, 4, step))
            optimizer.step()
            optimizer.zero_grad()
        state = runner.state_dict()
        digests.append(hashlib.sha256(b"".join(state[name].numpy().tobytes() for name in sorted(state))).hexdigest())
    return digests


def leaks(rank: int, steps: int) -> dict[str, Any]:
    """The least bytes that live after one of the first ten steps and of the last ten, with parameters and gradients left
    out. (Now and then one row lives a little longer than its step.)"""
    model = mlp(0)
    runner = Pipeline(model.build, random_schedule(a_problem((0, 1, 1, 0), 4), 3), loss=model.loss)
    batch = batch_of(model, 4)
    runner.step(*batch)
    meter, seen = LiveBytes(), []
    meter.ignore([*runner.module.parameters(), *(p.grad for p in runner.parameters() if p.grad is not None)])
    with meter:
        for _ in range(steps):
            runner.step(*batch).wait()
            seen.append(meter.now)
    return {"bytes": [min(seen[:10]), min(seen[-10:])], "live": sum(len(stage.live) for stage in runner.stages.values())}


def owned(rank: int, _: None) -> dict[str, Any]:
    """A model on the meta device: what this rank holds of it, its state dict, and what it says of a wrong one."""
    with torch.device("meta"):
        whole = nn.Sequential(OrderedDict((f"part{i}", nn.Linear(4, 4)) for i in range(4)))
    runner = Pipeline(whole, random_schedule(a_problem((0, 1), 2, layers=4)), loss=nn.functional.mse_loss)
    state = runner.state_dict()
    runner.load_state_dict({name: torch.ones_like(value) for name, value in state.items()} | {"other": torch.ones(1)})
    refused = refusal(lambda: runner.step(torch.ones(3, 4), torch.ones(3, 4)))
    return {
        "names": [name for name, _ in runner.named_parameters()],
        "meta": sum(p.is_meta for p in whole.parameters()),
        "sums": {name: float(value.detach().sum()) for name, value in runner.state_dict().items()},
        "refused": refused,
        "ones": runner.step(torch.ones(2, 4), torch.ones(2, 4)).timeline.makespan,
    }


def tied_on_meta(rank: int, order: list[int]) -> float:
    """A model on the meta device whose last layer has the first one's weights; `init` fills those of the first alone. The
    weight's value on this rank. order: stage → rank."""
    with torch.device("meta"):
        whole = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    whole[3].weight = whole[0].weight

    def init(number: int, layer: nn.Module) -> None:
        if number < 3:
            nn.init.constant_(layer.weight, 7.0 if number == 0 else 0.1)  # type: ignore[arg-type]

    schedule = random_schedule(a_problem(tuple(order), 2, layers=4))
    runner = Pipeline(whole, schedule, loss=nn.functional.mse_loss, init=init)
    return float(runner.layers[0 if rank == order[0] else 3].weight[0, 0])  # type: ignore[index]


def unfrozen_front(rank: int, _: None) -> list[str]:
    """A frozen layer before a trained one, on a rank each. What steps say: as it is, with both trained, as before."""
    layers = [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]
    problem = pipeline([10, 10], BW=[0, 20], microbatches=2, layers=[1, 1], untrained=1)
    runner = Pipeline(layers, random_schedule(problem), loss=nn.functional.mse_loss)
    said = []
    for trained in (False, True, False):
        layers[0].requires_grad_(trained)
        said.append(refusal(lambda: runner.step(torch.ones(2, 4), torch.ones(2, 4))))
    return said


def loaded(rank: int, seeds: list[int]) -> dict[str, Any]:
    """What this rank is told whose loader has its seed of `seeds`, by the form of its batch; the numbers in what begins each
    of four steps."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seeds[rank]))
    forms = {"plain": x, "cut": list(x.chunk(4)), "bfloat16": {"x": x.bfloat16(), "name": "a"}, "none": None if rank else x}
    said, sizes = {}, list[int]()
    more = {"part": dict.fromkeys(range(4 if rank == 0 else 3), x[:2]), "targets": torch.ones(8, 4)}
    for name, form in (forms | more).items():
        first = nn.Sequential(Float(), nn.Linear(4, 4)) if name == "bfloat16" else nn.Linear(4, 4)
        schedule = random_schedule(a_problem((0, 1), 4, layers=2))
        runner = Pipeline([first, nn.Linear(4, 4)], schedule, loss=nn.functional.mse_loss)
        tell = runner.mailbox.tell
        runner.mailbox.tell = lambda tensor, *to, tell=tell: sizes.append(len(tensor)) or tell(tensor, *to)  # type: ignore
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(4):
                runner.step(x if rank and name == "cut" else form, x if name == "targets" else torch.ones(8, 4))
        said[name] = [str(one.message) for one in caught]
    return {"said": said, "sizes": sizes}


class Float(nn.Module):
    """Takes a dict."""

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"].float()


def memories(rank: int, _: None) -> list[dict[str, Any]]:
    """A small GPT by several schedules, its memory profiled layer by layer; a metered step each."""
    model = gpt("small", 0, GptSizes(width=96, blocks=8, heads=4, batch=2, length=64))
    sizes = held(model, stages_of(model, range(len(model.layers))))
    rows = tuple(Layer(f"layer{i}", 10, 10, 10, 20, parameter_bytes=0, **size.costs()) for i, size in enumerate(sizes))
    profile = Profile("measured", "small", rows, Link(1.0, 1000.0), 4.0, None, {}, {})
    result = []
    for spot, name in (((0, 1), "1f1b"), ((0, 1), "zb-h1"), ((0, 1), ""), ((0, 1, 0, 1), ""), ((0, 1, 1, 0), "")):
        counts = split_layers(len(rows), len(spot))
        problem = profile.problem(2, 4, spot, layers=counts, fused=name == "1f1b")
        schedule = preset(name, problem) if name else random_schedule(problem, 2)
        runner = Pipeline(model.build, schedule, loss=model.loss)
        memory = metered(runner, *batch_of(model, 4))
        result.append({"peak": memory.peak, "predicted": memory.predicted_peak, "last": memory.held[-1]})
    return result
