"""DeepSeek-V3 (arXiv 2412.19437): its published sizes, what an estimate counts, and what its blocks compute."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from profiler import estimate
from profiler.dataflow import fake_mode
from zbsolve.models.blocks import BlockSizes, Decoder, LatentSizes, Routing
from zbsolve.models.by_name import load

pytestmark = pytest.mark.slow

LAYERS, DENSE, WIDTH, HEADS, WORDS = 61, 3, 7168, 128, 129_280
TOKENS, LENGTH = 4 * 4096, 4096

# Weights that a token is multiplied by, from section 4.2 and the released config: queries through 1536, keys and values
# through 512 numbers, heads of 128 with 64 more that rotate; an MLP of 18,432; 8 experts and a shared one of 2048, and the
# router of 256.
ATTENTION = WIDTH * (1536 + 512 + 64) + HEADS * (1536 * 192 + 512 * 256 + 128 * WIDTH)
MLP = 3 * WIDTH * 18_432
EXPERTS = 9 * 3 * WIDTH * 2048 + 256 * WIDTH
OUTPUT = WIDTH * WORDS


def test_parameters_are_those_of_the_released_weights() -> None:
    """671,026,419,200 numbers without the module that predicts one token more; 14,848 of them are corrections of scores,
    which no gradient trains."""
    with fake_mode():
        ends_and_blocks = load("deepseek-v3").build([0, 1, 4, 62])
    trained = [sum(p.numel() for p in layer.parameters()) for layer in ends_and_blocks]
    stored = [sum(one.numel() for one in layer.state_dict().values()) for layer in ends_and_blocks]
    times = (1, DENSE, LAYERS - DENSE, 1)
    assert sum(a * b for a, b in zip(stored, times, strict=True)) == 671_026_419_200
    assert sum(a * b for a, b in zip(trained, times, strict=True)) == 671_026_419_200 - 58 * 256


def test_an_estimate_counts_the_experts_that_a_token_takes() -> None:
    """37 billion active parameters, as published. FLOPs of F are 2 a token and weight, and those of attention, whose values
    are padded to the 192 numbers of a key; B and W of all but attention have as many."""
    assert round((LAYERS * ATTENTION + DENSE * MLP + (LAYERS - DENSE) * EXPERTS + OUTPUT) / 1e9) == 37
    profile = estimate("deepseek-v3@layers=4", "h100")
    flops = profile.facts["flops"]
    pairs = TOKENS * LENGTH * HEADS * (192 + 192)  # a causal kernel skips half of the products
    for name, weights in (("block0", ATTENTION + MLP), ("block3", ATTENTION + EXPERTS)):
        assert flops[name]["F"] == 2 * TOKENS * weights + pairs
        assert flops[name]["W"] == 2 * TOKENS * weights
        assert flops[name]["B"] == flops[name]["F"] + pairs + pairs // 2  # torch counts five products for attention's two
    assert flops["head"]["F"] == 2 * TOKENS * OUTPUT
    assert [layer.parameter_bytes // 2 for layer in profile.layers[1:5:3]] == [583_483_392, 11_507_286_016]
    assert profile.vocabulary is not None
    assert profile.facts["sequence"] == LENGTH


SMALL = """"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 1, "first_k_dense_replace": 0, "n_routed_experts": 8,
"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32, "num_attention_heads": 4,
"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
"v_head_dim": 16, "rope_interleave": false"""
NAMES = {
    "before_attention": "input_layernorm",
    "before_mlp": "post_attention_layernorm",
    "attention.q_down": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.q_up": "self_attn.q_b_proj",
    "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.kv_up": "self_attn.kv_b_proj",
    "attention.join": "self_attn.o_proj",
    "mlp.router": "mlp.gate",
    **{f"mlp.shared.{name}": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}


def test_a_block_computes_what_the_library_does() -> None:
    """The same numbers in transformers' layer give the same output and gradients, where experts have room for all tokens."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = load(f"hf:DeepseekV3Config{{{SMALL}}}@batch=2,length=32").build([1])[0]
    routing = Routing(taken=2, shared=1, groups=4, groups_taken=2, scale=2.5, room=400)
    mine = Decoder(BlockSizes(64, 4, 4, 16, 32, experts=8, routing=routing, latent=LatentSizes(24, 16, 8)), 32)
    ours: dict[str, Any] = {name: mine.get_submodule(name) for name in NAMES}
    library: dict[str, Any] = {name: theirs.get_submodule(f"layer.{other}") for name, other in NAMES.items()}
    experts: Any = theirs.get_submodule("layer.mlp.experts")
    with torch.no_grad():
        for p in theirs.parameters():
            p.copy_(torch.randn_like(p) / p.shape[-1] ** 0.5 if p.dim() > 1 else torch.rand_like(p) + 0.5)
        correction = library["mlp.router"].e_score_correction_bias.normal_(std=0.3)
        for name, layer in ours.items():
            layer.weight.copy_(library[name].weight)
            layer.eps = 1e-6
        mine.mlp.correction.copy_(correction)
        gate, up = experts.gate_up_proj.chunk(2, 1)
        for layer, weight in ((mine.mlp.experts.gate, gate), (mine.mlp.experts.up, up)):
            layer.weight.copy_(weight)
        mine.mlp.experts.down.weight.copy_(experts.down_proj)
    x, factors = torch.randn(2, 2, 32, 64)
    given, found = [x.clone().requires_grad_() for _ in range(2)], []
    for layer, h in zip((mine, theirs), given, strict=True):
        found.append(layer(h))
        (found[-1] * factors).sum().backward()
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    close(*found)
    close(*(h.grad for h in given))
    for name, layer in ours.items():
        close(layer.weight.grad, library[name].weight.grad)
    close(torch.cat((mine.mlp.experts.gate.weight.grad, mine.mlp.experts.up.weight.grad), 1), experts.gate_up_proj.grad)
    close(mine.mlp.experts.down.weight.grad, experts.down_proj.grad)
