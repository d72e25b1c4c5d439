"""Sequences in slices: a whole pipeline on gloo ranks or in one process, against the unsliced model."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from zbsolve import BadInput, Problem
from zbsolve.build import with_slices
from zbsolve.exec.backward.layer_split import Loss
from zbsolve.exec.lowering import lower
from zbsolve.models.model import Model
from zbsolve.models.presets import GptSizes, gpt
from zbsolve.util.errors import RunFailed

from ..support.exec_jobs_slices import CASES, EVALUATED, MEMORIES, TRAININGS, TRIALS, VALIDATED
from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem, random_schedule, run_here, worst_difference
from ..support.trials import too_far

pytestmark = pytest.mark.slow

LIMITS = {name: 1e-6 if "float32" in name else 1e-12 for name in TRIALS}
SMALL = GptSizes(width=8, blocks=2, heads=2, batch=2, length=12)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What four ranks tried in one launch."""
    return on_ranks(4, "tests.support.exec_jobs_slices:all_of", str(tmp_path_factory.mktemp("checkpoints")))


def test_loss_and_gradients_are_those_of_the_unsliced_model(found: list[dict[str, Any]]) -> None:
    assert found[0]["cases"].keys() == LIMITS.keys()
    assert min(len(rank["cases"]) for rank in found) >= 5
    assert too_far([rank["cases"] for rank in found], 0.0, **LIMITS) == {}


def test_evaluations_and_outputs_are_those_of_the_unsliced_model(found: list[dict[str, Any]]) -> None:
    assert found[0]["evaluated"].keys() == set(EVALUATED)
    for rank in found:
        for name, differences in rank["evaluated"].items():
            assert max(differences) <= LIMITS[name], name


def test_ranks_make_attention_for_each_other(found: list[dict[str, Any]]) -> None:
    """As often in any order as in the one that the exchange is made for, in each of two steps."""
    names = [one.name for one in CASES if one.exchange]
    assert len(names) == 4
    for name in names:
        orders = [order for order in TRIALS if order == name or order.startswith(f"{name}, order")]
        made, *anyhow = (
            sum(rank["cases"][order]["answers"] for rank in found if order in rank["cases"]) for order in orders
        )
        assert anyhow == [made, made], name
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
    assert found[0]["trained"].keys() == TRAININGS.keys()
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
