"""Sequences in slices: a whole pipeline on gloo ranks or in one process, against the unsliced model."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from profiler.memory import held
from profiler.stage_rounds import stages_of
from zbsolve import BadInput, Problem, Schedule
from zbsolve.build import (
    AttentionExchange,
    Vocabulary,
    with_attention_exchange,
    with_exchange,
    with_offload,
    with_slices,
    with_vocabulary,
)
from zbsolve.build.attention_balance import one_forward_one_backward
from zbsolve.build.attention_exchange import with_parts, without_exchange
from zbsolve.exec import Pipeline
from zbsolve.exec.ahead import Cut
from zbsolve.exec.attention import FIRST_TAG, AttentionPeers
from zbsolve.exec.backward.layer_split import Loss
from zbsolve.exec.check import reference, values
from zbsolve.exec.lowering import lower
from zbsolve.exec.slices.stage import Slices
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.model import Model
from zbsolve.models.presets import Block, Embed, GptSizes, Head, gpt
from zbsolve.profile.profile import Layer, Link, Profile
from zbsolve.systems import preset
from zbsolve.util.errors import RunFailed

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import (
    a_problem,
    batch_of,
    bytes_in,
    metered,
    random_schedule,
    refusal,
    run_here,
    split_layers,
    worst_difference,
)
from ..support.trainings import Training, all_trained, trained
from ..support.trials import Trial, first_ranks, mesh_of, too_far, tried

pytestmark = pytest.mark.slow


WIDTH, LENGTH, WORDS, BATCH, ANY_ORDERS = 8, 12, 11, 2, 1
LOSS = CrossEntropy(z_loss=1e-3)


@dataclass(frozen=True)
class Case:
    """What is tried. lengths: of the slices, in proportion; () for `count` even ones. offloaded: of what each stage keeps.
    ignored: labels that do not count, all of a slice and all of a microbatch among them. rows: of each microbatch, where
    they differ. dp: pipelines side by side, whose sums are in the graph. barriers: of a sharded vocabulary; embedding: the
    input's is sharded too. exchange: ranks make attention for each other. blocks: of the model; 0: one fewer than stages."""

    name: str
    placement: tuple[int, ...] = (0, 1, 2, 3)
    count: int = 3
    lengths: tuple[float, ...] = ()
    fused: bool = False
    recompute: str | tuple[int, ...] = ()
    offloaded: float = 0.0
    ignored: bool = False
    tied: bool = False
    rows: tuple[int, ...] = ()
    dp: int = 1
    barriers: int = 0
    embedding: bool = False
    exchange: bool = False
    blocks: int = 0
    kind: torch.dtype = torch.float64


EVEN = Case("even")
CASES = [
    # First of all, while each rank is in as many process groups: torch names a group of some ranks by that number.
    Case("vocabulary", fused=True, ignored=True, barriers=1),
    Case("vocabulary, embedding", lengths=(7, 1, 4), tied=True, barriers=1, embedding=True, recompute=(1,)),
    Case("vocabulary, two barriers", (0, 1, 2, 3, 3, 2, 1, 0), embedding=True, barriers=2, ignored=True),
    EVEN,
    Case("uneven, fused", lengths=(7, 1, 4), fused=True, ignored=True),
    Case("loop", (0, 1, 0, 1), 5, fused=True),
    Case("vee", (0, 1, 2, 2, 1, 0), 4, ignored=True, tied=True),
    Case("recompute", (0, 1, 2), recompute="all", ignored=True),
    Case("recompute, fused", (0, 1, 1, 0), 2, fused=True, recompute=(1, 3)),
    Case("one token", (0, 1), count=12),
    Case("rows", lengths=(1, 2, 3), rows=(3, 1), ignored=True),
    Case("offload", (0, 1), offloaded=1.0),
    Case("offload, recompute, fused", (0, 1, 1, 0), fused=True, recompute=(1, 3), offloaded=0.5, ignored=True),
    Case("two pipelines", (0, 1), lengths=(7, 1, 4), dp=2, ignored=True),
    Case("exchange", count=4, exchange=True, ignored=True),
    Case("exchange, recompute, fused", (0, 1, 2, 2, 1, 0), 4, fused=True, recompute=(1,), exchange=True),
    Case("exchange, loop", (0, 1, 0, 1), 4, fused=True, exchange=True, tied=True),
    Case("exchange, all recompute", (0, 1, 1, 0), fused=True, recompute="all", exchange=True, blocks=4),
    Case("float32", (0, 1, 2, 3, 3, 2, 1, 0), ignored=True, kind=torch.float32),
    Case("float32, fused", (0, 1), kind=torch.float32, fused=True),
]

LATE = 8.0  # the largest norm of gradients, some ten times a usual one
VALIDATED = ("even", "loop", "recompute", "exchange")
EVALUATED = ("uneven, fused", "vee", "exchange", "vocabulary, embedding")


def blocks_of(case: Case) -> int:
    return case.blocks or len(case.placement) - 1


def layers_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(WIDTH, 2) for _ in range(blocks_of(case))]
    layers = [Embed(LENGTH, WIDTH, WORDS), *blocks, Head(WIDTH, WORDS)]
    if case.tied:
        layers[-1].output.weight = layers[0].token.weight  # type: ignore[union-attr]
    return [layer.to(case.kind) for layer in layers]


def problem_of(case: Case, microbatches: int = 2) -> Problem:
    how = {"fused": case.fused, "recompute": case.recompute}
    step = a_problem(case.placement, microbatches * case.count, blocks_of(case) + 2, held_until_B=4, held_input=2, **how)
    step = with_offload(step, 1, 1, fraction=case.offloaded) if case.offloaded else step
    if case.barriers:
        costs = Vocabulary(3, 3, broadcast=1, reduce=2, lookup=2 if case.embedding else None, barriers=case.barriers)
        step = with_vocabulary(step, costs)
    sliced = with_slices(step, case.count, held_keys=1, held_gradients=1, lengths=case.lengths)
    sliced = with_exchange(sliced, 2, replicas=True) if case.dp > 1 else sliced
    return with_attention_exchange(sliced, AttentionExchange(2, 2, query_bytes=1)) if case.exchange else sliced


def exchanged_schedule(problem: Problem) -> Schedule:
    """One forward one backward, where ranks that would wait help others."""
    assert problem.passes.are("FH").any()
    assert problem.passes.are("BH").any()
    return with_parts(problem, one_forward_one_backward(without_exchange(problem)))


def batch(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    pairs = [torch.randint(WORDS, (2, rows, LENGTH), generator=drawn) for rows in case.rows or (BATCH, BATCH)]
    x, y = [one[0] for one in pairs], [one[1] for one in pairs]
    if case.ignored:
        y[0][:, :4] = -100
        y[0][-1, 7:] = -100
        y[1][:] = -100
    return x, y


def schedules_of(case: Case, seed: int) -> dict[str, Schedule]:
    """An order that the graph allows; with an exchange the one that it is made for, and some that put other passes between
    the parts of one."""
    problem = problem_of(case)
    if not case.exchange:
        return {case.name: random_schedule(problem, seed)}
    others = {f"{case.name}, order {more}": random_schedule(problem, seed + more) for more in range(ANY_ORDERS)}
    return {case.name: exchanged_schedule(problem), **others}


def trial_of(case: Case, schedule: Schedule) -> Trial:
    """Where pipelines are side by side each has the whole batch, so the mean is the same."""
    return Trial(
        problem=schedule,
        layers=layers_of,
        whole=lambda: layers_of(case),
        listed=True,
        batch=lambda place, step: batch(case),
        loss=LOSS,
        steps=2,
        each=True,
        uneven=bool(case.rows),
        options=(lambda: {"mesh": mesh_of(dp=2, pp=2)}) if case.dp > 1 else {},
    )


def pipeline_of(case: Case, seed: int = 0, schedule: Schedule | None = None, **more: Any) -> Pipeline:
    """On the first ranks, as many as the case has; all ranks know these groups by now."""
    ranks, schedule = max(case.placement) + 1, schedule or schedules_of(case, seed)[case.name]
    more |= {} if ranks == dist.get_world_size() else {"group": first_ranks(ranks)}
    return trial_of(case, schedule).pipeline(**more)


@cache
def trials() -> dict[str, Trial]:
    """Of every case, and of each order of one."""
    found = {}
    for seed, case in enumerate(CASES):
        found |= {name: trial_of(case, schedule) for name, schedule in schedules_of(case, seed).items()}
    return found


def right(layers: Sequence[nn.Module], x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    """The loss of the unsliced model, where every row counts alike, with its gradients."""
    rows = Trial(problem=None, layers=layers_of, batch=batch, uneven=True)
    return reference(layers, rows.data((x, y)), LOSS)


def ran(trial: Trial, pipe: Pipeline) -> dict[str, Any]:
    """Two steps; what is left, of keys too; how often this rank made attention for another one in both."""
    answers, found = counted(pipe), trial.ran(pipe)
    keys = [bytes_in(one.store) for part in pipe.parts if isinstance(part, Slices) for one in part.slices.values()]
    return found | {"left": found["left"] + sum(keys), "answers": len(answers)}


def exchange_of(pipe: Pipeline) -> AttentionPeers | None:
    """The rank's exchange of attention, where it has one."""
    return next((one for one in pipe.parts if isinstance(one, AttentionPeers)), None)


def counted(pipe: Pipeline) -> list[int]:
    """Gets the rank for every attention that this one makes for another; some of the answers are gradients."""
    found: list[int] = []
    if (attention := exchange_of(pipe)) is None:
        return found
    send = attention.send

    def noting(rank: int, tag: int, tensors: Any) -> Any:
        if (tag - FIRST_TAG) % 2:
            found.append(rank)
        return send(rank, tag, tensors)

    attention.send = noting  # type: ignore[method-assign]
    return found


def broken_helper(case: Case) -> str:
    """What this rank says where attention for another rank raises in a thread."""
    orders = (random_schedule(problem_of(case), seed) for seed in range(9))
    schedule = next(one for one in orders if any(action.goes_on for action in lower(one)[0].actions))
    pipe, (x, y) = pipeline_of(case, schedule=schedule), batch(case)
    attention = exchange_of(pipe)
    assert attention is not None
    serve = attention.serve

    def raising(*at: Any) -> None:
        if pipe.rank == 0 and threading.current_thread() is not threading.main_thread():
            raise ValueError("on purpose")
        serve(*at)

    attention.serve = raising  # type: ignore[method-assign]
    return refusal(lambda: pipe.step(x, y), RunFailed)


def evaluated(case: Case) -> list[float]:
    """The largest differences of evaluations in one round and in two, with outputs, and of steps behind them."""
    trial, (x, y) = trial_of(case, schedules_of(case, 0)[case.name]), batch(case)
    pipe, rounds = pipeline_of(case), [(x, y), ([*x, *x, x[0]], [*y, *y, y[0]])]
    apart, behind = trial.evaluated(pipe, rounds, outputs=not case.barriers), trial.ran(pipe)
    return [apart, behind["loss"], behind["gradient"]]


class Mixed(nn.Module):
    """It mixes tokens: in training, or in evaluation alone."""

    def __init__(self, training: bool) -> None:
        super().__init__()
        self.where = training

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if self.training == self.where else x


def compared(case: Case, group: Any, training: bool) -> str:
    """What this rank says where layer 1 mixes tokens: in a step, or in the evaluation behind one."""
    layers, (x, y) = layers_of(case), batch(case)
    layers[1] = Mixed(training)
    pipe = Pipeline(layers, schedules_of(case, 0)[case.name], loss=LOSS, group=group)
    try:
        pipe.step(x, y)
        return f"{training} {pipe.evaluate(x, y)}"
    except RunFailed as error:
        return f"{training} {error}"


MEMORIES: list[tuple[tuple[int, ...], str, bool, Any, Any, torch.dtype]] = [
    ((0, 1, 2, 3), "", False, "4,2,1,1", (), torch.float32),
    ((0, 1, 2, 3), "slimpipe", True, 4, (), torch.float32),
    ((0, 1, 2, 3), "", True, 4, "all", torch.float32),
    ((0, 1, 2, 3, 3, 2, 1, 0), "", False, 4, (1, 4), torch.float32),
    ((0, 1, 2, 3), "slimpipe", True, 4, (), torch.bfloat16),
]


def memories() -> list[dict[str, int]]:
    """Peaks of this rank beside the predicted ones: a GPT whose memory was profiled whole, a metered step each of `MEMORIES`
    (placement, named schedule or a random one, fused, slices, recompute)."""
    width, length = 48, 32
    models = {}
    for kind in (torch.float32, torch.bfloat16):
        model = gpt("small", 0, GptSizes(width=width, blocks=7, heads=4, batch=2, length=length))
        model = replace(model, layers=tuple(lambda build=build, kind=kind: build().to(kind) for build in model.layers))
        size = 2 * 2 * length * width * kind.itemsize
        keys = {"attention_F": 3, "attention_B": 6, "kv_bytes": size, "kv_gradient_bytes": size * 4 // kind.itemsize}
        rows = tuple(
            Layer(f"layer{i}", 10, 10, 10, 20, parameter_bytes=0, **size.costs(), **(keys if 0 < i < 8 else {}))
            for i, size in enumerate(held(model, stages_of(model, range(len(model.layers)))))
        )
        models[kind] = model, rows, Profile("measured", "small", rows, Link(1.0, 1000.0), 4.0, None, {}, {})
    found = []
    for placement, name, fused, slices, recompute, kind in MEMORIES:
        model, rows, profile = models[kind]
        how = {"layers": split_layers(len(rows), len(placement)), "fused": fused, "recompute": recompute}
        problem = profile.problem(4, 2, placement, slices=slices, **how)
        schedule = preset(name, problem) if name else random_schedule(problem, 2)
        runner = Pipeline(model.build, schedule, loss=model.loss)
        memory = metered(runner, *batch_of(model, 2))
        found.append({"peak": memory.peak, "predicted": memory.predicted_peak, "last": memory.held[-1]})
    return found


def refused(case: Case) -> str:
    """What a way to split that knows no slices is refused with."""
    return refusal(lambda: pipeline_of(case, split="graph"))


def tensor_parallel() -> dict[str, Any]:
    """A step with heads shared out over two ranks; messages between stages are still on their way from a collective when
    they are sent."""
    from ..support import tensor_parallel as tp

    def parallelize(stage: nn.Module, whole: Any) -> None:
        tp.parallel(list(stage.children()), whole["tp"], "tensor")

    problem = with_slices(a_problem((0, 1, 1, 0), 2 * 3, layers=4), 3, held_keys=1, lengths=(5, 3, 4))
    trial = Trial(
        problem=problem,
        layers=lambda numbers: [tp.model(2)[i] for i in numbers],
        batch=lambda place, step: batch(Case("", rows=(2, 2))),
        loss=tp.loss,
        order=1,
        options={"mesh": mesh_of(pp=2, tp=2), "parallelize": parallelize},
    )
    return trial.ran(trial.pipeline())


def autocast(case: Case) -> list[float]:
    """How far this rank's gradients are from the unsliced model's in float64, in the norm of all: in slices under autocast,
    the unsliced model's under autocast, and in slices without it."""
    (x, y), kind = batch(case), torch.bfloat16
    low, exact = layers_of(case), layers_of(replace(case, kind=torch.float64))
    right(exact, x, y)
    with torch.autocast("cpu", kind):
        right(low, x, y)
        pipe = pipeline_of(case)
        pipe.step(x, y)
    without = pipeline_of(case)
    without.step(x, y)
    wanted = values(dict(enumerate(exact)))
    rows = [values(pipe.layers), values(dict(enumerate(low))), values(without.layers)]
    names = rows[0].keys()
    apart = [[one[k].double() - wanted[k] for k in names] for one in rows]
    size = nn.utils.get_total_norm([wanted[k] for k in names])
    return [float(nn.utils.get_total_norm(one) / size) for one in apart]


def thousandfold(layers: Mapping[int, nn.Module], update: int, rank: int | None) -> None:
    """The first layer's gradients of the second step, which come last."""
    if update == 1 and 0 in layers:
        for p in layers[0].parameters():
            p.grad.mul_(1000)  # type: ignore[union-attr]


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


OTHERS = replace(EVEN, count=4, lengths=(5, 3, 2, 2))


@cache
def trained_here() -> dict[str, Training]:
    """Behind the first step another pipeline goes on, whose sequences are cut otherwise. With `PostValidated` the third
    step's forwards run twice, because the step before was too large."""
    others = trial_of(OTHERS, schedules_of(OTHERS, 1)["even"])
    rows = {
        "clipped": Training(trial=trials()["even"], optimizer=adamw, clip=0.01, saved=1),
        "others": Training(trial=others, optimizer=adamw, clip=0.01, after="clipped"),
    }
    for case in (one for one in CASES if one.name in VALIDATED):
        rows[f"late, {case.name}"] = Training(
            trial=trial_of(case, schedules_of(case, 0)[case.name]),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            updates=4,
            late=LATE,
            spoil=thousandfold,
        )
    return rows


def trainings(rank: int, folder: str) -> dict[str, Any]:
    """Of each training, and how many passes run ahead of a step's validation."""

    def run(training: Training, pipe: Pipeline, *more: Any) -> dict[str, Any]:
        return trained(training, pipe, *more) | {"ahead": Cut.of(pipe.programs, pipe.rank).length}

    return all_trained(rank, f"{__name__}:trained_here", folder, run)


def all_of(rank: int, folder: str) -> dict[str, Any]:
    """What is asked for in one launch: by name, of cases in which this rank has a part."""
    return most_of(rank, folder) | {
        "memories": memories(),
        "tensor parallel": tensor_parallel(),
        "autocast": autocast(Case("autocast", ignored=True, kind=torch.float32)),
        "refused": refused(EVEN),
    }


def most_of(rank: int, folder: str) -> dict[str, Any]:
    """What has models alike."""
    first = {one.name: evaluated(one) for one in CASES if one.name in EVALUATED and one.barriers}
    cases, again = tried(rank, f"{__name__}:trials", ran), dist.new_group([0, 1])
    named = {one.name: one for one in CASES if one.dp == 1 and rank <= max(one.placement)}
    here = [one for one in named.values() if one.name in EVALUATED and not one.barriers]
    return {
        "cases": cases,
        "evaluated": first | {one.name: evaluated(one) for one in here},
        "trained": trainings(rank, folder),
        "broken": [broken_helper(named[name]) for name in ("exchange, loop",) if name in named],
        "compared": [compared(named[name], first_ranks(3), True) for name in ("recompute",) if name in named]
        + [compared(named[name], again, False) for name in ("one token",) if name in named],
    }


@cache
def limits() -> dict[str, float]:
    """The largest differences of a trial, by its name."""
    return {name: 1e-6 if "float32" in name else 1e-12 for name in trials()}


SMALL = GptSizes(width=8, blocks=2, heads=2, batch=2, length=12)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks tried in one launch."""
    return on_ranks(4, f"{__name__}:all_of", str(tmp_path_factory.mktemp("checkpoints")))


def test_loss_and_gradients_are_those_of_the_unsliced_model(found: list[dict[str, Any]]) -> None:
    assert found[0]["cases"].keys() == limits().keys()
    assert min(len(rank["cases"]) for rank in found) >= 5
    assert too_far([rank["cases"] for rank in found], 0.0, **limits()) == {}


def test_evaluations_and_outputs_are_those_of_the_unsliced_model(found: list[dict[str, Any]]) -> None:
    assert found[0]["evaluated"].keys() == set(EVALUATED)
    for rank in found:
        for name, differences in rank["evaluated"].items():
            assert max(differences) <= limits()[name], name


def test_ranks_make_attention_for_each_other(found: list[dict[str, Any]]) -> None:
    """As often in any order as in the one that the exchange is made for, in each of two steps."""
    names = [one.name for one in CASES if one.exchange]
    assert len(names) == 4
    for name in names:
        orders = [order for order in trials() if order == name or order.startswith(f"{name}, order")]
        made, *anyhow = (
            sum(rank["cases"][order]["answers"] for rank in found if order in rank["cases"]) for order in orders
        )
        assert anyhow == [made] * ANY_ORDERS, name
        assert made >= 6, name


def test_a_thread_that_cannot_make_attention_stops_all_ranks(found: list[dict[str, Any]]) -> None:
    """Each says why, and not only that a connection broke."""
    for rank in (0, 1):
        (said,) = found[rank]["broken"]
        assert re.match(r"rank 0, pass \d[FB]H\d\.\d: ValueError at \S+: on purpose", said)
        assert rank == 0 or f"; then rank {rank}, pass " in said


def test_a_layer_that_mixes_tokens_is_named_on_all_ranks(found: list[dict[str, Any]]) -> None:
    """In a step, and in an evaluation of a layer that mixes them there alone."""
    line = (
        "rank 0, stage 0: slices: layer 1 (Mixed): its output in slices differs from the whole sequence's at 12 of 12 tokens"
    )
    for said in (one for rank in found for one in rank["compared"]):
        assert said.startswith((f"True {line}", f"False {line}"))
    assert [len(rank["compared"]) for rank in found] == [2, 2, 1, 0]


def test_training_is_that_of_the_unsliced_model(found: list[dict[str, Any]]) -> None:
    """Of steps validated late the first slices' forwards run ahead, and once more where the step before was made anew; keys
    are those of the second run then."""
    assert found[0]["trained"].keys() == trained_here().keys()
    assert too_far([rank["trained"] for rank in found], 1e-12) == {}
    for name in VALIDATED:
        rows = [rank["trained"][f"late, {name}"] for rank in found if f"late, {name}" in rank["trained"]]
        assert len(rows) >= 2
        assert max(row["amended"] for row in rows) == 1
        assert max(row["ahead"] for row in rows) >= (1 if name == "exchange" else 3)


def test_heads_may_be_shared_out_over_ranks(found: list[dict[str, Any]]) -> None:
    assert too_far([{"": rank["tensor parallel"]} for rank in found], 1e-12) == {}


def test_autocast_is_as_near_as_without_slices(found: list[dict[str, Any]]) -> None:
    """Layers are looked at in float64, which autocast would leave alone, and run under autocast."""
    for rank in found:
        sliced, whole, without = rank["autocast"]
        assert without < 1e-5 < 1e-3 < sliced < 3 * whole < 0.1


def test_peaks_are_as_predicted(found: list[dict[str, Any]]) -> None:
    """Keys and values stay until their slice's backward, their gradients come with the microbatch's first one."""
    for rank in found:
        assert len(rank["memories"]) == len(MEMORIES)
        for one in rank["memories"]:
            assert abs(one["peak"] / one["predicted"] - 1) < 0.002
            assert one["last"] < 200  # what losses leave


def test_a_split_that_knows_no_slices_is_refused(found: list[dict[str, Any]]) -> None:
    assert all(rank["refused"].startswith("split: 'graph' does not know slices") for rank in found)


def sliced(count: int, lengths: tuple[float, ...] = (), placement: tuple[int, ...] = (0, 1), **how: Any) -> Problem:
    return with_slices(a_problem(placement, 2 * count, layers=4, **how), count, held_keys=1, lengths=lengths)


@pytest.mark.parametrize("seed", range(4))
def test_any_order_of_the_graph_gives_the_unsliced_gradients(seed: int) -> None:
    """Even slices, uneven ones, and what 12 tokens do not divide into: 3, 3, 2, 2, 2 and 9, 1, 1, 1 tokens."""
    rng = random.Random(seed)
    count, lengths = [(4, ()), (4, (5, 1, 4, 2)), (5, ()), (4, (100, 0.1, 3, 2))][seed]
    problem = sliced(count, lengths, rng.choice([(0, 1), (0, 1, 1, 0)]), fused=rng.random() < 0.5)
    worst = worst_difference(random_schedule(problem, seed), gpt("small", 0, SMALL), lambda ready: rng.choice(list(ready)))
    assert worst < 1e-6


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (sliced(13), "inputs: slices: 13 slices of a sequence of 12 tokens: each needs one"),
        (replace(sliced(2), slice_lengths=(1, 2, 3)), "schedule: 3 slice lengths for 2 slices"),
    ],
    ids=["short", "lengths"],
)
def test_sequences_that_do_not_make_the_slices_are_refused(problem: Problem, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        run_here(random_schedule(problem), gpt("small", 0, SMALL))


def without_edge(problem: Problem, before: str, after: str) -> Problem:
    """The problem without the edge between two passes."""
    a, b = (problem.index[name] for name in (before, after))
    edges = problem.edges
    keep = [i for i in range(len(edges)) if (edges.before[i], edges.after[i]) != (a, b)]
    assert len(keep) < len(edges)
    return replace(problem, edges=edges.only(keep))


@pytest.mark.parametrize(
    ("ends", "line"),
    [
        (("1F0", "1F0.1"), r"pass 1F0\.1: no edge orders 1F0 and 1F0\.1"),
        (("0B1.2", "0B1.1"), r"pass 0B1\.1: no edge orders 0B1\.2 and 0B1\.1"),
    ],
)
def test_slices_that_no_edge_keeps_in_order_are_refused(ends: tuple[str, str], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        lower(random_schedule(without_edge(sliced(3), *ends)))


def test_kinds_that_do_not_run_in_slices_are_refused() -> None:
    step, gather = sliced(2), {name: np.zeros(1, np.int64) for name in ("stage", "microbatch", "rank", "duration")}
    gathered = replace(step, passes=step.passes.more("AG", "comm", **gather))
    with pytest.raises(BadInput, match=r"pass 0AG0: run knows none of its kind where sequences are cut into slices"):
        lower(random_schedule(gathered))


def changed(**how: Any) -> Model:
    return replace(gpt("small", 0, SMALL), **how)


def ignored(m: int, step: int) -> tuple[Tensor, Tensor]:
    """A batch where labels of the first slice do not count, nor some of the last; of microbatch 1 half of the first do."""
    x, y = gpt("small", 0, SMALL).batch(m, step)
    y[:, : 4 - 2 * m] = -100
    y[0, 9:] = -100
    return x, y


def plain(y: Tensor, t: Tensor) -> Tensor:
    """NaN where no label counts."""
    return functional.cross_entropy(y.flatten(0, 1), t.flatten())


def masked(y: Tensor, t: Tensor) -> Tensor:
    """NaN where no label counts, and so are the gradients."""
    kept = t != -100
    each = functional.cross_entropy(y.flatten(0, 1), t.flatten().clamp(min=0), reduction="none")
    return (each * kept.flatten()).sum() / kept.sum()


def squares(y: Tensor, t: Tensor) -> Tensor:
    """A mean over whole numbers, of which -100 is one."""
    return (y.mean(-1) - t / 50).square().mean()


def weighed(y: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), weight=weight)


@pytest.mark.parametrize("loss", [plain, masked, partial(weighed, weight=torch.arange(1, 256 + 1) / 7)])
def test_slices_without_labels_that_count_add_nothing(loss: Loss) -> None:
    for fused in (False, True):
        problem = sliced(3, placement=(0, 1, 1, 0), fused=fused)
        assert worst_difference(random_schedule(problem), changed(loss=loss, batch=ignored)) < 1e-6


def test_a_loss_in_which_ignored_labels_count_is_refused_where_there_are_some() -> None:
    assert worst_difference(random_schedule(sliced(3)), changed(loss=squares)) < 1e-6
    with pytest.raises(RunFailed, match="slices take it for a mean over all labels but -100"):
        run_here(random_schedule(sliced(3)), changed(loss=squares, batch=ignored))
