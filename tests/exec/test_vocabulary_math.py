"""Shards of the output layer, the loss and the embedding, all in one process, against the whole ones of torch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbsolve.exec.vocabulary import shard
from zbsolve.exec.vocabulary.parts import EmbeddingShard, add_gradient, look_up
from zbsolve.exec.vocabulary.shard import OutputShard, input_gradient, merge, pass_s, pass_t, shard_rows
from zbsolve.models.losses import CrossEntropy
from zbsolve.util.errors import BadInput

HIDDEN = 6
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}


class Sample:
    """An output layer, hidden states (2, 5, h) and labels, of which some do not count."""

    def __init__(self, vocabulary: int, kind: torch.dtype, bias: bool = False, large: float = 1.0, ignored: int = 3) -> None:
        torch.manual_seed(vocabulary)
        self.weight = torch.randn(vocabulary, HIDDEN, dtype=kind)
        self.bias = torch.randn(vocabulary, dtype=kind) if bias else None
        self.hidden = torch.randn(2, 5, HIDDEN, dtype=kind) * large
        self.labels = torch.randint(vocabulary, (2, 5))
        self.labels.view(-1)[:ignored] = -100

    def whole(self, loss: CrossEntropy, unit: float) -> dict[str, Tensor]:
        """The loss and gradients that torch finds."""
        given = {"hidden": self.hidden, "weight": self.weight} | ({} if self.bias is None else {"bias": self.bias})
        given = {name: one.clone().requires_grad_() for name, one in given.items()}
        value = loss(functional.linear(given["hidden"], given["weight"], given.get("bias")), self.labels)
        (unit * value.double()).backward()
        return {"loss": value.detach(), **{name: one.grad for name, one in given.items()}}

    def shards(self, loss: CrossEntropy, count: int) -> list[OutputShard]:
        """The same output layer cut."""
        rows = [shard_rows(len(self.weight), count, one) for one in range(count)]
        return [
            OutputShard(
                nn.Parameter(self.weight[one.start : one.stop].clone()),
                None if self.bias is None else nn.Parameter(self.bias[one.start : one.stop].clone()),
                one.start,
                len(self.weight),
                loss,
            )
            for one in rows
        ]

    def sharded(self, loss: CrossEntropy, count: int, barriers: int, unit: float, times: int = 1) -> dict[str, Tensor]:
        """The loss and gradients that shards find together. times: microbatches in flight at once, of which each is this."""
        shards = self.shards(loss, count)
        hidden: list[Tensor] = []
        kept = [[pass_s(one, self.hidden, self.labels, barriers) for one in shards] for _ in range(times)]
        for passes in kept:
            statistics = torch.stack([one.statistics for one in passes])
            merged = [merge(one, its, statistics, unit) for one, its in zip(shards, passes, strict=True)]
            assert all(torch.equal(one.loss, merged[0].loss) for one in merged)
            found = [input_gradient(*one) for one in zip(shards, passes, merged, strict=True)] if barriers == 1 else []
            late = [pass_t(*one, barriers) for one in zip(shards, passes, merged, strict=True)]
            hidden.append(torch.stack(found or late).sum(0))
        result = {"loss": merged[0].loss, "hidden": hidden[0], "weight": torch.cat([one.weight.grad for one in shards])}
        if self.bias is not None:
            result["bias"] = torch.cat([one.bias.grad for one in shards])
        return result


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """The largest difference of each tensor as a share of its largest number."""
    assert found.keys() == wanted.keys()
    assert all(found[name].shape == wanted[name].shape for name in found)
    return {
        name: float((found[name].double() - wanted[name].double()).abs().max() / wanted[name].double().abs().max())
        for name in found
    }


OPTIONS = [
    CrossEntropy(label_smoothing=epsilon, z_loss=z, soft_cap=cap)
    for epsilon, z, cap in itertools.product((0.0, 0.1), (0.0, 0.01), (0.0, 2.0))
]


@pytest.mark.parametrize("loss", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", LIMITS)
def test_shards_find_what_torch_finds(loss: CrossEntropy, kind: torch.dtype) -> None:
    """17 words: 2, 3 and 4 shards do not divide them; 5 words on 4 shards leave the last one empty."""
    for vocabulary, bias in ((17, False), (5, True)):
        sample = Sample(vocabulary, kind, bias)
        wanted = sample.whole(loss, unit=0.75)
        for count, barriers in itertools.product((1, 2, 3, 4), (1, 2)):
            found = sample.sharded(loss, count, barriers, unit=0.75)
            assert all(found[name].dtype == kind for name in found)
            assert max(differences(found, wanted).values()) < LIMITS[kind], (vocabulary, count, barriers)


def test_the_loss_is_torchs() -> None:
    torch.manual_seed(0)
    logits, labels = torch.randn(7, 11, dtype=torch.float64), torch.tensor([1, 2, 3, 3, 9, 9, 10])
    for ignored, epsilon in itertools.product((-100, 3), (0.0, 0.2)):
        wanted = functional.cross_entropy(logits, labels, ignore_index=ignored, label_smoothing=epsilon)
        assert float(CrossEntropy(ignored, epsilon)(logits, labels)) == pytest.approx(float(wanted), rel=1e-14)
    z = logits.logsumexp(-1).square().mean()
    assert float(CrossEntropy(z_loss=0.5)(logits, labels)) == pytest.approx(
        float(functional.cross_entropy(logits, labels) + 0.5 * z), rel=1e-14
    )


@pytest.mark.parametrize("barriers", [1, 2])
def test_blocks_and_microbatches_in_flight_change_nothing(barriers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, loss = Sample(17, torch.float64, bias=True), OPTIONS[-1]
    wanted = sample.sharded(loss, 3, barriers, 1.0)
    monkeypatch.setattr(shard, "BLOCK_CPU", 13)
    found = sample.sharded(loss, 3, barriers, 1.0, times=2)
    assert torch.equal(found["hidden"], wanted["hidden"])
    assert max(differences({**found, "weight": found["weight"] / 2, "bias": found["bias"] / 2}, wanted).values()) < 1e-14


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("loss", [OPTIONS[0], OPTIONS[-1]], ids=str)
def test_no_label_counts(loss: CrossEntropy, barriers: int) -> None:
    sample = Sample(7, torch.float32, bias=True, ignored=10)
    for found in (sample.whole(loss, 1.0), sample.sharded(loss, 3, barriers, 1.0)):
        assert all(not one.any() for one in found.values())


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_huge_logits(cap: float, barriers: int) -> None:
    """exp of these overflows, and on most shards every word has a probability of 0."""
    sample = Sample(17, torch.float64, large=1e4)
    loss = CrossEntropy(soft_cap=cap, z_loss=1e-4)
    found, wanted = sample.sharded(loss, 4, barriers, 1.0), sample.whole(loss, 1.0)
    assert float(wanted["loss"]) > 10
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-12, atol=1e-12 * float(wanted[name].abs().max()))


@pytest.mark.parametrize("barriers", [1, 2])
@pytest.mark.parametrize("loss", [OPTIONS[0], OPTIONS[-1]], ids=str)
def test_autocast(loss: CrossEntropy, barriers: int) -> None:
    """Low precision loses no more than torch's own, and gradients have the parameters' type."""
    sample = Sample(17, torch.float32, bias=True)
    exact = sample.whole(loss, 1.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, found = sample.whole(loss, 1.0), sample.sharded(loss, 3, barriers, 1.0)
    assert all(one.dtype == torch.float32 for one in found.values())
    ours, theirs = differences(found, exact), differences(low, exact)
    assert ours["weight"] > 1e-4  # it was low
    assert all(ours[name] < 2 * theirs[name] + 4e-3 for name in exact), (ours, theirs)


def test_a_sure_label_keeps_its_gradient_in_low_precision() -> None:
    """Where a word's probability is nearly 1 a difference of two products would lose what is left in bfloat16."""
    torch.manual_seed(0)
    weight, labels = torch.randn(8, 64), torch.arange(8)
    sample = Sample(8, torch.float32)
    sample.weight, sample.hidden, sample.labels = weight, weight[None] * 0.2, labels[None]
    exact = sample.whole(CrossEntropy(), 1.0)
    assert float(exact["loss"]) < 0.01
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low, found = sample.whole(CrossEntropy(), 1.0), sample.sharded(CrossEntropy(), 2, 1, 1.0)
    ours, theirs = differences(found, exact), differences(low, exact)
    assert ours["hidden"] < 2 * theirs["hidden"] + 4e-3


def test_models_in_bfloat16() -> None:
    sample = Sample(17, torch.bfloat16)
    wanted, found = sample.whole(CrossEntropy(), 1.0), sample.sharded(CrossEntropy(), 3, 1, 1.0)
    assert (found["loss"].dtype, found["hidden"].dtype, found["weight"].dtype) == (torch.float32, *[torch.bfloat16] * 2)
    assert max(differences(found, wanted).values()) < 0.02


def test_what_is_not_trained_gets_no_gradient() -> None:
    sample = Sample(7, torch.float32, bias=True)
    one = sample.shards(CrossEntropy(), 1)[0]
    one.weight.requires_grad_(False)
    kept = pass_s(one, sample.hidden, sample.labels)
    pass_t(one, kept, merge(one, kept, kept.statistics[None]))
    assert one.weight.grad is None
    torch.testing.assert_close(one.bias.grad, sample.whole(CrossEntropy(), 1.0)["bias"])


def test_s_keeps_what_its_docstring_says() -> None:
    sample = Sample(16, torch.float64)
    for loss in OPTIONS:
        one = sample.shards(loss, 2)[0]
        kept = pass_s(one, sample.hidden, sample.labels)
        both = loss.soft_cap > 0 and loss.label_smoothing > 0
        assert (kept.matrix.nbytes, kept.slope is not None) == (10 * 8 * 8, both)
        assert (kept.partial.nbytes, kept.statistics.shape) == (10 * HIDDEN * 8, (3 if loss.label_smoothing else 2, 10))
        merged = merge(one, kept, kept.statistics[None])
        input_gradient(one, kept, merged)
        assert kept.partial is None
        assert kept.partial_slope is None
        pass_t(one, kept, merged)
        assert not hasattr(kept, "matrix")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_embedding(count: int, tied: bool) -> None:
    """5 words: a shard of four is empty. Tied: an output shard's gradient is there already, and both add up."""
    torch.manual_seed(0)
    weight, tokens = torch.randn(5, HIDDEN, dtype=torch.float64), torch.tensor([[0, 4, 2], [2, 2, 1]])
    gradient = torch.randn(2, 3, HIDDEN, dtype=torch.float64)
    whole = weight.clone().requires_grad_()
    wanted = functional.embedding(tokens, whole, padding_idx=1) * 1.5
    wanted.backward(gradient)
    rows = [shard_rows(5, count, one) for one in range(count)]
    shards = [EmbeddingShard(nn.Parameter(weight[r.start : r.stop].clone()), r.start, 5, 1, 1.5) for r in rows]
    torch.testing.assert_close(sum(look_up(one, tokens) for one in shards), wanted, rtol=0, atol=0)
    for one in shards:
        one.weight.grad = torch.ones_like(one.weight) if tied else None
        add_gradient(one, tokens, gradient)
    found = torch.cat([one.weight.grad for one in shards])
    torch.testing.assert_close(found, whole.grad + tied, rtol=1e-14, atol=1e-14)


def test_rows_of_shards() -> None:
    assert [tuple(shard_rows(10, 4, i)) for i in range(4)] == [(0, 1, 2), (3, 4, 5), (6, 7, 8), (9,)]
    assert [len(shard_rows(5, 4, i)) for i in range(4)] == [2, 2, 1, 0]
    with pytest.raises(BadInput, match=r"^vocabulary: 8 shards of 7 words: there must be 1 to 7$"):
        shard_rows(7, 8, 0)


def test_what_does_not_fit_is_told() -> None:
    sample = Sample(7, torch.float32)
    one = sample.shards(CrossEntropy(), 1)[0]

    def refused(labels: Any, line: str) -> None:
        with pytest.raises(BadInput, match=line):
            pass_s(one, sample.hidden, labels)

    refused(torch.full((2, 5), 7), "^labels: 7 is not in a vocabulary of 7 words$")
    refused(torch.zeros(2, 4, dtype=torch.long), r"^labels: \(2, 4\) torch.int64: hidden states \(2, 5, 6\) need a whole")
    refused(torch.zeros(2, 5), r"^labels: \(2, 5\) torch.float32: hidden states")
    with pytest.raises(BadInput, match=r"^tokens: -1 is not in a vocabulary of 7 words$"):
        look_up(EmbeddingShard(one.weight, 0, 7), torch.tensor([3, -1]))
    for wrong, line in (({"label_smoothing": 1.5}, "label_smoothing 1.5"), ({"soft_cap": -1.0}, "soft_cap -1.0")):
        with pytest.raises(BadInput, match=f"^CrossEntropy: {line}"):
            CrossEntropy(**wrong)
