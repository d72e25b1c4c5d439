"""Profiles: every layer measured by the executor's passes; models by name."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from profiler import measure
from profiler.dataflow import fake_mode, flow, load_fake
from zbsolve import BadInput, Profile
from zbsolve.cli import main
from zbsolve.models.by_name import load
from zbsolve.models.presets import PRESETS


@pytest.mark.slow
def test_measure(tmp_path: Path) -> None:
    texts: list[str] = []
    profile = measure("mlp-tiny", seconds=0.2, progress=texts.append)
    assert [layer.name for layer in profile.layers] == [f"layer{i}" for i in range(8)]
    for layer in profile.layers:
        assert min(layer.F, layer.B, layer.W, layer.BW) > 0
        assert layer.parameter_bytes == (32 * 32 + 3 * 32) * 4
        assert layer.held_until_W + layer.held_from_B >= 2 * 16 * 32 * 4  # the Linear's input and output gradient
    assert profile.facts["measured_layers"] == ["layer0", "layer1", "layer2", "layer3", "layer7"]
    for name in profile.facts["measured_layers"]:
        assert all(len(profile.samples[f"{name}/{kind}"]) >= 3 for kind in ("F", "B", "W", "BW"))
    assert profile.layers[1].F == profile.layers[5].F
    assert profile.layers[1].transient > 0
    assert profile.layers[0].output_bytes == 16 * 32 * 4
    assert profile.facts["left_after_W"]["layer0"] == 0
    assert profile.facts["tensor_ranks"] == 1
    assert profile.facts["microbatch"] == {"sequences": 16, "tokens": 0}  # rows of numbers are no tokens
    assert profile.link.latency > 0
    assert profile.link.bytes_per_us > 1
    assert texts
    profile.save(tmp_path / "p.json")
    again = Profile.load(tmp_path / "p.json")
    assert again == profile
    assert again.problem(2, 4, "vee").layers


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_the_same_whoever_builds_them(name: str) -> None:
    whole, last = load(name).build(), load(name).build([len(load(name).layers) - 1])
    for a, b in zip(whole[-1].parameters(), last[0].parameters(), strict=True):
        assert torch.equal(a, b)
    x, y = load(name).batch(3, 1)
    again = load(name).batch(3, 1)
    assert torch.equal(x, again[0])
    assert torch.equal(y, again[1])
    assert not torch.equal(x, load(name, seed=1).batch(3, 1)[0])


def test_tied_layers_share_one_parameter() -> None:
    layers = load("gpt-tiny-tied").build()
    assert layers[0].token.weight is layers[-1].output.weight


OWN = """
import copy
import torch
from torch import nn
def shared():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    b.weight = a.weight
    return nn.Sequential(a, nn.ReLU(), b), torch.randn(2, 4)
def with_loss():
    return [nn.Linear(4, 2)], (torch.randn(3, 4), torch.tensor([0, 1, 1])), nn.functional.cross_entropy
def no_loss():
    return [nn.Linear(4, 2)], (torch.randn(3, 4), torch.tensor([0, 1, 1]))
def broken():
    raise KeyError("x")
def wrong():
    return 3
def empty():
    return [], torch.zeros(1)
def listed():
    return nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), torch.zeros(2, 4)
def called():
    net = nn.Sequential()
    net.add_module("up", nn.Linear(4, 8))
    net.add_module("down", nn.Linear(8, 4))
    return net, torch.zeros(2, 4)
def converted():
    layer = nn.Linear(7, 7).to(torch.bfloat16)
    return [copy.deepcopy(layer).double(), layer.double()], torch.zeros(2, 7, dtype=torch.float64)
class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)
def residual():
    return Residual(nn.Linear(4, 4)), torch.zeros(2, 4)
"""


def test_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    model = load("own_models:shared")
    assert model.tied == (((0, "weight"), (2, "weight")),)
    assert model.layer_names == ("0.Linear", "1.ReLU", "2.Linear")
    assert load("own_models:listed").layer_names == ("0.Linear", "1.Linear")
    assert load("own_models:called").layer_names == ("up", "down")
    assert flow(load_fake("own_models:converted", 0, fake_mode())).parameter_bytes == (448, 448)
    _, y = load("own_models.py:with_loss").batch(0, 0)
    assert load("own_models:with_loss").loss(torch.randn(3, 2), y).dim() == 0
    for name, text in {
        "no_loss": "must give a loss too",
        "broken": "broken.. raised KeyError",
        "wrong": "must return .layers, sample.",
        "empty": "list of nn.Modules",
        "residual": "returns a Residual, whose forward is its own",
        "absent": "has no function 'absent'",
    }.items():
        with pytest.raises(BadInput, match=text):
            load(f"own_models:{name}")
    with pytest.raises(BadInput, match="no module named 'nowhere_at_all'"):
        load("nowhere_at_all:f")
    with pytest.raises(BadInput, match="no such file"):
        load("nowhere.py:f")


@pytest.mark.usefixtures("one_link")
def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile"]) == 2
    assert capsys.readouterr().err == "zbsolve profile: name MODEL, or --from-trace TRACE\n"
    assert main(["profile", "gpt-tin", "-o", str(tmp_path / "p.json")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("zbsolve profile: model 'gpt-tin': unknown; did you mean gpt-tiny or gpt-tiny-tied or ")
    assert error.endswith(", mlp-N; or your own as module:function)\n")
    assert error.count("\n") == 1
    assert main(["profile", "mlp-tiny", "-o", str(tmp_path / "p.json"), "--seconds", "0.1"]) == 0
    assert "(B + W) / BW" in capsys.readouterr().out


def neighbours(parent: int) -> list[Path]:
    """The busy neighbours that a process started and that still run."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [path for child in children if runs(path := Path(f"/proc/{child}"))]


def runs(process: Path) -> bool:
    """Whether a process is there and no zombie, which an orphan stays where nobody waits for orphans."""
    try:
        return b"profiler.busy_process" in (process / "cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
@pytest.mark.slow
def test_a_signal_ends_the_neighbours_too(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    command = [sys.executable, "-m", "zbsolve", "profile", "mlp-tiny", "--beside", "2", "-o", str(out)]
    process = subprocess.Popen([*command, "--seconds", "1000"], stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 300
        while len(children := neighbours(process.pid)) < 2:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 143
    assert said == "zbsolve profile: interrupted\n"
    # one that the signal met while it was being started ends by itself, when it finds its parent gone
    until = time.monotonic() + 300
    while running := [child for child in children if runs(child)]:
        assert time.monotonic() < until, running
        time.sleep(0.05)
    assert not out.exists()


@pytest.mark.slow
def test_passes_beside_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both are timed, alone and beside each other; what is more than chance is in the file."""
    out = str(tmp_path / "p.json")
    assert main(["profile", "mlp-tiny", "--beside", "traffic", "--seconds", "0.2", "-o", out]) == 0
    found = Profile.load(out)
    for kind in ("F", "B", "W", "BW", "X"):
        assert all(min(found.samples[f"0/{kind} {where}"]) > 0 for where in ("alone", "beside"))
    assert min(len(found.samples[f"messages {where}"]) for where in ("alone", "beside")) > 0
    assert {one.kind in ("MF", "MB") or one.beside in ("MF", "MB") for one in found.slowdowns} <= {True}
    assert all(one.factor > 1 for one in found.slowdowns)
    for said in ("x", "traffic,traffic", "1,2", "-1"):
        assert main(["profile", "mlp-tiny", f"--beside={said}", "-o", out]) == 2
        assert f"--beside '{said}': traffic, a whole number, or both: traffic,3" in capsys.readouterr().err


def test_states_are_as_one_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "p.json")
    assert main(["profile", "mlp-tiny", "--estimate", "h100", "--optimizer-states", "sgd", "-o", out]) == 0
    assert Profile.load(out).states == 2.0
    assert main(["profile", "mlp-tiny", "--beside", "2000", "-o", out]) == 2
    assert "busy processes 2000 from 0 to 1000" in capsys.readouterr().err
