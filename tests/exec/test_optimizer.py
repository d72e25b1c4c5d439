"""Optimizer steps that wait for nobody: the same bits as with a barrier, and no rank does wait."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import BadInput, Schedule, pipeline
from zbsolve.build import with_updates
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.ahead import Cut, lengths
from zbsolve.exec.base.program import Message
from zbsolve.exec.check import reference
from zbsolve.exec.exchange import Shared
from zbsolve.exec.handlers import Data
from zbsolve.exec.lowering import lower
from zbsolve.exec.post_validation import OptimizerSnapshot
from zbsolve.exec.updates import as_one
from zbsolve.models.presets import GptSizes, gpt
from zbsolve.systems import preset
from zbsolve.util.errors import RunFailed

from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import a_problem, batch_of, part_of, random_schedule, refusal, split_layers

pytestmark = pytest.mark.slow


STEPS, MAX_NORM = 12, 4.0  # so many steps spoil gradients on each of three ranks in both ways


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
        if step % 4 == 1 and runner.rank == step // 4 % ranks:
            parameter.grad.mul_(1000.0)
        if step % 4 == 3 and runner.rank == (step // 4 + 1) % ranks:
            parameter.grad.view(-1)[0] = (math.inf, math.nan)[step // 4 % 2]


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


TWO, THREE = ["adam", "several"], ["momentum"]


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    jobs = {"as_with_a_barrier": TWO, "norms": None, "several_inside": None}
    return jobs_on(2, __name__, jobs)


@pytest.fixture(scope="module")
def three() -> dict[str, list[Any]]:
    return jobs_on(3, __name__, {"as_with_a_barrier": THREE, "nobody_waits": None})


def the_same(ranks: list[list[dict[str, Any]]]) -> None:
    for rank in ranks:
        for one in rank:
            found, right = one["became"]
            assert found == right, one["name"]
            assert {"clipped", "skipped", "stepped"} == set(right)
            assert len(right) == STEPS
            assert one["same"], one["name"]
            assert one["tensors"] > 20
    for i, runs in enumerate(zip(*ranks, strict=True)):
        if i % 4 < 3:  # some rank did step on what it knew, and took it back (of copies, one rank may know all)
            assert sum(one["amended"] for one in runs) > 0


def test_bit_by_bit_as_with_a_barrier_on_two_ranks(two: dict[str, list[Any]]) -> None:
    the_same(two["as_with_a_barrier"])


def test_bit_by_bit_as_with_a_barrier_on_three_ranks(three: dict[str, list[Any]]) -> None:
    the_same(three["as_with_a_barrier"])


def test_no_rank_waits_for_another(three: dict[str, list[Any]]) -> None:
    """Each rank in turn held its step back until the others had made theirs, and rank 0 was in its next step."""
    assert three["nobody_waits"] == [[0, 0], [2, 0], [2, 0]]


def test_the_norm_counts_each_parameter_once(two: dict[str, list[Any]]) -> None:
    for rank in two["norms"]:
        assert rank["norm"] == pytest.approx(rank["right"], rel=1e-6)
        assert rank["clipped"]
        assert rank["copies"] == pytest.approx(3, rel=0.01)


def test_several_optimizers_update_inside_a_step(two: dict[str, list[Any]]) -> None:
    """Picked by the names that parameters have in the whole model, as one process does."""
    for rank in two["several_inside"]:
        assert rank["named"]
        assert rank["away"] <= 1e-12
        assert "a parameter is in two of the optimizers" in rank["twice"]
        assert "PostValidated: a torch optimizer or a list of them is needed, not " in rank["none"]
        assert rank["first"] == ""
        assert "this pipeline has one; give it several optimizers as a list" in rank["second"]


def test_gradients_that_are_gone_too_early_are_an_error() -> None:
    assert "clear them by PostValidated.zero_grad" in on_ranks(1, f"{__name__}:misused")[0]


def test_what_runs_before_the_cut_needs_nothing_from_behind_it() -> None:
    rng = random.Random(1)
    for seed in range(60):
        ranks = rng.randint(1, 4)
        spot = [*range(ranks), *(rng.randrange(ranks) for _ in range(rng.randint(0, 4)))]
        rng.shuffle(spot)
        times = {"B": [10] * len(spot), "W": [10] * len(spot)}
        problem = pipeline([10] * len(spot), **times, placement=tuple(spot), microbatches=rng.randint(1, 6), comm=3)
        programs = lower(random_schedule(problem, seed))
        most = lengths(programs)
        made = {action.name for p, n in zip(programs, most, strict=True) for action in p.actions[:n]}
        assert most[spot[0]] > 0
        for rank, program in enumerate(programs):
            cut = Cut.of(programs, rank)
            before, behind = cut.program.actions[: cut.length], cut.program.actions[cut.length :]
            taken = [a.takes for a in before if isinstance(a.takes, Message)]
            assert all(a.kind == "F" for a in before)
            assert all(m.before in made for m in taken)
            assert all(m.before in made for a in before for m in a.posts)
            assert [a.name for a in cut.program.actions] == [a.name for a in program.actions]
            for source, sent in program.incoming.items():
                posts = [m for a in cut.program.actions for m in a.posts if m.source == source]
                assert posts == list(sent)
                assert {m.before for m in sent[: cut.counts[source]]} == {m.before for m in sent} & made
            assert behind


def test_a_zero_bubble_schedule_runs_all_its_warm_up_ahead() -> None:
    programs = lower(preset("zb-h2", a_problem((0, 1, 2, 3), 8)))
    assert lengths(programs) == (7, 5, 3, 1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_taken_back_exactly(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(5, 4)
    optimizer = OPTIMIZERS[name](layer.parameters())

    def look() -> list[Any]:
        state = optimizer.state_dict()
        values = [v for one in state["state"].values() for v in one.values()]
        values += [v for group in state["param_groups"] for v in group.values() if not isinstance(v, list)]
        return [t.clone() if isinstance(t, torch.Tensor) else t for t in (*layer.parameters(), *values)]

    def same(a: list[Any], b: list[Any]) -> bool:
        pairs = zip(a, b, strict=True)
        return len(a) == len(b) and all(torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)

    for _ in range(3):
        for parameter in layer.parameters():
            parameter.grad = torch.randn_like(parameter)
        start = look()
        before = OptimizerSnapshot(optimizer)
        before.keep()
        before.step()
        stepped = look()
        assert not same(start, stepped)
        before.amend(again=False)
        assert same(start, look())
        again = OptimizerSnapshot(optimizer)
        again.keep()
        again.step()
        rate = optimizer.param_groups[0]["lr"]
        optimizer.param_groups[0]["lr"] = rate / 2  # as a schedule of learning rates does
        again.amend(again=True)
        assert optimizer.param_groups[0]["lr"] == rate / 2
        optimizer.param_groups[0]["lr"] = rate
        assert same(stepped, look())


def test_post_validated_is_an_optimizer_of_torch() -> None:
    """Groups and state are those of the optimizer inside, also after it was loaded."""
    (found,) = on_ranks(1, f"{__name__}:an_optimizer")
    assert found["kind"]
    assert found["shared"] == [True, True]
    assert found["groups"] == 2
    assert "a step with a closure would run the model by itself" in found["closure"]


def test_nothing_to_validate_is_refused() -> None:
    from zbsolve.exec import PostValidated

    optimizer: Any = None
    with pytest.raises(BadInput, match="neither max_norm nor skip_nonfinite"):
        PostValidated(optimizer, optimizer, skip_nonfinite=False)
    with pytest.raises(BadInput, match="max_norm -1 must be positive"):
        PostValidated(optimizer, optimizer, max_norm=-1)
