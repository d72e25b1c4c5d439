"""A checkpoint's files without ranks: damage is named, and whose state serves whom."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from zbsolve import BadInput
from zbsolve.exec.loop.checkpoint import kinds_of, related
from zbsolve.exec.loop.checkpoint_files import Reader, from_tensor


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save({"weight": torch.arange(2000.0)}, storage_writer=FileSystemWriter(tmp_path / "one"), no_dist=True)
    return tmp_path / "one"


def test_a_file_that_is_damaged_or_missing_is_named(checkpoint: Path) -> None:
    room = torch.empty(2000)
    Reader(checkpoint).into({"weight": room})
    assert torch.equal(room, torch.arange(2000.0))
    (data,) = checkpoint.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:3000])
    with pytest.raises(BadInput, match=rf"^{checkpoint}: damaged: {data.name}: \w+"):
        Reader(checkpoint).into({"weight": room})
    data.unlink()
    with pytest.raises(BadInput, match=rf"^{checkpoint}: cannot read {data.name}: No such file or directory$"):
        Reader(checkpoint).into({"weight": room})


def test_what_another_rank_kept_on_its_gpu_comes_to_this_ranks_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count of steps of a fused or capturable optimizer is on the GPU. (Here a CPU's tensor is said to be there.)"""
    stream = io.BytesIO()
    with monkeypatch.context() as patch:
        patch.setattr(torch.serialization, "location_tag", lambda storage: "cuda:5")
        torch.save({"step": torch.tensor(7.0)}, stream)
    row = torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8)
    assert from_tensor(row, torch.device("cpu")) == {"step": torch.tensor(7.0)}


def test_a_state_serves_its_own_class_and_those_that_derive_from_it() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(1))]
    sgd, mine, adam = (one(parameters, 0.1) for one in (torch.optim.SGD, Mine, torch.optim.Adam))
    assert kinds_of(mine)[:2] == ["Mine", "SGD"]
    assert related(kinds_of(sgd), kinds_of(mine))
    assert related(kinds_of(mine), kinds_of(sgd))
    assert not related(kinds_of(adam), kinds_of(mine))
