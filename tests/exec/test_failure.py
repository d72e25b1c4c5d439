"""Ranks that die, hang, raise, run out of memory or got another schedule; NaN and inf; signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zbsolve.cli import main
from zbsolve.exec import Pipeline, RunFailed
from zbsolve.exec.run.launch import run_local
from zbsolve.exec.transport.peers import explained
from zbsolve.util.errors import LostRank, one_line
from zbsolve.util.machine import child_environment

from ..support.exec_failing import MODEL, failing
from ..support.exec_ranks import LIMIT, forking, on_ranks, torchrun
from ..support.exec_tools import a_problem, random_schedule


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture
def schedule(tmp_path: Path) -> str:
    path = tmp_path / "schedule.json"
    random_schedule(a_problem((0, 1), 4, layers=4)).save(path)
    return str(path)


# --- as a library, in anybody's loop: three ranks, one process group, no launcher ---

SILENT = 10  # seconds until a rank is lost: a busy machine holds one up for a part of one
HANGS: dict[str, dict[str, Any]] = {
    "rank 1": {"what": "hang", "rank": 1, "layer": 2},
    "rank 2": {"what": "hang", "rank": 2, "layer": 3},
    "0 gathers": {"what": "hang", "ranks": 4, "rank": 2, "shard": 0},
    "2 gathers": {"what": "hang", "ranks": 4, "rank": 2, "shard": 2},
    "evaluation": {"what": "hang", "rank": 1, "evaluate": True},
    "end of the step": {"what": "hang late", "rank": 1},
}


@cache
def hanging() -> dict[str, Future[list[Any]]]:
    """What ranks say where one hangs. They do nothing but wait for seconds, so these jobs run beside other tests."""
    forking()
    pool = ThreadPoolExecutor(len(HANGS))
    return {name: pool.submit(failing, timeout=SILENT, **how) for name, how in HANGS.items()}


@pytest.mark.parametrize(("what", "why"), [("die", "the connection broke"), ("hang", f"nothing for {SILENT} s")])
@pytest.mark.parametrize("rank", [1, 2])
@pytest.mark.slow
def test_survivors_name_the_rank_that_is_lost_and_the_pass_that_waited(what: str, why: str, rank: int) -> None:
    hangs = what == "hang"
    said = hanging()[f"rank {rank}"].result() if hangs else failing(what, rank=rank, layer=2 if rank == 1 else 3)
    assert said[rank] is None
    for other in {0, 1, 2} - {rank}:
        assert said[other]["kind"] == "LostRank"
        text = said[other]["text"]
        assert re.match(rf"rank {rank} is lost: rank \d, pass \d[FB]\d: (waiting for|sending) .*rank {rank}: {why}", text)
        assert f"rank {other}, pass " in text
        assert "\n" not in text


@pytest.mark.parametrize("gathers", [0, 2])
@pytest.mark.parametrize(
    ("what", "why"), [("die", "the connection broke"), ("throw", "the connection broke"), ("hang", "too long")]
)
@pytest.mark.slow
def test_all_end_when_a_rank_is_lost_while_parameters_are_gathered(what: str, why: str, gathers: int) -> None:
    """Ranks 0 and 2 are a pipeline, 1 and 3 the other; 2 and 3 share stage 1. Each names ranks of its own pipeline."""
    hangs = what == "hang"
    said = hanging()[f"{gathers} gathers"].result() if hangs else failing(what, ranks=4, rank=2, shard=gathers)
    assert (said[2] is None) == (what != "throw")
    other = rf"rank 1, pass 1(AG|F)\d: waiting for the parameters of stage 1: {why}"
    assert re.fullmatch(other, said[3]["text"])
    for rank, cause in ((0, "rank 1"), (1, other)):
        assert said[rank]["kind"] == "LostRank"
        assert what == "hang" or re.match(cause, said[rank]["text"])  # who hangs is waited for by all at once
        assert "rank 0, pass 0" in said[rank]["text"]
        assert "\n" not in said[rank]["text"]


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("throw", "ValueError: on purpose"),
        ("memory", "out of memory: tried to allocate 1125899906842624 bytes"),
        ("python memory", "out of memory"),
        ("object", r"the output of layer \d has a object: what can be handed on are tensors and plain values"),
        ("structure", r"makes \(\(.*\) torch.float32, \(.*\) torch.float32\), not \(.*\) torch.float32 as before.*"),
    ],
)
def test_all_ranks_say_what_one_of_them_raised(what: str, why: str) -> None:
    said = failing(what, rank=1)
    assert re.fullmatch(rf"rank 1, pass 1F\d: {why}", said[1]["text"])
    assert said[1]["kind"] == "RunFailed"
    assert not any(one["chained"] for one in said)  # the line comes alone; where it arose is there for who asks
    assert what != "throw" or "ValueError: on purpose\n" in said[1]["details"]
    for other in (0, 2):
        assert said[other]["text"].startswith(f"{said[1]['text']}; then rank {other}, ")
        assert said[other]["kind"] == "LostRank"


WRONG = r"\(5, 4\) does not split into 3 microbatches of equal size: .*"


def test_all_ranks_refuse_a_batch_of_which_the_inputs_do_not_fit() -> None:
    """Nothing has run, and the next batch does."""
    for what, rank in (("batch", 0), ("batches", None)):
        said = [one["text"] for one in failing(what, rank=rank)]
        assert re.fullmatch(f"BadInput: inputs: {WRONG}", said[0]["refused"])
        assert said[1]["refused"] == "BadInput: step: not run, because ranks of the first stage refuse their inputs"
        assert said[2]["refused"].startswith("BadInput: " + ("targets" if what == "batches" else "step: not run"))
        assert [one["then"] for one in said] == [""] * 3


def loaded(rank: int, seeds: list[int]) -> dict[str, Any]:
    """What this rank is told whose loader has its seed of `seeds`, by the form of its batch; the numbers in what begins each
    of four steps."""
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seeds[rank]))
    forms = {"plain": x, "cut": list(x.chunk(4)), "bfloat16": {"x": x.bfloat16(), "name": "a"}, "none": None if rank else x}
    said, sizes = {}, list[int]()
    more = {"part": dict.fromkeys(range(4 if rank == 0 else 3), x[:2]), "targets": torch.ones(8, 4)}
    for name, form in (forms | more).items():
        first = nn.Sequential(Float(), nn.Linear(4, 4)) if name == "bfloat16" else nn.Linear(4, 4)
        schedule = random_schedule(a_problem((0, 1), 4, layers=2))
        runner = Pipeline([first, nn.Linear(4, 4)], schedule, loss=nn.functional.mse_loss)
        tell = runner.mailbox.tell
        runner.mailbox.tell = lambda tensor, *to, tell=tell: sizes.append(len(tensor)) or tell(tensor, *to)  # type: ignore
        with warnings.catch_warnings(record=True) as caught:
            for _ in range(4):
                runner.step(x if rank and name == "cut" else form, x if name == "targets" else torch.ones(8, 4))
        said[name] = [str(one.message) for one in caught]
    return {"said": said, "sizes": sizes}


class Float(nn.Module):
    """Takes a dict."""

    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return given["x"].float()


def test_a_rank_whose_loader_has_another_seed_is_told() -> None:
    """In the first two steps, once; what ranks tell each other is longer by two numbers there, and not later."""
    jobs = [("loaded", [5, 5]), ("loaded", [5, 6])]
    (alike, first), (same, other) = on_ranks(2, __name__, jobs)
    assert [set(map(len, one["said"].values())) for one in (alike, same, first)] == [{0}] * 3
    assert {name: len(said) for name, said in other["said"].items()} == {
        "plain": 1,
        "cut": 1,
        "bfloat16": 1,
        "none": 0,
        "part": 0,
        "targets": 1,
    }
    for form, what in (("plain", "inputs"), ("targets", "targets")):
        told = f"rank 1 was given other {what} than rank 0, so its batch may be another one: give loaders one seed"
        assert other["said"][form][0].startswith(told)
    assert first["sizes"] == [6, 6, 4, 4] * 6


def test_targets_that_do_not_fit_end_the_step_on_all_ranks() -> None:
    """The others run already."""
    said = [one["text"]["refused"] for one in failing("batch", rank=2)]
    assert re.fullmatch(f"BadInput: targets: {WRONG}", said[2])
    for rank in (0, 1):
        assert re.match(rf"LostRank: rank 2, batch: targets: {WRONG}; then rank {rank}, ", said[rank])


def test_the_first_cause_stays_where_a_loop_goes_on() -> None:
    """The rank that failed asks for more at once, while others still read why it stopped."""
    said = [one["text"] for one in failing("throw", rank=1, again=["step", "evaluate", "load", "save"])]
    cause = said[1]["first"]
    assert re.fullmatch(r"rank 1, pass 1F\d: ValueError: on purpose", cause)
    for rank, one in enumerate(said):
        assert one["first"] == cause or one["first"].startswith(f"{cause}; then rank {rank}, ")
        told = f"this pipeline failed before: {one['first']}; make a new process group and a new pipeline"
        assert one["again"] == [f"RunFailed: {told}"] * 4


def test_another_schedule_is_said_by_all() -> None:
    said = failing("schedule", rank=1)
    assert said[0] == said[1] == said[2]
    assert re.fullmatch(r"rank 1 has another schedule than rank 0 \(digests \w{16} and \w{16}\)", said[0]["text"])
    assert said[0]["kind"] == "BadInput"


def test_a_rank_that_cannot_build_is_named_by_all() -> None:
    said = failing("build", rank=2)
    assert said[2] == {"kind": "ValueError", "text": "no such weights"}
    assert said[0] == said[1]
    assert re.fullmatch(r"rank 2, building: ValueError at .*exec_failing.py:\d+: no such weights", said[0]["text"])
    said = failing("no loss", rank=0)
    assert said[2] == {"kind": "BadInput", "text": "Pipeline: rank 2 has the last stage, and needs a loss"}
    assert said[0] == said[1] == {"kind": "BadInput", "text": f"rank 2: {said[2]['text']}"}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("throw", r"rank 1, pass 1F\d: ValueError: on purpose"),
        ("die", "rank 1 is lost"),
        pytest.param("hang", "rank 1 is lost", marks=pytest.mark.slow),
        ("nan", r"rank 1, pass 1F\d: its activation has 8 NaN among 8 numbers"),
    ],
)
def test_an_evaluation_fails_as_a_step_does(what: str, text: str) -> None:
    how = {"rank": 1, "evaluate": True, "watch": what == "nan"}
    said = hanging()["evaluation"].result() if what == "hang" else failing(what, **how)
    for rank, one in enumerate(said):
        if rank != 1 or what in ("throw", "nan"):
            assert re.match(text, one["text"])


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("nan", r"rank 1, pass 1F\d: its activation has 8 NaN among 8 numbers"),
        ("nan back", r"rank 1, pass 1B\d: the gradient of its input has 8 (NaN|inf) among 8 numbers"),
        ("nan weight", r"rank 1, pass 1W\d: the gradient of layer 2 inner.weight has .* among 16 numbers"),
    ],
)
def test_watch_names_the_pass_that_made_it(what: str, text: str) -> None:
    said = failing(what, rank=1, watch=True)
    assert re.fullmatch(text, said[1]["text"]), said[1]
    for other in (0, 2):
        assert said[other]["text"].startswith(f"{said[1]['text']}; then rank {other}, ")


@pytest.mark.slow
def test_a_rank_that_hangs_at_the_end_of_a_step() -> None:
    said = hanging()["end of the step"].result()
    assert said[1] is None
    for other in (0, 2):
        assert re.match(rf"rank 1 is lost: rank {other}, end of the step: ", said[other]["text"]), said


def test_without_watch_it_is_a_loss_like_others() -> None:
    assert [one["text"] for one in failing("nan", rank=1)] == ["nan"] * 3


def test_who_is_lost_follows_from_who_waited_for_whom() -> None:
    notes: dict[int, Any] = {
        0: {"text": "rank 0, pass 0B0: a", "lost": True, "peer": 1, "gone": True, "time": 3.0},
        1: {"text": "rank 1, pass 1B0: b", "lost": True, "peer": 2, "gone": False, "time": 2.0},
    }
    found = explained(0, notes, 4)
    assert (str(found), found.peer) == ("rank 2 is lost: rank 1, pass 1B0: b; then rank 0, pass 0B0: a", 2)
    cause = {"text": "rank 3, pass 3F1: c", "lost": False, "peer": None, "gone": False, "time": 1.0}
    found = explained(0, {**notes, 3: cause}, 4)
    assert (str(found), found.peer) == ("rank 3, pass 3F1: c; then rank 0, pass 0B0: a", 3)
    alone = {0: {**notes[0], "peer": None}}
    assert str(explained(0, alone, 2)) == "rank 1 is lost: rank 0, pass 0B0: a"
    assert str(explained(0, alone, 3)) == "rank 0, pass 0B0: a"  # nobody knows
    assert str(explained(0, {0: notes[0], 1: {**notes[1], "peer": 0}}, 2)) == "rank 0, pass 0B0: a"


def test_one_line() -> None:
    assert one_line(MemoryError()) == "out of memory"
    assert one_line(ValueError("a\n  b")) == "ValueError: a b"
    assert one_line(LostRank("text")) == "text"


# --- with the launcher ---


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("die", r"rank 1, pass 1F\d: the process died of SIGKILL"),
        ("throw", r"rank 1, pass 1F\d: ValueError at .*own.py:20: on purpose"),
        ("hang", r"rank 1, pass 1F\d: hangs, not done after 10 s \(rank 0, pass 0B\d: .*: nothing for 10 s\)"),
    ],
)
@pytest.mark.slow
def test_a_rank_that_fails_ends_all_in_one_line(own: str, what: str, text: str, request: pytest.FixtureRequest) -> None:
    """However long starting takes: time is counted since a rank last went on."""
    request.getfixturevalue("monkeypatch").setattr("zbsolve.exec.run.launch.LATE_SECONDS", 60.0)
    if what != "hang":  # which is of processes that take their time to start
        request.getfixturevalue("forked")
    planned = random_schedule(a_problem((0, 1), 4, layers=4))
    with pytest.raises(RunFailed) as caught:
        run_local(planned, f"{own}:{what}", timeout=SILENT if what == "hang" else 300)
    assert re.fullmatch(text, str(caught.value)), caught.value
    assert not workers(os.getpid())


@pytest.mark.slow
def test_nothing_stays_of_what_a_rank_leaves(own: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a search beside rank 0, which ends at once where another rank fails."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with pytest.raises(RunFailed, match="rank 1, pass 1F"):
        run_local(random_schedule(a_problem((0, 1), 4, layers=4)), f"{own}:leave")
    assert not list(tmp_path.glob("zbsolve-*"))


def test_a_loss_that_is_no_number_fails_the_check(
    own: str, schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    step = ["run", schedule, "--model", f"{own}:nan", "--one-device", "cpu", "--steps", "1", "--warmup", "0"]
    assert main([*step, "--check"]) == 1
    assert re.search(r"^check: WRONG: no finite number: the loss of step 0 is nan \(over \d", capsys.readouterr().out, re.M)
    out = tmp_path / "trace.json"
    assert main([*step, "--watch", "-o", str(out)]) == 1
    assert re.fullmatch(r"zbsolve run: rank 1, pass 1F\d: its loss is nan\n", capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.slow
def test_a_signal_to_the_launcher_ends_all(
    own: str, schedule: str, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    command = [sys.executable, "-m", "zbsolve", "run", schedule, "--model", f"{own}:hang", "--local"]
    environment = {**child_environment(), "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)
    try:
        until = time.monotonic() + LIMIT
        while not list(tmp_path.glob("zbsolve-run-*/said.1")) or len(workers(process.pid)) < 2:
            assert time.monotonic() < until
            assert process.poll() is None
            time.sleep(0.02)
        children = workers(process.pid)
        process.send_signal(number)
        _, said = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == code
    assert said.splitlines()[-1] == "zbsolve run: interrupted"
    assert not list(tmp_path.glob("zbsolve-*"))
    until = time.monotonic() + LIMIT  # a rank that the signal met while it was being started ends by itself, its parent gone
    while [child for child in children if Path(f"/proc/{child}").exists()]:
        assert time.monotonic() < until
        time.sleep(0.02)


# --- with torchrun ---


def test_torchrun_with_other_schedules(own: str, tmp_path: Path) -> None:
    for rank in range(2):
        random_schedule(a_problem((0, 1), 2, layers=4), rank).save(tmp_path / f"{rank}.json")
    done = torchrun(2, "run", str(tmp_path / "RANK.json"), "--model", f"{own}:good")
    assert done.returncode != 0
    assert re.search(r"^zbsolve run: rank 1 has another schedule than rank 0 \(digests", done.stderr, re.M), done.stderr


@pytest.mark.slow
def test_torchrun_with_a_rank_that_hangs(own: str, schedule: str, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    done = torchrun(2, "run", schedule, "--model", f"{own}:hang", "--timeout", str(SILENT), "-o", str(out))
    assert done.returncode != 0
    assert re.search(r"^zbsolve run: rank 1 is lost: rank 0, pass 0B\d: .*: nothing for 10 s$", done.stderr, re.M), (
        done.stderr
    )
    assert not out.exists()


def workers(parent: int) -> list[int]:
    """The ranks that a process started and that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
            words = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z" and b"zbsolve.exec.run.launch" in words:
            found.append(int(path.parent.name))
    return found
