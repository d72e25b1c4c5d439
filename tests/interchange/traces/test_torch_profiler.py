"""Runs that torch's profiler recorded: of torch's own runtime, and files written from a prediction; what cannot be used."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from zbsolve import Trace
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.interchange.traces.torch_profiler import TraceForm

from ...support.recorded import a_schedule, refused, torch_folder


@pytest.mark.parametrize(("placement", "split"), [("single", False), ("loop", False), ("vee", True)])
@pytest.mark.parametrize("device", [False, True])
def test_a_run_as_predicted_gives_its_schedule_back(placement: str, split: bool, device: bool, tmp_path: Path) -> None:
    """Order, placement and exact times, waiting taken off where it is inside the labels; by labels on the device's time line
    where there are such, whatever the host's say."""
    schedule = a_schedule(placement, split)
    found = read_trace(torch_folder(tmp_path / "run", schedule, device=device, zipped=device))
    assert found.problem.placement == schedule.problem.placement
    assert found.schedule == dict(schedule.order)
    assert (found.problem.passes.duration == schedule.problem.passes.duration).all()
    assert set(found.problem.edges.lag.tolist()) == {0, 40}
    for step in found.steps:
        assert step.makespan == pytest.approx(schedule.timeline().makespan, abs=1)
    assert found.replayed(0).makespan == schedule.timeline().makespan
    assert (found.facts["backend"], found.facts["ranks"], len(found.steps)) == ("gloo", 4, 2)


@pytest.mark.slow
def test_torchs_own_runtime_is_read_back(tmp_path: Path) -> None:
    """Two gloo ranks run torch's own schedules under its profiler: the order is the schedule's, times ascend, and no pass
    holds the waiting for its input (rank 1 begins with one for rank 0's first forward). Times are those of a busy machine,
    so none is asserted."""
    torch = pytest.importorskip("torch")
    from ...support.exec_ranks import on_ranks
    from ...support.torch_trace_jobs import PLACEMENTS

    names = ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"]
    if torch.__version__.startswith("2.11"):  # in a V its ranks send to themselves, which gloo cannot
        names.pop()
    argument = {"folder": str(tmp_path), "schedules": [*names, "Schedule1F1B"], "microbatches": 4, "steps": 2}
    planned = on_ranks(2, "tests.support.torch_trace_jobs:record", argument)
    for name in names:
        found = read_trace(tmp_path / name)
        assert found.problem.placement == PLACEMENTS[name]
        assert found.problem.microbatches == 4
        for rank in range(2):
            ours = [one.replace("I", "B") for one in planned[rank][name]]
            assert list(found.schedule[f"compute:{rank}"]) == ours
        edges = found.problem.edges
        for number, step in enumerate(found.steps):
            assert (step.start <= step.end).all()
            assert (step.start[edges.after] >= step.end[edges.before] - 1000).all()
            work = np.bincount(found.problem.passes.rank, step.end - step.start)
            assert work.max() <= step.makespan
            assert 0 < found.replayed(number).makespan <= 1.5 * step.makespan
        waited = _label_minus_pass(tmp_path / name / "rank1_trace.json", found, "1F0")
        assert min(waited) > 10
    refused(tmp_path / "Schedule1F1B", "rank0_trace.json", "no pass has a label PP:", "export --to torch-csv")


def _label_minus_pass(path: Path, found: Trace, name: str) -> list[float]:
    """µs by which the label of a pass is longer than the pass, step by step."""
    form = msgspec.json.decode(path.read_text(), type=TraceForm)
    seen = [one for one in form.traceEvents if one.name == f"PP:{name}" and one.cat == "user_annotation"]
    labels = [one.dur for one in sorted(seen, key=lambda one: one.ts)]
    took = found.computed()[:, found.problem.index[name]].tolist()
    return [labels[int(number) - 1] - one for number, one in zip(found.facts["steps"], took, strict=True)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return torch_folder(tmp_path / "run", a_schedule("vee", split=True))


def edit(folder: Path, rank: int, **fields: Any) -> None:
    path = folder / f"rank{rank}_trace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def events(folder: Path, rank: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((folder / f"rank{rank}_trace.json").read_text())["traceEvents"]
    return found


def test_a_missing_rank_is_named(folder: Path) -> None:
    (folder / "rank3_trace.json").unlink()
    refused(folder, "stage 2 on rank 2 sends to stage 3", "world size 4", "ranks 0, 1, 2")
    refused(folder / "rank0_trace.json", "stage 0 on rank 0 sends to stage 1", "name the folder")


def test_the_first_rank_may_not_be_missing(folder: Path) -> None:
    (folder / "rank0_trace.json").unlink()
    refused(folder, "stage 7", "no file")


def test_replicas_are_left_out(folder: Path) -> None:
    body = json.loads((folder / "rank2_trace.json").read_text())
    body["distributedInfo"]["rank"] = 6
    (folder / "rank6_trace.json").write_text(json.dumps(body))
    assert read_trace(folder).facts["left_out"] == ["replicas: ranks 6 ran the same stages as others"]
    (folder / "again.json").write_text((folder / "rank2_trace.json").read_text())
    refused(folder, "rank 2, as ")


def test_mixed_steps_are_named(folder: Path) -> None:
    kept = events(folder, 1)
    last = max(i for i, one in enumerate(kept) if one["name"] == "PP:1W7")
    edit(folder, 1, traceEvents=[one for i, one in enumerate(kept) if i != last])
    refused(folder, "rank1_trace.json", "rank 1", "label PP:1W7 is there 1 times", "inside one")
    half = [one for one in kept if one.get("ts", 0) < 0.5 * max(e.get("ts", 0) for e in kept)]
    edit(folder, 1, traceEvents=half)
    refused(folder, "rank 1", "steps are mixed")


def test_combined_passes_are_named(folder: Path) -> None:
    more = [*events(folder, 0), {"name": "PP:(0F1;7B0)OVERLAP_F_B", "cat": "user_annotation", "ts": 1.0, "dur": 2.0}]
    edit(folder, 0, traceEvents=more)
    refused(folder, "rank0_trace.json", "(0F1;7B0)OVERLAP_F_B", "combined passes")


def test_a_device_without_labels_on_its_time_line_is_named(folder: Path) -> None:
    edit(folder, 2, traceEvents=[*events(folder, 2), {"name": "gemm", "cat": "kernel", "ts": 1.0, "dur": 2.0}])
    refused(folder, "rank2_trace.json", "gpu_user_annotation")


def captured(folder: Path) -> Path:
    """The files of a run on a device as if its steps were captured: two kernels a pass, with its label in their `args`, and
    kernels of messages on another stream."""
    for path in folder.iterdir():
        body = json.loads(path.read_text())
        kept: list[dict[str, Any]] = [{"ph": "M", "name": "process_labels", "args": {"name": 3}}]
        for one in body["traceEvents"]:
            if one.get("cat") == "gpu_user_annotation":
                for part, share in ((0.0, 0.5), (0.75, 0.25)):  # a gap between kernels is part of the pass
                    at = one["ts"] + part * one["dur"]
                    kept.append(kernel(at, share * one["dur"], 7, name=one["name"]))
            elif "SEND_F" in one["name"]:
                kept.append(kernel(one["ts"], one["dur"], 20, name=one["name"]))
        kept.append(kernel(kept[-1]["ts"] + 900, 5.0, 7, stream=7))  # an optimizer's, without a label
        path.write_text(json.dumps(body | {"traceEvents": kept}))
    return folder


def kernel(ts: float, dur: float, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": "gemm", "cat": "kernel", "pid": 0, "tid": tid, "ts": ts, "dur": dur, "args": args}


@pytest.mark.parametrize(("placement", "split"), [("single", False), ("vee", True)])
def test_captured_steps_are_read_by_their_kernels_labels(placement: str, split: bool, tmp_path: Path) -> None:
    schedule = a_schedule(placement, split)
    folder = captured(torch_folder(tmp_path / "run", schedule, device=True))
    found = read_trace(folder)
    assert found.schedule == dict(schedule.order)
    assert (found.problem.passes.duration == schedule.problem.passes.duration).all()
    assert found.replayed(0).makespan == schedule.timeline().makespan
    (folder / "rank3_trace.json").unlink()
    refused(folder, "stage 2 on rank 2 sends to stage 3" if placement == "single" else "no file")


def test_combined_passes_of_captured_steps_are_named(tmp_path: Path) -> None:
    folder = captured(torch_folder(tmp_path / "run", a_schedule("vee", split=True), device=True))
    edit(folder, 0, traceEvents=[*events(folder, 0), kernel(1.0, 2.0, 7, name="PP:(0F1;7B0)OVERLAP_F_B")])
    refused(folder, "rank0_trace.json", "(0F1;7B0)OVERLAP_F_B", "combined passes")


def test_hosts_with_other_clocks_are_aligned(folder: Path) -> None:
    before = read_trace(folder)
    edit(folder, 3, baseTimeNanoseconds=10**18 + 5 * 10**9)
    after = read_trace(folder)
    assert "clocks" not in before.facts
    assert after.facts["clocks"] == "aligned by messages"
    assert after.steps[0].makespan == pytest.approx(before.steps[0].makespan, rel=0.05)


def test_damaged_files_are_named(folder: Path) -> None:
    path = folder / "rank1_trace.json"
    text = path.read_text()
    path.write_text(text[:-40])
    refused(folder, "rank1_trace.json", "damaged JSON at line 1")
    path.write_text(text.replace('"dur": ', '"dur": "long", "x": ', 1))
    refused(folder, "rank1_trace.json", "traceEvents[", "'dur' has a wrong type")
    path.unlink()
    (folder / "rank1_trace.json.gz").write_bytes(gzip.compress(text.encode())[:-100])
    refused(folder, "rank1_trace.json.gz", "damaged gzip")
