"""Sharded vocabularies on gloo ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import BadInput, Problem, Schedule, pipeline, solve, verify
from zbsolve.build import Vocabulary, with_vocabulary
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.awaits import begins_and_ends
from zbsolve.exec.base.program import Action, Message, Program
from zbsolve.exec.base.values import full
from zbsolve.exec.check import reference
from zbsolve.exec.emulate import Times
from zbsolve.exec.lowering import lower
from zbsolve.kinds import TABLE
from zbsolve.models.losses import CrossEntropy

from ..support.exec_ranks import jobs_on, on_ranks
from ..support.exec_tools import a_problem, random_schedule, refusal
from ..support.trials import TRIED, Trial, mesh_of, too_far
from ..support.trials import tried as tried
from ..support.vocabulary_problems import random_vocabulary

pytestmark = pytest.mark.slow


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


def trial_of(case: Case, seed: int = 0, problem: Problem | None = None) -> Trial:
    def layers(numbers: list[int]) -> list[nn.Module]:
        made = model(case)
        return [made[i] for i in numbers]

    def options() -> dict[str, Any]:
        how: dict[str, Any] = {"split": case.split}
        if case.emulated:
            how["emulate"] = Times.of(schedule, "schedule")
        if case.meta:
            how["layers"] = nn.ModuleList(model(case)).to("meta")
            how["init"] = lambda number, layer: layer.load_state_dict(model(case)[number].state_dict())
        return how | ({"mesh": mesh_of(dp=1, pp=3), "parallelize": lambda stage, whole: None} if case.mesh else {})

    schedule = random_schedule(problem_of(case) if problem is None else problem, seed, in_order=True)
    return Trial(
        problem=schedule,
        layers=layers,
        whole=lambda: model(case),
        listed=not case.builder,
        batch=lambda place, step: batch(case),
        loss=CrossEntropy(**dict(case.options)),
        uneven=bool(case.rows),
        around=lambda: torch.autocast("cpu", torch.bfloat16, enabled=case.autocast),
        options=options,
    )


def pipeline_of(case: Case, problem: Problem | None = None, **more: Any) -> Pipeline:
    return trial_of(case, problem=problem).pipeline(**more)


@cache
def trials(graph: bool = False) -> dict[str, Trial]:
    """Of the cases whose backward is split by layers, or by their graph."""
    return {one.name: trial_of(one, seed) for seed, one in enumerate(CASES) if (one.split == "graph") == graph}


graphs = partial(trials, graph=True)


def evaluated(rank: int, _: None) -> dict[str, float]:
    """The largest differences from the unsplit model of evaluations, even and uneven, in one round and in two, and of a step
    behind them."""
    options, found = (("label_smoothing", 0.1), ("z_loss", 1e-2)), dict[str, float]()
    vee = Case("", (0, 1, 2, 2, 1, 0), embedding=True, tied=True, cap=3.0, options=options, emulated=True)
    for name, case in {"embedding": vee, "ignored": Case("", barriers=2, bias=True, ignored=True)}.items():
        trial, (x, y) = trial_of(case), (torch.cat(one) for one in batch(case))
        pipe, rows = trial.pipeline(), replace(trial, uneven=True)
        whole = [layer.eval() for layer in model(case)]
        for parts in (4, 3, 6):
            given = [x.tensor_split(parts), y.tensor_split(parts)]
            right = reference(whole, rows.data(given), trial.loss, backward=False)
            asked = given if parts == 4 else (x, y)
            found[f"{name}, {parts} microbatches"] = abs(pipe.evaluate(*asked, microbatches=parts) / right - 1)
        assert all(p.grad is None for p in pipe.parameters())
        ran = trial.ran(pipe)
        found[f"{name}, step"] = max(ran["gradient"], ran["loss"])
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


LIMITS = {"float32": 1e-6, "autocast": 5e-2}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What three ranks tried in one launch."""
    jobs = {"tried": f"{__name__}:trials", "refused": None, "evaluated": None}
    return jobs_on(3, __name__, {**jobs, "checkpoints": str(tmp_path_factory.mktemp("checkpoints"))})


@pytest.mark.parametrize("seed", range(12))
def test_all_ranks_begin_a_collective_when_the_last_can(seed: int) -> None:
    """Else it would wait, in its stream's order, for ranks that come to it after passes that wait for this rank."""
    problem = replace(random_vocabulary(seed, 3, 4), capacity=None)
    schedule = random_schedule(problem, seed, in_order=True)
    (begin, end), p, e = begins_and_ends(schedule), problem.passes, problem.edges
    joins, timeline = np.flatnonzero(problem.passes.that(together=True)), schedule.timeline()
    assert len(joins)
    for row in joins.tolist():
        group = joins[(p.kind[joins] == p.kind[row]) & (p.microbatch[joins] == p.microbatch[row])]
        before = e.before[e.after == row]
        assert timeline.end[before].max(initial=0) <= begin[row] <= timeline.end[group].max()
        assert end[row] == timeline.end[group].max()
        assert begin[row] == begin[group].max()


@pytest.mark.parametrize("first", range(0, 32, 8))
def test_ranks_begin_collectives_in_one_order_and_none_waits_for_ever(first: int) -> None:
    """Whatever their kinds, in ample memory and in tight one, by any search: one communicator has one order on all ranks."""
    for seed in range(first, first + 8):
        problem = random_vocabulary(seed, 3, 4)
        schedules = [solve(problem, effort=0.05, prefer=None)]
        if problem.capacity is None:
            schedules.append(random_schedule(problem, seed, in_order=True))
        for schedule in schedules:
            assert finished(lower(schedule))


def test_ranks_that_disagree_are_named() -> None:
    """Rank 0 begins the broadcast of microbatch 1 before the barrier of microbatch 0, rank 1 behind it. One communicator a
    kind allowed that."""
    step = pipeline(1, 2, placement=(0, 1), microbatches=2)
    problem = with_vocabulary(step, Vocabulary(1, 1))
    good = random_schedule(problem, 0, in_order=True)
    orders = {"comm:0": "2VB0 2VB1 2VR0 2VR1", "comm:1": "3VB0 3VR0 3VB1 3VR1"}
    schedule = Schedule(problem, {**good.order, **{stream: tuple(one.split()) for stream, one in orders.items()}})
    (said,) = verify(problem, schedule)
    assert said.rule == "deadlock"
    assert "wait for each other in collectives" in said.text
    with pytest.raises(BadInput, match="wait for each other in collectives"):
        lower(schedule)


def finished(programs: Sequence[Program]) -> bool:
    """Whether all ranks come to their ends where each does its actions in order, waits for messages and for all that it may
    wait for, and the collectives of all ranks go one after the other, each begun by all before it ends."""
    at, over, done = [0] * len(programs), 0, set[str]()
    begun: list[list[Action]] = [[] for _ in programs]
    while True:
        before = sum(at) + over
        for rank, program in enumerate(programs):
            for action in program.actions[at[rank] :]:
                needs = {one.name for one in action.awaits if TABLE[one.kind].together}
                needs |= {action.takes.before} if isinstance(action.takes, Message) else set()
                if not needs <= done:
                    break
                at[rank] += 1
                if TABLE[action.kind].together:
                    begun[rank].append(action)
                else:
                    done.add(action.name)
        while all(len(mine) > over for mine in begun):
            together = [mine[over] for mine in begun]
            assert len({(one.kind, one.part) for one in together}) == 1
            done |= {one.name for one in together}
            over += 1
        if sum(at) + over == before:
            return at == [len(program.actions) for program in programs]


def test_loss_and_gradients_are_those_of_the_unsplit_model(found: dict[str, list[Any]]) -> None:
    assert [rank.keys() for rank in found["tried"]] == [trials().keys()] * 3
    assert too_far(found["tried"], 1e-12, **LIMITS) == {}


def test_evaluations_give_the_loss_of_the_unsplit_model(found: dict[str, list[Any]]) -> None:
    for rank in found["evaluated"]:
        assert len(rank) == 8
        assert max(rank.values()) <= 1e-12


def test_graphs_split_what_is_left_of_the_ends() -> None:
    ranks = on_ranks(3, TRIED, f"{__name__}:graphs")
    assert [rank.keys() for rank in ranks] == [graphs().keys()] * 3
    assert too_far(ranks, 1e-12) == {}


def test_checkpoints_go_on_with_and_without_shards(found: dict[str, list[Any]]) -> None:
    for steps in found["checkpoints"]:
        if "two" in steps:
            assert steps["two"][:2] == pytest.approx(steps["three"][2:], rel=1e-12)
            assert steps["again"] == pytest.approx(steps["two"][2:], rel=1e-12)
            assert steps["again norm"] == pytest.approx(steps["two norm"], rel=1e-12)


def test_state_dicts_have_the_whole_models_keys(found: dict[str, list[Any]]) -> None:
    first, *_, last = found["checkpoints"]
    assert {"0.position.weight", "0.token.weight", "3.output.weight", "3.output.bias"} <= set(first["keys"])
    assert {"0.token.weight", "3.norm.weight", "3.output.weight"} <= set(last["keys"])
    assert first["shape"] == [11]
    assert first["loaded"]
    assert last["loaded"]


def test_what_shards_cannot_do_is_refused_by_name(found: dict[str, list[Any]]) -> None:
    said = found["refused"][0]
    assert said["forward"].startswith("forward: the vocabulary is sharded")
    assert said["tied"].startswith("layer 3: its output.weight is sharded over the vocabulary, but tied to layer 0's token")
    assert said["words"] == "vocabulary: 3 shards of 2 words: there must be 1 to 2"
    assert said["loss"].startswith("loss: torch.nn.functional.mse_loss")
    assert said["validated"].startswith("PostValidated: the vocabulary is sharded")
