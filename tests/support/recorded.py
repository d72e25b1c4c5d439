"""Traces of other engines: samples, and files in their formats written from a schedule's prediction."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zbsolve
from zbsolve import BadInput, Problem, Schedule
from zbsolve.build.restage import durations_of, rebuilt
from zbsolve.interchange.traces.reading import read_trace
from zbsolve.interchange.traces.torch_profiler import KINDS
from zbsolve.systems.one_direction import interleaved_in_groups
from zbsolve.util.files import write_text

from .house import ROOT

SAMPLES = ROOT / "tests" / "data" / "traces"
PRIMUS = SAMPLES / "primus-pp8"
FIELDS = {"F": "fwd", "B": "bwd", "BW": "bwd", "W": "wgrad"}


def a_schedule(placement: str, split: bool, comm: int = 40, blocking: bool = False, times: int = 1) -> Schedule:
    """A named schedule of eight microbatches on four ranks, each stage with times of its own; `times` as long."""
    stages = 4 if placement == "single" else 8
    F, B, W = (
        [(100 + 3 * s) * times for s in range(stages)],
        [(110 + s) * times for s in range(stages)],
        [90 * times] * stages,
    )
    backward: dict[str, Any] = {"B": B, "W": W} if split else {"BW": [b + w for b, w in zip(B, W, strict=True)]}
    step: dict[str, Any] = {"placement": placement, "microbatches": 8, "comm": comm, "blocking": blocking}
    problem = zbsolve.pipeline(F, **backward, **step, layers=(1,) * stages)
    if placement == "loop" and not split:
        return interleaved_in_groups(problem, 4)
    names = {("single", False): "1f1b", ("single", True): "zb-h1"}
    return zbsolve.preset(names.get((placement, split), "zb-v"), problem)


def refused(path: Path, *words: str) -> None:
    """The trace is refused in one line with these words in it."""
    with pytest.raises(BadInput) as error:
        read_trace(path)
    said = str(error.value)
    assert "\n" not in said
    for word in words:
        assert word in said, said


def primus_folder(folder: Path, schedule: Schedule, *, places: bool, steps: int = 2, clocks: float = 1000.0) -> Path:
    """Files as Primus writes them of a run exactly as predicted, each rank's clock off by `clocks` µs times its number. A
    message that holds its sender up is no part of the pass. places: with microbatch and chunk, as its newer versions do."""
    return primus_run(folder, [schedule] * steps, places=places, clocks=clocks)


def primus_run(folder: Path, steps: Sequence[Schedule], *, places: bool = True, clocks: float = 1000.0) -> Path:
    """The same of steps that differ, a schedule of one order each."""
    problem = steps[0].problem
    placement = problem.placement
    chunk_of = {stage: placement[:stage].count(rank) for stage, rank in enumerate(placement)}
    config = {"pp_size": problem.ranks, "vp_size": len(placement) // problem.ranks, "num_mbs": problem.microbatches}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for rank in range(problem.ranks):
        body = {str(i + 1): _primus_step(one, rank, clocks * rank, chunk_of, places) for i, one in enumerate(steps)}
        (folder / f"pp_rank_{rank}.json").write_text(json.dumps(body))
    return folder


def _primus_step(schedule: Schedule, rank: int, clock: float, chunk_of: dict[int, int], places: bool) -> dict[str, Any]:
    timeline, p = schedule.timeline(), schedule.problem.passes
    end = timeline.end - schedule.problem.sending
    step: dict[str, Any] = {"total": timeline.makespan / 1e3, "memory": 1.0}
    rows = np.flatnonzero(p.rank == rank)
    for row in rows[np.lexsort((end[rows], timeline.start[rows]))].tolist():
        field = FIELDS[p.kind_names[row]]
        said = {"start": (timeline.start[row] + clock) / 1e3, "end": (end[row] + clock) / 1e3}
        said |= {"minibatch": int(p.microbatch[row]), "chunk": chunk_of[int(p.stage[row])]} if places else {}
        for name, value in said.items():
            step.setdefault(f"{field}_{name}", []).append(float(value) if name in ("start", "end") else value)
    return step


def with_lengths(
    schedule: Schedule, lengths: Sequence[Sequence[float]], noise: float = 0.0, seed: int = 0
) -> list[Schedule]:
    """The same order where microbatches compute so many times as long, a row a step, and each pass by chance more."""
    random, steps = np.random.default_rng(seed), []
    for row in lengths:
        problem = schedule.problem.scaled(row, latency=inf)
        own = problem.passes.duration - problem.sending
        took = np.rint(own * np.exp(noise * random.standard_normal(len(own)))).astype(np.int64) + problem.sending
        steps.append(Schedule(replace(problem, passes=replace(problem.passes, duration=took)), schedule.order))
    return steps


def changed(folder: Path, rank: int, step: str, **fields: Any) -> None:
    """Other values in one step of one rank's file."""
    path = folder / f"pp_rank_{rank}.json"
    body = json.loads(path.read_text())
    body[step] |= fields
    path.write_text(json.dumps(body))


def torch_folder(folder: Path, schedule: Schedule, *, device: bool = False, steps: int = 2, zipped: bool = False) -> Path:
    """Files as torch's profiler writes them of a run exactly as predicted. Without a device, the label of a pass whose input
    another rank sends begins when the rank's last pass ended, and with its first operation where the pass really begins."""
    problem, timeline = schedule.problem, schedule.timeline()
    word = {ours: theirs for theirs, ours in KINDS.items()}
    folder.mkdir(exist_ok=True)
    for rank in range(problem.ranks):
        events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}}]
        for step in range(steps):
            at = step * (timeline.makespan + 500)
            before = at
            for row in schedule.sequences[f"compute:{rank}"].tolist():
                one = problem.passes[row]
                label = f"PP:{one.stage}{word[one.kind]}{one.microbatch}"
                start, end = at + float(timeline.start[row]), at + float(timeline.end[row])
                begins = start if device else before
                events += _labels(label, begins, start, end, device)
                if one.kind == "F" and one.stage < problem.stages - 1:
                    events.append(_event(f"PP:{one.stage}SEND_F{one.microbatch}", "user_annotation", end, 1.0))
                before = end
        info = {"backend": "gloo", "rank": rank, "world_size": problem.ranks}
        body = {"schemaVersion": 1, "distributedInfo": info, "baseTimeNanoseconds": 10**18 - rank * 7000}
        for event in events[1:]:
            event["ts"] += rank * 7.0
        text = json.dumps({**body, "traceEvents": events})
        write_text(folder / f"rank{rank}_trace.json{'.gz' if zipped else ''}", text)
    return folder


def _labels(label: str, begins: float, start: float, end: float, device: bool) -> list[dict[str, Any]]:
    if device:
        where, launch = "gpu_user_annotation", _event(label, "user_annotation", 0.3 * begins, 5.0)
        return [launch, _event(label, where, start, end - start, 7), _event("gemm", "kernel", start, end - start, 7)]
    return [_event(label, "user_annotation", begins, end - begins), _event("aten::linear", "cpu_op", start, end - start)]


def _event(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": ts, "dur": dur}


def with_halved_backward(problem: Problem) -> Problem:
    """A plain step of F and BW with B and W in its place, each half of BW: an estimate, and its source says so. What BW
    freed, W frees. Raises BadInput where the problem is no such step."""
    if problem.passes.kinds != ("F", "BW"):
        raise BadInput(f"problem: no step of F and BW alone: it has {' '.join(problem.passes.kinds)}")
    whole = durations_of(problem, "BW")
    split = {"F": durations_of(problem, "F"), "B": whole // 2, "W": whole - whole // 2}
    source = f"estimated: B and W are half of BW each, {problem.source or 'given'}"
    return rebuilt(problem, problem.placement, split, source)
