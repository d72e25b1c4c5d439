"""Checkpoints: training goes on to the same bits on the same ranks, and within rounding on others."""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest

from zbsolve.exec.loop.checkpoint_files import _IndexUnpickler

from ..support.exec_ranks import on_ranks

pytestmark = pytest.mark.slow

KINDS = ["plain", "validated", "inside"]
JOBS = "tests.support.exec_jobs_checkpoint"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[str, list[float]]:
    """The losses of training that was not interrupted, behind the checkpoints that it left."""
    first, second = on_ranks(2, f"{JOBS}:saved", {"ranks": 2, "folder": str(folder), "kinds": KINDS})
    assert first == second
    assert len(first["plain"]) == 4
    assert len({*first["plain"]}) == 4
    return first  # type: ignore[no-any-return]


def resumed(folder: Path, ranks: int, kinds: list[str]) -> dict[str, list[float]]:
    found = on_ranks(ranks, f"{JOBS}:resumed", {"ranks": ranks, "folder": str(folder), "kinds": kinds})
    assert all(one == found[0] for one in found)
    return found[0]  # type: ignore[no-any-return]


def test_on_the_same_ranks_training_goes_on_to_the_same_bits(folder: Path, straight: dict[str, list[float]]) -> None:
    """With dropout, tied weights, late validation, a learning rate schedule, updates inside a step, and batches that random
    numbers pick."""
    assert resumed(folder, 2, KINDS) == straight


@pytest.mark.parametrize("ranks", [1, 3])
def test_on_other_ranks_training_goes_on_within_rounding(folder: Path, straight: dict[str, list[float]], ranks: int) -> None:
    kinds = [kind for kind in KINDS if kind != "inside"]  # there other stages see other versions of weights
    found = resumed(folder, ranks, kinds)
    for kind in kinds:
        assert found[kind] == pytest.approx(straight[kind], rel=1e-11)


def test_nothing_but_the_checkpoint_stays(folder: Path, straight: dict[str, list[float]]) -> None:
    assert {path.name for path in folder.iterdir()} >= set(KINDS)
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_paths_are_read_as_python_3_13_writes_them() -> None:
    written = re.sub(rb"cpathlib\n", b"cpathlib._local\n", pickle.dumps(Path("a"), 2))
    assert b"pathlib._local" in written
    assert _IndexUnpickler(io.BytesIO(written)).load() == Path("a")


class Evil:
    def __reduce__(self) -> Any:
        return os.system, ("true",)


def test_what_does_not_fit_is_refused_by_all(folder: Path, straight: dict[str, list[float]]) -> None:
    (folder / "evil").mkdir()
    (folder / "evil" / ".metadata").write_bytes(pickle.dumps(Evil()))
    (folder / "text").write_text("mine")
    first, second = on_ranks(2, f"{JOBS}:refused", {"folder": str(folder)})
    nothing, evil, name, model, state, taken, under, optimizer, rates, warned = first
    assert nothing == f"{folder}/nothing: not a checkpoint: No such file or directory"
    assert evil == f"{folder}/evil: not a checkpoint: UnpicklingError: it names posix.system, which is not data"
    assert name == f"{folder}/plain: it has no 'other'"
    assert model == f"{folder}/plain: model.0.weight is missing"
    assert state.startswith("checkpoint: its state holds more than numbers, words, lists and tensors: ")
    assert taken == f"{folder}/text: cannot write: there is something else, which is no checkpoint"
    assert under.startswith(f"{folder}/text/under: cannot write: ")
    assert optimizer == f"{folder}/plain: 'optimizer' is the state of NAdam, not of SGD"
    assert rates == f"{folder}/plain: 'rates' is the state of MultiStepLR, not of CosineAnnealingLR"
    assert warned == f"exec_jobs_checkpoint: {folder}/plain: it has 'rates' too, which is not loaded"
    assert all(second[:-1])
    assert not second[-1]  # rank 0 alone warns
    assert (folder / "text").read_text() == "mine"
    assert not (folder / "new").exists()
