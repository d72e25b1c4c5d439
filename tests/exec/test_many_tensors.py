"""Stages take and give any pytree of tensors: masks, ids, skips, auxiliary losses, None."""

from __future__ import annotations

import pytest
import torch

from zbsolve import BadInput
from zbsolve.exec.feed import split_batch
from zbsolve.exec.transport.format import Format

from ..support.exec_ranks import on_ranks

CASES = [
    {"placement": placement, "seed": seed, "split": split}
    for split in ("layers", "graph")
    for seed, placement in enumerate([(0, 1), (0, 1, 1, 0), (0, 0, 1, 0, 1, 1)])
]


@pytest.mark.slow
def test_gradients_are_the_whole_models() -> None:
    jobs = [("trained", case) for case in CASES]
    for rank in on_ranks(2, "tests.support.exec_jobs_values", jobs, timeout=200):
        for case, differences in zip(CASES, rank, strict=True):
            assert max(differences) < 2e-6, case


def test_an_evaluation_gives_all_tensors_of_the_outputs() -> None:
    for outputs, value in on_ranks(2, "tests.support.exec_jobs_values:evaluated", "layers", timeout=60):
        assert outputs < 1e-5
        assert value < 1e-5


def test_a_message_comes_out_as_it_went_in() -> None:
    value = {
        "x": torch.randn(3, 2, requires_grad=True),
        "flags": (torch.tensor([True, False, True]), None, 2.5, "word"),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4, dtype=torch.int64),
        "one": torch.tensor(7, dtype=torch.int32),
    }
    there = Format.of(value)
    here = Format.loads(there.dumps())
    assert here == there
    found = here.unpack(there.pack(value, torch.device("cpu")))
    assert Format.of(found) == there
    assert found["flags"][1:] == (None, 2.5, "word")
    for name in ("x", "half", "empty", "one"):
        assert torch.equal(found[name], value[name])
    assert torch.equal(found["flags"][0], value["flags"][0])
    assert there.nbytes == 24 + 3 + 10 + 4
    assert there.gradient.tensors == (Format.of(value["x"].detach()).tensors[0],)
    assert Format.of((torch.ones(2),)).gradient.buffer(torch.device("cpu")).shape == (1,)


def test_a_format_says_where_its_tensors_are() -> None:
    found = Format.of({"x": torch.ones(2, 3), "more": (None, [torch.ones(1, dtype=torch.bool)], 2)})
    assert str(found) == "{x: (2, 3) torch.float32, more: (None, ((1,) torch.bool), 2)}"
    assert str(found.gradient) == "()"
    assert str(Format.of(torch.ones(4))) == "(4,) torch.float32"


def test_batches_of_several_tensors_are_cut_along_their_rows() -> None:
    ids, mask = torch.arange(8).reshape(4, 2), torch.ones(4, 2)
    cpu = torch.device("cpu")
    found = split_batch((ids, mask), "inputs", [1], range(2), cpu)
    assert torch.equal(found[1][0], ids[2:])
    named = split_batch({"ids": ids, "scale": 3}, "inputs", [0], range(2), cpu)
    assert torch.equal(named[0]["ids"], ids[:2])
    assert named[0]["scale"] == 3
    each = split_batch(ids.chunk(2), "inputs", [0, 1], range(2), cpu)  # alike: a microbatch each
    assert torch.equal(each[1], ids[2:])
    with pytest.raises(BadInput, match=r"inputs: .* does not split into 3"):
        split_batch((ids, mask), "inputs", [0], range(3), cpu)
