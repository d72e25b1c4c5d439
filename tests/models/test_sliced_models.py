"""Models that run slice by slice, as they are: ours, and Hugging Face's by its attention interface. Against the same model
unsliced."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbsolve import BadInput
from zbsolve.build import with_slices
from zbsolve.exec import slice_offset, transformers_attention
from zbsolve.exec.slices.comparing import Sequences, compare
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.exec.slices.store import SliceStore
from zbsolve.models.by_name import load
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.model import Model
from zbsolve.models.published_models import PUBLISHED

from ..support.exec_tools import a_problem, random_schedule, run_here, worst_difference

EVEN, UNEVEN = (1, 1, 1, 1), (5, 1, 2, 4)
SETTING = "batch=2,length=12,layers=2,dtype=float32"
FAMILIES = ["gpt-1.5b", "llama3-8b", "gemma2-9b", "qwen2-7b"]


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> Model:
    """The published model with its kinds of layers, and few numbers in each."""
    found = PUBLISHED[name]
    sizes = {"width": 16, "vocabulary": 23, "heads": 4}
    if found.block is not None:
        sizes["block"] = replace(found.block, width=16, heads=4, kv_heads=2, head_width=4, ffn=24)
    monkeypatch.setitem(PUBLISHED, name, replace(found, **sizes))
    return load(f"{name}@{SETTING}")


def cast(layer: nn.Module, kind: torch.dtype) -> nn.Module:
    """`Module.to` would take complex numbers for real ones."""
    for one in (*layer.parameters(), *layer.buffers()):
        one.data = one.data.to(kind if one.is_floating_point() else kind.to_complex() if one.is_complex() else one.dtype)
    return layer


def in_type(model: Model, kind: torch.dtype) -> Model:
    def made(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: cast(build(), kind)

    return replace(model, layers=tuple(map(made, model.layers)))


def worst(model: Model, lengths: tuple[int, ...], kind: torch.dtype, fused: bool = False) -> float:
    """The largest difference of loss and gradients of a step in slices from the unsliced model."""
    count, layers = len(lengths), len(model.layers)
    whole = a_problem((0, 1, 1, 0), 2 * count, layers=layers, fused=fused, recompute=() if fused else (1,))
    problem = with_slices(whole, count, held_keys=1, lengths=() if len(set(lengths)) == 1 else lengths)
    return worst_difference(random_schedule(problem), in_type(model, kind))


@pytest.mark.parametrize("name", FAMILIES)
def test_our_models_run_in_slices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(name, monkeypatch)
    assert worst(model, UNEVEN, torch.float64) <= 1e-12
    assert worst(model, EVEN, torch.float32, fused=True) <= 1e-6


LIBRARY: dict[str, dict[str, Any]] = {
    "LlamaConfig": {},
    "Qwen2Config": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},  # the second block alone
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 3},
    "GPT2Config": {"attn_pdrop": 0, "resid_pdrop": 0, "embd_pdrop": 0},
    "Llama4TextConfig": {
        "attention_chunk_size": 4,  # in the first block, by a mask
        "layer_types": ["chunked_attention", "full_attention"],
        "num_local_experts": 2,
        "intermediate_size_mlp": 24,
    },
}


def library(name: str, **more: Any) -> Model:
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 23, "num_hidden_layers": 2}
    if name != "GPT2Config":
        sizes |= {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4}
    else:
        sizes |= {"bos_token_id": 0, "eos_token_id": 0}
    return load(f"hf:{name}{json.dumps(sizes | LIBRARY.get(name, {}) | more)}@batch=2,length=12")


@pytest.mark.parametrize("name", LIBRARY)
def test_the_librarys_models_run_in_slices(name: str) -> None:
    model = library(name)
    assert worst(model, UNEVEN, torch.float64) <= 1e-12
    assert worst(model, EVEN, torch.float32, fused=True) <= 1e-6


def test_a_model_that_asks_for_the_name_of_its_attention_is_the_librarys_own() -> None:
    """Falcon knows its attention by the library's names alone."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "vocab_size": 23, "num_hidden_layers": 2, "multi_query": False}
    model = load(f"hf:FalconConfig{json.dumps(sizes)}@batch=2,length=12")
    x, _ = model.batch(0, 0)
    for layer in model.build():
        x = layer(x)
    assert x.shape == (2, 12, 23)


class Begin(nn.Module):
    """Tokens and documents in, hidden states and documents out."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.tokens = model.embed_tokens

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return self.tokens(given[0]), given[1]


class Own(nn.Module):
    """The library's decoder layer as a user's layer calls it, with positions of the slice."""

    def __init__(self, model: Any, i: int) -> None:
        super().__init__()
        self.layer, self.rotary = model.layers[i], model.rotary_emb

    def forward(self, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, documents = given
        positions = slice_offset() + torch.arange(x.shape[1])[None]
        y = self.layer(x, position_embeddings=self.rotary(x, positions), position_ids=positions, documents=documents)
        return y, documents


class End(nn.Module):
    def __init__(self, causal: Any) -> None:
        super().__init__()
        self.norm, self.head = causal.model.norm, causal.lm_head

    def forward(self, given: tuple[Tensor, Tensor]) -> Tensor:
        found: Tensor = self.head(self.norm(given[0]))
        return found


def test_documents_of_a_users_own_layers_are_what_a_mask_says_to_the_library() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, vocab_size=23, num_hidden_layers=2)
    torch.manual_seed(0)
    build = transformers.AutoModelForCausalLM.from_config
    whole, mine = build(config).double(), build(config, attn_implementation=transformers_attention()).double()
    mine.load_state_dict(whole.state_dict())
    ids, labels = torch.randint(23, (2, 1, 12))
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3, 3]])
    seen = (documents[:, :, None] == documents[:, None, :]).tril()[:, None]
    loss = CrossEntropy()
    right = loss(whole(ids, attention_mask=seen, use_cache=False).logits, labels)
    right.backward()
    layers = [Begin(mine.model), Own(mine.model, 0), Own(mine.model, 1), End(mine)]
    x: Any = (ids, documents)
    for layer in layers:
        x = layer(x)
    assert abs(loss(x, labels) - right) < 1e-12  # unsliced
    model = Model(
        "own", tuple(lambda one=one: one for one in layers), tuple("abcd"), lambda m, step: ((ids, documents), labels), loss
    )
    problem = with_slices(a_problem((0, 1), 4, layers=4), 4, held_keys=1, lengths=UNEVEN)
    found, _, _ = run_here(random_schedule(problem), model)
    assert abs(found - right) < 1e-12
    gradients = {name: one.grad for name, one in mine.named_parameters()}
    for name, one in whole.named_parameters():
        assert (gradients[name] - one.grad).abs().max() < 1e-12, name


@pytest.mark.parametrize(
    ("name", "more", "line"),
    [
        ("Gemma2Config", {}, r"layer 1 \(Layer\): .*Gemma2DecoderLayer: slices do not reach its attention, 'eager'"),
        (
            "GPT2Config",
            {"attn_pdrop": 0.1},
            r"layer 1 \(Layer\): .*no dropout, this has 0.1: set attn_pdrop of GPT2Config to 0",
        ),
    ],
)
def test_attention_that_slices_cannot_do_is_named(name: str, more: dict[str, Any], line: str) -> None:
    model = library(name, **more)
    with pytest.raises(BadInput, match=line):
        compared(model)


def test_a_mask_that_slices_cannot_take_is_refused() -> None:
    """Too short, and a soft cap, as the library's attention gets them; the rule's own is taken, and one that says less."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers import AttentionInterface

    attention, q = AttentionInterface()[transformers_attention()], torch.randn(1, 4, 3, 8)
    module = nn.Module()
    own = torch.ones(1, 1, 3, 6, dtype=torch.bool).tril(3).triu(2)
    tried = {
        r"attn_mask \(1, 1, 3, 3\): for tokens 3 to 5": {"attention_mask": own[..., :3], "sliding_window": 2},
        "softcap: sliced_attention has none": {"attention_mask": None, "softcap": 5.0},
        "is_causal=True is needed": {"attention_mask": None, "is_causal": False},
        "no dropout, this has 0.1$": {"attention_mask": None, "dropout": 0.1},
    }
    store = SliceStore(2)
    with store.forward(0, 0, 0):
        attention(module, q, q, q, None, sliding_window=2)
    with store.forward(0, 1, 3):
        y, _ = attention(module, q, q, q, own, scaling=0.3, sliding_window=2, position_ids=torch.arange(3), use_cache=False)
    assert y.shape == (1, 3, 4, 8)
    with store.forward(0, 1, 3):
        masked, _ = attention(module, q, q, q, own, scaling=0.3, sliding_window=3)
    assert torch.allclose(masked, y)
    for line, given in tried.items():
        with pytest.raises(BadInput, match=line), store.forward(0, 1, 3):
            attention(module, q, q, q, **given)


def compared(model: Model, kind: torch.dtype = torch.float32) -> None:
    x, labels = model.batch(0, 0)
    compare([layer.to(kind) for layer in model.build()], 0, model.loss, Sequences([x] * 2, [labels] * 2), Cutting(4))


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_experts_without_a_capacity_mix_no_tokens(kind: torch.dtype) -> None:
    compared(library("MixtralConfig", num_local_experts=4, num_experts_per_tok=2), kind)
