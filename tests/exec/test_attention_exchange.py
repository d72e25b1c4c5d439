"""Attention that ranks make for each other: what `solve` finds runs, whatever comes between the parts of a pass.

Gradients in random orders are in test_slices.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from zbsolve import BadInput, Profile, Schedule, pipeline, preset
from zbsolve.build import AttentionExchange
from zbsolve.cli import main
from zbsolve.exec.backward.layer_split import Loss
from zbsolve.exec.lowering import lower
from zbsolve.models.presets import GptSizes, gpt

from ..support.exec_tools import random_schedule, run_here

MODEL = f"{__name__}:four_blocks"


def comes_in_parts(schedule: Schedule, helper: str) -> bool:
    """Does a pass come between the parts of one of the two passes that the helper's stage has of its slice?"""
    stage, part = helper.split("FH" if "FH" in helper else "BH")
    last = ("F", "BW")
    (home,) = {stream for stream, names in schedule.order.items() if f"{stage}F{part}" in names}
    order = schedule.order[home]
    for begin, behind, end in (("FQ", "FA", last[0]), ("BQ", "BA", last[1])):
        if (first := f"{stage}{begin}{part}") in order:
            at = order.index(first)
            if order[at : at + 3] != (first, f"{stage}{behind}{part}", f"{stage}{end}{part}"):
                return True
    return False


def test_a_rank_goes_on_where_what_it_helps_comes_in_parts() -> None:
    """In SlimPipe's order no pass comes between parts, so helpers serve until what they help is over. In other orders one
    may, and wait for what a helper's rank does next: two passes that each come between the other's parts."""
    times, how = [[10, 12, 14, 16]] * 4, {"layers": (1, 1, 1, 1), "attention_exchange": AttentionExchange(2, 2)}
    problem = pipeline(times, BW=times, microbatches=2, slices=4, **how)
    schedule = preset("slimpipe", problem)
    assert not any(action.goes_on for program in lower(schedule) for action in program.actions)
    for seed in range(3):
        one = random_schedule(problem, seed)
        going = {action.name for program in lower(one) for action in program.actions if action.goes_on}
        assert going == {name for name in problem.names if "H" in name and comes_in_parts(one, name)} != set()
    with pytest.raises(BadInput, match="one device: passes for another rank need a process for each rank"):
        run_here(schedule, gpt("small", 0, GptSizes(width=8, blocks=2, heads=2, batch=2, length=12)))


def four_blocks() -> tuple[list[nn.Module], tuple[Tensor, Tensor], Loss]:
    """A model for `--model`."""
    model = gpt("small", 0, GptSizes(width=16, blocks=4, heads=2, batch=2, length=16))
    return model.build(), model.batch(0, 0), model.loss


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As if its sequences were long: most of a layer's time is attention's."""
    path = str(tmp_path_factory.mktemp("exchange") / "profile.json")
    assert main(["profile", MODEL, "--estimate", "a100", "-o", path]) == 0
    found = Profile.load(path)
    times = {"F": 4000.0, "B": 6000.0, "W": 2000.0, "BW": 8000.0, "X": 4000.0, "attention_F": 3000.0, "attention_B": 6000.0}
    replace(found, layers=tuple(replace(one, **times) if one.attention_F else one for one in found.layers)).save(path)
    return path


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    ("solved", "run", "shared"),
    [
        (["--fused", "--recompute", "all"], [], ""),
        (["--placement", "loop"], [], ""),
        (["--fused"], [], "rank"),
        (["--fused", "--vocabulary", "sharded"], ["--emulate", "schedule"], ""),
    ],
    ids=["recompute", "loop", "shared", "vocabulary"],
)
@pytest.mark.slow
def test_what_the_default_search_finds_runs(
    profile: str, solved: list[str], run: list[str], shared: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From command to command; ranks whose devices are emulated wait for each other's parts, too."""
    path, given = str(tmp_path / "schedule.json"), Profile.load(profile)
    replace(given, link=replace(given.link, shared=shared)).save(profile := str(tmp_path / "profile.json"))
    step = ["--ranks", "2", "--microbatches", "2", "--slices", "4", "--attention-exchange", "--effort", "0.05"]
    assert main(["solve", profile, *step, *solved, "-o", path]) == 0
    assert "passes hand attention over" in capsys.readouterr().out
    passes = Schedule.load(path).problem.passes
    assert passes.are("FH", "BH").any()
    assert passes.are("FS", "BR").any() == bool(shared)
    how = ["--model", MODEL, "--local", "--steps", "1", "--warmup", "0", "--check", *run]
    assert main(["run", path, *how, "-o", str(tmp_path / "trace.json")]) == 0
    assert "check: right" in capsys.readouterr().out
