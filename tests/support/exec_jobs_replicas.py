"""What the tests of replicas run on gloo ranks: two pipelines of two ranks (see `exec_ranks`)."""

from __future__ import annotations

import math
import shutil
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Problem, Schedule
from zbsolve.build import Vocabulary, with_exchange, with_offload, with_vocabulary
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.check import difference, named, reference
from zbsolve.exec.exchange import Shared
from zbsolve.exec.handlers import Data
from zbsolve.models.presets import GptSizes, gpt

from .exec_tools import a_problem, part_of, random_schedule, refusal, worst

MODEL = gpt("small", 0, GptSizes(width=16, blocks=2, heads=2, batch=2, length=8), tied=True)


class Sometimes(nn.Module):
    """Has a gradient only where `used`; another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.some, self.never, self.used = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2)), True

    def forward(self, x: Tensor) -> Tensor:
        return x * self.some if self.used else x.clone()


class Dropped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.dropout = inner, nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.dropout(self.inner(x))
        return y


def layers(numbers: list[int] | None = None) -> list[nn.Module]:
    """A small GPT in double precision with tied embeddings, and dropout."""
    made = [layer.double() for layer in MODEL.build(numbers)]
    return [Dropped(layer) if i in (1, 2) else layer for i, layer in zip(numbers or range(4), made, strict=True)]


def grid() -> tuple[Any, Any]:
    """This rank's pipeline, and the ranks of its stages."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    return mesh.get_group("pipeline"), mesh.get_group("replica")


def runner_of(schedule: Schedule, groups: tuple[Any, Any], **more: Any) -> Pipeline:
    tied = tuple(tuple((i, f"inner.{name}" if i in (1, 2) else name) for i, name in group) for group in MODEL.tied)
    return Pipeline(layers, schedule, loss=MODEL.loss, tied=tied, group=groups[0], replicas=groups[1], timeout=20, **more)


def part(runner: Pipeline, step: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """This pipeline's part of the batch."""
    m = len(runner.microbatches)
    pairs = {i: MODEL.batch(runner.place * m + i, step) for i in range(m)}
    return {i: x for i, (x, _) in pairs.items()}, {i: y for i, (_, y) in pairs.items()}


def right(steps: int, microbatches: int, seed: int) -> list[nn.Module]:
    """The unsplit model with the gradients of whole batches."""
    from zbsolve.exec.feed import step_seed

    whole = layers()
    for step in range(steps):
        pairs = {i: MODEL.batch(i, step) for i in range(2 * microbatches)}
        data = Data({i: x for i, (x, _) in pairs.items()}, {i: y for i, (_, y) in pairs.items()}, step_seed(seed, step))
        reference(whole, data, MODEL.loss)
    return whole


def bits_alike(runner: Pipeline, tensors: list[Tensor]) -> bool:
    """Are they the same in both pipelines?"""
    assert runner.replicas is not None
    mine = torch.cat([t.detach().reshape(-1).double() for t in tensors])
    both = [torch.zeros_like(mine) for _ in range(2)]
    dist.all_gather(both, mine, group=runner.replicas)
    return torch.equal(both[0], both[1])


def problems() -> list[Problem]:
    """Placements with the tied parameter on both ranks, on one, and stages of one layer each; and with passes C, which begin
    sums: the same, a fused backward, offload, two directions, where a stage is on two ranks of each pipeline, and a sharded
    vocabulary."""
    plain = [a_problem(placement, 3, layers=4) for placement in ((0, 1), (0, 1, 1, 0), (0, 1, 0, 1))]
    fused = a_problem((0, 1, 1, 0), 3, layers=4, fused=True)
    offload = with_offload(a_problem((0, 1, 0, 1), 3, layers=4, held_until_B=4), 1, 1)
    two_ways = a_problem(((0, 1), (1, 0)), 3, layers=4)  # type: ignore[arg-type]
    further = (fused, offload, two_ways, with_vocabulary(plain[0], Vocabulary(3, 3, lookup=2)))
    return plain + [with_exchange(one, 2, replicas=True) for one in (*plain[:2], *further)]


def gradients(rank: int, _: None) -> list[dict[str, Any]]:
    """Two steps that add up, on each of `problems`."""
    groups, result, whole = grid(), [], right(2, 3, 5)
    for problem in problems():
        runner = runner_of(random_schedule(problem, 2), groups, seed=5)
        ended: list[int] = []
        interpreter = runner._runner.interpreter
        interpreter._done = [*interpreter._done, ended.append]
        for step in range(2):
            times = runner.step(*part(runner, step)).timeline
        runner.wait_gradients()
        found = [p.grad for p in runner.parameters() if p.grad is not None]
        alike = bits_alike(runner, found)
        early = [
            problem.names[b]
            for a, b in zip(problem.edges.before.tolist(), problem.edges.after.tolist(), strict=True)
            if "C" in problem.names[b] and times.end[a] > times.end[b]
        ]
        said = {"alike": alike, "ended": ended, "tensors": len(found), "early": early}
        result.append({"worst": worst(runner, whole), "sums": sorted(part_of(runner, Shared).exchanged), **said})
    return result


def clipped(rank: int, _: None) -> dict[str, Any]:
    """The norm of the mean gradients of both pipelines, though nobody waited for them."""
    runner = runner_of(random_schedule(a_problem((0, 1, 1, 0), 2, layers=4), 1), grid())
    runner.step(*part(runner, 0))
    norm = runner.clip_grad_norm_(0.1)
    whole = nn.ModuleList(right(1, 2, 0))
    expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), 0.1)
    return {"norm": float(norm), "right": float(expected), "worst": worst(runner, list(whole))}


def resumed(rank: int, _: None) -> dict[str, Any]:
    """The losses of both pipelines behind a checkpoint, of the run that went on and of one that began there."""
    names = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(names)
    groups, losses = grid(), []
    for first in (True, False):
        runner = runner_of(random_schedule(a_problem((0, 1), 2, layers=4), 1), groups, seed=4 if first else 5)
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.01)
        if not first:
            runner.load(f"{names[0]}/checkpoint", optimizer=optimizer)
        while runner.steps < 4:
            if runner.steps == 2 and first:
                runner.save(f"{names[0]}/checkpoint", optimizer=optimizer)
            loss = runner.step(*part(runner, runner.steps)).loss
            optimizer.step()
            optimizer.zero_grad()
            if runner.steps > 2:
                losses.append(loss)
        dist.barrier()
    if rank == 0:
        shutil.rmtree(str(names[0]))
    return {"straight": losses[:2], "resumed": losses[2:]}


def optimizers_wait(rank: int, _: None) -> dict[str, Any]:
    """A plain optimizer, without a word about gradients; pipeline 1 begins its step when that of pipeline 0 has returned."""
    groups, signs = grid(), dist.new_group()
    runner = runner_of(random_schedule(a_problem((0, 1), 2, layers=4), 1), groups)
    optimizer = torch.optim.SGD(runner.parameters(), lr=0.1)
    before = {place: p.detach().clone() for place, p in named(runner.layers).items()}
    if runner.place:
        dist.recv(torch.zeros(1), rank - 2, group=signs)
    runner.step(*part(runner, 0))
    if not runner.place:
        dist.send(torch.zeros(1), rank + 2, group=signs)
    optimizer.step()
    expected = named(dict(enumerate(right(1, 2, 0))))
    moved = {place: before[place] - 0.1 * expected[place].grad for place in before}  # type: ignore[operator]
    return {"worst": max(difference(p.detach(), moved[place]) for place, p in named(runner.layers).items())}


def validated(rank: int, _: None) -> dict[str, Any]:
    """With post-validation: bit by bit as with a barrier of all ranks; an inf in one pipeline is skipped in both."""
    groups, schedule = grid(), random_schedule(a_problem((0, 1), 2, layers=4), 1)
    trained, norm, became = [], 0.0, []
    for ahead_of in (True, False):
        runner = runner_of(schedule, groups)
        optimizer = torch.optim.AdamW(runner.parameters(), lr=0.01)
        ahead = PostValidated(runner, optimizer, max_norm=2.0) if ahead_of else None
        for step in range(10):
            runner.step(*part(runner, step))
            spoiled = [p for p in runner.parameters() if p.grad is not None]
            if step == 4:
                runner.wait_gradients()
                for p in spoiled:
                    p.grad.mul_(100.0)  # type: ignore[union-attr]
            if step == 7 and rank in (1, 3):
                runner.wait_gradients()
                spoiled[0].grad.view(-1)[0] = math.inf  # type: ignore[union-attr]
            if ahead is None:
                became.append(barrier(runner, optimizer, 2.0))
                optimizer.zero_grad()
            else:
                ahead.step()
                ahead.zero_grad()
                if step == 0:
                    ahead.finish()
                    assert ahead.last is not None
                    norm = ahead.last.norm
        if ahead is not None:
            ahead.finish()
        trained.append([p.detach().clone() for p in runner.parameters()])
        alike = bits_alike(runner, trained[-1])
    whole = nn.ModuleList(right(1, 2, 0))
    total = torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None])
    same = all(map(torch.equal, *trained))
    return {"same": same, "alike": alike, "became": became, "norm": norm, "right": float(total)}


def barrier(runner: Pipeline, optimizer: torch.optim.Optimizer, max_norm: float) -> str:
    """The norm of the ranks of this pipeline, then clip and step."""
    runner.wait_gradients()
    shared = {id(p) for p in part_of(runner, Shared).parameters()} if runner.rank else set()
    once = [p.grad for p in runner.parameters() if p.grad is not None and id(p) not in shared]
    mine = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in once]).square().sum()
    everything = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    runner.wires.control.allgather([everything], [mine]).wait()
    ends = runner.schedule.timeline().end
    first = min(range(2), key=lambda r: max(ends[runner.schedule.problem.passes.rank == r]))
    total = float(everything[first]) + float(everything[1 - first])
    if not math.isfinite(total):
        return "skipped"
    scale = min(1.0, max_norm / (math.sqrt(total) + 1e-6))
    for p in runner.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)
    optimizer.step()
    return "clipped" if scale < 1 else "stepped"


def corners(rank: int, _: None) -> dict[str, Any]:
    """Starting values, gradients that are missing, large gradients, other schedules."""
    groups = grid()

    def build(numbers: list[int]) -> list[nn.Module]:
        torch.default_generator.manual_seed(rank)
        return [nn.Sequential(nn.Linear(3, 3), Sometimes()) if i else nn.Linear(400, 400) for i in numbers]

    schedule = random_schedule(a_problem((0, 1), 2, layers=2), 1)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    def first(numbers: list[int]) -> list[nn.Module]:
        made = build(numbers)
        return [nn.Sequential(layer, nn.Linear(400, 3)) if i == 0 else layer for i, layer in zip(numbers, made, strict=True)]

    runner = Pipeline(first, schedule, loss=loss, group=groups[0], replicas=groups[1], timeout=20)
    alike = bits_alike(runner, list(runner.parameters()))
    for module in runner.module.modules():
        if isinstance(module, Sometimes):
            module.used = runner.place == 1
    numbers = torch.Generator().manual_seed(runner.place)
    x = torch.randn(4, 400, generator=numbers)
    runner.step(x, x[:, :3])
    missing = [name for name, p in runner.named_parameters() if p.grad is None]
    runner.wait_gradients()
    still = [name for name, p in runner.named_parameters() if p.grad is None]
    same = bits_alike(runner, [p.grad for p in runner.parameters() if p.grad is not None])
    other = random_schedule(a_problem((0, 1), 2, layers=2), 7 + rank // 2)
    refused = refusal(lambda: Pipeline(first, other, loss=loss, group=groups[0], replicas=groups[1], timeout=20))
    return {"alike": alike, "missing": missing, "still": still, "same": same, "refused": refused}
