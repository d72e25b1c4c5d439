"""Steps of pipelines whose sequences run in slices, on gloo ranks: against the unsliced model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve import BadInput, Problem, Schedule
from zbsolve.build import with_slices
from zbsolve.exec import Pipeline
from zbsolve.exec.check import difference, reference, values
from zbsolve.exec.handlers import Data
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.presets import Block, Embed, Head

from .exec_tools import a_problem, random_schedule

WIDTH, LENGTH, WORDS, BATCH = 8, 12, 11, 2
LOSS = CrossEntropy(z_loss=1e-3)


@dataclass(frozen=True)
class Case:
    """What is tried. lengths: of the slices, in proportion; () for `count` even ones. ignored: labels that do not count,
    all of a slice and all of a microbatch among them. rows: of each microbatch, where they differ."""

    name: str
    placement: tuple[int, ...] = (0, 1, 2)
    count: int = 3
    lengths: tuple[float, ...] = ()
    fused: bool = False
    recompute: str | tuple[int, ...] = ()
    ignored: bool = False
    tied: bool = False
    rows: tuple[int, ...] = ()
    kind: torch.dtype = torch.float64


CASES = [
    Case("even"),
    Case("uneven, fused", lengths=(7, 1, 4), fused=True, ignored=True),
    Case("loop", (0, 1, 2, 0, 1, 2), 4, fused=True),
    Case("vee", (0, 1, 2, 2, 1, 0), 4, ignored=True, tied=True),
    Case("recompute", recompute="all", ignored=True),
    Case("recompute, fused", (0, 1, 2, 2, 1, 0), 2, fused=True, recompute=(1, 3)),
    Case("one token", count=12),
    Case("rows", lengths=(1, 2, 3), rows=(3, 1), ignored=True),
    Case("float32", (0, 1, 2, 2, 1, 0), ignored=True, kind=torch.float32),
    Case("float32, fused", kind=torch.float32, fused=True),
]


def layers_of(case: Case) -> list[nn.Module]:
    torch.manual_seed(0)
    blocks = [Block(WIDTH, 2) for _ in range(len(case.placement) - 1)]
    layers = [Embed(LENGTH, WIDTH, WORDS), *blocks, Head(WIDTH, WORDS)]
    if case.tied:
        layers[-1].output.weight = layers[0].token.weight  # type: ignore[union-attr]
    return [layer.to(case.kind) for layer in layers]


def problem_of(case: Case, microbatches: int = 2) -> Problem:
    how = {"fused": case.fused, "recompute": case.recompute}
    step = a_problem(case.placement, microbatches * case.count, len(case.placement) + 1, **how)
    return with_slices(step, case.count, held_keys=1, held_gradients=1, lengths=case.lengths)


def batch(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    drawn = torch.Generator().manual_seed(1)
    pairs = [torch.randint(WORDS, (2, rows, LENGTH), generator=drawn) for rows in case.rows or (BATCH, BATCH)]
    x, y = [one[0] for one in pairs], [one[1] for one in pairs]
    if case.ignored:
        y[0][:, :4] = -100
        y[0][-1, 7:] = -100
        y[1][:] = -100
    return x, y


def pipeline_of(case: Case, seed: int = 0, schedule: Schedule | None = None, **more: Any) -> Pipeline:
    found = random_schedule(problem_of(case), seed) if schedule is None else schedule
    return Pipeline(layers_of(case), found, loss=more.pop("loss", LOSS), timeout=30, **more)


def right(layers: Sequence[nn.Module], x: Sequence[Tensor], y: Sequence[Tensor]) -> float:
    """The loss of the unsliced model, where every row counts alike, with its gradients."""
    total, rows = 0.0, sum(map(len, x))
    for one, target in zip(x, y, strict=True):
        share = len(one) / rows
        data = Data({0: one}, {0: target})
        total += reference(layers, data, lambda output, labels, share=share: LOSS(output, labels) * share)
    return total


def tried(case: Case, seed: int) -> float:
    """The largest difference of loss and gradients here from the unsliced model, in two steps; afterwards no key is left."""
    pipe, (x, y), whole, worst = pipeline_of(case, seed), batch(case), layers_of(case), [0.0]
    loss = right(whole, x, y)
    expected = values(dict(enumerate(whole)))
    for _ in range(2):
        found = pipe.step(x, y, uneven=bool(case.rows)).loss
        mine = values(pipe.layers)
        worst += [abs(found - loss) / abs(loss), *(difference(v.found, expected[k].found) for k, v in mine.items())]
        pipe.module.zero_grad()
    for stage in pipe.stages.values():
        assert stage.slices is not None
        assert stage.slices.store.bytes == 0
        assert not stage.live
    return max(worst)


def evaluated(case: Case) -> list[float]:
    """The largest differences of evaluations in one round, in two, and of outputs, and of a step behind them."""
    pipe, (x, y), whole = pipeline_of(case), batch(case), layers_of(case)
    losses = [abs(pipe.evaluate(*asked) / right(whole, *asked) - 1) for asked in ((x, y), ([*x, *x, x[0]], [*y, *y, y[0]]))]
    outputs = pipe.forward(x, everywhere=True)
    with torch.no_grad():
        wanted = [nn.Sequential(*whole)(one) for one in x]
    apart = [difference(a, b) for a, b in zip(outputs, wanted, strict=True)]
    return [*losses, *apart, abs(pipe.step(x, y).loss / right(whole, x, y) - 1)]


def refused(case: Case) -> str:
    """What a way to split that knows no slices is refused with."""
    try:
        pipeline_of(case, split="graph")
    except BadInput as error:
        return str(error)
    return ""


def all_of(rank: int, _: None) -> dict[str, Any]:
    """What is asked for in one launch."""
    some = [one for one in CASES if one.name in ("uneven, fused", "vee")]
    return {
        "cases": {one.name: tried(one, seed) for seed, one in enumerate(CASES)},
        "evaluated": {one.name: evaluated(one) for one in some},
        "refused": refused(CASES[0]),
    }
