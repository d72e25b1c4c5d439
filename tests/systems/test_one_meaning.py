"""1F1B is one thing wherever its value is said: the same stages, a fused backward, the same µs. Split, it is 1f1b-split."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zbsolve import BadInput, Layer, Link, Profile, Step, pipeline, preset, solve
from zbsolve.cli import main
from zbsolve.profile.named_steps import step_for
from zbsolve.search.pareto import frontier
from zbsolve.show.profile_meaning import meaning
from zbsolve.systems import name_on, presets_of
from zbsolve.util.text import format_time

RANKS, MICROBATCHES = 4, 6


def uneven() -> Profile:
    """Layers whose fused backward does not cost B and W together: by F + BW they would be split elsewhere."""
    times = [(20, 30, 10, 90), (25, 20, 30, 50), (40, 45, 20, 55), (10, 15, 5, 19), (60, 70, 55, 120), (35, 20, 20, 41)]
    layers = tuple(Layer(f"l{i}", *row, 100 + i, 50, 1000, 400) for i, row in enumerate(times))
    return Profile("estimated: by hand", "uneven", layers, Link(3.0, 100.0), 4.0, None, {}, {})


def equal() -> Profile:
    """The step on which `zbsolve show systems` shows everything."""
    layers = tuple(Layer(f"l{i}", 600, 600, 600, 1200, 300, 300, 0, 0) for i in range(RANKS))
    return Profile("estimated: by hand", "equal", layers, Link(0.0, 1000.0), 4.0, None, {}, {})


def solved(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    step = ["--ranks", str(RANKS), "--microbatches", str(MICROBATCHES)]
    assert main(["solve", str(path), *step, *options, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("profile", [uneven(), equal(), replace(uneven(), rank_factors=(1.0, 1.3, 1.0, 1.0))])
def test_all_commands_agree_to_the_us(profile: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    profile.save(path)
    by_method = solved(path, capsys, "--method", "1f1b")
    assert by_method == solved(path, capsys, "--method", "1f1b", "--fused") | {"seconds": by_method["seconds"]}
    value = by_method["value"]
    assert by_method["solver"] == "1f1b"
    said = meaning(profile, RANKS, MICROBATCHES)[0]
    assert said.startswith(f"1F1B on {RANKS} ranks with {MICROBATCHES} microbatches takes {format_time(value)}, ")
    points = frontier(profile, Step(RANKS, MICROBATCHES), points=2, effort=0.01)
    named = {one.name: one.value for one in points.named}
    assert named["1f1b"] == value
    split = solved(path, capsys, "--method", "1f1b-split")
    assert split["solver"] == "1f1b-split"
    raced = solved(path, capsys, "--method", "1f1b,1f1b-split")
    compared = {row["name"]: row["value"] for row in raced["schedules"]}
    assert compared == {"1f1b": value, "1f1b-split": split["value"]}
    assert named["1f1b-split"] == split["value"] == solved(path, capsys, "--method", "1f1b", "--no-fused")["value"] < value


def test_the_table_of_systems_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    equal().save(path)
    assert main(["show", "systems", "--ranks", str(RANKS), "--microbatches", str(MICROBATCHES), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name in ("1f1b", "1f1b-split"):
        assert rows[name]["makespan"] == solved(path, capsys, "--method", name)["value"]


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 9), (8, 16)])
@pytest.mark.parametrize("times", [(1, 1, 1), (3, 4, 2), (5, 6, 3)])
def test_a_split_backward_waits_for_b_alone(p: int, m: int, times: tuple[int, int, int]) -> None:
    """The rank before needs B, not W: the pipeline fills with F and drains with B."""
    F, B, W = times
    problem = pipeline([F] * p, [B] * p, [W] * p, microbatches=m)
    assert preset("1f1b-split", problem).timeline().makespan - problem.work == (p - 1) * (F + B)


def test_names_follow_the_backward() -> None:
    """The name 1f1b goes on to give its order on a split backward; what comes out says its right name."""
    split, fused = pipeline([2] * 3, [2] * 3, [1] * 3, microbatches=4), pipeline([2] * 3, BW=[3] * 3, microbatches=4)
    assert preset("1f1b", split).order == preset("1f1b-split", split).order
    assert [name_on("1f1b", one) for one in (split, fused)] == ["1f1b-split", "1f1b"]
    certificate = solve(split, method="1f1b", effort=0.01).certificate
    assert certificate is not None
    assert certificate.solver == "1f1b-split"
    with pytest.raises(BadInput, match="1f1b-split: needs B and W apart; with one backward BW the same order is 1f1b"):
        preset("1f1b-split", fused)
    for problem, name, other in ((split, "1f1b-split", "1f1b"), (fused, "1f1b", "1f1b-split")):
        names = [one for one, _ in presets_of(problem)]
        assert name in names
        assert other not in names


def test_a_named_step_keeps_its_stages() -> None:
    profile = uneven()
    for partition in ("balanced", "alpa", "equal", None):
        step = Step(2, 4, partition=partition)
        layers = {step_for(name, profile, step).problem(profile).layers for name in ("1f1b", "zb-h1")}
        assert layers == {step.problem(profile).layers}
