"""Layers run slice by slice, in one process, against the same layers run whole."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbsolve.build.attention_exchange import HandedOver
from zbsolve.exec.attention import Helping, _attention, _gradients
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.part import share_of_loss
from zbsolve.exec.slices.attention import Scores, merge, partial_attention, partial_gradients
from zbsolve.exec.slices.cutting import Counting, cut_sequence, offsets, slice_shares
from zbsolve.exec.slices.store import SliceStore, gradient_bytes
from zbsolve.models.blocks import BlockSizes, Decoder, Tokens
from zbsolve.models.blocks import Scores as Head
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.presets import Block, Embed
from zbsolve.models.slicing import slice_offset, sliced_attention
from zbsolve.util.errors import BadInput

from ..support.exec_tools import bytes_in

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
    held = bytes_in(store)
    for i in reversed(range(count)):
        for m in (1, 0):
            if m == 1 and i % 2 == 0:
                with store.forward(m, i, offsets(lengths)[i]):
                    stage.recompute(m * count + i)
            with store.backward(m, i):
                stage.backward(m * count + i, None, shares[m][i])
    for i in range(count):
        stage.weights(count + i)
    assert bytes_in(store) == 0 < held
    compare(found | gradients(layers), wanted, kind)


def test_keys_are_held_once_and_gradients_from_the_first_backward_on() -> None:
    layer, lengths = Block(WIDTH, 4), (4, 6, 2)
    x, store = torch.randn(2, LENGTH, WIDTH), SliceStore(3)
    bytes_of = [2 * 2 * one * WIDTH * 4 for one in lengths]  # keys and values, 2 samples, float32
    outputs, held = [], []
    for i, (part, offset) in enumerate(zip(cut_sequence(x, lengths, "x"), offsets(lengths), strict=True)):
        with store.forward(0, i, offset):
            outputs.append(layer(part))
        held.append(bytes_in(store))
    assert held == [sum(bytes_of[: i + 1]) for i in range(3)]
    held = []
    for i in (2, 1, 0):
        with store.backward(0, i):
            outputs[i].sum().backward()
        held.append(bytes_in(store))
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
        held.append(bytes_in(store) // (2 * 2 * 3 * 8 * 4))
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
    assert bytes_in(store) == 0


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


WEIGHTS = torch.ones(WORDS).index_fill(0, torch.tensor([3]), 2.5)


def test_labels_weigh_what_the_loss_says() -> None:
    known = nn.Sequential(nn.CrossEntropyLoss(ignore_index=0, weight=WEIGHTS))
    entropy = partial(functional.cross_entropy, ignore_index=0, weight=WEIGHTS)
    assert [Counting.of(one).ignored for one in (known, entropy, partial(known), lambda y, t: entropy(y, t))] == [
        0,
        0,
        0,
        -100,
    ]
    assert [Counting.of(one).weights is WEIGHTS for one in (partial(known), entropy, lambda y, t: y)] == [True, True, False]
    assert Counting.of(nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum")).weights is None
    labels = torch.tensor([[0, 3, 3], [5, 6, 0]])
    assert Counting.of(known).counted(labels) == 7
    with pytest.raises(BadInput, match="label 23, but the loss has 23 weights"):
        Counting.of(known).counted(labels + 20)


class Beside(Helping):
    """A helper that is no other rank: it makes what it is asked for as one does, and counts."""

    def __init__(self, share: float, backward: bool) -> None:
        super().__init__(self, HandedOver(1, share), 0)
        self.backward, self.asked = backward, 0
        self.found: list[Tensor] = []

    def send(self, rank: int, tag: int, value: Any) -> list[Any]:
        self.asked += 1
        self.found = list((_gradients if self.backward else _attention)(*value))
        return []

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
