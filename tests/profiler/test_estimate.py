"""Estimates: FLOPs counted through the executor's split against the papers' formulas, and times against published ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from profiler.dataflow import fake_mode, flow
from profiler.devices import DEVICES, assumed, device
from profiler.operation_costs import OPTIMIZER_STATES, FusedNorms, Op, Work, passes, state_of, total
from profiler.roofline import estimate, sequence_fact, time_us
from profiler.stage_rounds import stages_of
from zbsolve import BadInput, Profile, Schedule
from zbsolve.cli import main
from zbsolve.models.by_name import load

NORMS = ("native_layer_norm", "native_layer_norm_backward")
H, S, B, A, V = 2304, 1024, 6, 24, 32_000


@pytest.fixture(scope="module")
def work() -> dict[int, dict[str, list[Op]]]:
    """gpt-1.5b's embedding, two blocks and head."""
    model = load("gpt-1.5b@layers=2")
    through, mode = flow(model), fake_mode()
    with mode:
        batch = mode.from_tensor(model.batch(0, 0)[0]), mode.from_tensor(model.batch(0, 0)[1])
        return passes(stages_of(model, range(4)), through, batch)


def test_flops_of_a_block_are_the_papers(work: dict[int, dict[str, list[Op]]]) -> None:
    """2401.10241, Table 1: F sbh(24h+4s), B sbh(24h+8s), W sbh·24h. A fused causal attention skips half of every s, and
    its backward computes the scores again: 10s in place of 8s."""
    counted = {kind: total(ops) for kind, ops in work[1].items()}
    assert counted["F"] == S * B * H * (24 * H + 4 * S // 2)
    assert counted["B"] == S * B * H * (24 * H + 10 * S // 2)
    assert counted["W"] == S * B * H * 24 * H
    assert counted["BW"] == counted["B"] + counted["W"]
    assert work[1].keys() == work[2].keys()
    assert counted == {kind: total(ops) for kind, ops in work[2].items()}


def test_attention_is_known_apart(work: dict[int, dict[str, list[Op]]]) -> None:
    """4s and 10s of the papers' formulas, half of it skipped; keys and values of 16 bits. Not causal: not known."""
    counted = {kind: [op for op in ops if op.tokens] for kind, ops in work[1].items()}
    assert [total(counted[kind]) for kind in ("F", "B", "W")] == [S * B * H * 4 * S // 2, S * B * H * 10 * S // 2, 0]
    assert sum(op.keys for op in counted["F"]) == 2 * 2 * S * B * H
    assert sequence_fact(work.values()) == {"sequence": S}
    other = {"F": [Op("attention", 1, 1, "attention", True)]}
    assert sequence_fact([*work.values(), other]) == sequence_fact([{"F": []}]) == {}
    layer = estimate("gpt-1.5b@layers=2", "h200").layers[1]
    assert 0 < layer.attention_F < layer.F
    assert 0 < layer.attention_B < layer.B
    assert layer.kv_bytes == 4 * S * B * H


def test_flops_of_the_output_layer_are_the_papers(work: dict[int, dict[str, list[Op]]]) -> None:
    """2411.05288, Table 4: 6bshV for forward and both backwards; 2bshV each. The input layer multiplies nothing."""
    assert {kind: total(ops) for kind, ops in work[3].items()} == {
        "F": 2 * B * S * H * V,
        "B": 2 * B * S * H * V,
        "W": 2 * B * S * H * V,
        "BW": 4 * B * S * H * V,
    }
    assert all(total(ops) == 0 for ops in work[0].values())


def test_memory_of_a_block_is_the_papers() -> None:
    """2401.10241, section 2.2: 34sbh and attention; of it 32sbh (16 bits: inputs and output gradients of four linear
    layers) wait for W. Without dropout masks (2sbh) 32sbh are kept after F too; scores are never stored by a fused
    attention, only their row sums (4 bytes for each of a·s·b, and a mean and a deviation for every row of two norms)."""
    block = estimate("gpt-1.5b@layers=2", "a100").layers[1]
    assert block.held_until_W == 32 * S * B * H
    small = 4 * A * S * B + 2 * 2 * 4 * S * B
    assert block.held_until_B <= small
    assert block.parameter_bytes == 2 * (12 * H * H + 13 * H)


@pytest.mark.slow
def test_weight_gradients_take_what_was_published() -> None:
    """Table 9 of 2401.10241, on A100s. W is matrix products alone; F and B ran attention that was not fused, and tensor
    copies of Megatron's, so those are only bounded from above."""
    papers = {"gpt-1.5b": (18522, 18086, 9337, 3), "gpt-28.3b": (10419, 10207, 7715, 2)}
    for name, (f, b, w, layers) in papers.items():
        block = estimate(f"{name}@layers=1", "a100").layers[1]
        assert layers * block.W == pytest.approx(w, rel=0.1)
        assert 0.5 * f < layers * block.F < f
        assert 0.5 * b < layers * block.B < b
        # Fused, autograd makes each gradient anew and then adds it: that traffic comes on top.
        assert block.B + block.W <= block.BW <= 1.3 * (block.B + block.W)


def test_a_roofline_is_the_slower_of_two() -> None:
    """But an attention is as slow as both together."""
    a100, h200 = device("a100"), device("h200")
    one = Op("mm", 10**12, 10**6, "matrix", True)
    assert time_us([one], a100) == pytest.approx(1e12 / (312e6 * 0.8))
    assert time_us([one], h200) == pytest.approx(1e12 / (989.4e6 * 0.73))
    add = Op("add", 0, 10**9, "other", True)
    assert time_us([add], a100) == pytest.approx(1e9 / (2039e3 * 0.75))
    assert time_us([replace(add, scattered=True)], a100) == pytest.approx(1e9 / (2039e3 * 0.3))
    assert time_us([Op("add", 0, 8, "other", True)] * 3, a100) == pytest.approx(9.0)
    assert time_us([replace(add, kernels=3)], a100) == pytest.approx(time_us([add], a100) + 6.0)
    assert time_us([Op("mm", 10**12, 10**6, "matrix", False)], a100) > 10 * time_us([one], a100)
    attention = Op("attention", 10**12, 10**9, "attention", True)
    assert time_us([attention], h200) == pytest.approx(1e12 / (989.4e6 * 0.5) + 1e9 / (4800e3 * 0.75))
    assert "matrix products at 80% of peak (as published for it)" in assumed(a100)
    assert "matrix products at 73% of peak (fitted)" in assumed(h200)
    with pytest.raises(BadInput, match="device 'h20': unknown; did you mean h200"):
        device("h20")
    assert all(row.source for row in DEVICES.values())


def test_bytes_are_those_of_a_gpus_kernels() -> None:
    """A softmax reads long rows again and short ones once; a loss looks at one score a row; gradients of a norm's weights
    are a second kernel. What lies differently, is put together or gets a longer type goes by element."""
    with fake_mode():
        short, long, labels = torch.empty(8, 4000), torch.empty(8, 128_000), torch.empty(8, dtype=torch.int64)
        half, turned = torch.empty(64, 32, dtype=torch.bfloat16), torch.empty(32, 64, dtype=torch.bfloat16).t()
        weight = torch.empty(32, dtype=torch.bfloat16, requires_grad=True)
        with Work() as work:
            short.log_softmax(-1)
            long.log_softmax(-1)
            nn.functional.nll_loss(long, labels, reduction="sum")
            half.relu(), half + turned, half.float(), half.float().bfloat16(), torch.cat((half, half)), half.sum(0)
        with FusedNorms(), Work() as norm:
            nn.functional.rms_norm(half.requires_grad_(), (32,), weight).backward(torch.empty_like(half))
    rows = [(op.name, op.bytes, op.scattered) for op in work.ops]
    assert rows[:3] == [
        ("_log_softmax", 2 * short.nbytes, False),
        ("_log_softmax", 4 * long.nbytes, False),
        ("nll_loss_forward", labels.nbytes + 2 * 4, False),
    ]
    scattered = [False, True, True, True, False, True, False]
    assert [row[::2] for row in rows[3:]] == list(
        zip(["relu", "add", "_to_copy", "_to_copy", "_to_copy", "cat", "sum"], scattered, strict=True)
    )
    there, back = (next(op for op in norm.ops if op.name == name) for name in NORMS)
    assert there.bytes == 2 * half.nbytes + weight.nbytes + 2 * 2 * 64
    assert back.bytes == 5 * half.nbytes + 2 * weight.nbytes + 2 * 2 * 64


def test_states() -> None:
    half, single = torch.zeros(4, dtype=torch.bfloat16), torch.zeros(4)
    assert state_of(None, [half]) is OPTIMIZER_STATES["adam-mixed"]
    assert state_of(None, [half, single, single]) is OPTIMIZER_STATES["adam"]
    assert state_of("sgd", [half]).factor == 2
    assert OPTIMIZER_STATES["adam-mixed"].factor * 2 == 16  # bytes a parameter: 16Ψ of 1910.02054
    with pytest.raises(BadInput, match="16 bits"):
        state_of("adam-mixed", [single])
    with pytest.raises(BadInput, match="one of adam"):
        state_of("lion", [single])


@pytest.mark.slow
def test_an_estimate_is_never_taken_for_a_measurement(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = str(tmp_path / "p.json")
    assert main(["profile", "llama3-70b@layers=6", "--estimate", "h200", "-o", where]) == 0
    out = capsys.readouterr().out
    assert out.startswith("estimated: h200 roofline: no number here was measured\n")
    assert "block0 … block5" in out
    profile = Profile.load(where)
    assert profile.source == "estimated: h200 roofline"
    assert profile.samples == {}
    assert profile.capacity == 141 * 10**9
    assert profile.states == 8
    assert profile.layers[1].U > 0
    schedule = str(tmp_path / "s.json")
    solve = ["solve", where, "--ranks", "2", "--microbatches", "2", "--effort", "0.05"]
    assert main([*solve, "-o", schedule]) == 0
    said = "times are estimated: h200 roofline: llama3-70b@layers=6, not measured"
    assert said in capsys.readouterr().out
    assert Schedule.load(schedule).problem.source == "estimated: h200 roofline: llama3-70b@layers=6"
    assert main([*solve, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["source"].startswith("estimated: ")
    assert main(["show", schedule]) == 0
    assert "estimated: h200 roofline" in capsys.readouterr().out
    assert "not measured" in profile.title
    body = json.loads(Path(where).read_text())
    for source in ("estimated", "measured: no", "guessed"):
        Path(where).write_text(json.dumps({**body, "source": source}))
        with pytest.raises(BadInput, match="field 'source' is"):
            Profile.load(where)


@pytest.mark.slow
def test_tensor_ranks_share_times_and_bytes_and_send_hidden_states() -> None:
    """A block over 8 devices (2205.05198, section 4.2.2): its passes over 8 and a ring's turn for each of 4 collectives in F
    and in B, 2 in W; messages of a rank that fills a node take the network, each device its part."""
    whole, part = (estimate("llama3-70b@layers=2,length=4096", "h100", tensor_ranks=ranks) for ranks in (1, 8))
    before, after = whole.layers[1], part.layers[1]
    hidden = 4096 * 8192 * 2
    turn = 10 + hidden * 7 / 8 / (450e3 * 0.8)
    for kind, turns in (("F", 4), ("B", 4), ("W", 2), ("BW", 6), ("X", 4)):
        assert getattr(after, kind) == pytest.approx(getattr(before, kind) / 8 + turns * turn, abs=0.01)
    assert after.attention_F == pytest.approx(before.attention_F / 8, abs=0.01)
    for size in ("held_until_B", "held_until_W", "parameter_bytes", "output_bytes", "kv_bytes"):
        assert 0 <= 8 * getattr(after, size) - getattr(before, size) < 8
    assert after.transient == -(-before.transient // 8) + hidden
    assert part.link.bytes_per_us == 50e3 * 0.8
    assert whole.host is not None
    assert part.host is not None
    assert (part.host.ranks, part.host.memory) == (1, whole.host.memory // 8)
    assert part.source == "estimated: h100 roofline, 8 tensor ranks"
    assert (whole.facts["tensor_ranks"], part.facts["tensor_ranks"]) == (1, 8)  # a plan by profiles asks for both
    assert part.facts["microbatch"] == {"sequences": 1, "tokens": 4096}


@pytest.mark.parametrize(
    ("model", "mesh", "said"),
    [
        ("gpt-tiny", "pp=2,tp=2", "an estimate knows tp alone"),
        ("gpt-tiny", "tp=3", "tp is 3, and a node of h100 has 8 devices"),
        ("mlp-6", "tp=2", "the estimate knows no causal attention"),
        ("qwen2-7b@layers=1,length=64", "tp=8", "tp is 8, and attention has 28 heads, which it must divide"),
    ],
)
def test_tensor_ranks_that_cannot_be_are_refused(
    model: str, mesh: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", model, "--estimate", "h100", "--mesh", mesh, "-o", str(tmp_path / "p.json")]) == 2
    assert said in capsys.readouterr().err
