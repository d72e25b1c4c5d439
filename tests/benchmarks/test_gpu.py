"""`make gpu` where there is no GPU: what a part that fails leaves of the others, and each part in its smallest form."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from benchmarks import demo, gpu, gpu_ranks, harness, splits  # noqa: E402
from benchmarks.harness import ENDING_SECONDS, RESULTS, TABLES, Part, failures, longest, results_of  # noqa: E402
from zbsolve.cli.app import parser  # noqa: E402
from zbsolve.exec.graphs.auto import parts_by_name  # noqa: E402
from zbsolve.exec.run import host  # noqa: E402
from zbsolve.exec.transport.wires import came_true  # noqa: E402
from zbsolve.models.by_name import load  # noqa: E402

from ..support.exec_ranks import ForkedModule  # noqa: E402

PARTS = "tests.support.parts"
without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture
def note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of a part that hangs. Once it is there, 1,000 s are over by the clock of the harness."""
    path = tmp_path / "note"
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000 * path.exists(), sleep=time.sleep)
    monkeypatch.setattr(harness, "time", clock)
    return path


@pytest.mark.slow
def test_parts_that_fail_or_hang_leave_the_others_alone(note: Path, capfd: pytest.CaptureFixture[str]) -> None:
    parts = [
        Part("fails", f"{PARTS}:fails", 300),
        Part("hangs", f"{PARTS}:hangs", 300, {"note": str(note)}),
        Part("finds wrong", f"{PARTS}:finds_wrong", 300),
        Part("works", f"{PARTS}:works", 300, {"number": 7}),
    ]
    found = results_of(parts)
    assert list(found) == [part.name for part in parts]
    assert found["works"]["found"] == {"number": 7}
    assert found["finds wrong"]["found"]["number"] == 2
    assert all(row["limit"] == 300 and row["seconds"] > 0 for row in found.values())
    assert failures(found) == [
        "fails: exit code 1: zbsolve.util.errors.BadInput: stage 3: no such thing",
        "hangs: not done after 300 s",
        "finds wrong: a is not b",
        "finds wrong: c is not d",
    ]
    assert "Traceback" in capfd.readouterr().err  # of the one that failed, for whoever reads along
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


@pytest.mark.slow
def test_parts_without_results_are_errors_and_what_is_found_so_far_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[list[str]] = []
    monkeypatch.setattr(harness, "STOPPED", SimpleNamespace(is_set=lambda: bool(kept)))  # as by Ctrl-C, behind two parts
    parts = [Part(name, f"{PARTS}:{name}", 300, beside=True) for name in ("ends_early", "garbage")]
    found = results_of([*parts, Part("works", f"{PARTS}:works", 300)], lambda rows: kept.append(list(rows)))
    assert kept == [["ends_early", "garbage"], ["ends_early", "garbage", "works"]]
    assert found["ends_early"]["error"].startswith("no results: a library")
    assert len(found["ends_early"]["error"]) < 1100
    assert "no text" in found["garbage"]["error"]
    assert found["works"]["error"] == "not begun: no time was left"


@pytest.mark.slow
def test_what_a_killed_part_leaves_running_is_stopped_and_no_part_goes_on_behind_the_end(
    note: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    control = tmp_path / host.CONTROL
    control.write_text(f"#!/bin/sh\ncat > {told}; echo $CUDA_MPS_PIPE_DIRECTORY >> {told}\n")
    control.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(harness, "ENDING_SECONDS", 0.5)
    parts = [Part("leaves", f"{PARTS}:leaves_a_server", 300, {"note": str(note)}), Part("works", f"{PARTS}:works", 300)]
    found = results_of(parts, until=time.monotonic() + 600)
    assert found["leaves"]["error"] == "not done after 300 s"
    assert found["works"]["error"] == "not begun: no time was left"
    stop, folder = told.read_text().splitlines()
    assert stop == "quit -t 2"
    assert not Path(folder).exists()  # it lay in the part's


@pytest.mark.slow
def test_ctrl_c_while_kernels_compile_alone_stops_them_and_keeps_their_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, note = threading.Event(), tmp_path / "note"
    for module in (gpu, harness):
        monkeypatch.setattr(module, "STOPPED", stopped)
    monkeypatch.setattr(gpu, "all_parts", lambda *_: [Part("kernels", f"{PARTS}:hangs", 300, {"note": str(note)})])

    def press() -> None:
        came_true(note.exists, 300.0)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press).start()
    found = TABLES["gpu"].measure(tmp_path)
    assert found["failed"] == ["kernels: stopped", "stopped before its end"]


def test_all_parts_have_less_than_twelve_minutes() -> None:
    parts = gpu.all_parts("cuda", tiny=False)
    before, kernels, after = gpu.in_turn(parts)
    assert [part.name for part in kernels] == ["kernels"]
    assert max(longest(before), longest(kernels)) + longest(after) <= gpu.ALL_SECONDS <= 720 - 2 * ENDING_SECONDS
    for part in parts:
        assert callable(getattr(gpu, part.work.partition(":")[2]))
    assert len(load(gpu.PROFILED).layers) >= 4


@without_gpu
def test_without_a_gpu_one_line_says_so_and_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        TABLES["gpu"].main(["--output", str(tmp_path)])
    assert end.value.code == 2
    assert list(tmp_path.iterdir()) == []
    told = capsys.readouterr()
    assert told.out == ""
    assert len(told.err.splitlines()) == 1
    assert "sees no CUDA device here: nothing was run" in told.err


def test_numbers_of_a_cpu_are_not_kept_as_a_gpus() -> None:
    before = sorted(RESULTS.iterdir())
    with pytest.raises(SystemExit) as end:
        TABLES["gpu"].main(["--device", "cpu", "--tiny"])
    assert end.value.code == 2
    assert sorted(RESULTS.iterdir()) == before


@pytest.mark.slow
def test_the_file_says_what_ran_and_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("device", "copies"):
        monkeypatch.setitem(gpu.SECONDS, part, 300.0)  # it imports torch, which takes long on a loaded machine
    chosen = ["--parts", "device", "copies"]
    found = TABLES["gpu"].main(["--device", "cpu", "--tiny", *chosen, "--output", str(tmp_path)])
    body = json.loads((tmp_path / "gpu.json").read_text())
    assert body["results"] == found
    assert body["machine"]["cpu"]
    assert found["parts"]["device"]["found"]["torch"] == torch.__version__
    (line,) = found["failed"]
    assert line.endswith("BadInput: copies between host and device need a GPU")
    assert found["parts"]["copies"].keys() == {"seconds", "limit", "error", "said"}
    assert "Traceback" in found["parts"]["copies"]["said"][0]


@pytest.mark.parametrize("name", ["layers", "graph", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_splits_are_held_against_eager_mode(name: str) -> None:
    found = gpu.split("cpu", True, name)
    assert found["wrong"] == []
    for row in found["rows"].values():
        assert {"output 1", "input gradient 0", "gradient of 0.up.weight"} <= row["differences"].keys()
        assert set(row["samples_us"]) == {"eager", name}
        assert {kind: len(us) for kind, us in row["samples_us"][name].items()} == {"F": 4, "B": 4, "W": 4}
    if name == "graph":  # the same operations
        assert set(found["rows"]["float32"]["differences"].values()) == {0.0}


def test_a_split_that_leaves_gradients_out_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Half:
        def __init__(self, part: Any) -> None:
            self.forward, self.backward, self.rest, self.calls = part.forward, part.backward, part.weights, 0

        def weights(self, kept: Any) -> None:
            self.calls += 1
            if self.calls != 2:  # microbatch 1 of the round that is compared
                self.rest(kept)

    def parts(name: str) -> Any:
        return lambda layers, first, loss: [Half(part) for part in parts_by_name(name)(layers, first, loss)]

    monkeypatch.setattr(splits, "parts_by_name", parts)
    wrong = gpu.split("cpu", True, "layers")["wrong"]
    assert any(line.startswith("float32: gradient of 0.up.weight is ") for line in wrong)
    assert not any("input gradient" in line for line in wrong)


def test_speeds_of_copies_are_bytes_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = {"product": [1.0], "h2d/1000000": [40.0, 50.0, 900.0], "d2h/1000000 both": [100.0]}
    monkeypatch.setattr(gpu, "measure_copies", lambda: samples)
    found = gpu.copies("cuda", False)
    assert found["gigabytes_per_s"] == {"h2d/1000000": 20.0, "d2h/1000000 both": 10.0}
    assert found["samples_us"] == samples


@without_gpu
@pytest.mark.slow
def test_tests_that_are_all_skipped_are_no_success() -> None:
    found = gpu.tests("cpu", True)
    assert {row["outcome"] for row in found["tests"]} == {"skipped"}
    assert len(found["tests"]) >= 7
    assert found["wrong"] == ["none passed (the first: no CUDA device here)"]


@pytest.mark.slow
def test_a_step_with_offload_saves_bytes_and_has_the_same_gradients() -> None:
    torch.set_num_threads(1)
    found = gpu.offload("cpu", True)
    assert found["wrong"] == []
    assert found["differs"] == 0.0
    assert found["saved_bytes"] > 0.3 * found["rows"]["kept"]["peak_bytes"]
    assert all(len(row["samples_us"]) == 2 for row in found["rows"].values())


@pytest.mark.slow
def test_the_profile_has_all_numbers() -> None:
    profile = gpu.profile("cpu", True)
    assert profile["wrong"] == []
    assert "host" not in profile["facts"]
    assert profile["samples"]["layer1/F"]


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of `gpu_ranks` are forked with their imports done, and may end as late as they want."""
    monkeypatch.setattr(gpu_ranks, "AFTER_FIRST", 300.0)
    monkeypatch.setattr(gpu_ranks, "subprocess", SimpleNamespace(Popen=ForkedModule))


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_ranks_are_held_against_the_unsplit_model_and_what_is_wrong_is_named() -> None:
    found = gpu.ranks("cpu", True)
    assert found["wrong"] == []
    (rows,) = ([row for one in run for row in one["rows"]] for run in found["runs"].values())
    assert [row["worst"] for row in rows] == [0.0, 0.0]
    rows[1] |= {"right": False, "worst": 0.5, "where": "step 1, 1.weight"}
    assert gpu_ranks.wrong_of([{"rows": rows, "cases": 2, "code": 0, "errors": ""}]) == [
        "rank 0, single, layers, float64, mlp: 5.0e-01 of the largest gradient at step 1, 1.weight"
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("forked_ranks")
def test_a_rank_that_fails_is_named_by_the_other_in_one_line() -> None:
    found = gpu.failure("cpu", True)
    assert found["wrong"] == []
    assert set(found["runs"]) == set(gpu_ranks.FAILURES)
    assert [one["code"] for one in found["runs"]["killed"]] == [0, -9]


def test_several_gpus_job_is_commands_and_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    commands = demo.Job("m", 8, 32, "cuda", capture=True, seconds=30.0).commands(tmp_path)
    assert list(commands) == ["profile", "solve 1f1b", "solve solved", "run 1f1b", "run solved"]
    for words in commands.values():
        assert parser().parse_args(words).name == words[0]
    row = {"predicted_ms": 2.0, "measured_ms": 2.2, "on": "cuda:0, a card", "torch": "2.11"}
    found = {"job": {"ranks": 8, "model": "m", "microbatches": 32}, "rows": {"1f1b": row, "solved": row}}
    assert demo.line_of(found | {"speed_up": {"predicted": 1.25, "measured": 1.2}}) == (
        "8 × cuda:0, a card, torch 2.11, m, 32 microbatches: 1f1b 2.0 predicted 2.2 ms measured, "
        "solved 2.0 predicted 2.2 ms measured; speed-up predicted 1.250, measured 1.200"
    )
    with pytest.raises(SystemExit) as end:
        demo.gpus(tmp_path / "gpus.json", ranks=1)
    assert end.value.code == 2
    assert "it needs two GPUs or more" in capsys.readouterr().err
