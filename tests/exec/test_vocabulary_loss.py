"""Which output layers, embeddings and losses a sharded vocabulary knows; all others are refused by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zbsolve.exec.vocabulary.loss import embedding_of, kind_of, recognised
from zbsolve.models.by_name import load
from zbsolve.models.losses import CrossEntropy, capped
from zbsolve.util.errors import BadInput


@pytest.mark.parametrize(
    ("loss", "kind"),
    [
        (CrossEntropy(z_loss=1e-4), CrossEntropy(z_loss=1e-4)),
        (functional.cross_entropy, CrossEntropy()),
        (nn.CrossEntropyLoss(), CrossEntropy()),
        (nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1), CrossEntropy(0, 0.1)),
        (partial(functional.cross_entropy), CrossEntropy()),
        (partial(functional.cross_entropy, weight=None, reduction="mean", ignore_index=3), CrossEntropy(3)),
        (partial(functional.cross_entropy, label_smoothing=0.2), CrossEntropy(label_smoothing=0.2)),
        (partial(nn.CrossEntropyLoss(ignore_index=7)), CrossEntropy(7)),
    ],
)
def test_losses(loss: Any, kind: CrossEntropy) -> None:
    assert kind_of(loss) == kind
    torch.manual_seed(0)
    logits, labels = torch.randn(9, 8), torch.tensor([0, 0, 1, 2, 3, 4, 5, 6, 7])
    torch.testing.assert_close(kind(logits, labels), loss(logits, labels))


def mine(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize(
    ("loss", "line"),
    [
        (mine, r"loss: .*\.mine: a sharded vocabulary knows zbsolve.exec.CrossEntropy, torch's"),
        (functional.mse_loss, r"loss: torch.nn.functional.mse_loss: a sharded"),
        (nn.NLLLoss(), r"loss: torch.nn.modules.loss.NLLLoss: a sharded"),
        (nn.CrossEntropyLoss(weight=torch.ones(3)), "loss: cross_entropy with a weight of each class"),
        (nn.CrossEntropyLoss(reduction="sum"), "loss: cross_entropy with reduction 'sum': a loss is a mean"),
        (partial(functional.cross_entropy, size_average=True), "loss: cross_entropy with size_average: a sharded"),
        (partial(functional.cross_entropy, torch.ones(2)), "loss: functools.partial of .*cross_entropy with arguments"),
        (partial(mine), r"loss: .*\.mine: a sharded"),
        (None, "loss: none is given"),
    ],
)
def test_other_losses_are_refused(loss: Any, line: str) -> None:
    with pytest.raises(BadInput, match=f"^{line}"):
        kind_of(loss)


class Times3(nn.Embedding):
    """An embedding that multiplies its vectors inside."""

    def forward(self, tokens: Any) -> Any:
        return 3 * super().forward(tokens)


class Named(nn.Module):
    """A user's own head or embedding."""

    def __init__(self, said: Any) -> None:
        super().__init__()
        self.said = said
        self.inner = nn.ModuleDict({"out": nn.Linear(2, 3), "norm": nn.LayerNorm(2), "words": nn.Embedding(3, 2)})

    def output_layer(self) -> Any:
        return self.said

    def token_embedding(self) -> Any:
        return self.said


def test_output_layers() -> None:
    plain, capping = CrossEntropy(), CrossEntropy(soft_cap=2.0)
    assert recognised(nn.Linear(2, 3), plain, 1) == ("", plain)
    assert recognised(nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 3)), capping, 1) == ("1", capping)
    assert recognised(Named(("inner.out", 2.0)), plain, 1) == ("inner.out", capping)
    for layer, line in (
        (nn.LayerNorm(2), "layer 4: LayerNorm is no nn.Linear, and has no method output_layer that names one"),
        (nn.Sequential(nn.Linear(2, 3), nn.Tanh()), "layer 4: Sequential: '1' is Tanh, no nn.Linear"),
        (nn.Sequential(nn.modules.linear.NonDynamicallyQuantizableLinear(2, 3)), "layer 4: Sequential: '0' is NonDyn"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(2, 3)), "layer 4: ParametrizedLinear is no nn.Linear"),
        (Named(("inner.norm", 0.0)), "layer 4: Named: 'inner.norm' is LayerNorm, no nn.Linear"),
        (Named(("outer", 0.0)), "layer 4: Named has no 'outer'"),
    ):
        with pytest.raises(BadInput, match=f"^{line}"):
            recognised(layer, plain, 4)
    with pytest.raises(BadInput, match=r"^layer 4: Named has a soft cap \(3\), and the loss too: say it once$"):
        recognised(Named(("inner.out", 3.0)), capping, 4)


def test_embeddings() -> None:
    assert embedding_of(nn.Embedding(3, 2, padding_idx=0), 0) == ("", 1.0)
    assert embedding_of(nn.Sequential(nn.Embedding(3, 2), nn.LayerNorm(2)), 0) == ("0", 1.0)
    assert embedding_of(Named(("inner.words", 1.0)), 0) == ("inner.words", 1.0)
    scaled = Named(("inner.words", 3.0))
    scaled.inner["words"] = Times3(3, 2)
    assert embedding_of(scaled, 0) == ("inner.words", 3.0)
    for layer, line in (
        (Named(("inner.words", 3.0)), "layer 0: Named: 'inner.words' is a plain nn.Embedding, which multiplies"),
        (nn.Linear(2, 3), "layer 0: Linear is no nn.Embedding, and has no method token_embedding"),
        (nn.Embedding(3, 2, max_norm=1.0), "layer 0: Embedding: a sharded embedding knows no max_norm"),
        (nn.Embedding(3, 2, sparse=True), "layer 0: Embedding: a sharded embedding knows no sparse"),
        (Named(("inner.out", 1.0)), "layer 0: Named: 'inner.out' is Linear, no nn.Embedding"),
    ):
        with pytest.raises(BadInput, match=f"^{line}"):
            embedding_of(layer, 0)


SMALL = '"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2'
HF = "@batch=1,length=4,dtype=float32"
OURS = {
    "gpt-tiny": 0.0,
    "moe-tiny": 0.0,
    f"hf:LlamaConfig{{{SMALL}}}{HF}": 0.0,
    f"hf:GemmaConfig{{{SMALL}}}{HF}".replace("float32", "bfloat16"): 0.0,
    f'hf:Gemma2Config{{{SMALL}, "head_dim": 16, "num_key_value_heads": 1}}{HF}': 30.0,
    f'hf:GPT2Config{{"vocab_size": 64, "n_embd": 32, "n_layer": 1, "n_head": 2}}{HF}': 0.0,
    f"hf:PhiConfig{{{SMALL}}}{HF}": 0.0,
}


@pytest.mark.parametrize(("spec", "cap"), OURS.items(), ids=lambda one: str(one).partition("{")[0])
def test_our_models(spec: str, cap: float) -> None:
    """The output layer's input, through the weight and the cap that are named, is the model's output; its loss is known."""
    if spec.startswith("hf:"):
        pytest.importorskip("transformers")
    model = load(spec)
    first, *_, last = model.build([0, len(model.layers) - 1])
    name, loss = recognised(last, model.loss, 9)
    assert loss == CrossEntropy(soft_cap=cap)
    linear = last.get_submodule(name)
    seen: list[Tensor] = []
    linear.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    tokens, _ = model.batch(0, 0)
    output = last(first(tokens) * 30)
    torch.testing.assert_close(capped(functional.linear(seen[0], linear.weight, linear.bias), cap), output)
    seen.clear()
    name, scale = embedding_of(first, 0)
    table = first.get_submodule(name)
    table.register_forward_hook(lambda module, args, output: seen.extend((args[0], output)))
    first(tokens)
    assert len(seen) == 2
    assert torch.equal(seen[0], tokens)
    assert torch.equal(seen[1], functional.embedding(tokens, table.weight) * scale)


def test_a_head_that_does_more_is_refused() -> None:
    pytest.importorskip("transformers")
    model = load(f"hf:CohereConfig{{{SMALL}}}{HF}")
    (head,) = model.build([len(model.layers) - 1])
    with pytest.raises(BadInput, match=r"^hf: CohereForCausalLM does more to its logits than a soft cap$"):
        recognised(head, model.loss, 2)
