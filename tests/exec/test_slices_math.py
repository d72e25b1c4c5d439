"""Layers run slice by slice, in one process, against the same layers run whole."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbsolve.build.attention_order import HandedOver
from zbsolve.exec import auxiliary_loss
from zbsolve.exec.attention import _attention, _gradients, asked
from zbsolve.exec.backward.layer_split import Loss
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.state import share_of_loss
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.slices.check import check_layers, check_stage
from zbsolve.exec.slices.counting import Counting
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.exec.slices.inputs import SeenInputs
from zbsolve.exec.slices.labels import SeenTargets
from zbsolve.exec.slices.loss import check_loss
from zbsolve.exec.slices.partial import Scores, merge, partial_attention, partial_gradients
from zbsolve.exec.slices.sequence import cut_sequence, offsets, slice_shares
from zbsolve.exec.slices.stage import StageSlices
from zbsolve.exec.slices.store import SliceStore, gradient_bytes
from zbsolve.models.blocks import BlockSizes, Decoder, Experts, Tokens
from zbsolve.models.blocks import Scores as Head
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.presets import Block, Embed
from zbsolve.models.slicing import slice_offset, sliced_attention
from zbsolve.util.errors import BadInput

pytestmark = pytest.mark.usefixtures("one_thread")
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-6}
LENGTH, WIDTH, WORDS = 12, 16, 23
GQA = BlockSizes(WIDTH, 4, 2, 4, 24)
LOSS = CrossEntropy(z_loss=1e-3)


class Documents(nn.Module):
    """Attention within documents and a window; both come with the hidden states."""

    def __init__(self, window: int | None, documents: bool) -> None:
        super().__init__()
        self.window, self.documents = window, documents
        self.qkv = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, documents = x
        q, k, v = self.qkv(hidden).unflatten(-1, (8, 4)).transpose(1, 2).split((4, 2, 2), 1)
        rule = {"window": self.window, "documents": documents if self.documents else None, "scale": 0.7}
        mixed = sliced_attention(q, k, v, is_causal=True, enable_gqa=True, **rule)
        return hidden + mixed.transpose(1, 2).flatten(2), documents


class Masked(nn.Module):
    """Attention under a mask: added numbers of a whole sequence, with a slope a head (arXiv 2108.12409), or what the slice's
    queries see, by blocks."""

    def __init__(self, blocks: bool) -> None:
        super().__init__()
        self.blocks, self.qkv = blocks, nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (12, 4)).transpose(1, 2).split((4, 4, 4), 1)
        places = torch.arange(slice_offset() + x.shape[1])
        distance = places[:, None] - places
        if self.blocks:
            mask = ((distance >= 0) & (places[:, None] // 5 == places // 5))[slice_offset() :]
        else:
            far = torch.arange(20)[:, None] - torch.arange(20)
            mask = (-0.1 * far * torch.arange(1, 5)[:, None, None]).where(far >= 0, -torch.inf).to(x.dtype)
        return x + sliced_attention(q, k, v, mask, window=None if self.blocks else 9).transpose(1, 2).flatten(2)


class Begin(nn.Module):
    """Token numbers → hidden states and documents, a new one behind each 0."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Tokens(WORDS, WIDTH)

    def forward(self, ids: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.tokens(ids[0]), ids[1]


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = Head(WORDS, WIDTH)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.head(x[0])
        return found


def with_documents(window: int | None, documents: bool) -> list[nn.Module]:
    return [Begin(), Documents(window, documents), Documents(window, documents), End()]


MODELS = {
    "preset": lambda: [Embed(LENGTH, WIDTH, WORDS), Block(WIDTH, 4), Block(WIDTH, 2), Head(WORDS, WIDTH)],
    "gqa": lambda: [Tokens(WORDS, WIDTH), Decoder(GQA, LENGTH), Decoder(GQA, LENGTH), Head(WORDS, WIDTH)],
    "window": lambda: with_documents(3, False),
    "documents": lambda: with_documents(None, True),
    "both": lambda: with_documents(5, True),
    "blocks": lambda: [Tokens(WORDS, WIDTH), Masked(True), Head(WORDS, WIDTH)],
    "slopes": lambda: [Tokens(WORDS, WIDTH), Masked(False), Masked(True), Head(WORDS, WIDTH)],
}


def batch(name: str, seed: int) -> tuple[Any, Tensor]:
    """A microbatch: tokens (with documents, where the model takes them), and labels of which some do not count."""
    drawn = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(WORDS, (2, 2, LENGTH), generator=drawn)
    labels[:, :4] = -100  # all of the first of three slices
    labels[1, 7:] = -100
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2], [5] * 7 + [6] * 5])
    return ((ids, documents) if name in ("window", "documents", "both") else ids), labels


def gradients(layers: Sequence[nn.Module]) -> dict[str, Tensor]:
    found = {f"{i} {n}": p.grad for i, layer in enumerate(layers) for n, p in layer.named_parameters() if p.grad is not None}
    for layer in layers:
        layer.zero_grad()
    return {name: one.clone() for name, one in found.items()}


def compare(found: dict[str, Tensor], wanted: dict[str, Tensor], kind: torch.dtype) -> None:
    assert found.keys() == wanted.keys()
    for name, one in wanted.items():
        assert (found[name] - one).abs().max() <= LIMITS[kind] * max(1, one.abs().max()), name


EVEN, UNEVEN, ONE = (4, 4, 4), (7, 1, 4), (12,)


@pytest.mark.parametrize(
    ("name", "lengths", "kind"),
    [
        *((name, UNEVEN, torch.float64) for name in MODELS),
        *((name, EVEN, torch.float32) for name in MODELS),
        ("gqa", EVEN, torch.float64),
        ("gqa", ONE, torch.float64),
    ],
    ids=str,
)
def test_slices_are_the_whole(name: str, lengths: tuple[int, ...], kind: torch.dtype) -> None:
    """Two microbatches of a stage interleaved; the backward is split into B and W in one of them, and recomputed in it for
    every other slice."""
    torch.manual_seed(1)
    layers = [layer.to(kind) for layer in MODELS[name]()]
    data = [batch(name, seed) for seed in range(2)]
    wanted = {}
    for m, (ids, labels) in enumerate(data):
        loss = LOSS(nn.Sequential(*layers)(ids), labels)
        loss.backward()
        wanted[f"loss {m}"] = loss.detach()
    wanted |= gradients(layers)

    stage, store, count = Stage(layers, loss=LOSS), SliceStore(len(lengths)), len(lengths)
    parts = [list(zip(cut_sequence(ids, lengths, "x"), cut_sequence(y, lengths, "y"), strict=True)) for ids, y in data]
    shares = [slice_shares([Counting().counted(label) for _, label in one]) for one in parts]
    found: dict[str, Tensor] = {f"loss {m}": torch.zeros((), dtype=kind) for m in range(2)}
    for i, offset in enumerate(offsets(lengths)):
        for m in range(2):
            again = m == 1 and i % 2 == 0
            with store.forward(m, i, offset):
                one = stage.forward(m * count + i, *parts[m][i], split=m == 1, seed=m, recompute=again)
            found[f"loss {m}"] += share_of_loss(one, shares[m][i])
    held = store.bytes
    for i in reversed(range(count)):
        for m in (1, 0):
            if m == 1 and i % 2 == 0:
                with store.forward(m, i, offsets(lengths)[i]):
                    stage.recompute(m * count + i)
            with store.backward(m, i):
                stage.backward(m * count + i, None, shares[m][i])
    for i in range(count):
        stage.weights(count + i)
    assert store.bytes == 0 < held
    compare(found | gradients(layers), wanted, kind)


def test_keys_are_held_once_and_gradients_from_the_first_backward_on() -> None:
    layer, lengths = Block(WIDTH, 4), (4, 6, 2)
    x, store = torch.randn(2, LENGTH, WIDTH), SliceStore(3)
    bytes_of = [2 * 2 * one * WIDTH * 4 for one in lengths]  # keys and values, 2 samples, float32
    outputs, held = [], []
    for i, (part, offset) in enumerate(zip(cut_sequence(x, lengths, "x"), offsets(lengths), strict=True)):
        with store.forward(0, i, offset):
            outputs.append(layer(part))
        held.append(store.bytes)
    assert held == [sum(bytes_of[: i + 1]) for i in range(3)]
    held = []
    for i in (2, 1, 0):
        with store.backward(0, i):
            outputs[i].sum().backward()
        held.append(store.bytes)
    assert held == [2 * (bytes_of[0] + bytes_of[1]), 2 * bytes_of[0], 0]
    assert gradient_bytes(x.bfloat16()) == 4 * x.numel()


def test_no_graph_holds_another_slices() -> None:
    layer, store = Block(WIDTH, 4), SliceStore(2)
    parts = [torch.randn(1, 3, WIDTH, requires_grad=True) for _ in range(2)]
    outputs = []
    for i, part in enumerate(parts):
        with store.forward(0, i, 3 * i):
            outputs.append(layer(part))
    with store.backward(0, 1):
        outputs[1].sum().backward()
    assert parts[0].grad is None  # it comes with the slice's own backward
    with store.backward(0, 0):
        (outputs[0] * 0).sum().backward()  # no loss of its own
    assert parts[0].grad is not None
    assert parts[0].grad.abs().max() > 0


@pytest.mark.parametrize(("window", "slices"), [(3, [1, 1, 1, 0]), (5, [1, 2, 2, 0]), (8, [1, 2, 3, 0])])
def test_a_forward_without_gradients_drops_what_no_window_sees(window: int, slices: list[int]) -> None:
    layer, store, held = Documents(window, False), SliceStore(4), []
    for i in range(4):
        with torch.no_grad(), store.forward(0, i, 3 * i):
            layer((torch.randn(2, 3, WIDTH), torch.zeros(2, 3)))
        held.append(store.bytes // (2 * 2 * 3 * 8 * 4))
    assert held == slices


def test_autocast_makes_attention_as_torch_does() -> None:
    layer, store, x = Decoder(GQA, LENGTH), SliceStore(2), torch.randn(2, LENGTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        whole = layer(x)
        parts = []
        for i in range(2):
            with store.forward(0, i, 6 * i):
                parts.append(layer(x[:, 6 * i : 6 * i + 6]))
    assert parts[0].dtype == whole.dtype
    assert (torch.cat(parts, 1) - whole).abs().max() < 0.02 * whole.abs().max()
    for i in (1, 0):
        with store.backward(0, i):
            parts[i].sum().backward()


@pytest.mark.parametrize("kind", LIMITS)
@pytest.mark.parametrize("fused", [True, False])
def test_parts_of_attention_merge_with_exact_gradients(fused: bool, kind: torch.dtype) -> None:
    """Queries travel, partial results with their statistics come back; with a part of which some queries see nothing."""
    torch.manual_seed(3)
    q, k, v = (torch.randn(2, heads, n, 8, dtype=kind, requires_grad=True) for heads, n in ((4, 5), (2, 11), (2, 11)))
    mask = torch.ones(5, 11, dtype=torch.bool).tril(6)
    if not fused:
        mask[:3, :4] = False
        mask[:, 4:6] = torch.eye(5, 2, dtype=torch.bool)
    y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    gradient = torch.randn_like(y)
    y.backward(gradient)
    places = [slice(0, 4), slice(4, 6), slice(6, 11)]
    given = [(q.detach(), k.detach()[:, :, one], v.detach()[:, :, one]) for one in places]
    scores = [Scores(causal=i == 2) if fused else Scores(mask=mask[:, one]) for i, one in enumerate(places)]
    whole = merge(partial_attention(*one, how) for one, how in zip(given, scores, strict=True))
    assert (whole.out - y).abs().max() < LIMITS[kind]
    found = [partial_gradients(gradient, whole, *one, how) for one, how in zip(given, scores, strict=True)]
    dq, dk, dv = sum(one[0] for one in found), *(torch.cat([one[i] for one in found], 2) for i in (1, 2))
    for mine, leaf in ((dq, q), (dk, k), (dv, v)):
        assert (mine - leaf.grad).abs().max() < 3 * LIMITS[kind]


SEEN = torch.ones(6, 6, dtype=torch.bool).tril()


def test_without_slices_it_is_torchs_function() -> None:
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    given = {"is_causal": True, "scale": 0.3}
    assert sliced_attention(q, k, v, **given).equal(functional.scaled_dot_product_attention(q, k, v, **given))
    assert slice_offset() == 0
    assert torch.allclose(sliced_attention(q, k, v, window=6, **given), sliced_attention(q, k, v, **given))
    assert torch.allclose(sliced_attention(q, k, v, window=1, **given), v)
    longer = torch.ones(9, 9, dtype=torch.bool).tril()
    for mask in (SEEN, longer):
        assert torch.allclose(sliced_attention(q, k, v, mask, scale=0.3), sliced_attention(q, k, v, **given))
        assert torch.allclose(
            sliced_attention(q, k, v, mask, scale=0.3, window=2), sliced_attention(q, k, v, window=2, **given)
        )
    with pytest.raises(BadInput, match=r"attn_mask \(6, 5\) does not broadcast to \(2, 4, 6, 6\)"):
        sliced_attention(q, k, v, attn_mask=SEEN[:, :5])
    with pytest.raises(BadInput, match="causal: no such setting"):
        sliced_attention(q, k, v, causal=True)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"is_causal": False}, "is_causal=True is needed"),
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"attn_mask": SEEN}, "attn_mask and is_causal=True: only one says what is seen"),
        ({"is_causal": False, "attn_mask": SEEN[:2]}, r"attn_mask \(2, 6\): for tokens 0 to 2 it is \(…, length, length\)"),
        ({"is_causal": False, "attn_mask": SEEN[0]}, r"attn_mask \(6,\) of torch.bool: \(…, queries, keys\) of bool"),
        ({"is_causal": False, "attn_mask": SEEN.long()}, "attn_mask .* of torch.int64"),
        ({"is_causal": False, "attn_mask": [True]}, "attn_mask  of list"),
        ({"is_causal": False, "attn_mask": SEEN.expand(3, 6, 6)}, r"does not broadcast to \(2, 4, 3, 3\)"),
        ({"is_causal": False, "attn_mask": torch.ones(6, 6)}, "attn_mask shows keys of later slices"),
        ({"is_causal": False, "attn_mask": SEEN.tril(-1)}, "attn_mask hides all keys from a token"),
        ({"is_causal": False, "attn_mask": SEEN.float().log().requires_grad_()}, "attn_mask is trained"),
        ({"window": 0}, "window 0"),
        ({"documents": torch.zeros(1, 3)}, r"documents \(1, 3\)"),
        ({"enable_gpa": True}, "enable_gpa: no such setting; it takes attn_mask, dropout_p, is_causal, scale, enable_gqa, "),
    ],
)
def test_what_slices_cannot_do_is_refused(settings: dict[str, Any], line: str) -> None:
    q = torch.randn(2, 4, 3, 8)
    with pytest.raises(BadInput, match=line), SliceStore(2).forward(0, 0, 0):
        sliced_attention(q, q, q, **{"is_causal": True} | settings)
    with pytest.raises(BadInput, match="enable_gqa is needed"), SliceStore(2).forward(0, 0, 0):
        sliced_attention(q, q[:, :2], q[:, :2], is_causal=True)


def test_slices_out_of_order_are_refused() -> None:
    layer, store, x = Block(WIDTH, 4), SliceStore(3), torch.randn(1, 3, WIDTH)
    outputs = []
    with pytest.raises(BadInput, match="slice 1 of microbatch 0 runs, but slice 0 has not"), store.forward(0, 1, 3):
        layer(x)
    for i in range(3):
        with store.forward(4, i, 3 * i):
            outputs.append(layer(x))
    with pytest.raises(BadInput, match="calls sliced_attention 0 times, another called it 1"), store.forward(5, 0, 0):
        pass
    with pytest.raises(BadInput, match="slice 1 of microbatch 4 runs before"), store.backward(4, 1):
        outputs[1].sum().backward()
    with store.backward(4, 2):
        outputs[2].sum().backward()
    with pytest.raises(BadInput, match="slice 1 of microbatch 4 were not taken"), store.backward(4, 1):
        pass
    store.drop(4)
    assert store.bytes == 0


def test_a_checkpoint_inside_a_layer_is_refused() -> None:
    layer, store = Block(WIDTH, 4), SliceStore(1)
    x = torch.randn(1, 3, WIDTH, requires_grad=True)
    with store.forward(0, 0, 0):
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    with pytest.raises(BadInput, match="a checkpoint"), store.backward(0, 0):
        y.sum().backward()


def test_shares_of_a_sequence() -> None:
    assert slice_shares([0, 3, 1]) == [0, 0.75, 0.25]
    assert slice_shares([0, 0]) == [0, 0]
    assert share_of_loss(torch.tensor(torch.nan), 0).item() == 0
    assert Counting().counted(torch.rand(2, 3, 4)) == 24
    assert Counting().counted((torch.tensor([[1, -100, 2]]),)) == 2
    with pytest.raises(BadInput, match="x: slices of"):
        cut_sequence(torch.zeros(2, 4), (4, 0), "x")
    with pytest.raises(BadInput, match=r"x: \(2, 5\) is not"):
        cut_sequence(torch.zeros(2, 5), (2, 2), "x")


class Convolution(nn.Module):
    """Causal over time, and all 0 at the start."""

    def __init__(self) -> None:
        super().__init__()
        self.over_time = nn.Conv1d(WIDTH, WIDTH, 2, padding=1)
        nn.init.zeros_(self.over_time.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.over_time(x.transpose(1, 2))[..., :-1].transpose(1, 2)


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True)


class Positions(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.arange(x.shape[1])[:, None]


class Direct(nn.Module):
    """Attention that slices do not reach, in both directions or causal."""

    def __init__(self, causal: bool, reached: bool) -> None:
        super().__init__()
        self.causal, self.call = causal, sliced_attention if reached else functional.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        return self.call(*[x[:, None]] * 3, is_causal=self.causal)[:, 0]


class Backward(torch.autograd.Function):
    """Only the gradient is mixed: it is divided by its norm over the sequence."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm(dim=1, keepdim=True)


class Normalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Backward.apply(x)
        return found


class Rescaled(nn.Module):
    """Only the gradient of the parameter is mixed: it is that of the last token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x[:, :-1] * self.weight.detach(), x[:, -1:] * self.weight], 1)


class Sometimes(nn.Module):
    """Mixes where `places` says, and where `training` says: in some states of the layer alone."""

    def __init__(self, places: slice = slice(None), training: bool = False) -> None:
        super().__init__()
        self.places, self.only_training = places, training

    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        if self.training or not self.only_training:
            y[:, self.places] += x[:, self.places].mean(1, keepdim=True)
        return y


class Pairs(nn.Module):
    """Two neighbours are mixed: aligned, where slices have an even length."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = x.unflatten(1, (-1, 2)) if x.shape[1] % 2 == 0 else torch.cat([x, x[:, -1:]], 1).unflatten(1, (-1, 2))
        return (pairs + pairs.flip(2)).flatten(1, 2)[:, : x.shape[1]]


class Tallying(nn.Module):
    """Keeps from call to call how many tokens it saw, and begins anew behind 12 of them."""

    seen = 0

    def forward(self, x: Tensor) -> Tensor:
        places = (self.seen + torch.arange(x.shape[1])) % LENGTH
        self.seen = (self.seen + x.shape[1]) % LENGTH
        return x + places[:, None]


class Balanced(nn.Module):
    """Adds to the loss in training alone, where it draws random numbers too."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            auxiliary_loss(x.mean())
        return functional.dropout(x, 0.5, self.training)


class Dropped(nn.Module):
    """Attention with dropout in training."""

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        y = sliced_attention(q, q, q, is_causal=True, dropout_p=0.1 if self.training else 0.0)
        return functional.dropout(y.transpose(1, 2).flatten(2), 0.1, self.training)


class BatchNormed(nn.Module):
    """With a batch norm that may not be called."""

    def __init__(self, called: bool) -> None:
        super().__init__()
        self.norm, self.called = nn.BatchNorm1d(WIDTH), called

    def forward(self, x: Tensor) -> Tensor:
        y = functional.dropout(x, 0.1, self.training)
        return self.norm(y.transpose(1, 2)).transpose(1, 2) if self.called else y


class Again(nn.Module):
    """Attention that runs again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.utils.checkpoint.checkpoint(self.block, x, use_reentrant=False)
        return found


class Noisy(nn.Module):
    """Draws numbers in training by whatever name, and mixes there."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        noise = torch.rand_like(x) + torch.randn(x.shape) + torch.empty_like(x).normal_() + torch.bernoulli(x * 0 + 0.5)
        return functional.dropout(x - x.mean(1, keepdim=True), 0.2) + noise * x.new_empty(len(x), 1, 1).bernoulli_(0.3)


class WithMask(nn.Module):
    """Hands on a bool for each token, or what each sees of the whole sequence."""

    def forward(self, x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, mask = x
        if mask.dim() < 3:
            return hidden * mask[..., None], mask.logical_not()
        q = hidden.unflatten(-1, (4, 4)).transpose(1, 2)
        return hidden + sliced_attention(q, q, q, mask[:, None]).transpose(1, 2).flatten(2), mask


class Marking(nn.Module):
    """Whole numbers, or bools, that differ in slices."""

    def __init__(self, bools: bool) -> None:
        super().__init__()
        self.bools = bools

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = 2**60 + torch.arange(x.shape[1]).expand(x.shape[:2])
        return x, large > 2**60 if self.bools else large


def test_bools_and_whole_numbers_are_compared() -> None:
    """Masks may be handed on: what counts of each token, and what each sees, also of more tokens than are looked at."""
    drawn = torch.Generator().manual_seed(0)
    x, seen = torch.randn(2, 64, WIDTH, generator=drawn), torch.rand(2, 64, 64, generator=drawn) < 0.5
    seen = (seen | torch.eye(64, dtype=torch.bool)).tril()
    for mask in (seen[..., 0], seen):
        check_stage([WithMask(), WithMask()], 0, None, ((x[:, :16], mask[:, :16]), None), 64)
    for bools in (False, True):
        with pytest.raises(BadInput, match=r"layer 1 \(Marking\): its output differs"):
            check_layers([nn.ReLU(), Marking(bools)], x[:, :LENGTH])


class Far(nn.Module):
    """Adds the token `reach` before; or takes so many tokens of all alone."""

    def __init__(self, reach: int, most: bool = False) -> None:
        super().__init__()
        self.reach, self.most = reach, most

    def forward(self, x: Tensor) -> Tensor:
        if self.most:
            return torch.where((torch.arange(x[..., 0].numel()) < self.reach).view(x.shape[:2])[..., None], x, 0)
        return x + functional.pad(x, (0, 0, self.reach, 0))[:, : x.shape[1]]


class Deep(nn.Module):
    """A mean between parts that mix nothing, called twice; behind it all differs."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.mixer = Block(WIDTH, 4), nn.ModuleDict({"norm": nn.LayerNorm(WIDTH), "over_time": Mean()})
        self.behind = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.behind(self.mixer["over_time"](self.mixer["norm"](self.block(self.block(x)))))
        return found


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (Deep(), r"layer 4 \(Deep\): its output differs .*; first in 'mixer.over_time' \(Mean\)$"),
        (Normalised(), r"layer 4 \(Normalised\): its input's gradient differs"),
        (Rescaled(), r"layer 4 \(Rescaled\): its parameters' gradient differs"),
        (Sometimes(slice(LENGTH - 2, None)), r"layer 4 \(Sometimes\): its output differs"),
        (Sometimes(slice(7, 9)), r"layer 4 \(Sometimes\): its output differs"),
        (Sometimes(training=True), r"layer 4 \(Sometimes\): its output differs"),
        (Pairs(), r"layer 4 \(Pairs\): its output differs"),
        (Tallying(), r"layer 4 \(Tallying\): its output differs .* or keeps something from call to call"),
        (Again(), r"^slices: layer 4 \(Again\): a layer runs again in the backward \(a checkpoint\)"),
        (Noisy(), r"layer 4 \(Noisy\): its output differs"),
        (Balanced(), r"layer 4 \(Balanced\): adds to the loss by auxiliary_loss"),
        (Dropped(), r"layer 4 \(Dropped\): BadInput.*dropout_p"),
        (Convolution(), r"layer 4 \(Convolution\): its output differs"),
        (Mean(), r"layer 4 \(Mean\): its output differs by [0-9.]+ .* from call to call$"),
        (Positions(), r"layer 4 \(Positions\): its output differs"),
        (Direct(False, False), r"layer 4 \(Direct\): its output differs"),
        (Direct(True, False), r"layer 4 \(Direct\): its output differs"),
        (Direct(False, True), r"layer 4 \(Direct\): BadInput.*is_causal"),
        (BatchNormed(called=True), r"layer 4 \(BatchNormed\): a batch norm mixes positions: 'norm'"),
        (nn.BatchNorm1d(LENGTH), r"layer 4 \(BatchNorm1d\): RuntimeError: running_mean"),
        (nn.Flatten(), r"layer 4 \(Flatten\)"),
    ],
    ids=str,
)
def test_a_layer_that_mixes_positions_elsewhere_is_named(layer: nn.Module, line: str) -> None:
    good = [Block(WIDTH, 4), Decoder(GQA, LENGTH)]
    with pytest.raises(BadInput, match=line):
        check_layers([*good, layer, Mean()], torch.randn(2, LENGTH, WIDTH), first=2)


class FarKeys(nn.Module):
    """Keys and queries that the one 50 before is added to, queries that grow from position 50 on, documents of 50 tokens;
    in sequences of more tokens a window, and other rotary positions (as dynamic NTK has them)."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        q = x.unflatten(-1, (4, 4)).transpose(1, 2)
        places, mixed = torch.arange(x.shape[1]), q + functional.pad(q, (0, 0, 50, 0))[:, :, : q.shape[2]]
        long, key, rule = len(places) > 50, mixed if self.how == "key" else q, dict[str, Any]()
        query = {"query": mixed, "grown": q * (places[:, None] / 50).clamp(min=1)}.get(self.how, q)
        if self.how == "documents":
            rule = {"documents": (places // 50).expand(len(x), -1)}
        if self.how == "window" and long:
            rule = {"window": 5}
        if self.how == "turned":
            query = key = turned(q, (slice_offset() + places) * (0.5 if long else 1.0))
        return x + sliced_attention(query, key, q, is_causal=True, **rule).transpose(1, 2).flatten(2)


def turned(one: Tensor, angles: Tensor) -> Tensor:
    """By these angles, a token each."""
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = one.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


@pytest.mark.parametrize(
    "layer",
    [
        Far(50),
        Far(90, most=True),
        *(FarKeys(how) for how in ("key", "query", "grown", "documents", "window", "turned")),
    ],
    ids=["token", "capacity", "key", "query", "grown", "documents", "window", "turned"],
)
def test_what_reaches_further_than_the_tiny_input_is_named(layer: nn.Module) -> None:
    """Of two samples of 64 tokens the tiny input has 32 of one."""
    x = torch.randn(2, 16, WIDTH)
    check_stage([BatchNormed(called=False), layer], 2, None, (x, None), 32)
    with pytest.raises(BadInput, match=r"layer 3 \(Far(Keys)?\): its output for 64 tokens differs"):
        check_stage([Block(WIDTH, 4), layer], 2, None, (x, None), 64)


class Ended(nn.Module):
    """Token numbers → numbers and documents; behind each 0 a new one begins."""

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return ids, (ids == 0).cumsum(1)


class EndedLater(nn.Module):
    """The same of numbers that come with others."""

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return (x[0] == 0).cumsum(1) + x[1]


@pytest.mark.parametrize(
    ("layers", "line"),
    [
        ([Ended()], r"layer 2 \(Ended\): its output for tokens of a later slice differs by 1"),
        ([Begin(), Documents(None, True)], ""),
        ([nn.Identity(), EndedLater()], r"layer 3 \(EndedLater\): its output for tokens of a later slice differs by 1"),
    ],
    ids=["ended", "given", "ended later"],
)
def test_tokens_that_come_late_are_tried_once(layers: list[nn.Module], line: str) -> None:
    """The one that ends documents comes in the third slice, with the step's other microbatch."""
    found, calls = SeenInputs(), list[int]()
    layers[0].register_forward_hook(lambda *_: calls.append(1))
    ids = torch.arange(1, 1 + LENGTH).repeat(2, 1)
    documents = torch.zeros(1, LENGTH, dtype=torch.long)  # of all samples
    for _ in range(2):
        found.check(layers, 2, ids if line.startswith("layer 2") else (ids, documents), 2 * LENGTH)
        assert len(calls) == 3  # whole, and two slices
    assert all(layer.training for layer in layers)
    late = ids.index_fill(1, torch.tensor([LENGTH - 1]), 0)
    late = late if line.startswith("layer 2") else (late, documents + 1)
    with pytest.raises(BadInput, match=line) if line else nullcontext():
        found.check(layers, 2, late, 2 * LENGTH)


class Shifted(nn.Module):
    """Adds the token 12 before; in training alone, or always."""

    def __init__(self, only_training: bool) -> None:
        super().__init__()
        self.only_training = only_training

    def forward(self, x: Tensor) -> Tensor:
        return x if self.only_training and not self.training else x + functional.pad(x, (0, 0, 12, 0))[:, : x.shape[1]]


@pytest.mark.parametrize("only_training", [False, True])
def test_layers_are_looked_at_again_in_training_and_in_longer_sequences(only_training: bool) -> None:
    layer, slices = Shifted(only_training), StageSlices(Cutting(2))
    stage, looked = Stage([layer], first=3), list[bool]()
    stage.around = slices
    layer.train(not only_training)
    for length in (4, 3, 4) if not only_training else (16, 4, 16):
        for part in range(2):
            looked.append(bool(slices.looks(part, torch.ones(1, length, WIDTH), [layer], False)))
            with torch.no_grad():
                stage.forward(part, torch.ones(1, length, WIDTH), None, split=False)
        slices.clear()
    assert looked == [True] + [False] * 5
    layer.train()
    with pytest.raises(BadInput, match=r"layer 3 \(Shifted\): its output differs"):
        stage.forward(0, torch.ones(1, 16, WIDTH), None, split=False)


def test_a_check_holds_a_layer_and_its_gradient_in_float64() -> None:
    """Beside them little: of a parameter 16 bytes, and 8 of the largest while its gradient is added."""
    layers = [nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)), nn.Linear(512, 512)]
    with LiveBytes([p for layer in layers for p in layer.parameters()]) as live:
        check_layers(layers, torch.randn(1, 4, 512))
    assert live.most < (16 * 2 + 8 + 2) * 512 * 512


def test_experts_with_a_capacity_are_named() -> None:
    torch.manual_seed(0)
    experts = Experts(BlockSizes(WIDTH, 4, 2, 4, 24, experts=4))
    with pytest.raises(BadInput, match=r"layer 0 \(Experts\)"):
        check_layers([experts], torch.randn(2, LENGTH, WIDTH))


@pytest.mark.parametrize("name", MODELS)
def test_models_that_can_be_cut_pass(name: str) -> None:  # dropout between layers draws other numbers, and passes too
    layers, (ids, labels) = MODELS[name](), batch(name, 0)
    layers += [nn.Dropout(0.5), nn.ReLU(inplace=True)]
    before = [one.clone() for layer in layers for one in layer.parameters()]
    output = check_layers(layers, ids)
    check_loss(LOSS, output, labels)
    assert all(a.equal(b) for a, b in zip(before, (p for x in layers for p in x.parameters()), strict=True))
    with pytest.raises(BadInput, match="is no mean of labels"):
        check_loss(lambda y, t: LOSS(y, t) ** 2, output, labels)
    with pytest.raises(BadInput, match="4 or more"):
        check_layers(layers, torch.zeros(1, 3, dtype=torch.long))


class Keeping(nn.Module):
    """Adds the sum of all means so far."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.total += float(x.detach().abs().mean())
        return x + self.total


class AlwaysDropped(nn.Module):
    """Drops numbers in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(x, 0.3)


class MixedInTraining(nn.Module):
    """Adds the token before in training, and drops numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x + x.roll(1, 1) if self.training else x)


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        (Keeping(), r"layer 0 \(Keeping\): keeps something from call to call"),
        (AlwaysDropped(), r"layer 0 \(AlwaysDropped\): draws random numbers in evaluation too"),
        (MixedInTraining(), r"layer 0 \(MixedInTraining\): its output differs"),
    ],
    ids=str,
)
def test_no_layer_escapes_by_state_or_random_numbers(layer: nn.Module, line: str) -> None:
    with pytest.raises(BadInput, match=line):
        check_layers([layer], torch.randn(2, LENGTH, WIDTH))


def flat(loss: Loss) -> Loss:
    """The same over rows of tokens."""
    return lambda y, t: loss(y.flatten(0, 1), t.flatten())


WEIGHTS = torch.ones(WORDS).index_fill(0, torch.tensor([3]), 2.5)


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (flat(partial(functional.cross_entropy, ignore_index=3)), "leaves out label 3, and slices take -100 for"),
        (flat(partial(functional.cross_entropy, weight=WEIGHTS)), "the loss weighs its labels, which is known of Cross"),
    ],
    ids=["ignored", "weighed"],
)
def test_labels_that_come_late_are_tried_once(loss: Loss, line: str) -> None:
    """A step's labels are looked at when they come for the first time, and no more."""
    calls, seen = [0], SeenTargets()

    def counted(y: Tensor, t: Tensor) -> Tensor:
        calls[0] += 1
        return loss(y, t)

    made, labels = torch.empty(1, 4, WORDS), torch.randint(4, WORDS, (2, 40), generator=torch.Generator().manual_seed(0))
    seen.check(counted, made, labels)
    often = calls[0]
    seen.check(counted, made, labels[:, :7])
    assert calls[0] == often > 0
    late = labels.index_fill(1, torch.tensor([30]), 3)
    with pytest.raises(BadInput, match=line):
        seen.check(counted, made, late)
    seen.check(LOSS, made, late)


def test_masks_and_other_targets_are_tried() -> None:
    """A mask beside the labels, and numbers of which the loss leaves some out."""
    made, labels = torch.empty(1, 4, WORDS), torch.arange(12).repeat(2, 1)

    def masked(y: Tensor, t: tuple[Tensor, Tensor]) -> Tensor:
        each = functional.cross_entropy(y.flatten(0, 1), t[0].flatten(), reduction="none")
        return (each * t[1].flatten()).sum() / t[1].sum()

    def squares(y: Tensor, t: Tensor) -> Tensor:
        kept = (t.abs().sum(-1) > 0).double()
        return ((y - t).square().mean(-1) * kept).sum() / kept.sum()

    for mask in (torch.ones(2, 12), torch.ones(2, 12).bool()):
        seen = SeenTargets()
        seen.check(masked, made, (labels, mask))
        with pytest.raises(
            BadInput, match="weighs tokens by more than their labels: give those that do not count the label"
        ):
            seen.check(masked, made, (labels, mask.index_fill(1, torch.tensor([9]), 0)))
    seen, numbers = SeenTargets(), torch.randn(2, 12, WORDS)
    seen.check(squares, made, numbers)
    with pytest.raises(BadInput, match="it is no mean of labels"):
        seen.check(squares, made, numbers.index_fill(1, torch.tensor([9]), 0))


def codebooks(y: Tensor, t: Tensor) -> Tensor:
    """The mean of each codebook's mean."""
    rows = zip(y.unbind(2), t.unbind(2), strict=True)
    return torch.stack([functional.cross_entropy(a.flatten(0, 1), b.flatten()) for a, b in rows]).mean()


def test_each_codebook_is_tried() -> None:
    """A label of one codebook counts elsewhere than that of another, so that a mean of their means is none of labels; and a
    loss may leave out a label in one codebook alone."""
    made, labels = torch.empty(1, 4, 3, 97), torch.randint(97, (2, 200, 3), generator=torch.Generator().manual_seed(0))
    late = labels.clone()
    for k in range(3):
        late[:, :k, k] = -100

    def together(y: Tensor, t: Tensor) -> Tensor:
        return functional.cross_entropy(y.flatten(0, 2), t.flatten())

    def without(y: Tensor, t: Tensor) -> Tensor:
        return together(y, t.where((t != 5) | (torch.arange(3) != 1), -100))

    means, seen, one = SeenTargets(), SeenTargets(), SeenTargets()
    means.check(codebooks, made, labels)
    seen.check(together, made, labels)
    seen.check(together, made, late)
    assert seen._new(late, Counting()).numel() == 0
    with pytest.raises(BadInput, match="it is no mean of labels that leaves out label -100"):
        means.check(codebooks, made, late)
    kept = labels.where(labels != 5, 6)
    kept[0, 100, 0] = 5
    one.check(without, made, kept)
    with pytest.raises(BadInput, match="it is no mean of labels"):
        one.check(without, made, kept.roll(1, 2))


def test_a_loss_that_is_cut_off_is_said_to_be() -> None:
    """All labels of it count, although none changes it."""

    def cut(y: Tensor, t: Tensor) -> Tensor:
        return (100 * functional_loss(y, t)).round() / 100

    made, labels = torch.empty(1, 4, WORDS), torch.arange(12)[None]
    with pytest.raises(BadInput, match="does not change with the outputs at labels 0 to 11, as if it were cut off"):
        SeenTargets().check(cut, made, labels)
    with pytest.raises(BadInput, match="of label 7 does not change with the outputs: either it is cut off, or it leaves"):
        SeenTargets().check(lambda y, t: cut(y, t) + 0.001 * y.detach().std(), made, 0 * labels + 7)


def test_labels_weigh_what_the_loss_says() -> None:
    known = nn.Sequential(nn.CrossEntropyLoss(ignore_index=0, weight=WEIGHTS))
    entropy = partial(functional.cross_entropy, ignore_index=0, weight=WEIGHTS)
    hidden = flat(entropy)
    assert [Counting.of(one).ignored for one in (known, entropy, partial(known), hidden)] == [0, 0, 0, -100]
    assert [Counting.of(one).weights is WEIGHTS for one in (partial(known), entropy, hidden)] == [True, True, False]
    assert Counting.of(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")).weights is None
    labels = torch.tensor([[0, 3, 3], [5, 6, 0]])
    assert Counting.of(known).counted(labels) == 7
    with pytest.raises(BadInput, match="label 23, but the loss has 23 weights"):
        Counting.of(known).counted(labels + 20)
    output, labels = torch.randn(1, LENGTH, WORDS), torch.arange(LENGTH)[None]
    check_loss(partial(weighed, weight=WEIGHTS), output, labels, ignored=True)
    with pytest.raises(BadInput, match="the loss weighs its labels"):
        check_loss(lambda y, t: weighed(y, t, WEIGHTS), output, labels)


def weighed(y: Tensor, t: Tensor, weight: Tensor) -> Tensor:
    """In float32, as its weights are."""
    return functional.cross_entropy(y.flatten(0, 1), t.flatten(), weight=weight)


def test_a_mean_of_means_of_rows_is_refused_where_labels_do_not_count() -> None:
    def of_rows(y: Tensor, t: Tensor) -> Tensor:
        return torch.stack([functional.cross_entropy(a, b) for a, b in zip(y, t, strict=True)]).mean()

    output, labels = torch.randn(1, LENGTH, WORDS), torch.randint(0, WORDS, (1, LENGTH))
    check_loss(of_rows, output, labels)
    with pytest.raises(BadInput, match="no mean of labels that leaves out label -100"):
        check_loss(of_rows, output, labels, ignored=True)
    check_loss(functional_loss, output, labels, ignored=True)


def functional_loss(y: Tensor, t: Tensor) -> Tensor:
    """Torch's own, over all rows."""
    return functional.cross_entropy(y.flatten(0, 1), t.flatten())


class Beside:
    """A helper that is no other rank: it makes what it is asked for as one does, and counts."""

    def __init__(self, share: float, backward: bool) -> None:
        self.handed, self.backward = HandedOver(1, share), backward
        self.found: list[Tensor] = []
        self.asked = 0

    def ask(self, *given: Any) -> None:
        self.asked += 1
        self.found = list((_gradients if self.backward else _attention)(asked(*given)))

    def answer(self) -> list[Tensor]:
        return self.found


@pytest.mark.parametrize("name", ["gqa", "documents", "both", "slopes"])
@pytest.mark.parametrize("share", [0.01, 0.4, 1.0])
def test_a_part_may_be_made_by_another_rank(name: str, share: float) -> None:
    """Of keys before a slice, cut anywhere: output and gradients are those of the whole sequence."""
    torch.manual_seed(1)
    layers, (ids, _), lengths = [layer.double() for layer in MODELS[name]()], batch(name, 0), (5, 3, 4)
    whole = nn.Sequential(*layers)
    y = whole(ids)
    seed = torch.randn(y.shape, dtype=y.dtype)
    (y * seed).sum().backward()
    wanted, store, outputs, asked_for = gradients(layers), SliceStore(3), [], 0
    for i, (one, offset) in enumerate(zip(cut_sequence(ids, lengths, "ids"), offsets(lengths), strict=True)):
        store.helper = helper = Beside(share, False)
        with store.forward(0, i, offset):
            outputs.append(whole(one))
        asked_for += helper.asked
    assert torch.allclose(torch.cat(outputs, 1), y, rtol=0, atol=1e-12)
    parts = cut_sequence(seed, lengths, "seed")
    for i in reversed(range(3)):
        helper = Beside(share, True)
        store.helper = None if i == 1 else helper  # one slice's backward has no helper, whatever its forward had
        with store.backward(0, i):
            (outputs[i] * parts[i]).sum().backward()
        asked_for += helper.asked
    compare(gradients(layers), wanted, torch.float64)
    assert (asked_for > 0) == (share > 0.1)  # of 0.01 no token is left
