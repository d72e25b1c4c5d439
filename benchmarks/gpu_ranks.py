"""Ranks that share one GPU, or run on CPUs: gradients of many steps against the unsplit model's, under random delays.

The ranks of one call join once and then run case after case. Delays are put on every stream of a rank (on CPUs its thread
sleeps). Three planted errors leave out a wait each, and must be detected.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zbsolve import Schedule, pipeline, preset
from zbsolve.exec import Pipeline
from zbsolve.exec.base.part import Data, Hooks
from zbsolve.exec.check import reference
from zbsolve.exec.choices import BACKENDS, device_of
from zbsolve.exec.device.rank_device import DeviceRows
from zbsolve.exec.feed import step_seed
from zbsolve.exec.run.host import at_once, take_environment, together
from zbsolve.exec.transport.wires import came_true
from zbsolve.models.model import seeded
from zbsolve.models.presets import Block
from zbsolve.util.machine import child_environment

SYSTEMS = {"single": "zb-h1", "loop": "interleaved-zb", "vee": "zb-v"}
LIMITS = {"float64": 1e-12, "float32": 2e-5, "bfloat16": 5e-2}  # of the largest value of a gradient
PLANTED = ("takes without waiting", "receives into used memory", "sends what is not there")
FAILURES = ("raises", "memory", "killed", "hangs")
LONGEST_SLEEP = 400_000  # cycles of a GPU, some 0.2 ms
PLANTED_SLEEP = 20_000_000  # some 10 ms: the host runs far ahead of the device, and memory is used again early
PLANTED_TOKENS = 512  # a message is larger than what NCCL takes in before the other end asks
TIMEOUT = 40.0
DUMP_SECONDS = 5.0  # for a rank that does not end to say where it is
AFTER_FIRST = 12.0  # seconds that ranks go on behind the first that ended


@dataclass(frozen=True)
class Case:
    """What to run. split, capture: as `Pipeline` takes them. wide: width of a layer; tokens: of a microbatch. delays: add
    some. planted: the wait to leave out. kind: of layers: "mlp", "dropout" (with it), "gpt" (attention); "host": launching
    times (see `host_times`). failing: what goes wrong, see `_fail`.
    """

    placement: str = "single"
    split: str = "layers"
    capture: bool = False
    steps: int = 4
    dtype: str = "float32"
    wide: int = 256
    tokens: int = 3
    kind: str = "mlp"
    delays: bool = False
    planted: str = ""
    failing: str = ""
    timeout: float = TIMEOUT


def schedule_for(placement: str, ranks: int, microbatches: int) -> Schedule:
    """The order of a published system, by unit times."""
    once = list(range(ranks))
    places = {"single": once, "loop": once * 2, "vee": once + once[::-1]}[placement]
    times = [10] * len(places)
    problem = pipeline(times, times, times, placement=tuple(places), microbatches=microbatches, comm=1, held_until_W=1)
    return preset(SYSTEMS[placement], problem)


def layers_of(case: Case, count: int, device: torch.device) -> list[nn.Module]:
    """Equal layers each time."""
    made: list[nn.Module] = []
    for i in range(count):
        if case.kind == "gpt":
            layer: nn.Module = seeded(0, i, partial(Block, case.wide, 4))()
        else:
            torch.manual_seed(100 + i)
            some = [nn.Linear(case.wide, case.wide), nn.GELU(), nn.LayerNorm(case.wide)]
            layer = nn.Sequential(*some, *[nn.Dropout(0.2)] * (case.kind == "dropout"))
        made.append(layer.to(device, getattr(torch, case.dtype)))
    return made


def run_case(case: Case, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """One case on this rank: the largest difference of a gradient or the loss from the unsplit model's, and times."""
    microbatches = 2 * ranks
    schedule = schedule_for(case.placement, ranks, microbatches)
    count = schedule.problem.stages
    delayer = Delays(case, device)
    pipe = Pipeline(
        layers_of(case, count, device),
        schedule,
        loss=nn.functional.mse_loss,
        device=device,
        split=case.split,
        timeout=case.timeout,
        capture=case.capture,
        hooks=Hooks(announce=delayer.before) if case.delays or case.failing else None,
    )
    delayer.pipeline = pipe
    if case.planted:
        plant(pipe, case.planted)
    whole, shape = layers_of(case, count, device), (microbatches, case.tokens, case.wide)
    if case.kind == "gpt":
        shape = (microbatches, 2, 24, case.wide)
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn((2, *shape), generator=generator).to(device, getattr(torch, case.dtype)) for _ in range(2)]
    names = dict(nn.ModuleList(whole).named_parameters())
    worst, where, losses, host, wall, right = 0.0, "", [], [], [], dict[int, Any]()
    for step in range(case.steps):
        delayer.step = step
        x, y = batches[step % 2]
        feed = [{m: part[m] for m in range(microbatches)} for part in (x, y)]
        began = time.perf_counter()
        result = pipe.step(*feed)
        loss = result.loss
        wall.append(time.perf_counter() - began)
        losses.append(loss)
        key = step if case.kind == "dropout" else step % 2
        if key not in right:
            for p in names.values():
                p.grad = None
            data = Data(*feed, step_seed(0, step))
            right[key] = reference(whole, data, nn.functional.mse_loss), {n: p.grad for n, p in names.items()}
        wanted, gradients = right[key]
        for name, p in pipe.named_parameters():
            far = _apart(p.grad, gradients[name])
            if not far <= worst:
                worst, where = far, f"step {step}, {name}"
            p.grad.zero_()
        if not abs(loss - wanted) <= max(1e-4, LIMITS[case.dtype]) * abs(wanted):
            worst, where = math.inf, f"step {step}: loss {loss}, not {wanted}"
        if device.type == "cuda":
            host.append(float(sum(result.timeline and result.seen.columns[3])))
    found = {"worst": worst, "where": where, "right": worst <= LIMITS[case.dtype], "loss": losses[-1]}
    found |= {"captured": pipe.captured, "wall_ms": [round(1e3 * t, 2) for t in wall[:3] + wall[-3:]]}
    if device.type == "cuda":
        makespan = round(result.timeline.makespan)
        found |= {"host_us": round(host[-1]), "communicators": pipe.communicators, "makespan_us": makespan}
    pipe.peers.wires.close()
    return found


def host_times(case: Case, rank: int, ranks: int, device: torch.device) -> dict[str, Any]:
    """The host's time for a pass of 1F1B, here and in torch's own runtime: the median step's time until all is launched,
    divided by its passes, µs. Both run the same layers and microbatches, eager, on NCCL."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    count, found = 4 * ranks, dict[str, Any]()
    places = tuple(range(ranks))
    problem = pipeline([10] * ranks, BW=[20] * ranks, placement=places, microbatches=count, held_until_W=1)
    x, y = (torch.randn(count * 4, case.wide, device=device) for _ in range(2))
    mine = layers_of(case, ranks, device)
    pipe = Pipeline(mine, preset("1f1b", problem), loss=nn.functional.mse_loss, device=device, timeout=case.timeout)
    stage = PipelineStage(layers_of(case, ranks, device)[rank], rank, ranks, device)
    theirs = Schedule1F1B(stage, count, loss_fn=nn.functional.mse_loss)

    def ours() -> float:
        pipe.step(x, y)
        gpu = pipe._runner.gpu
        return math.nan if gpu is None else gpu.launching / 1e3

    def torchs() -> float:
        began = time.perf_counter()
        theirs.step(*([x] if rank == 0 else []), target=y if rank == ranks - 1 else None)
        return (time.perf_counter() - began) * 1e6

    for name, step in (("ours", ours), ("torch", torchs)):
        rows = []
        for _ in range(3 + case.steps):
            if device.type == "cuda":
                torch.cuda.synchronize()
            pipe.peers.wait(pipe.wires.control.barrier(), "a step")
            rows.append(step() / (2 * count))
        found[name] = sorted(rows[3:])[case.steps // 2]
    pipe.peers.wires.close()
    return found | {"ratio": found["ours"] / found["torch"], "worst": 0.0, "where": "", "right": True, "captured": []}


def _apart(found: Tensor | None, right: Tensor) -> float:
    if found is None:
        return math.inf
    far = float((found.double() - right.double()).abs().max() / right.double().abs().max())
    return far if math.isfinite(far) else math.inf


class Delays:
    """Sleeps on a rank's streams, and failures of the rank, before its passes. step: the current step."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device, self.step = case, device, 0
        self.pipeline: Any = None
        self._random = random.Random(int(os.environ.get("RANK", 0)))

    def before(self, name: str) -> None:
        """A pass begins."""
        if self.case.failing and self.step == 2 and name.endswith("1"):
            _fail(self.case, self.pipeline.rank, self.device)
        if not self.case.delays or self._random.random() > 0.3:
            return
        cycles = self._random.randrange(PLANTED_SLEEP if self.case.planted else LONGEST_SLEEP)
        if self.device.type == "cpu":
            time.sleep(cycles * 1e-9)
            return
        streams = [torch.cuda.current_stream()]
        if not torch.cuda.is_current_stream_capturing():  # nothing would join what sleeps on the others
            streams += getattr(self.pipeline.mailbox._rows, "_streams", {}).values()
        with torch.cuda.stream(self._random.choice(streams)):
            torch.cuda._sleep(cycles)


def _fail(case: Case, rank: int, device: torch.device) -> None:
    """On rank 1 something goes wrong in the middle of a step."""
    if rank != 1:
        return
    if case.failing == "killed":
        os.kill(os.getpid(), 9)
    if case.failing == "raises":
        raise ValueError("a layer does not like its input")
    if case.failing == "hangs":
        came_true(Path(sys.argv[1], "found.0").exists, 1000.0)  # until the other rank has told of it
        os._exit(9)
    if case.failing == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)


def plant(pipe: Pipeline, planted: str) -> None:
    """Leave a wait out, on every rank."""
    rows = pipe.mailbox._rows
    assert isinstance(rows, DeviceRows)
    if planted == PLANTED[0]:
        there, flush = list[Any](), rows.flush

        def take(message: Any, coming: Any) -> Any:
            rows.receive(message, coming)
            there.append(coming.there)
            return coming.row, coming.arrived

        def waits_at_last() -> None:
            for event in there:
                torch.cuda.current_stream().wait_event(event)
            there.clear()
            flush()

        rows.take, rows.flush = take, waits_at_last  # type: ignore[method-assign]
    elif planted == PLANTED[1]:
        before = rows.reserve

        def reserve(message: Any, row: Tensor) -> Any:
            coming = before(message, row)
            coming.free = torch.cuda.Event()  # type: ignore[no-untyped-call]
            return coming

        rows.reserve = reserve  # type: ignore[method-assign]
    else:
        side, send = torch.cuda.Stream(), rows.send  # type: ignore[no-untyped-call]

        def too_early(message: Any, row: Tensor) -> None:
            with torch.cuda.stream(side):
                send(message, row)

        rows.send = too_early  # type: ignore[method-assign]


def wrong_of(run: list[Any]) -> list[str]:
    """The errors in what `ranks_run` returned, a line each."""
    found = []
    for rank, one in enumerate(run):
        if one["code"]:
            text = " ".join(one["errors"].split())[-300:]
            found.append(f"rank {rank} ended with {one['code']} after {len(one['rows'])} of {one['cases']} cases: {text}")
        for row in one["rows"]:
            case = ", ".join(str(value) for value in row["case"].values() if isinstance(value, str) and value)
            if "error" in row:
                found.append(f"rank {rank}, {case}: {row['error'][:300]}")
            elif not row["right"]:
                found.append(f"rank {rank}, {case}: {row['worst']:.1e} of the largest gradient at {row['where']}")
    return found


# --- Processes ---


def ranks_run(cases: list[Case], ranks: int, device: str = "cuda", at_a_time: bool = True, seconds: float = 120.0) -> Any:
    """Each rank's results of all cases: a list a rank. at_a_time: so many processes compute at once, by MPS. A rank that
    does not end in time says where it is."""
    with tempfile.TemporaryDirectory(prefix="zb-") as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))
        if device == "cuda" and at_a_time:
            with together(folder):
                return _ran(folder, ranks, device, seconds, {})
        return _ran(folder, ranks, device, seconds, {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "none")})


def _ran(folder: Path, ranks: int, device: str, seconds: float, more: dict[str, str]) -> list[Any]:
    children, until = [], time.monotonic() + seconds
    for rank in range(ranks):
        environment = child_environment() | {"RANK": str(rank), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | more
        command = [sys.executable, "-m", "benchmarks.gpu_ranks", str(folder), str(ranks), device, str(until)]
        with open(folder / f"errors.{rank}", "wb") as errors:
            children.append(subprocess.Popen(command, env=environment, stdout=errors, stderr=errors))
    until += DUMP_SECONDS
    while any(child.poll() is None for child in children) and time.monotonic() < until:
        if any(child.poll() is not None for child in children):
            until = min(until, time.monotonic() + AFTER_FIRST)
        time.sleep(0.05)
    for child in children:
        if child.poll() is None:
            child.kill()
        child.wait()
    found, cases = [], len(json.loads((folder / "cases.json").read_text()))
    for rank, child in enumerate(children):
        path = folder / f"found.{rank}"
        rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
        text = (folder / f"errors.{rank}").read_text(errors="replace")
        errors = text[-3000:] if child.returncode else text[-300:]
        found.append({"rows": rows, "cases": cases, "code": child.returncode, "errors": errors})
    return found


def main(folder: Path, ranks: int, kind: str, until: float) -> int:
    """One rank. until: the time at which it gives up, monotonic s."""
    import faulthandler

    faulthandler.dump_traceback_later(max(0.1, until - time.monotonic()), exit=True)
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    if kind == "cuda":
        take_environment(rank, ranks)
        torch.cuda.set_device(0)
    device = device_of(kind, rank, share=True)
    store = f"file://{folder / 'store'}"
    dist.init_process_group(BACKENDS[kind], init_method=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    cases = [Case(**row) for row in json.loads((folder / "cases.json").read_text())]
    for case in cases:
        began = time.monotonic()
        try:
            row = (host_times if case.kind == "host" else run_case)(case, rank, ranks, device)
        except Exception as error:
            row = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()[-2000:]}
        row |= {"case": asdict(case), "seconds": round(time.monotonic() - began, 2), "at_once": at_once()}
        with open(folder / f"found.{rank}", "a") as stream:
            stream.write(json.dumps(row) + "\n")
        if "error" in row:
            return 0 if case.failing or case.planted else 1
    faulthandler.cancel_dump_traceback_later()
    return 0


def all_cases(steps: int = 4) -> list[Case]:
    """Placements and splits, plain and captured."""
    ways = [("single", "layers"), ("loop", "layers"), ("vee", "layers"), ("vee", "graph"), ("single", "graph")]
    plain = [Case(placement, split, steps=steps) for placement, split in ways]
    plain += [Case("vee", kind="dropout", steps=steps), Case("single", kind="gpt", steps=steps, dtype="bfloat16")]
    return [*plain, *(replace(one, capture=True) for one in plain)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, kind in (("folder", Path), ("ranks", int), ("kind", str), ("until", float)):
        parser.add_argument(name, type=kind)
    asked = parser.parse_args()
    code = main(asked.folder, asked.ranks, asked.kind, asked.until)
    sys.stderr.flush()
    os._exit(code)
