"""What ranks print is told as it comes, with the rank's name; long runs say how far they are, and may be ended."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zbsolve import Trace
from zbsolve.cli import main
from zbsolve.exec.run import job
from zbsolve.exec.run.launch import Said, path_of
from zbsolve.util.machine import child_environment

from ..support.exec_tools import a_problem, random_schedule

MODEL = """
import sys, warnings
import torch
from torch import nn

class Talks(nn.Module):
    def forward(self, x):
        print("a line of the model")
        warnings.warn("a warning of the model")
        sys.stdout.write("no end")
        return x

def pipeline():
    x = torch.randn(2, 4)
    return [nn.Linear(4, 4), Talks(), nn.Linear(4, 4), Talks()], (x, x), nn.functional.mse_loss
"""
# How far training is, not only after five seconds; and the last step may take as long as it wants.
SOON = "from zbsolve.exec.run import job, launch; job.TOLD_SECONDS, launch.STOP_SECONDS = 0.3, 300.0"


def test_lines_are_told_once_when_they_are_whole(tmp_path: Path) -> None:
    told: list[str] = []
    for rank in range(4):
        path_of(tmp_path, rank).write_bytes(b"")
    said = Said(tmp_path, 4, {"pp": 2, "dp": 2}, told.append)
    with open(path_of(tmp_path, 0), "ab") as first, open(path_of(tmp_path, 3), "ab") as last:
        first.write(b"one\n\ntw")
        last.write(b"one\nthree \xff\n")
        first.flush()
        last.flush()
        said.hear()
        assert told == ["rank 0 (dp=0): one", "rank 1 (dp=1): three \N{REPLACEMENT CHARACTER}"]
        first.write(b"o")
    said.hear()
    assert len(told) == 2
    said.hear(last=True)
    assert told[2:] == ["rank 0 (dp=0): two"]


def test_a_run_in_this_process_says_how_far_it_is(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "TOLD_SECONDS", 0.0)
    schedule = tmp_path / "s.json"
    random_schedule(a_problem((0, 1), 2)).save(schedule)
    assert main(["run", str(schedule), "--model", "mlp-tiny", "--steps", "2", "--warmup", "1", "--one-device"]) == 0
    assert "step 2 of 4: loss " in capfd.readouterr().err


@pytest.mark.slow
def test_what_a_model_prints_is_shown_and_an_interrupt_keeps_the_steps_that_were_done(tmp_path: Path) -> None:
    path, schedule, out = tmp_path / "talks.py", tmp_path / "s.json", tmp_path / "trace.json"
    path.write_text(f"{MODEL}\n{SOON}")
    random_schedule(a_problem((0, 1), 2, layers=4)).save(schedule)
    command = [sys.executable, "-m", "zbsolve", "run", str(schedule), "--model", f"{path}:pipeline", "--local"]
    command += ["--steps", "1000000", "--warmup", "1", "-o", str(out)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment()
    ) as process:
        try:
            assert process.stderr is not None
            lines = [""]
            while "step " not in lines[-1]:
                lines.append(process.stderr.readline())
                assert lines[-1]
            process.send_signal(signal.SIGINT)
            said, told = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0
    lines += told.splitlines()
    assert "a line of the model" not in said
    assert sum(line.rstrip().endswith(": a line of the model") for line in lines) == 1
    assert sum("UserWarning: a warning of the model" in line for line in lines) == 1
    assert any(line.startswith("rank ") and "no end" in line for line in lines)
    assert "zbsolve run: the step that runs is the last one\n" in told
    trace = Trace.load(out)
    assert 1 <= len(trace.steps) == len(trace.losses) < 1_000_000
    assert trace.facts["steps"] == len(trace.steps)
    assert f"{len(trace.steps)} steps on 2 ranks" in said
