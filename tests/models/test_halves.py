"""Hugging Face encoder-decoders as layers with side inputs: numbers and gradients of the library's own model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from profiler import estimate
from profiler.dataflow import flow
from zbsolve import BadInput
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.models.sides import called, names_of
from zbsolve.partition.layer import Given

from ..support.exec_tools import random_schedule, worst_difference
from ..support.side_steps import step_of

pytestmark = pytest.mark.slow

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers reads it when it is imported

T5 = {"num_layers": 2, "num_decoder_layers": 3, "d_model": 32, "d_kv": 8, "num_heads": 4, "d_ff": 64, "dropout_rate": 0.0}
BART = {"encoder_layers": 2, "decoder_layers": 3, "d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BART |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32, "dropout": 0.0}
FAMILIES = {
    "T5Config": T5,
    "UMT5Config": T5,  # each layer has a position bias of its own
    "LongT5Config": T5,  # attention in blocks, whose mask is a constant
    "BartConfig": BART | {"scale_embedding": True},
    "PegasusConfig": BART,  # positions that are no parameter; norms behind the layers
    "MvpConfig": BART,
}


def spec_of(name: str, **more: Any) -> str:
    return f"hf:{name}{json.dumps(FAMILIES[name] | {'vocab_size': 50} | more)}@batch=2,length=8"


def library() -> Any:
    return pytest.importorskip("transformers", reason="transformers is not installed")


def whole_of(model: Model, layers: list[Any], name: str, **more: Any) -> tuple[Any, list[tuple[nn.Module, nn.Module]]]:
    """The library's model with the layers' numbers, and each layer beside its own."""
    transformers = library()
    config = getattr(transformers, name)(**FAMILIES[name], vocab_size=50, **more)
    whole = transformers.AutoModelForSeq2SeqLM.from_config(config).double()
    end = model.layer_names.index("encoder_end")
    pairs = []
    halves = (whole.get_encoder(), 0, layers[1:end]), (whole.get_decoder(), end + 1, layers[end + 2 : -1])
    for stack, begin, mine in halves:
        stack.load_state_dict(layers[begin].base.state_dict(), strict=False)
        rows = next(one for one in stack.children() if isinstance(one, nn.ModuleList))
        pairs += [(one.layer, theirs) for one, theirs in zip(mine, rows, strict=True)]
    for one, theirs in pairs:
        theirs.load_state_dict(one.state_dict())
    (scores,) = [one for one in layers[-1].parameters() if one.shape == (50, 32)]
    whole.get_output_embeddings().weight.data.copy_(scores.data)
    assert len([*whole.parameters()]) == len({id(one) for layer in layers for one in layer.parameters()})
    return whole, pairs


@pytest.mark.parametrize("name", FAMILIES)
def test_layers_compute_what_the_model_does(name: str) -> None:
    library()
    model = load(spec_of(name))
    layers: list[Any] = [layer.double() for layer in model.build()]
    whole, pairs = whole_of(model, layers, name)
    (ids, words), targets = model.batch(0, 0)
    assert not ids.equal(words)
    x: Any = (ids, words)
    for layer in layers:
        x = called(layer, x)
    scores = whole(input_ids=ids, decoder_input_ids=words, use_cache=False).logits
    torch.testing.assert_close(x.row, scores, rtol=0, atol=1e-12)
    model.loss(x.row, targets).backward()
    model.loss(scores, targets).backward()
    for mine, theirs in pairs:
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            assert (a.grad is None) == (b.grad is None)
            assert a.grad is None or float((a.grad - b.grad).abs().max()) < 1e-12


def test_tied_and_not() -> None:
    """One table for both halves and the output layer, where the library has one. Numbers are of
    the library's size: matrices of d_model^-½, d_ff^-½, (d_model · d_kv)^-½."""
    library()
    model = load(spec_of("T5Config"))
    table = "base.embed_tokens.weight"
    assert model.tied == (((0, table), (4, table), (8, "whole.lm_head.weight")),)
    assert load(spec_of("BartConfig", tie_word_embeddings=False)).tied == ()
    layers = model.build()
    spread = {name: float(one.detach().std()) for name, one in layers[1].named_parameters() if "norm" not in name}
    assert len(spread) == 7
    assert all(0.05 < one < 0.3 for one in spread.values()), spread


def test_side_inputs_are_what_layers_hand_on() -> None:
    """Bytes in float32: ids of 2 · 8 · 8, memory of 2 · 8 · 32 · 4, a bias of 4 heads · 8 · 8 · 4. Zeros that T5's
    first decoder layer hands on as the other attention's bias are made by each layer."""
    library()
    through = flow(load(spec_of("T5Config")))
    found = dict(zip(load(spec_of("T5Config")).layer_names, through.gives, strict=True))
    assert {name: gives for name, gives in found.items() if gives} == {
        "embedding": (Given("words", 128, gradient=False, kept=128),),  # the batch's
        "encoder0": (Given("encoder.position_bias", 1024),),
        "encoder_end": (Given("memory", 2048),),
        "decoder0": (Given("decoder.position_bias", 1024),),
    }
    assert [tuple(one) for one in through.takes[5:8]] == [("memory",), *[("decoder.position_bias", "memory")] * 2]
    assert through.prints[6] == through.prints[7]
    profile = estimate(f"{spec_of('BartConfig')},layers=2", "h100")
    names = "embedding encoder0 encoder1 encoder_end decoder_embedding decoder0 decoder1 head"
    assert [layer.name for layer in profile.layers] == names.split()
    assert profile.layers[3].output_bytes == 128


def in_double(build: Callable[[], nn.Module]) -> nn.Module:
    """Without biases of keys, whose gradients are 0 but for rounding: they change no attention."""
    layer = build().double()
    for name, one in layer.named_parameters():
        one.requires_grad_(not name.endswith("k_proj.bias"))
    return layer


@pytest.mark.parametrize("name", ["T5Config", "BartConfig"])
@pytest.mark.parametrize(
    ("placement", "counts", "fused"), [((0, 1, 2), (3, 3, 3), False), ((0, 1, 1, 0), (2, 3, 2, 2), True)]
)
def test_gradients_over_ranks(name: str, placement: tuple[int, ...], counts: tuple[int, ...], fused: bool) -> None:
    """Both biases, the memory and the tied table over ranks."""
    library()
    model = load(spec_of(name))
    model = replace(model, layers=tuple(partial(in_double, build) for build in model.layers))
    problem = step_of(model, placement, counts, fused)
    assert any(names_of(layer)[0] for layer in model.build())
    assert worst_difference(random_schedule(problem, 3), model) < 1e-12


def test_what_is_not_a_row_of_layers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    library()
    for spec, why in {
        "hf:FSMTConfig": "its layers cannot be taken apart",
        f"hf:NllbMoeConfig{json.dumps(BART)}": "encoder_layerdrop leaves layers out at random: set it to 0",
        "hf:ViTConfig": "ViTConfig is of no language model: a decoder, or an encoder and a decoder",
    }.items():
        with pytest.raises(BadInput, match=why):
            load(spec)
    import transformers.models.bart.modeling_bart as bart

    monkeypatch.setattr(bart.BartEncoder, "forward", _scaled(bart.BartEncoder.forward))
    with pytest.raises(BadInput, match="hf: the encoder of BartForConditionalGeneration does more than its layers"):
        load(spec_of("BartConfig"))


def _scaled(forward: Any) -> Any:
    def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
        y = forward(self, *args, **kwargs)
        y.last_hidden_state = 2 * y.last_hidden_state
        return y

    return doubled
