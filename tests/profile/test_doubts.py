"""What is to be doubted of a profile goes with every answer that comes of it, and so does another model's schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import Step, solve
from zbsolve.cli import main
from zbsolve.profile.doubtful import doubts, model_said_by, other_model

from ..support.profiles import equal_layers

STEP = ("--ranks", "2", "--microbatches", "2")
COMMANDS = {
    "solve": ("solve", "p.json", *STEP, "--effort", "0.01"),
    "race": ("solve", "p.json", *STEP, "--method", "1f1b,zb-h1"),
    "compare": ("compare", "s.json", "--profile", "p.json"),
    "frontier": ("solve", "p.json", *STEP, "--effort", "0.01", "--frontier", "2"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_warnings_go_with_the_numbers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = equal_layers(4)
    solve(Step(2, 2).problem(profile), effort=0.01).save("s.json")
    for facts, BW, told in (
        ({}, 20.0, []),
        ({"warnings": ["disturbed: x"]}, 28.0, ["disturbed: x", "(B + W) / BW is 0.71"]),
    ):
        replace(profile, facts=facts, layers=tuple(replace(one, BW=BW) for one in profile.layers)).save("p.json")
        assert main([*COMMANDS[command]]) == 0
        said = [line for line in capsys.readouterr().err.splitlines() if "compiling" not in line]
        assert len(said) == len(told)
        assert all(
            line.startswith(f"zbsolve {COMMANDS[command][0]}: WARNING: p.json: {doubt}")
            for line, doubt in zip(said, told, strict=True)
        )


def test_each_doubt_is_told_once() -> None:
    profile = equal_layers(4)
    slow = replace(profile, layers=tuple(replace(one, BW=10.0) for one in profile.layers))
    (line,) = doubts(slow)
    assert line.startswith("(B + W) / BW is 2.00: splitting the backward costs more")
    assert doubts(replace(slow, facts={"warnings": [line, "x"]})) == [line, "x"]
    fused = tuple(replace(one, B=0.0, W=0.0) for one in profile.layers)
    assert doubts(profile) == doubts(replace(profile, layers=fused)) == doubts(replace(profile, facts={"warnings": 1})) == []


@pytest.mark.parametrize(
    ("source", "model", "other"),
    [
        ("", "gpt-tiny", False),
        ("given: numbers", "gpt-tiny", False),
        ("measured: gpt-tiny", "gpt-tiny", False),
        ("measured: gpt-tiny-tied", "gpt-tiny", True),
        ("measured: gpt-tiny", "gpt-tiny-tied", True),
        ("measured with split auto:least: gpt-tiny", "gpt-tiny", False),
        ("estimated: h100 roofline, retimed by a run: gpt-tiny", "gpt-tiny", False),
        ("estimated: gpt, a100: gpt-3.6b@layers=8, pp 2", "gpt-3.6b@layers=8", False),
        (
            'measured: hf:LlamaConfig{"num_hidden_layers": 4}@length=512',
            'hf:LlamaConfig{"num_hidden_layers": 4}@length=512',
            False,
        ),
        (
            'measured: hf:LlamaConfig{"num_hidden_layers": 4}@length=512',
            'hf:LlamaConfig{"num_hidden_layers": 8}@length=512',
            True,
        ),
        ("measured: jobs/my-model.py:build", "/home/x/my-model.py:build", False),
        ("measured: my-model.py:build", "jobs/my-model.py:other", True),
        ("measured: jobs/a.py:build", "jobs/b.py:build", True),
        ("measured with split graph: pkg.models:build", "models.py:build", False),
    ],
)
def test_another_model_is_known(source: str, model: str, other: bool) -> None:
    line = f"WARNING: the schedule was made by the times '{source}', and the model here is {model}"
    assert other_model(source, model) == (line if other else "")


@pytest.mark.parametrize("model", ["gpt-tiny", 'hf:LlamaConfig{"num_hidden_layers": 4, "rope": {"a": 1}}@length=512'])
def test_a_source_says_its_model(model: str) -> None:
    assert model_said_by(f"measured: {model}") == model_said_by(f"estimated: h100 roofline: {model}") == model


def test_notes_in_brackets_are_left_out() -> None:
    line = other_model("estimated: cost model, a100 (a sheet (of June); assumed): gpt, pp 2", "llama")
    assert "made by the times 'estimated: cost model, a100: gpt, pp 2', and" in line


def test_a_schedule_of_another_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    profile = equal_layers(4)
    solve(Step(2, 2).problem(profile), effort=0.01).save("s.json")
    for model, told in (("toy", 0), ("other", 1)):
        replace(profile, model=model).save("p.json")
        for words in (("compare", "s.json"), ("check", "s.json", "--seconds", "1")):
            assert main([*words, "--profile", "p.json"]) == 0
            said = capsys.readouterr().err
            assert said.count("made by the times 'estimated: by hand: toy', and the model here is other") == told
