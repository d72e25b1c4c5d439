"""Work beside the step: the caller's function is called at its moments, and gradients stay those of the unsplit model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zbsolve import BadInput, Schedule, solve
from zbsolve.build import Work, with_work
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.exec.run.launch import run_local

from ..support.profiles import equal_layers
from ..support.work_model import HANDING, SOURCE


def scheduled() -> Schedule:
    """Two pieces on rank 0, before its first F; one on rank 1, behind its last gradients."""
    problem = with_work(equal_layers(4).problem(2, 3), Work(0, 40, 2, before=0), Work(1, 30, after=1))
    return solve(problem, effort=0.05)


@pytest.fixture
def spec(tmp_path: Path) -> str:
    """The model's file, and the function in it."""
    (tmp_path / "worked.py").write_text(SOURCE)
    return f"{tmp_path / 'worked.py'}:pipeline"


@pytest.mark.usefixtures("forked")
def test_ranks_do_it_and_train_as_the_whole_model(spec: str, tmp_path: Path) -> None:
    trace = run_local(scheduled(), spec, steps=2, warmup=0, check=True)
    assert {rank: json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)} == {
        0: [[0, 3], [1, 3]] * 3,  # two steps, and the one that is checked
        1: [[2, 3]] * 3,
    }
    first = trace.steps[0]
    assert first["0J1"][1] <= first["0F0"][0]
    assert first["1W2"][1] <= first["1J2"][0]


def test_one_process_does_it_for_all_ranks(spec: str, tmp_path: Path) -> None:
    run_on_one_device(scheduled(), spec, Options(steps=1, warmup=0, check=True))
    assert json.loads((tmp_path / "0.json").read_text()) == [[0, 3], [1, 3]] * 2  # a step, and the one that is checked


@pytest.mark.usefixtures("forked")
def test_pieces_take_what_others_made(tmp_path: Path) -> None:
    """Rank 1's pieces hand a matrix each to rank 0, of different shapes, and that to a copy engine's of its own; a teacher's
    pieces come before the F of their microbatches. So in sequences that are cut into slices, where numbers are no others."""
    (tmp_path / "handing.py").write_text(HANDING)
    works = (
        Work(1, 40, 2),
        Work(0, 2, 2, takes=0, comm=3),
        Work(0, 20, 2, takes=1, stream="d2h"),
        Work(0, 9, 3, before=0, microbatches=(2, 0, 1)),
    )
    profile = equal_layers(4)
    layers = tuple(replace(one, attention_F=2.0, attention_B=4.0, kv_bytes=8) for one in profile.layers)
    for slices in (1, 2):
        problem = with_work(replace(profile, layers=layers).problem(2, 3, slices=slices), *works)
        trace = run_local(solve(problem, effort=0.05), f"{tmp_path / 'handing.py'}:pipeline", steps=1, warmup=0)
        step, said = trace.steps[0], (tmp_path / "0.txt").read_text().split()
        assert set(said) == {"2:2x3:0", "3:3x3:1", "4:2x3:2", "5:3x3:3", "6", "7", "8"}
        assert all(step[f"0J{piece}"][1] <= step[f"0F{number}"][0] for piece, number in ((6, 2), (7, 0), (8, 1)))
        (tmp_path / "0.txt").unlink()


def test_without_a_function_it_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bare.py"
    path.write_text(SOURCE.partition("def work")[0])
    with pytest.raises(BadInput, match=r"work: rank 0 has 2 passes J, and no function for them: give Pipeline\(work=\)"):
        run_on_one_device(scheduled(), f"{path}:pipeline", Options(steps=1, warmup=0))
