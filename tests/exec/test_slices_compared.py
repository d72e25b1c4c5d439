"""Errors that slices would make in silence, each planted, and what a comparison with the whole sequence says of it."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbsolve.build import with_slices
from zbsolve.exec import auxiliary_loss
from zbsolve.exec.backward.stage import ForwardStage, Stage
from zbsolve.exec.base.part import Hooks
from zbsolve.exec.one_device import OneDevice
from zbsolve.exec.slices.comparing import Sequences, compare
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.exec.slices.stage import Slices, StageSlices
from zbsolve.models.blocks import BlockSizes, Decoder, Experts, Tokens
from zbsolve.models.blocks import Scores as Head
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.presets import Block, GptSizes, gpt
from zbsolve.models.slicing import slice_offset, sliced_attention
from zbsolve.util.errors import BadInput, RunFailed

from ..support.exec_tools import a_problem, random_schedule, run_here

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, WIDTH, WORDS = 64, 16, 23
KINDS = [torch.float64, torch.float32, torch.bfloat16]
SMALL = GptSizes(width=8, blocks=2, heads=2, batch=2, length=12)
Loss = Callable[[Any, Any], Tensor]


def tried(layer: nn.Module | list[nn.Module], x: Any = None, kind: torch.dtype = torch.float64, **how: Any) -> None:
    """Compare layers from number 4 on, in slices of 20, 24 and 20 tokens."""
    torch.manual_seed(0)
    layers = layer if isinstance(layer, list) else [layer]
    x = torch.randn(2, LENGTH, WIDTH, dtype=kind) if x is None else x
    targets, loss = how.pop("targets", None), how.pop("loss", None)
    compare([one.to(kind) for one in layers], 4, loss, Sequences([x] * 2, [targets] * 2), Cutting(3, (5, 6, 5)), **how)


class Mixing(nn.Module):
    """A layer of a function of (batch, length, width)."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def mean(x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True)


def positions(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1]).to(x)[:, None] / 8


def pairs(x: Tensor) -> Tensor:
    """Two neighbours are mixed: aligned, where slices have an even length."""
    each = x.unflatten(1, (-1, 2))
    return (each + each.flip(2)).flatten(1, 2)


def before(tokens: int) -> Callable[[Tensor], Tensor]:
    """Adds the token so many before."""
    return lambda x: x + functional.pad(x, (0, 0, tokens, 0))[:, : x.shape[1]]


def capacity(x: Tensor) -> Tensor:
    """Takes so many tokens of all alone."""
    return torch.where((torch.arange(x[..., 0].numel()) < 90).view(x.shape[:2])[..., None], x, 0)


def attention(causal: bool = True, **how: Any) -> Callable[[Tensor], Tensor]:
    """To keys of one slice alone."""
    return lambda x: functional.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=causal, **how)[:, 0]


def keys(how: str) -> Callable[[Tensor], Tensor]:
    """Keys and queries that the one 50 before is added to, queries that grow from position 50 on, documents of 50 tokens; in
    sequences of more tokens a window."""

    def forward(x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        places, mixed = torch.arange(x.shape[1]), q + functional.pad(q, (0, 0, 50, 0))[:, :, : q.shape[2]]
        query = {"query": mixed, "grown": q * (places[:, None] / 50).clamp(min=1).to(q)}.get(how, q)
        rule: dict[str, Any] = {"documents": {"documents": (places // 50).expand(len(x), -1)}, "window": {"window": 5}}
        more = rule.get(how, {}) if len(places) > 50 or how == "documents" else {}
        found = sliced_attention(query, mixed if how == "key" else q, q, is_causal=True, **more)
        return x + found.transpose(1, 2).flatten(2)

    return forward


class Slope(torch.autograd.Function):
    """Only the gradient is mixed: it is divided by its norm over the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=1, keepdim=True)


class Rescaled(nn.Module):
    """Only the gradient of the parameter is mixed: it is that of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1] * self.weight.detach(), x[:, -1:] * self.weight], 1)


class Convolution(nn.Module):
    """Causal over time, and all 0 at the start: outputs show nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 2, padding=1)
        nn.init.zeros_(self.over_time.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.over_time(x.transpose(1, 2))[..., :-1].transpose(1, 2)


class Normed(nn.Module):
    """Running statistics over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return found


class Tallying(nn.Module):
    """Keeps from call to call how many tokens it saw, and begins anew behind a sequence: right, until another one's slice
    comes between."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        places = (self.seen + torch.arange(x.shape[1])) % LENGTH
        self.seen = (self.seen + x.shape[1]) % LENGTH
        return x + places.to(x)[:, None] / 8


class Cached(nn.Module):
    """A cache of its own by position, as for decoding: another sequence's slice overwrites it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, LENGTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        start, end = slice_offset(), slice_offset() + x.shape[1]
        self.cache = torch.cat([self.cache[:, :start].to(x), x, self.cache[:, end:].to(x)], 1)
        return x + self.cache[:, :end].cumsum(1)[:, start:] / LENGTH


class Last(nn.Module):
    """Keeps the last token for the next call, and forgets it where a sequence begins."""

    kept: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        first = self.kept if slice_offset() else torch.zeros_like(x[:, :1])
        self.kept = x[:, -1:].detach()
        return x + torch.cat([first, x[:, :-1]], 1)


class Special(nn.Module):
    """Token numbers → hidden states; behind each token 0 another kind of text begins."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.tokens(ids) + self.kinds((ids == 0).cumsum(1))
        return found


class InTraining(nn.Module):
    """Adds the token before in training alone, behind dropout by several names."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = torch.rand_like(x) + torch.randn(x.shape).to(x) + torch.bernoulli(x.detach() * 0 + 0.5)
        return functional.dropout(x + x.roll(1, 1), 0.2) + noise


class Marking(nn.Module):
    """Whole numbers, or bools, that differ in slices."""

    def __init__(self, bools: bool) -> None:
        super().__init__()
        self.bools = bools

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = 2**60 + torch.arange(x.shape[1]).expand(x.shape[:2])
        return x, large > 2**60 if self.bools else large


def ids_with(token: int, at: int) -> Tensor:
    """Token numbers from 1 on, and one of another kind somewhere."""
    ids = torch.randint(1, WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
    ids[:, at] = token
    return ids


ERRORS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "attention to a slice": (lambda: Mixing(attention()), "its output .* first at token 20 "),
    "attention both ways": (lambda: Mixing(attention(causal=False)), "its output .* first at token 0 "),
    "mean": (lambda: Mixing(mean), "its output .* at 64 of 64 tokens, first at token 0 "),
    "positions": (lambda: Mixing(positions), "its output .* at 44 of 64 tokens, first at token 20 "),
    "late window": (lambda: Mixing(before(50)), "its output .* at 14 of 64 tokens, first at token 50 "),
    "one late token": (lambda: Mixing(before(63)), "its output .* at 1 of 64 tokens, first at token 63 "),
    "token before": (lambda: Mixing(before(1)), "its output .* at 2 of 64 tokens, first at token 20 "),
    "capacity": (lambda: Mixing(capacity), "its output .* first at token 26 "),
    "key": (lambda: Mixing(keys("key")), "its output .* first at token 50 "),
    "query": (lambda: Mixing(keys("query")), "its output .* first at token 50 "),
    "grown": (lambda: Mixing(keys("grown")), "its output .* first at token 5[1-9] "),
    "documents": (lambda: Mixing(keys("documents")), "its output .* first at token 50 "),
    "window": (lambda: Mixing(keys("window")), "its output .* first at token "),
    "gradient": (lambda: Mixing(Slope.apply), "the gradient of its input .* first at token 0 "),
    "parameter": (Rescaled, "the gradient of its weight in slices differs from the whole sequence's by 1"),
    "convolution": (Convolution, "the gradient of its over_time.weight in slices differs"),
    "statistics": (Normed, "its output .* first at token 0 "),
    "tally": (Tallying, "its output .* first at token 20 "),
    "cache": (Cached, "its output .* first at token 20 "),
    "last token": (Last, "its output .* first at token 20 "),
    "training": (InTraining, "its output .* first at token 0 "),
    "whole numbers": (lambda: Marking(False), "its output .* first at token 20 "),
    "bools": (lambda: Marking(True), "its output .* first at token 20 "),
}


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_named_with_its_first_token(name: str, kind: torch.dtype) -> None:
    build, line = ERRORS[name]
    layer = build()
    said = rf"^slices: layer 6 \({type(layer).__name__}\): {line}.*: it mixes tokens elsewhere than in .* Mend that, cut"
    other = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(kind)
    x = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(2)).to(kind)
    layers = [one.to(kind) for one in (nn.LayerNorm(WIDTH), nn.Identity(), layer, nn.Identity())]
    with pytest.raises(BadInput, match=said):
        compare(layers, 4, None, Sequences([x, other], [None] * 2), Cutting(3, (5, 6, 5)))


def test_pairs_are_named_where_cuts_part_them_alone() -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    for lengths in ((20, 24, 20), (22, 20, 22)):
        compare([Mixing(pairs)], 0, None, Sequences([x] * 2, [None] * 2), Cutting(3, lengths))
    with pytest.raises(BadInput, match="RuntimeError at "):
        compare([Mixing(pairs)], 0, None, Sequences([x] * 2, [None] * 2), Cutting(3, (21, 22, 21)))


def test_a_rare_token_is_seen_where_it_is_there() -> None:
    """In its own slice nothing is wrong: only what comes behind differs."""
    tried(Special(), ids_with(1, 5))
    with pytest.raises(BadInput, match=r"its output .* at 20 of 64 tokens, first at token 44 "):
        tried(Special(), torch.cat([ids_with(1, 5)[:1], ids_with(0, 23)[1:]]))


def test_experts_with_a_capacity_are_named() -> None:
    with pytest.raises(BadInput, match=r"layer 4 \(Experts\)"):
        tried(Experts(BlockSizes(WIDTH, 4, 2, 4, 24, experts=4)))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_models_that_can_be_cut_pass(kind: torch.dtype) -> None:
    sizes = BlockSizes(WIDTH, 4, 2, 4, 24)
    layers: list[nn.Module] = [Tokens(WORDS, WIDTH), Decoder(sizes, LENGTH), Block(WIDTH, 4), nn.Dropout(0.5)]
    layers += [nn.ReLU(inplace=True), Mixing(partial(functional.dropout, p=0.3)), Head(WORDS, WIDTH)]
    ids, labels = torch.randint(WORDS, (2, 2, LENGTH), generator=torch.Generator().manual_seed(0))
    labels[:, 22:50] = -100
    tried(layers, ids, kind, targets=labels, loss=CrossEntropy(z_loss=1e-3))
    tried(layers, ids, kind, targets=labels, loss=CrossEntropy(z_loss=1e-3), backward=False)


class Deciding(nn.Module):
    """Rounding decides which of two experts the last token gets, and it is another for another number of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if x.dtype == torch.bfloat16 and x.shape[1] == 20:
            y[:, -1] *= 2
        return y


def test_where_rounding_decides_more_bits_are_asked() -> None:
    tried(Deciding(), kind=torch.bfloat16)
    short = attention()
    with pytest.raises(BadInput, match=r"its output .* at 44 of 64 tokens"):  # a kernel for 16 bits that slices do not reach
        tried(Mixing(lambda x: short(x) if x.dtype == torch.bfloat16 else x), kind=torch.bfloat16)
    with pytest.raises(BadInput, match=r"layer 5 \(Mixing\)"):
        tried([Deciding(), Mixing(mean)], kind=torch.bfloat16)


def test_not_a_number_is_no_difference() -> None:
    """Whoever looks for it names it elsewhere; a mask of -inf is handed on."""
    tried(Mixing(lambda x: torch.where(x > 2, torch.nan, x).where(x > -2, -torch.inf)))


class Statistics(nn.Module):
    """Counts calls, in a buffer and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = nn.Linear(WIDTH, WIDTH), 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        found: Tensor = functional.dropout(self.inner(x), 0.1)
        return found


def test_a_comparison_leaves_no_trace() -> None:
    layer, x = Statistics(), torch.randn(2, LENGTH, WIDTH)
    layer(x).sum().backward()
    count, gradient, state = layer.count, layer.inner.weight.grad, torch.get_rng_state()
    assert gradient is not None
    kept = gradient.clone()
    compare([layer], 0, None, Sequences([x] * 2, [None] * 2), Cutting(4))
    assert layer.count is count
    assert (layer.calls, float(count)) == (1, 1)
    assert layer.inner.weight.grad is gradient
    assert gradient.equal(kept)
    assert torch.get_rng_state().equal(state)
    assert not x.requires_grad


class Large(nn.Module):
    """Counts how many of what such layers have made before is still there when it runs."""

    made: list[Any] = []
    most = 0

    def forward(self, x: Tensor) -> Tensor:
        Large.most = max(Large.most, sum(one() is not None for one in Large.made))
        inside = x * 2
        Large.made.append(weakref.ref(inside))
        found: Tensor = inside * inside
        return found


def test_activations_of_one_layer_are_there_at_once() -> None:
    """Those of its slices, or those of its whole sequence."""
    tried([Large() for _ in range(4)])
    assert Large.most == 3  # slices of the first sequence, when the last one of the second runs
    assert len(Large.made) == 4 * 2 * (3 + 1)


class Narrow(nn.Module):
    """Memory suffices for so many tokens."""

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 30:
            raise MemoryError
        return mean(x) if x.shape[1] < 4 else x


def test_where_memory_does_not_suffice_fewer_tokens_are_compared() -> None:
    with pytest.warns(UserWarning, match="compared with whole sequences on 16 of 64 tokens: memory"):
        tried(
            [nn.Identity(), Narrow()], torch.randn(2, LENGTH, WIDTH), loss=lambda y, t: y.mean(), targets=torch.ones(2, 64)
        )
    with pytest.raises(BadInput, match=r"layer 5 \(Narrow\): its output .* at 3 of 28 tokens, first at token 25 "):
        compare([nn.Identity(), Narrow()], 4, None, Sequences([torch.randn(1, 56, 2)] * 2, [None] * 2), Cutting(2, (25, 3)))


def entropy(y: Tensor, t: Tensor, **how: Any) -> Tensor:
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), **how)


def of_rows(y: Tensor, t: Tensor) -> Tensor:
    """A mean of means of rows."""
    return torch.stack([functional.cross_entropy(a, b) for a, b in zip(y, t, strict=True)]).mean()


def codebooks(y: Tensor, t: Tensor) -> Tensor:
    """The mean of the means of two codebooks, where labels count elsewhere."""
    return entropy(y, t) + entropy(y, t.roll(1, 0).where(t > 4, -100))


WEIGHTS = torch.ones(WORDS, dtype=torch.float64).index_fill(0, torch.tensor([3]), 2.5)
LABELS = torch.randint(WORDS, (2, LENGTH), generator=torch.Generator().manual_seed(0))
PARTLY = LABELS.masked_fill(torch.arange(LENGTH) % 7 == 0, -100)
PARTLY[1, 10:30] = -100
SHORT = "What does not count needs that label, or the loss an attribute ignore_index"
MEAN = "slices take it for a mean over all labels but -100"


@pytest.mark.parametrize(
    ("loss", "labels", "line"),
    [
        (lambda y, t: entropy(y, t, ignore_index=3), LABELS, rf"{MEAN}. Label 3 does not count in it: say so by functools"),
        (lambda y, t: entropy(y, t, weight=WEIGHTS), LABELS, rf"{MEAN}. {SHORT}.*; weights are known of CrossEntropyLoss"),
        (lambda y, t: entropy(y[:, :-1], t[:, 1:]), LABELS, rf"{MEAN}. {SHORT}.*labels are shifted before the step"),
        (lambda y, t: entropy(y, t) ** 2, LABELS, MEAN),
        (lambda y, t: entropy(y, t, reduction="sum"), LABELS, MEAN),
        (of_rows, PARTLY, MEAN),
        (codebooks, PARTLY, MEAN),
        (lambda y, t: (y.mean(-1) - t / 50).square().mean(), PARTLY, MEAN),
        (lambda y, t: entropy(y, t.where(torch.arange(t.shape[1]) < 23, -100)), LABELS, MEAN),
    ],
    ids=["ignored", "weights", "shifted", "square", "sum", "rows", "codebooks", "numbers", "late"],
)
def test_a_loss_that_is_no_mean_of_labels_is_said_to_be(loss: Loss, labels: Tensor, line: str) -> None:
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        y = torch.randn(2, LENGTH, WORDS, generator=torch.Generator().manual_seed(1)).to(kind)
        said = re.escape("slices: the loss is ") + rf"[-\d.e]+ of the whole sequence and [-\d.e]+ in slices.*: {line}"
        with pytest.raises(BadInput, match=said):
            tried([], y, kind, targets=labels, loss=lambda y, t: loss(y.double() if "weights" in line else y, t))


def test_one_label_of_many_is_seen_in_few_bits() -> None:
    labels = LABELS.where(LABELS != 3, 4)
    labels[1, 50] = 3
    y = torch.randn(2, LENGTH, WORDS, generator=torch.Generator().manual_seed(1)).bfloat16()
    with pytest.raises(BadInput, match="Label 3 does not count in it"):
        tried([], y, torch.bfloat16, targets=labels, loss=lambda y, t: entropy(y, t, ignore_index=3))


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (entropy, PARTLY),
        (partial(entropy, ignore_index=3), LABELS),
        (partial(entropy, weight=WEIGHTS), PARTLY),
        (of_rows, LABELS),
        (lambda y, t: (y - t).square().mean(), torch.randn(2, LENGTH, WORDS)),
        (lambda y, t: (entropy(y, t), {"metric": 1}), PARTLY),
        (entropy, torch.full((2, LENGTH), -100)),
    ],
    ids=["labels", "ignored", "weights", "rows", "numbers", "metrics", "none"],
)
def test_a_mean_of_labels_passes(loss: Loss, labels: Tensor) -> None:
    """Also where it is learned by heart, so that only rounding is left of its gradient."""
    for kind, scale in ((torch.float64, 1), (torch.float32, 1), (torch.float32, 300), (torch.bfloat16, 1)):
        if kind != torch.float64 and loss is not entropy:
            continue
        y = torch.randn(2, LENGTH, WORDS, generator=torch.Generator().manual_seed(1))
        right = functional.one_hot(labels.clamp(min=0), WORDS) if labels.dim() == 2 else 0
        tried([], (y + right * scale).to(kind), kind, targets=labels, loss=loss)


def steps_of(layers: list[nn.Module], batches: list[list[Any]], **how: Any) -> list[str]:
    """Steps of a stage with these microbatches, in two slices; what each step's comparison says."""
    stage, said = Stage(layers, 3), list[str]()
    slices = StageSlices(Cutting(2), **how)
    for microbatches in batches:
        for m, x in enumerate(microbatches):
            for i, part in enumerate(x.chunk(2, 1)):
                with slices.forward(stage, 2 * m + i, part, None):
                    stage.forward(2 * m + i, part, None, split=False)
        for m, x in enumerate(microbatches):
            for i in (1, 0):
                with slices.backward(2 * m + i):
                    stage.backward(2 * m + i, [torch.ones(*x.chunk(2, 1)[i].shape, WIDTH)])
        try:
            slices.compare(stage)
            said.append("")
        except BadInput as error:
            said.append(str(error))
    return said


def test_steps_one_two_four_and_so_forth_are_compared() -> None:
    """Of five microbatches each time two others: 0 and 1, 2 and 3, 4, 1 and 2. A rare token that comes elsewhere is
    not seen."""
    plain, rare = ids_with(1, 40), ids_with(0, 20)
    wrong = [[plain] * m + [rare] + [plain] * (4 - m) for m in range(5)]
    for m in range(5):
        said = steps_of([Special()], [wrong[m]] * 8)
        assert [step for step, one in enumerate(said, 1) if one] == [[1], [1, 8], [2, 8], [2], [4]][m]
    assert not any(steps_of([Special()], [[plain], [plain], [rare], [plain]]))
    assert not any(steps_of([Special()], [[rare]], compares=False))


def test_longer_sequences_and_layers_in_training_are_compared_at_once() -> None:
    layer = Mixing(before(12))
    stage, lengths, said = Stage([layer], 3), [8, 4, 16, 16, 32, 32], list[bool]()
    slices = StageSlices(Cutting(2))
    for length in (*lengths, 0):
        layer.function = before(12) if length else before(1)
        layer.train(length > 0)
        for part in range(2):
            x = torch.ones(1, length // 2 or 4, WIDTH)
            with torch.no_grad(), slices.forward(stage, part, x, None):
                stage.alone(x, None, 0)
        try:
            slices.compare(stage)
            said.append(False)
        except BadInput:
            said.append(True)
    assert said == [False, False, True, True, True, False, True]  # the fourth step is compared anyway


def test_all_rounds_of_forwards_count_as_one_row_of_steps() -> None:
    """Of the first, second and fourth; and of the first with a loss."""
    stage, said = Stage([Mixing(mean)], 3, lambda y, t: y.mean()), list[bool]()
    part = Slices(0, {3: stage}, {3: StageSlices(Cutting(2))})
    for with_loss in (False, False, False, False, False, True, True):
        one = ForwardStage(stage, with_loss, last=True)
        rounds = part.for_forwards({3: one})
        for i in range(2):
            x = torch.full((1, 4, WIDTH), float(i))
            with torch.no_grad(), rounds.slices[3].forward(one, i, x, None):
                one.forward(i, x, None, split=False)
        try:
            rounds.end()
            said.append(False)
        except RunFailed:
            said.append(True)
    assert said == [True, True, False, True, False, True, False]


def sliced(count: int, **how: Any) -> Any:
    return with_slices(a_problem((0, 1, 1, 0), 2 * count, layers=4, **how), count, held_keys=1)


def with_layer(build: Callable[[], nn.Module], number: int = 2) -> Any:
    model = gpt("small", 0, SMALL)
    return replace(model, layers=(*model.layers[:number], build, *model.layers[number + 1 :]))


@pytest.mark.parametrize("how", [{"fused": True}, {"recompute": "all"}], ids=str)
def test_a_rank_says_which_of_its_stages_differs(how: dict[str, Any]) -> None:
    with pytest.raises(RunFailed, match=r"^rank 1, stage 2: slices: layer 2 \(Mixing\): its output in slices differs"):
        run_here(random_schedule(sliced(3, **how)), with_layer(lambda: Mixing(mean)))
    with pytest.raises(RunFailed, match=rf"^rank 0, stage 3: slices: the loss is .*{MEAN}"):
        run_here(random_schedule(sliced(3)), replace(gpt("small", 0, SMALL), loss=lambda y, t: entropy(y, t) ** 2))


class Balanced(nn.Module):
    """Adds to the loss."""

    def forward(self, x: Tensor) -> Tensor:
        auxiliary_loss(x.mean())
        return x


def test_a_layer_that_adds_to_the_loss_is_refused() -> None:
    with pytest.raises(RunFailed, match=r"rank 1, pass 2F\d: slices: a layer adds to the loss by auxiliary_loss"):
        run_here(random_schedule(sliced(3)), with_layer(Balanced))


def test_a_step_is_the_same_to_the_last_bit_whether_it_is_compared_or_not() -> None:
    """With dropout, and running counts."""
    found = []
    for compares in (True, False):
        torch.manual_seed(0)
        model = with_layer(lambda: nn.Sequential(Block(8, 2), nn.Dropout(0.2)))
        one = OneDevice(model, random_schedule(sliced(3)), hooks=[Hooks(compare=compares)] * 2)
        batches = [{m: model.batch(m, 0)[i] for m in range(2)} for i in range(2)]
        losses = [one.step(*batches).loss for _ in range(2)]
        found.append([torch.tensor(losses), *(p.grad for p in one.parameters())])
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
