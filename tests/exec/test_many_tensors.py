"""Stages take and give any pytree of tensors: masks, ids, skips, auxiliary losses, None."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from zbsolve import BadInput
from zbsolve.exec import Pipeline
from zbsolve.exec.base.program import Message
from zbsolve.exec.check import difference
from zbsolve.exec.feed import split_batch
from zbsolve.exec.transport.format import Format
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.wires import CPU, DATA, FORMATS

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import a_problem
from ..support.trials import TRIED, Batches, Trial, too_far, tried


class Enter(nn.Module):
    """Ids and a padding mask in; hidden states, skips and what is constant out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8)

    def forward(self, batch: tuple[Tensor, Tensor]) -> dict[str, Any]:
        ids, mask = batch
        x = self.table(ids)
        return {"x": x, "mask": mask, "skips": (x,), "ids": ids, "none": None, "depth": 0, "aux": x.square().mean()}


class Middle(nn.Module):
    """Adds to the skips and to an auxiliary loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, v: dict[str, Any]) -> dict[str, Any]:
        x = torch.tanh(self.norm(self.layer(v["x"]))) * v["mask"].unsqueeze(-1)
        aux = v["aux"] + 0.1 * x.square().mean()
        return v | {"x": x, "skips": (*v["skips"], x), "depth": v["depth"] + 1, "aux": aux}


class Leave(nn.Module):
    """Uses the skips, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 20)

    def forward(self, v: dict[str, Any]) -> tuple[Tensor, Tensor]:
        x = v["x"]
        for skip in reversed(v["skips"]):
            x = x + skip
        assert v["none"] is None
        assert v["depth"] == len(v["skips"]) - 1
        return self.layer(x), v["aux"]


def layers(numbers: list[int]) -> list[nn.Module]:
    """Six layers, the same wherever they are built."""
    made: list[nn.Module] = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(Enter() if i == 0 else Leave() if i == 5 else Middle())
    return made


def loss(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Cross entropy and the auxiliary losses of all layers."""
    logits, aux = output
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten()) + 0.5 * aux


def batch(place: int, step: int, rows: tuple[int, ...] = (2, 2, 2, 2)) -> Batches:
    """Ids and masks of microbatches, and targets; the length is another one in each step."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(20, (sum(rows), 5 + 2 * step), generator=generator)
    mask = torch.ones(ids.shape)
    mask[:, -1] = 0
    return list(zip(ids.split(rows), mask.split(rows), strict=True)), ids.roll(-1, 1).split(rows)


TRIALS = {
    f"{split}, {placement}": Trial(
        problem=a_problem(placement, 4, layers=6),
        layers=layers,
        batch=batch,
        loss=loss,
        order=seed,
        steps=2,
        each=True,
        options={"split": split},
    )
    for split in ("layers", "graph")
    for seed, placement in enumerate([(0, 1), (0, 1, 1, 0), (0, 0, 1, 0, 1, 1)])
    if (split, seed) != ("graph", 0)  # graphs are cut layer by layer, whatever the stages
}


class Aside(nn.Module):
    """Gives what later layers use where a number of the batch is not 0, and what nobody uses. branches: looks at it."""

    def __init__(self, branches: bool) -> None:
        super().__init__()
        self.main, self.used, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.scale, self.branches = nn.Parameter(torch.rand(4)), branches

    def forward(self, v: Any) -> tuple[Tensor, ...]:
        x, number, used, unused = v if len(v) == 4 else (*v, v[0], v[0])
        x = torch.tanh(self.main(x)) + (used if self.branches and float(number) else 0)
        return x, number, self.used(used), self.unused(unused) * self.scale


def squares(output: tuple[Tensor, ...], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output[0], target)


def numbered(place: int, step: int) -> Batches:
    """Microbatches with a number each: some look at what others do not."""
    x = torch.randn(4, 3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    digits = ("0000", "0010", "1111")[step]
    return [(row, torch.tensor(int(digit))) for row, digit in zip(x, digits, strict=True)], list(x)


def asides(numbers: list[int], branches: bool) -> list[nn.Module]:
    made = []
    for i in numbers:
        torch.default_generator.manual_seed(i)
        made.append(Aside(branches).double())
    return made


UNUSED = {
    f"{split}, {placement}, {again}": Trial(
        problem=a_problem(placement, 4, layers=4, fused=bool(again), recompute=again),
        layers=partial(asides, branches=split == "layers"),
        batch=numbered,
        loss=squares,
        order=seed,
        steps=3,
        each=True,
        options={"split": split},
    )
    for split in ("layers", "graph")
    for seed, (placement, again) in enumerate([((0, 1), ()), ((0, 1, 1, 0), "all")])
}


@pytest.mark.slow
def test_gradients_are_the_whole_models_and_what_nobody_used_has_none() -> None:
    """Trials see None too."""
    found = on_ranks(2, "tests.support.trials", [("tried", f"{__name__}:{name}") for name in ("TRIALS", "UNUSED")])
    for ranks, limit in zip(zip(*found, strict=True), (2e-6, 1e-12), strict=True):
        assert too_far(ranks, limit) == {}


class Wave(nn.Module):
    """Complex numbers go on; all layers have one weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight, self.bias = weight, nn.Parameter(torch.randn(4, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ self.weight).conj() * self.bias


def waves(numbers: list[int]) -> list[nn.Module]:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(4, 4, dtype=torch.complex128))
    made = [Wave(weight) for _ in range(4)]
    return [made[i] for i in numbers]


def tables(numbers: list[int]) -> list[nn.Module]:
    """Gradients of the first layer's table are sparse, and those of the last one's, the same, are not."""
    torch.manual_seed(0)
    made = [nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 9, bias=False)]
    made[3].weight = made[0].weight
    return [made[i].double() for i in numbers]


def drawn(place: int, step: int, words: bool = False) -> Batches:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(3, 2, 9 if words else 4, dtype=torch.float64, generator=generator)
    return list(x.argmax(-1) if words else x), list(x)


KINDS = {
    "complex": Trial(
        problem=a_problem((0, 1), 3, layers=4),
        layers=waves,
        batch=drawn,
        loss=lambda y, target: (y - target).abs().square().mean(),
        steps=2,
        options={"tied": [[(i, "weight") for i in range(4)]]},
    ),
    "sparse": Trial(
        problem=a_problem((0, 1), 3, layers=4),
        layers=tables,
        batch=partial(drawn, words=True),
        steps=2,
        options={"tied": [[(0, "weight"), (3, "weight")]]},
    ),
}


def test_gradients_of_other_kinds_are_added_up_over_ranks() -> None:
    """Complex ones, and sparse ones with dense ones."""
    assert too_far(on_ranks(2, TRIED, f"{__name__}:KINDS"), 1e-12) == {}
    turned = difference(torch.tensor([1.0 + 1.0j]), torch.tensor([1.0 - 1.0j]))
    assert turned == pytest.approx(2**0.5)


class Line:
    """Wires of two ranks in one process, whose rows come in the order in which they went."""

    rank = 0

    def __init__(self) -> None:
        self.rows: dict[int, list[Tensor]] = {DATA: [], FORMATS: []}

    def send(self, row: Tensor, destination: int, tag: int = DATA) -> None:
        self.rows[tag].append(row)

    def receive(self, row: Tensor, source: int, tag: int = DATA) -> Any:
        return SimpleNamespace(wait=lambda timeout: row.copy_(self.rows[tag].pop(0)))

    def copies(self, rank: int) -> bool:
        return False


def test_gradients_that_are_not_there_do_not_travel() -> None:
    """Flags come before each, until all were there once; then zeros stand for what is not."""
    there = [Message(f"0F{m}", f"1F{m}", 0, 1, 0, m, gradient=False) for m in range(4)]
    back = [Message(f"1B{m}", f"0B{m}", 1, 0, 0, m, gradient=True) for m in range(4)]
    line, given, x = Line(), torch.ones(2, requires_grad=True), torch.ones(2)
    first, last = (Mailbox(line, {source: messages}, CPU, 1) for source, messages in ((1, back), (0, there)))  # type: ignore[arg-type]
    for mailbox in (first, last):
        mailbox.begin(dict.fromkeys(range(4), 0))
    values: list[tuple[Any, Any, Any]] = [(x, None, None), (None, x, None), (x, x, x), (x, None, x)]
    for message, answer, value in zip(there, back, values, strict=True):
        first.send(message, (given,) * 3)
        last.take(message)
        settled = message.part == 3
        with pytest.warns(UserWarning, match="pass 1B3: a part of its stage's input") if settled else nullcontext():
            last.send(answer, value)
        assert [row.tolist() for row in line.rows[FORMATS]] == ([] if settled else [[t is not None for t in value]])
        assert first.here(answer)
        assert last.no_capture == first.no_capture if settled else (last.no_capture != "") == (None in value)
        found, _ = first.take(answer)
        assert [t is not None for t in found] == [t is not None or settled for t in value]
        assert all(b is None or torch.equal(b, a if a is not None else 0 * x) for a, b in zip(value, found, strict=True))
        assert first.size(answer) == 8 * sum(t is not None for t in found)


EVALUATED = {"vee": replace(TRIALS["layers, (0, 1, 1, 0)"], uneven=True)}


def evaluated(rank: int, where: str) -> dict[str, list[float]]:
    """Of an evaluation in rounds of microbatches that differ in rows, and of a step behind it, whose messages carry
    gradients again."""

    def run(trial: Trial, pipe: Pipeline) -> list[float]:
        apart = trial.evaluated(pipe, [batch(0, 0, (3, 3, 2, 2)), batch(0, 1, (1, 2, 1, 1, 2))])
        return [apart, trial.ran(pipe)["gradient"]]

    return tried(rank, where, run)


def test_an_evaluation_gives_all_tensors_of_the_outputs() -> None:
    for found in on_ranks(2, f"{__name__}:evaluated", f"{__name__}:EVALUATED"):
        assert max(found["vee"]) < 1e-5


def test_a_message_comes_out_as_it_went_in() -> None:
    value = {
        "x": torch.randn(3, 2, requires_grad=True),
        "flags": (torch.tensor([True, False, True]), None, 2.5, "word"),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "one": torch.tensor(7, dtype=torch.int32),
    }
    there = Format.of(value)
    here = Format.loads(there.dumps())
    assert here == there
    found = here.unpack(there.pack(value, torch.device("cpu")))
    assert Format.of(found) == there
    assert found["flags"][1:] == (None, 2.5, "word")
    for name in ("x", "half", "empty", "one"):
        assert torch.equal(found[name], value[name])
    assert torch.equal(found["flags"][0], value["flags"][0])
    assert there.nbytes == 24 + 3 + 10 + 4
    assert there.gradient.tensors == (Format.of(value["x"].detach()).tensors[0],)
    assert Format.of((torch.ones(2),)).gradient.buffer(torch.device("cpu")).shape == (1,)


def test_a_format_says_where_its_tensors_are() -> None:
    found = Format.of({"x": torch.ones(2, 3), "more": (None, [torch.ones(1, dtype=torch.bool)], 2)})
    assert str(found) == "{x: (2, 3) torch.float32, more: (None, ((1,) torch.bool), 2)}"
    assert str(found.gradient) == "()"
    assert str(Format.of(torch.ones(4))) == "(4,) torch.float32"


class Named(NamedTuple):
    x: Tensor


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (lambda: Named(torch.ones(1)), "a structure that cannot be sent: .*Named.*: hand on tuples, lists and dicts"),
        (lambda: (torch.eye(2).to_sparse(),), "makes a sparse tensor, which cannot be sent: hand on a dense one"),
        (lambda: torch.nested.nested_tensor([torch.ones(1)], layout=torch.jagged), "makes a nested tensor, which cannot"),
    ],
)
def test_what_cannot_be_sent_is_named(value: Callable[[], Any], why: str) -> None:
    with pytest.raises(BadInput, match=f"^{why}[^\n]*$"):
        Format.of(value())


def test_batches_of_several_tensors_are_cut_along_their_rows() -> None:
    ids, mask = torch.arange(8).reshape(4, 2), torch.ones(4, 2)
    cpu = torch.device("cpu")
    found = split_batch((ids, mask), "inputs", [1], range(2), cpu)
    assert torch.equal(found[1][0], ids[2:])
    named = split_batch({"ids": ids, "scale": 3}, "inputs", [0], range(2), cpu)
    assert torch.equal(named[0]["ids"], ids[:2])
    assert named[0]["scale"] == 3
    each = split_batch(ids.chunk(2), "inputs", [0, 1], range(2), cpu)  # alike: a microbatch each
    assert torch.equal(each[1], ids[2:])
    with pytest.raises(BadInput, match=r"inputs: .* does not split into 3"):
        split_batch((ids, mask), "inputs", [0], range(3), cpu)
