"""Layers that a mesh spreads are measured by all their ranks together, each its part."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from zbsolve import Profile
from zbsolve.cli import main

from ..support.exec_ranks import on_ranks
from ..support.exec_tools import Resting

MODEL = "tests.support.mesh_model:pipeline"


def profiled(rank: int, words: list[str]) -> tuple[int, str]:
    """What `zbsolve profile` returns here and says on standard error, where torchrun's environment is there."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(dist.get_world_size()), "LOCAL_RANK": str(rank)}
    counted = mock.patch("profiler.memory.Settled", Resting)
    with mock.patch.dict(os.environ, place), counted, redirect_stderr(io.StringIO()) as said:
        code = main(["profile", *words])
    return code, said.getvalue()


def profile(ranks: int, *options: str) -> list[tuple[int, str]]:
    """What `zbsolve profile` returns and says on standard error, on ranks as torchrun starts them."""
    return [tuple(one) for one in on_ranks(ranks, f"{__name__}:profiled", [*options, "--seconds", "0.1"])]


@pytest.mark.slow
def test_a_rank_has_its_part_of_every_layer(tmp_path: Path) -> None:
    """Norm and second bias are whole on both ranks; of the rest each has a half. F keeps the norm's input (but the first
    layer's, which is the batch), its output and statistics, a half of the hidden layer, and which outputs dropout kept."""
    path = tmp_path / "p.json"
    done = profile(4, MODEL, "--mesh", "pp=2,tp=2", "-o", str(path))
    assert [code for code, _ in done] == [0] * 4, done
    found = Profile.load(path)
    assert found.facts["mesh"] == {"pp": 2, "tp": 2}
    assert found.facts["tensor_ranks"] == 2
    assert [layer.parameter_bytes for layer in found.layers] == [(8 + 8 + 8 + (8 * 16 + 16 + 16 * 8) // 2) * 8] * 4
    assert all(min(layer.F, layer.B, layer.W, layer.BW) > 0 for layer in found.layers)
    assert [layer.output_bytes for layer in found.layers] == [4 * 8 * 8] * 3 + [0]
    kept = [layer.held_until_B + layer.held_until_W for layer in found.layers]
    assert kept[1] == kept[2] == kept[0] + 4 * 8 * 8
    assert len(found.facts["links"]) == 1


@pytest.mark.slow
def test_what_cannot_be_measured_on_a_mesh_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(tmp_path / "p.json")
    assert main(["profile", MODEL, "--mesh", "tp=2", "-o", path]) == 2
    assert capsys.readouterr().err == "zbsolve profile: --mesh tp=2: start profile under torchrun --nproc-per-node 2\n"
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["profile", MODEL, "--mesh", "tp=4", "-o", path]) == 2
    assert "zbsolve profile: --mesh tp=4: it has 4 ranks, but torchrun started 2\n" in capsys.readouterr().err
    for code, said in profile(2, "mlp-2", "--mesh", "tp=2", "-o", path):
        assert (code, "model 'mlp-2' has no parallelize(stage, mesh), which tp needs" in said) == (2, True)
