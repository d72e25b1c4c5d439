"""Steps of pipelines whose vocabulary is sharded, on gloo ranks: against the unsplit model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from zbsolve import Problem
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.base.values import full
from zbsolve.exec.check import reference
from zbsolve.exec.emulate import Times
from zbsolve.exec.handlers import Data
from zbsolve.models.losses import CrossEntropy

from .exec_tools import a_problem, random_schedule, refusal, worst

WIDTH, LENGTH = 8, 5


class Inner(nn.Module):
    """A layer with dropout, so that random numbers count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(x)))


class Tokens(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(words, WIDTH, padding_idx=1), nn.Embedding(LENGTH, WIDTH)

    def token_embedding(self) -> tuple[str, float]:
        return "token", 1.0

    def forward(self, given: Tensor | dict[str, Tensor]) -> Tensor:
        ids, mask = (given["ids"], given["mask"][..., None]) if isinstance(given, dict) else (given, 1)
        return self.token(ids) * 2.0 * mask + self.position(torch.arange(ids.shape[1]))


class Scores(nn.Module):
    def __init__(self, words: int, cap: float, bias: bool) -> None:
        super().__init__()
        self.norm, self.output, self.cap = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, words, bias=bias), cap

    def output_layer(self) -> tuple[str, float]:
        return "output", self.cap

    def forward(self, x: Tensor) -> Tensor:
        y = self.output(self.norm(x))
        return (y / self.cap).tanh() * self.cap if self.cap else y


@dataclass(frozen=True)
class Case:
    """What is tried. words: in the vocabulary. options: of the loss. rows: of each microbatch, where they differ."""

    name: str
    placement: tuple[int, ...] = (0, 1, 2)
    words: int = 11
    barriers: int = 1
    embedding: bool = False
    tied: bool = False
    cap: float = 0.0
    bias: bool = False
    options: tuple[tuple[str, Any], ...] = ()
    fused: bool = False
    recompute: str = ""
    split: str = "layers"
    rows: tuple[int, ...] = ()
    ignored: bool = False
    kind: torch.dtype = torch.float64
    autocast: bool = False
    meta: bool = False
    emulated: bool = False
    builder: bool = False
    mesh: bool = False  # and a function that may parallelize stages
    masked: bool = False  # its inputs are dicts of ids and a padding mask


CASES = [
    Case("algorithm 2"),
    Case("algorithm 1", barriers=2, bias=True),
    Case("embedding", embedding=True, words=10),
    Case("embedding, algorithm 1, fused", embedding=True, barriers=2, fused=True, builder=True),
    Case("tied, vee", (0, 1, 2, 2, 1, 0), embedding=True, tied=True),
    Case("options", options=(("label_smoothing", 0.1), ("z_loss", 1e-2)), cap=3.0, ignored=True, words=7),
    Case("options, algorithm 1", barriers=2, options=(("label_smoothing", 0.1), ("z_loss", 1e-2)), cap=3.0, ignored=True),
    Case("few words", words=4, embedding=True),
    Case("graph", split="graph", embedding=True, tied=True),
    Case("recompute", recompute="all", embedding=True),
    Case("uneven", rows=(3, 2, 2, 2), embedding=True),
    Case("float32", kind=torch.float32, meta=True),
    Case("emulated", (0, 1, 2, 2, 1, 0), barriers=2, embedding=True, emulated=True),
    Case("autocast", kind=torch.float32, autocast=True, embedding=True),
    Case("mesh", embedding=True, tied=True, mesh=True),
    Case("dicts", embedding=True, tied=True, rows=(3, 2, 2, 2), masked=True),
]


def model(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    inner = [Inner() for _ in range(max(len(case.placement) - 1, 1))]
    layers = [Tokens(case.words), *inner, Scores(case.words, case.cap, case.bias)]
    if case.tied:
        layers[-1].output.weight = layers[0].token.weight  # type: ignore[union-attr, assignment]
    return [layer.to(case.kind) for layer in layers]


def problem_of(case: Case, microbatches: int = 4) -> Problem:
    step = a_problem(case.placement, microbatches, len(case.placement) + 1, fused=case.fused, recompute=case.recompute)
    lookup = 2 if case.embedding else None
    return with_vocabulary(step, Vocabulary(3, 3, broadcast=1, reduce=2, lookup=lookup, barriers=case.barriers))


def batch(case: Case) -> tuple[list[Any], list[Tensor]]:
    numbers = torch.Generator().manual_seed(1)
    rows = case.rows or (2, 2, 2, 2)
    x = [torch.randint(0, case.words, (n, LENGTH), generator=numbers) for n in rows]
    y = [one.roll(1, 1).clone() for one in x]
    if case.ignored:
        for one in y[1:]:
            one[0, :2] = -100
        y[2][:] = -100  # nothing counts
    return [{"mask": one % 3 > 0, "ids": one} for one in x] if case.masked else x, y


def pipeline_of(case: Case, seed: int = 0, problem: Problem | None = None, **more: Any) -> Pipeline:
    made: Any = model(case)
    if case.builder:
        made = lambda numbers: [model(case)[i] for i in numbers]  # noqa: E731
    schedule = random_schedule(problem_of(case) if problem is None else problem, seed, in_order=True)
    if case.emulated:
        more["emulate"] = Times.of(schedule, "schedule")
    if case.meta:
        made = nn.ModuleList(made).to("meta")
        more["init"] = lambda number, layer: layer.load_state_dict(model(case)[number].state_dict())
    if case.mesh:
        mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "pp"))
        more |= {"mesh": mesh, "parallelize": lambda stage, whole: None}
    return Pipeline(made, schedule, loss=CrossEntropy(**dict(case.options)), timeout=30, split=case.split, **more)


def tried(case: Case, seed: int) -> float:
    """The largest difference of loss and gradients here from the unsplit model."""
    return stepped(case, pipeline_of(case, seed), *batch(case))


def stepped(case: Case, pipe: Pipeline, x: list[Any], y: list[Tensor]) -> float:
    """The same, of a pipeline's first step."""
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
        result = pipe.step(x, y, uneven=True) if case.rows else pipe.step(x, y)
        whole = model(case)
        loss = right(case, whole, x, y)
    return max(abs(result.loss - loss) / abs(loss), worst(pipe, whole))


def right(case: Case, whole: list[nn.Module], x: list[Any], y: list[Tensor]) -> float:
    """The loss of the unsplit model, where every row counts alike."""
    loss, total, rows = CrossEntropy(**dict(case.options)), 0.0, [len(one) for one in y]
    for m, n in enumerate(rows):
        share = n / sum(rows)
        data = Data({m: x[m]}, {m: y[m]})
        total += reference(whole, data, lambda output, target, share=share: loss(output, target) * share)
    return total


def cases(rank: int, names: list[str]) -> dict[str, float]:
    """Case → the largest difference."""
    return {one.name: tried(one, seed) for seed, one in enumerate(CASES) if one.name in names}


def all_of(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """What is asked for in one launch."""
    found = {"cases": cases(rank, given["names"]), "refused": refused(rank, None)}
    return found | {"evaluated": evaluated(rank, None), "checkpoints": checkpoints(rank, given["folder"])}


def evaluated(rank: int, _: None) -> dict[str, float]:
    """The largest differences from the unsplit model of evaluations, even and uneven, in one round and in two, and of a step
    behind them."""
    options, found = (("label_smoothing", 0.1), ("z_loss", 1e-2)), dict[str, float]()
    vee = Case("", (0, 1, 2, 2, 1, 0), embedding=True, tied=True, cap=3.0, options=options, emulated=True)
    for name, case in {"embedding": vee, "ignored": Case("", barriers=2, bias=True, ignored=True)}.items():
        pipe, (x, y), whole = pipeline_of(case), batch(case), [layer.eval() for layer in model(case)]
        for parts in (4, 3, 6):
            xs, ys = (list(torch.cat(one).tensor_split(parts)) for one in (x, y))
            asked = (x, y) if parts == 4 else (torch.cat(x), torch.cat(y))
            loss = pipe.evaluate(*asked, microbatches=parts)
            found[f"{name}, {parts} microbatches"] = abs(loss / right(case, whole, xs, ys) - 1)
        assert all(p.grad is None for p in pipe.parameters())
        found[f"{name}, step"] = stepped(case, pipe, x, y)
    return found


def checkpoints(rank: int, folder: str) -> dict[str, Any]:
    """Three ranks with shards train, two ranks without go on from their checkpoint, and three with shards from theirs. The
    losses of the steps, of each."""
    case, two = (
        Case("", embedding=True, tied=True, bias=True),
        dist.new_group([0, 1] if rank < 2 else [2], use_local_synchronization=True),
    )
    (x, y), found = batch(case), dict[str, Any]()

    def trained(name: str, pipe: Pipeline, before: str, steps: int) -> None:
        optimizer = torch.optim.Adam(pipe.parameters(), lr=0.05)
        if before:
            pipe.load(f"{folder}/{before}", adam=optimizer)
        found[name] = []
        for _ in range(steps):
            found[name].append(pipe.step(x, y).loss)
            norm = pipe.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            if len(found[name]) == 2:
                pipe.save(f"{folder}/{name}", adam=optimizer)
        found[f"{name} norm"] = float(norm)

    three, again = (
        pipeline_of(case),
        pipeline_of(case),
    )  # torch names their groups by how many a rank has: first those of all
    trained("three", three, "", 4)
    if rank < 2:
        trained("two", pipeline_of(case, problem=a_problem((0, 1), 4, 4), group=two), "three", 4)
    dist.barrier()
    trained("again", again, "two", 2)
    state = again.state_dict()
    whole = {name: full(value).clone() for name, value in state.items()}
    found["keys"], found["shape"] = sorted(state), list(whole["3.output.bias"].shape)
    again.load_state_dict({name: value + 1 for name, value in whole.items()})
    found["loaded"] = all(bool((full(value) == whole[name] + 1).all()) for name, value in again.state_dict().items())
    return found


def refused(rank: int, _: None) -> dict[str, str]:
    """What a pipeline with shards says to what it cannot do."""
    case = Case("")
    pipe = pipeline_of(case)
    return {
        "forward": refusal(lambda: pipe.forward(batch(case)[0])),
        "tied": refusal(lambda: pipeline_of(replace(case, tied=True))),
        "words": refusal(lambda: pipeline_of(replace(case, words=2))),
        "loss": refusal(lambda: Pipeline(model(case), pipe.schedule, loss=nn.functional.mse_loss)),
        "validated": refusal(lambda: PostValidated(pipe, torch.optim.SGD(pipe.parameters()))),
    }
