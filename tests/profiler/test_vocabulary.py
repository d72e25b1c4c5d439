"""What a sharded vocabulary costs, estimated by FLOPs and bytes and measured: against the paper, and against the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from profiler import estimate, measure
from profiler.dataflow import batch_of, fake_mode, flow, quiet
from profiler.operation_costs import Work, total
from profiler.vocabulary_cut import RANKS, Cut, cut_of
from profiler.vocabulary_times import counted_shard, counted_table
from zbsolve import BadInput, Profile
from zbsolve.exec.vocabulary.shard import pass_s
from zbsolve.features.vocabulary import without_vocabulary
from zbsolve.models.by_name import load
from zbsolve.models.losses import CrossEntropy
from zbsolve.models.model import Model
from zbsolve.show.profile_report import profile_as_text

S, H, V = 64, 4096, 128_256


@pytest.fixture(scope="module")
def cut() -> Cut:
    """Llama 3 8B's vocabulary."""
    model, mode = load(f"llama3-8b@layers=1,length={S}"), fake_mode()
    with mode, quiet():
        return cut_of(model, flow(model), batch_of(model, mode))


def test_flops_of_the_shards_are_the_papers(cut: Cut) -> None:
    """2411.05288, Table 4: 6bshV FLOPs. Algorithm 2 (one barrier) makes the input gradient in S, algorithm 1 in T."""
    with fake_mode(), quiet():
        one, two = ({name: total(ops) for name, ops in counted_shard(cut, 8, barriers).items()} for barriers in (1, 2))
    part = 2 * S * H * V // 8
    assert one == {"S": 2 * part, "merge": 0, "T": part}
    assert two == {"S": part, "merge": 0, "T": 2 * part}
    with fake_mode(), quiet():
        assert [total(ops) for ops in counted_table(cut, 8).values()] == [0, 0]


def test_of_many_blocks_of_labels_a_few_are_looked_at_and_all_count(cut: Cut, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shards one has 64,128 words: blocks of four labels, sixteen of them."""
    monkeypatch.setattr("zbsolve.exec.vocabulary.shard.BLOCK", 4 * V // 2)
    with fake_mode(), quiet():
        shard = cut.output(2)
        with Work() as every:
            pass_s(shard, cut.hidden, cut.labels)
        with Work() as few:
            ops = counted_shard(cut, 2, 1)["S"]
    assert ops == every.ops
    assert [op.name for op in every.ops].count("_softmax") == S // 4
    assert [op.name for op in few.ops].count("_softmax") == 3


@pytest.mark.slow
def test_an_estimate_knows_what_a_sharded_vocabulary_costs(tmp_path: Path) -> None:
    profile = estimate(f"gemma2-9b@layers=1,length={S}", "h200")
    costs, words, width = profile.vocabulary, 256_128, 3584
    assert costs is not None
    assert costs.source == profile.source == "estimated: h200 roofline"
    assert (costs.size, costs.hidden_bytes, costs.statistic_bytes, costs.tied) == (words, 2 * S * width, 2 * 4 * S, True)
    assert tuple(row.ranks for row in costs.shards) == RANKS
    for row in costs.shards:
        rows = -(-words // row.ranks)
        assert row.parameter_bytes == 2 * width * rows  # Table 4: 2hV bytes, here both ends' at once
        assert row.one.held == row.two.held == 2 * S * rows + (8 + 4 + 4 + 1 + 1) * S  # softmax; labels, statistics, masks
        assert row.one.S > row.two.S
        assert row.one.T < row.two.T
        assert row.broadcast is None
    # All shards together do what the whole layer did, and S its softmax for itself.
    whole, eight = profile.layers[-1], costs.shard(8)
    assert 8 * eight.parameter_bytes == whole.parameter_bytes - costs.output_rest.parameter_bytes
    assert 0.7 * whole.work < 8 * (eight.one.S + eight.one.T) + costs.output_rest.work < 1.5 * whole.work
    (shown,) = (line.split() for line in profile_as_text(profile).splitlines() if line.startswith("2 ranks"))
    assert float(shown[-1]) == pytest.approx(2 * width * -(-words // 2) / 2**30, rel=1e-3)  # GiB
    rest = without_vocabulary(profile)
    assert rest.layers[-1].work < 0.1 * whole.work
    assert (rest.layers[0].parameter_bytes, rest.layers[-1].parameter_bytes) == (0, 2 * width)
    assert rest.layers[0].output_bytes == profile.layers[0].output_bytes
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile


def model(*ends: nn.Module) -> Model:
    def batch(microbatch: int, step: int) -> tuple[Tensor, Tensor]:
        ids = torch.arange(6).view(2, 3)
        return ids, ids

    return Model("own", tuple((lambda one=one: one) for one in ends), ("a", "b"), batch, CrossEntropy())


def own(*ends: nn.Module, inputs: Callable[[Tensor], Any] = lambda ids: ids) -> Cut:
    one, mode = model(*ends), fake_mode()
    plain = one.batch
    one = replace(one, batch=lambda m, step: (inputs(plain(m, step)[0]), plain(m, step)[1]))
    with mode, quiet():
        return cut_of(one, flow(one), batch_of(one, mode))


def test_bare_layers_leave_nothing_and_other_embeddings_stay() -> None:
    found = own(nn.Embedding(7, 4), nn.Linear(4, 7))
    assert [rest.parameter_bytes for rest in found.rests] == [0, 0]
    assert found.ranks == (2, 4)
    assert found.parameter_bytes(2) == 4 * (4 * 4 + 4 + 4 * 4)  # four rows of both, and of the bias
    assert own(nn.Embedding(8, 4), nn.Linear(4, 7)).table is None


class Masked(nn.Module):
    """Of a dict of ids and a padding mask, or of a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(7, 4)

    def forward(self, given: Any) -> Tensor:
        ids, mask = given.values() if isinstance(given, dict) else given
        return self.token(ids) * mask[..., None]

    def token_embedding(self) -> tuple[str, float]:
        return "token", 1.0


@pytest.mark.parametrize("name", ["input_ids", "ids", "tokens"])
def test_a_batch_may_be_a_dict_with_its_tokens(name: str) -> None:
    found = own(Masked(), nn.Linear(4, 7), inputs=lambda ids: {name: ids, "mask": ids % 2})
    assert found.tokens.shape == (2, 3)
    assert found.rests[1].given[0].keys() == {name, "mask"}
    assert found.rests[1].given[1].shape == (2, 3, 4)


def test_a_batch_whose_tokens_nobody_knows_is_refused() -> None:
    with pytest.raises(BadInput, match="a dict with one as input_ids, ids or tokens, not a tuple"):
        own(Masked(), nn.Linear(4, 7), inputs=lambda ids: (ids, ids % 2))
    with pytest.raises(BadInput, match="not a dict with words, mask"):
        own(Masked(), nn.Linear(4, 7), inputs=lambda ids: {"words": ids, "mask": ids % 2})


def test_why_nothing_is_known_is_a_fact() -> None:
    assert "mse_loss" in estimate("mlp-24", "h200").facts["no_vocabulary"]


@pytest.mark.slow
def test_estimates_look_at_hugging_faces_output_layer_and_scaled_embedding_too() -> None:
    sizes = '"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8'
    found = estimate(f'hf:Gemma2Config{{{sizes}, "intermediate_size": 32, "vocab_size": 50}}@batch=1,length=8', "h200")
    assert "no_vocabulary" not in found.facts
    assert found.vocabulary is not None
    assert (found.vocabulary.size, found.vocabulary.embedding) == (50, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("one_link")
def test_shards_of_a_real_output_layer_are_measured(tmp_path: Path) -> None:
    profile = measure("gpt-tiny-tied", seconds=0.05)
    costs = profile.vocabulary
    assert costs is not None
    assert costs.source == "measured"
    assert costs.tied
    estimated = estimate("gpt-tiny-tied", "h200").vocabulary
    assert estimated is not None
    for row in costs.shards:
        assert min(row.one.S, row.one.T, row.two.S, row.two.T, row.one.merge, row.lookup) > 0
        other = estimated.shard(row.ranks)
        assert (row.one.held, row.two.held, row.parameter_bytes) == (other.one.held, other.two.held, other.parameter_bytes)
        assert len(profile.samples[f"vocabulary/{row.ranks}/S1"]) >= 5
        assert (row.broadcast is not None) == (row.ranks == 2)
    assert replace(costs.output_rest, F=0, B=0, W=0, BW=0, X=0, U=0) == replace(
        estimated.output_rest, F=0, B=0, W=0, BW=0, X=0, U=0
    )
    profile.save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json") == profile
