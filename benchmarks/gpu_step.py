"""The main job on one GPU that four ranks share by MPS: profile, solve, run captured, compare.

A profile is taken while three other processes compute, as the other ranks will. 1F1B and the order found with it run, each
rank's step as one CUDA graph; steps and the speed-up are compared with the prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from zbsolve import Profile, Trace, preset, solve
from zbsolve.exec.run.host import device_environment, together
from zbsolve.exec.run.launch import run_local
from zbsolve.models.presets import Block
from zbsolve.schedule import Schedule
from zbsolve.util.errors import ZbsolveError
from zbsolve.util.machine import child_environment

from .harness import table

RANKS, MICROBATCHES, BLOCKS = 4, 12, 8
WIDTH, HEADS, LENGTH = 2048, 16, 1024
SECONDS = {"profile": 4.0, "solve": 5.0}
STEPS, WARMUP = 6, 3
PROFILE_LIMIT = 60.0  # seconds


def loss(output: Tensor, target: Tensor) -> Tensor:
    """Mean square."""
    return nn.functional.mse_loss(output.float(), target.float())


def pipeline() -> Any:
    """Equal blocks in bfloat16, one sequence a microbatch. Parameters repeat a few random numbers: a core would take seconds
    to draw all of them."""
    some = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)
    layers = []
    for _ in range(BLOCKS):
        with torch.device("meta"):
            block = Block(WIDTH, HEADS).to(torch.bfloat16)
        layers.append(block.to_empty(device="cpu"))
        with torch.no_grad():
            for name, p in block.named_parameters():
                p.copy_(some.repeat(-(-p.numel() // len(some)))[: p.numel()].view(p.shape))
                p += float(name.endswith("norm.weight") or name in ("before_attention.weight", "before_mlp.weight"))
    x = torch.randn(1, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return nn.Sequential(*layers), (x, x.flip(1)), loss


SPEC = "benchmarks.gpu_step:pipeline"


@table()
def gpu_step(device: Literal["cuda"] = "cuda") -> dict[str, Any]:
    """The main job on one GPU that four ranks share. Both steps, predicted and measured, µs; the time of each rank's host to
    launch one; and ratios."""
    with tempfile.TemporaryDirectory(prefix="zb-") as name:
        folder = Path(name)
        with together(folder):
            profile = _profiled(folder)
            found: dict[str, Any] = {"rows": {}, "profile": _short(profile)}
            problem = profile.problem(RANKS, MICROBATCHES, placement="single")
            fused = profile.problem(RANKS, MICROBATCHES, placement="single", fused=True)
            solved = solve(problem, seconds=SECONDS["solve"], seed=0)
            for what, schedule in {"1f1b": preset("1f1b", fused), "solved": solved}.items():
                try:
                    found["rows"][what] = _row(schedule, check=what == "solved")
                except ZbsolveError as error:
                    found["rows"][what] = {"error": str(error), "details": error.details[-1500:]}
                print(what, json.dumps(found["rows"][what]), flush=True)  # what is kept where time runs out
    return found | _ratios(found["rows"])


def _ratios(rows: dict[str, Any]) -> dict[str, Any]:
    """The speed-up over 1F1B, predicted and measured, and what is wrong."""
    wrong = [f"{what}: {row['error']}" for what, row in rows.items() if "error" in row]
    if wrong:
        return {"wrong": wrong}
    base, ours = rows["1f1b"], rows["solved"]
    ratios = {way: base[way] / ours[way] for way in ("predicted", "measured")}
    check = ours["check"]
    if not check["passed"]:
        wrong.append(f"solved: gradients are {check['worst']:.1e} from the unsplit model's: {check['where']}")
    if any(row["gpu_is"] != "shared at once" for row in rows.values()):
        wrong.append("MPS did not start: ranks took turns, and the times mean little")
    says = []
    for what, row in rows.items():
        times = (
            f"{row['predicted'] / 1e3:.1f} ms predicted, {row['measured'] / 1e3:.1f} measured, {row['over_predicted']:.2f}"
        )
        beside = ", ".join(f"{ratio:.2f} beside {count}" for count, ratio in row["beside"].items())
        says.append(f"{what}: {times}; passes over predicted, by how many other ranks compute: {beside}")
    says.append(f"speed-up: {ratios['predicted']:.3f} predicted, {ratios['measured']:.3f} measured")
    return ratios | {"speed_up_kept": ratios["measured"] / ratios["predicted"], "says": says, "wrong": wrong}


def _beside(schedule: Schedule, trace: Trace) -> dict[int, float]:
    """How many other ranks compute during a pass, most of the time → the time of such passes over the predicted one."""
    passes, found = schedule.problem.passes, dict[int, list[float]]()
    other = passes.rank[:, None] != passes.rank
    for step in trace.steps:
        common = np.minimum(step.end[:, None], step.end) - np.maximum(step.start[:, None], step.start)
        took = np.maximum(step.end - step.start, 1e-9)
        for count, us, predicted in zip(
            np.rint((common.clip(0) * other).sum(1) / took).astype(int).tolist(), took, passes.duration, strict=True
        ):
            sums = found.setdefault(count, [0.0, 0.0])
            sums[0], sums[1] = sums[0] + float(us), sums[1] + float(predicted)
    return {count: us / max(1.0, predicted) for count, (us, predicted) in sorted(found.items())}


def _row(schedule: Schedule, check: bool) -> dict[str, Any]:
    how: dict[str, Any] = {"capture": True, "check": check, "steps": STEPS, "warmup": WARMUP, "timeout": 40.0}
    with _clocks() as clocks:
        trace = run_local(schedule, SPEC, device="cuda", share_gpus=True, **how)
    predicted, measured = schedule.timeline().makespan, trace.median().makespan
    kinds = {}
    for kind in schedule.problem.passes.kinds:
        rows = schedule.problem.rows(kind)
        took = [float((step.end - step.start)[rows].mean()) for step in trace.steps]
        kinds[kind] = [float(schedule.problem.passes.duration[rows].mean()), sorted(took)[len(took) // 2]]
    return {
        "predicted": predicted,
        "measured": measured,
        "over_predicted": measured / predicted,
        "steps": [round(step.makespan) for step in trace.steps],
        "kinds": kinds,
        "beside": _beside(schedule, trace),
        "clocks": clocks,
        "launching_us": trace.facts["launching_us"],
        "launching_share": max(trace.facts["launching_us"]) / measured,
        "captured": trace.facts["captured"],
        "gpu_is": trace.facts["gpu_is"],
        "peaks": [trace.peaks[0], trace.facts["predicted_peaks"], trace.facts.get("device_peaks")],
        "check": trace.facts.get("check"),
        "status": None if schedule.certificate is None else schedule.certificate.status,
    }


@contextmanager
def _clocks() -> Iterator[list[str]]:
    """The device's clock and power inside, ten times a second: "1980 MHz, 512 W"; empty if they cannot be read."""
    said: list[str] = []
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader", "-lms", "100"]
    if shutil.which(query[0]) is None:
        yield said
        return
    with subprocess.Popen(query, stdout=subprocess.PIPE, text=True) as child:
        try:
            yield said
        finally:
            child.terminate()
            said += child.communicate()[0].splitlines()


def _short(profile: Profile) -> dict[str, Any]:
    first = profile.layers[0]
    times = {kind: round(getattr(first, kind), 1) for kind in ("F", "B", "W", "BW")}
    facts = {name: value for name, value in profile.facts.items() if name != "host"}
    return times | {"latency": profile.link.latency, "bytes_per_us": profile.link.bytes_per_us, "facts": facts}


def _profiled(folder: Path) -> Profile:
    """A profile of the model on a quarter of the GPU, while others compute on the other quarters."""
    path, stop = folder / "profile.json", folder / "stop"
    busy = [_start(["-m", "benchmarks.gpu_step", str(stop)], rank) for rank in range(1, RANKS)]
    command = ["-m", "zbsolve", "profile", SPEC, "--device", "cuda", "--capture", "--seconds", str(SECONDS["profile"])]
    one = _start([*command, "-o", str(path)], 0)
    try:
        if one.wait(PROFILE_LIMIT):
            raise RuntimeError(f"profile ended with {one.returncode}")
        if not all(child.poll() is None for child in busy):
            raise RuntimeError("who was to compute beside the profile has ended")
    finally:
        stop.touch()
        one.kill()
        for child in busy:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
    return Profile.load(path)


def _start(arguments: list[str], rank: int) -> subprocess.Popen[bytes]:
    environment = child_environment() | device_environment(rank, RANKS)
    return subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL)


def busy(stop: Path) -> None:
    """Train a block repeatedly until a file exists: as a graph, since the device must not wait for this host."""
    torch.cuda.set_device(0)
    layers, until = Block(WIDTH, HEADS).to("cuda", torch.bfloat16), time.monotonic() + 150
    x = torch.randn(1, LENGTH, WIDTH, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    y, graph, stream = x.detach().flip(1), torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            loss(layers(x), y).backward()  # type: ignore[no-untyped-call]
        with torch.cuda.graph(graph, stream=stream):
            loss(layers(x), y).backward()  # type: ignore[no-untyped-call]
    while not stop.exists() and time.monotonic() < until:
        for _ in range(10):
            graph.replay()
        torch.cuda.synchronize()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stop", type=Path, help="compute until this file is there")
    busy(parser.parse_args().stop)
    os._exit(0)
