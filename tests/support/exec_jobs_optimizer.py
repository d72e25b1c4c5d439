"""What the tests of `PostValidated` and of replicas run on gloo ranks (see `exec_ranks`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Schedule, pipeline
from zbsolve.build import with_updates
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.check import reference
from zbsolve.exec.exchange import Shared
from zbsolve.exec.handlers import Data
from zbsolve.exec.updates import as_one
from zbsolve.models.presets import GptSizes, gpt
from zbsolve.systems import preset
from zbsolve.util.errors import RunFailed

from .exec_tools import a_problem, batch_of, part_of, random_schedule, refusal, split_layers

STEPS, MAX_NORM = 18, 3.0  # so many steps spoil gradients on each of three ranks in both ways


def _several(named: Iterable[tuple[str, nn.Parameter]]) -> list[torch.optim.Optimizer]:
    """Adam for what is called a weight or has two dimensions, SGD for the rest; each with something to train."""
    parts: list[list[nn.Parameter]] = [[], []]
    for name, parameter in named:
        parts[not name.endswith(("weight", "2"))].append(parameter)
    made = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    return [optimizer(own) for optimizer, own in zip(made, parts, strict=True) if own]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "several": lambda p: as_one(_several([(str(one.dim()), one) for one in p]), "test"),
}

EXPONENTIAL = partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.97)
RATES: dict[str, Callable[[Any], torch.optim.lr_scheduler.LRScheduler]] = {
    "momentum": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.1, total_steps=STEPS),  # it changes momentum too
    "adam": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step % 3)),
}


def layer(number: int) -> nn.Module:
    """With a buffer that every forward changes."""
    torch.default_generator.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1))


def build(numbers: list[int]) -> list[nn.Module]:
    return [layer(i) for i in numbers]


def schedules(ranks: int) -> list[Schedule]:
    """One that runs ahead of the validation, a V shape, random ones, and last one with a copy of each stage on two ranks."""
    straight, vee = tuple(range(ranks)), (*range(ranks), *reversed(range(ranks)))
    ten, routes = [10] * ranks, (straight, straight[::-1])
    copies = pipeline(ten, B=ten, W=ten, placement=routes, microbatches=4, comm=3, layers=split_layers(8, ranks))
    return [
        preset("zb-h1", a_problem(straight, 2 * ranks, layers=8)),
        random_schedule(a_problem(vee, 4, layers=8), 3),
        random_schedule(a_problem(straight, 3, layers=8), 5),
        random_schedule(copies, 2),
    ]


def batch(schedule: Schedule, step: int) -> tuple[Tensor, Tensor]:
    numbers = torch.Generator().manual_seed(step)
    m = len(set(schedule.problem.passes.microbatch.tolist()))
    x = torch.randn(4 * m, 6, generator=numbers)
    return x, x.flip(1).tanh()


def once(runner: Pipeline) -> list[nn.Parameter]:
    """Without those that an earlier rank holds too."""
    elsewhere = {id(p) for p in part_of(runner, Shared).elsewhere()}
    return [p for p in runner.parameters() if p.grad is not None and id(p) not in elsewhere]


def spoil(runner: Pipeline, step: int, ranks: int) -> None:
    """Large gradients in some steps, inf or NaN in others, each on one rank."""
    for parameter in once(runner):
        assert parameter.grad is not None
        if step % 6 == 2 and runner.rank == step // 6 % ranks:
            parameter.grad.mul_(1000.0)
        if step % 6 == 5 and runner.rank == (step // 6 + 1) % ranks:
            parameter.grad.view(-1)[0] = (math.inf, math.nan)[step % 4 // 2]


def clip_and_step(runner: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float) -> str:
    """With a barrier: the norm of all ranks of this pipeline first, which adds up in the order in which they end."""
    ends, ranks = runner.schedule.timeline().end, runner.schedule.problem.passes.rank
    gradients = [p.grad for p in runner.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(p.grad, dtype=torch.float64) for p in once(runner) if p.grad is not None]
    mine = torch.stack([*norms, torch.zeros((), dtype=torch.float64)]).square().sum()
    everything, total = [torch.zeros((), dtype=torch.float64) for _ in range(runner.wires.size)], 0.0
    runner.wires.control.allgather([everything], [mine]).wait()
    for rank in sorted(range(runner.wires.size), key=lambda r: (max(ends[ranks == r]), r)):
        total += float(everything[rank])
    if not math.isfinite(total):
        return "skipped"
    scale = min(1.0, max_norm / (math.sqrt(total) + 1e-6))
    for gradient in gradients:
        gradient.mul_(scale)
    optimizer.step()
    return "clipped" if scale < 1 else "stepped"


def trained(schedule: Schedule, name: str, max_norm: float, validated: bool, none: bool) -> dict[str, Any]:
    """Parameters, buffers and state after each of STEPS steps, what became of each step, and the losses."""
    runner = Pipeline(build, schedule, loss=nn.functional.mse_loss)
    optimizer = OPTIMIZERS[name](runner.parameters())
    ahead = PostValidated(runner, optimizer, max_norm=max_norm) if validated else None
    falling = RATES.get(name, EXPONENTIAL)(ahead or optimizer)
    became, results, copied, amended = [], [], 0, 0
    for step in range(STEPS):
        results.append(runner.step(*batch(schedule, step)))
        if ahead is not None and ahead.last is not None:
            became.append("clipped" if ahead.last.clipped else "skipped" if ahead.last.skipped else "stepped")
            amended += ahead.last.amended
        spoil(runner, step, runner.wires.size)
        if ahead is None:
            became.append(clip_and_step(runner, optimizer, max_norm))
            optimizer.zero_grad(set_to_none=none)
        else:
            ahead.step()
            ahead.zero_grad(set_to_none=none)
            copied = max(copied, ahead.copied_bytes)
        falling.step()
        if step % 10 == 9 and runner.rank == 0:
            runner.state_dict()  # one rank alone may look
    if ahead is not None:
        ahead.finish()
        assert ahead.last is not None
        became.append("clipped" if ahead.last.clipped else "skipped" if ahead.last.skipped else "stepped")
    bits = [t.detach().clone() for t in (*runner.module.parameters(), *runner.module.buffers())]
    for values in (ahead or optimizer).state_dict()["state"].values():
        bits += [torch.as_tensor(value) for value in values.values() if value is not None]
    return {
        "bits": bits,
        "became": became,
        "losses": [r.loss for r in results],
        "rates": [group["lr"] for group in (ahead or optimizer).param_groups],
        "copied": copied,
        "amended": amended,
        "parameters": sum(p.nbytes for p in runner.parameters()),
    }


def as_with_a_barrier(rank: int, names: list[str]) -> list[dict[str, Any]]:
    """Post-validated training against synchronous training, for each optimizer and schedule."""
    result = []
    for i, name in enumerate(names):
        for j, schedule in enumerate(schedules(dist.get_world_size())):
            none = (i + j) % 2 == 0
            found, right = (trained(schedule, name, MAX_NORM, validated, none) for validated in (True, False))
            same = len(found["bits"]) == len(right["bits"]) and all(map(torch.equal, found["bits"], right["bits"]))
            result.append(
                {
                    "name": name,
                    "same": same and found["rates"] == right["rates"] and found["losses"] == right["losses"],
                    "became": [found["became"], right["became"]],
                    "tensors": len(right["bits"]),
                    "amended": found["amended"],
                    "copied": found["copied"] / found["parameters"],
                }
            )
    return result


def nobody_waits(rank: int, _: None) -> list[int]:
    """Steps of the optimizer on each rank in turn begin after all others' have returned, and rank 0 is in its next step:
    where one waited for another, this would end in a timeout. How many passes rank 0 had begun there."""
    ranks, signs = dist.get_world_size(), dist.new_group()
    schedule = schedules(ranks)[0]
    runner = Pipeline(build, schedule, loss=nn.functional.mse_loss)
    ahead = PostValidated(runner, torch.optim.AdamW(runner.parameters()), max_norm=1e9)
    begun: list[str] = []
    told: list[int] = []

    def announce(name: str) -> None:
        begun.append(name)
        if len(begun) == 2 and told:
            dist.send(torch.tensor([len(begun)]), told.pop(), group=signs)

    runner.hooks.announce = announce
    result = []
    for step in range(ranks + 1):
        runner.step(*batch(schedule, step))
        begun.clear()
        held = step % ranks
        if step < ranks and rank == held:
            for other in range(ranks):
                if other != held:
                    sign = torch.zeros(1, dtype=torch.int64)
                    dist.recv(sign, other, group=signs)
                    result.append(int(sign))
        ahead.step()
        ahead.zero_grad()
        if step < ranks and rank != held:
            if rank == 0:
                told.append(held)
            else:
                dist.send(torch.zeros(1, dtype=torch.int64), held, group=signs)
    ahead.finish()
    return result


def norms(rank: int, _: None) -> dict[str, Any]:
    """A parameter on two ranks counts once; bytes of the copies."""
    model = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=True)
    schedule = random_schedule(a_problem((0, 1), 2, layers=4), 1)
    runner = Pipeline(model.build, schedule, loss=model.loss, tied=model.tied)
    optimizer = torch.optim.AdamW(runner.parameters(), lr=0.01)
    ahead = PostValidated(runner, optimizer, max_norm=1e-3)
    inputs, targets = batch_of(model, 2)
    runner.step(inputs, targets)
    ahead.step()
    ahead.finish()
    assert ahead.last is not None
    whole = model.build()
    reference(whole, Data(dict(enumerate(inputs)), dict(enumerate(targets))), model.loss)
    right = torch.nn.utils.get_total_norm([p.grad for p in nn.ModuleList(whole).parameters() if p.grad is not None])
    ahead.zero_grad()
    result = {"norm": ahead.last.norm, "right": float(right), "clipped": ahead.last.clipped}
    ahead.max_norm = None
    for _ in range(2):
        runner.step(inputs, targets)
        ahead.step()
        ahead.zero_grad()
    result["copies"] = ahead.copied_bytes / sum(p.nbytes for p in runner.parameters())
    ahead.finish()
    return result


def misused(rank: int, _: None) -> str:
    """Gradients that are cleared behind its back."""
    schedule = random_schedule(a_problem((0, 0), 2, layers=2))
    runner = Pipeline(build, schedule, loss=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(runner.parameters(), lr=0.01)
    ahead = PostValidated(runner, optimizer)
    runner.step(*batch(schedule, 0))
    ahead.step()
    optimizer.zero_grad()
    return refusal(lambda: runner.step(*batch(schedule, 1)), RunFailed)


def several_inside(rank: int, _: None) -> dict[str, Any]:
    """Passes U of several optimizers, picked by names; and what is refused. How far weights are from one process's."""
    problem = with_updates(a_problem((0, 1), 2, layers=4), 5, every=2, delay=1)
    layers = split_layers(4, 1)[0]
    given: list[Any] = []

    def build_double(numbers: list[int]) -> list[nn.Module]:
        return [nn.Sequential(*[one.double() for one in layer(i)][::2]) for i in numbers]  # (no batch norm)

    def update(parameters: Any) -> list[torch.optim.Optimizer]:
        given.extend(parameters.names)
        return _several(zip(parameters.names, parameters, strict=True))

    runner = Pipeline(build_double, random_schedule(problem, 2), loss=nn.functional.mse_loss, update=update)
    alone = build_double(list(range(layers)))
    optimizers = _several(nn.ModuleList(alone).named_parameters())
    for step in range(3):
        x, y = (one.double() for one in batch(runner.schedule, step))
        runner.step(x, y)
        for a, b in zip(x.chunk(2), y.chunk(2), strict=True):
            (nn.functional.mse_loss(nn.Sequential(*alone)(a), b) / 2).backward()  # type: ignore[no-untyped-call]
        for one in optimizers:
            one.step()
            one.zero_grad()
    right, mine = dict(nn.ModuleList(alone).named_parameters()), dict(runner.named_parameters())
    wrong = Pipeline(build, random_schedule(a_problem((0, 1), 2, layers=4)), loss=nn.functional.mse_loss)
    sgd = torch.optim.SGD(wrong.parameters(), 0.1)
    return {
        "named": sorted(given) == sorted(mine),
        "away": max(float((p - right[name]).detach().abs().max()) for name, p in mine.items()),
        "twice": refusal(lambda: PostValidated(wrong, [sgd, torch.optim.Adam(wrong.parameters())])),
        "none": refusal(lambda: PostValidated(wrong, [sgd, 5])),  # type: ignore[list-item]
        "first": refusal(lambda: PostValidated(wrong, [sgd])),
        "second": refusal(lambda: PostValidated(wrong, sgd)),
    }


def an_optimizer(rank: int, _: None) -> dict[str, Any]:
    """What torch's tools ask of an optimizer."""
    runner = Pipeline(build, random_schedule(a_problem((0,), 2, layers=2)), loss=nn.functional.mse_loss)
    first, *others = runner.parameters()
    inner = torch.optim.AdamW([first], lr=0.1)
    ahead = PostValidated(runner, inner)
    shared = [ahead.param_groups is inner.param_groups and ahead.state is inner.state]
    runner.step(torch.ones(4, 6), torch.ones(4, 6))
    ahead.step()
    for one in (inner, ahead):
        one.load_state_dict(ahead.state_dict())
    shared.append(ahead.param_groups is inner.param_groups and ahead.state is inner.state and first in ahead.state)
    ahead.add_param_group({"params": others})
    said = refusal(lambda: ahead.step(lambda: 0.0))  # type: ignore[arg-type,return-value]
    optimizer = isinstance(ahead, torch.optim.Optimizer) and "lr: 0.1" in repr(ahead)
    return {"kind": optimizer, "shared": shared, "closure": said, "groups": len(inner.param_groups)}
