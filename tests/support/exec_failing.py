"""Ranks that fail on purpose, forked as those of `exec_ranks`."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from .exec_ranks import LIMIT, forking, redirect

MODEL = """
import os, signal, time
import torch
from torch import nn
from zbsolve.exec.run import torchrun

torchrun.LATE_SECONDS = 60.0  # before a rank is ended that may still say what it waits for

class Bad(nn.Module):
    def __init__(self, what):
        super().__init__()
        self.what, self.inner, self.calls = what, nn.Linear(4, 4), 0

    def forward(self, x):
        self.calls += 1
        if self.calls > 3:
            if self.what == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "throw":
                raise ValueError("on\\npurpose")
            if self.what == "hang":
                time.sleep(600)
            if self.what == "leave":
                from zbsolve.util.files import temporary_folder
                left = temporary_folder("left")
                left.__enter__()
                os._exit(1)
            if self.what == "memory":
                torch.empty(1 << 50, dtype=torch.uint8)
            if self.what == "python memory":
                bytearray(1 << 60)
            if self.what == "nan":
                x = x * float("nan")
            if self.what == "object":
                return {"x": x, "odd": object()}
            if self.what == "structure":
                return x, x
            if self.what == "nan back":
                x.register_hook(lambda gradient: gradient / 0)
        y = self.inner(x)
        if self.what == "nan weight" and self.calls > 3:
            x.data[0, 0] = float("inf")  # what W reads
        return y

def model(what):
    return lambda: ([nn.Linear(4, 4), nn.Linear(4, 4), Bad(what), nn.Linear(4, 4)], torch.randn(2, 4))

die, leave, throw, hang, memory, nan, good = map(model, ("die", "leave", "throw", "hang", "memory", "nan", ""))
"""


def failing(what: str, **job: Any) -> list[Any]:
    """What each of some ranks said (None: nothing): {"kind", "text"}, of a step's error also "chained" and "details". Layer
    2 of four, on rank `job["rank"]`, does `what`."""
    job = {"what": what, "ranks": 3, **job}
    ranks = job["ranks"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        children = [forking().Process(target=_rank, args=(folder, rank, job)) for rank in range(ranks)]
        try:
            for child in children:
                child.start()
            until = time.monotonic() + LIMIT
            waited = [one for rank, one in enumerate(children) if rank != job.get("rank") or not what.startswith("hang")]
            for child in waited:
                child.join(max(0.0, until - time.monotonic()))
            paths = [folder / f"said.{rank}" for rank in range(ranks)]
            said = [json.loads(path.read_text()) if path.exists() else None for path in paths]
            assert all(one.exitcode is not None for one in waited), f"not done after {LIMIT} s: {said}"
            return said
        finally:
            for child in children:
                child.kill()
                child.join(10.0)


def _rank(folder: Path, rank: int, job: dict[str, Any]) -> None:
    from zbsolve.exec.run.host import end_with_parent, local_network
    from zbsolve.exec.transport import peers

    if job["what"] == "hang":
        peers.NOTES_SECONDS = 5.0  # on a busy machine others say later what they wait for
    redirect(folder / f"stderr.{rank}")
    end_with_parent()
    local_network()
    try:
        said = {"kind": "", "text": _train(folder, rank, job)}
    except Exception as error:
        said = {"kind": type(error).__name__, "text": str(error)}
        if details := getattr(error, "details", ""):
            said |= {"chained": bool(error.__cause__) or not error.__suppress_context__, "details": details}
    (folder / f"part.{rank}").write_text(json.dumps(said))
    (folder / f"part.{rank}").rename(folder / f"said.{rank}")
    # Staying alive on purpose: that this rank has gone must not be what tells the others.
    others = [other for other in range(job["ranks"]) if other != job["rank"] or not job["what"].startswith(("die", "hang"))]
    while not all((folder / f"said.{other}").exists() for other in others):
        time.sleep(0.01)
    os._exit(0)


def _train(folder: Path, rank: int, job: dict[str, Any]) -> Any:
    """Two steps or evaluations with this package's Pipeline, as anybody's loop would; the last loss. With `job["again"]`:
    what the loop hears first, and of each of these calls that it makes after that."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch import nn

    from zbsolve.exec import Pipeline, RunFailed
    from zbsolve.exec.handlers import PARTS, Part

    from .exec_tools import random_schedule

    names: dict[str, Any] = {}
    exec(MODEL, names)
    ranks, here = job["ranks"], rank == job.get("rank")
    limit = timedelta(seconds=LIMIT)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=limit)
    mesh: Any = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")) if "shard" in job else None
    stages = ranks if mesh is None else 2
    odd = job["what"] == "schedule" and here
    schedule = random_schedule(_problem(tuple(range(stages)), 3 - odd, job), 1)

    class Late(Part):
        def done(self, stage: int) -> None:
            time.sleep(600)

    def layers(numbers: list[int]) -> list[nn.Module]:
        if job["what"] == "build" and here:
            raise ValueError("no such weights")
        bad = [number for number in numbers if here and number == job.get("layer", 2)]
        made = [names["Bad"](job["what"]) if i in bad and mesh is None else nn.Linear(4, 4) for i in numbers]
        if mesh is not None:
            _shard(made, mesh["dp"], job["what"] if here else "")
        return made

    loss = None if job["what"] == "no loss" else nn.functional.mse_loss
    if job["what"] == "hang late" and here:
        PARTS.append(lambda c: Late())
    more: dict[str, Any] = {"timeout": job.get("timeout", 300), "watch": job.get("watch", False)}
    if mesh is not None:
        more["group"] = mesh.get_group("pp")
    runner = Pipeline(layers, schedule, loss=loss, **more)
    result, x = 0.0, torch.randn(6, 4)
    if job["what"].startswith("batch"):
        wrong = dict.fromkeys(("inputs", "targets"), x[:5] if here or job["what"] == "batches" else x)
        refused = _refused(lambda: runner.step(**wrong))
        return {"refused": refused, "then": _refused(lambda: runner.step(x, x).loss)}
    try:
        for _ in range(2):
            result = runner.evaluate(x, x) if job.get("evaluate") else runner.step(x, x).loss
    except RunFailed as error:
        if "again" not in job:
            raise
        return {"first": str(error), "again": [_refused(one) for one in _calls(runner, x, folder, job["again"])]}
    return str(result)


def _problem(placement: tuple[int, ...], microbatches: int, job: dict[str, Any]) -> Any:
    from zbsolve.build import with_sharding

    from .exec_tools import a_problem

    problem = a_problem(placement, microbatches, layers=4)
    return with_sharding(problem, 5, 5, gathers=job["shard"]) if job.get("shard") else problem


def _shard(layers: list[Any], mesh: Any, what: str) -> None:
    """Shard them; where `what` is to happen, it does in the second step, when the others have begun to gather the last."""
    from torch.distributed.fsdp import fully_shard

    for layer in layers:
        fully_shard(layer, mesh=mesh)
    gather, calls = layers[-1].unshard, []

    def unshard(async_op: bool = False) -> Any:
        calls.append(async_op)
        if len(calls) < 2:
            return gather(async_op)
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "throw":
            raise ValueError("on purpose")
        return time.sleep(600)

    if what:
        layers[-1].unshard = unshard


def _calls(runner: Any, x: Any, folder: Path, names: list[str]) -> list[Any]:
    """What a loop that goes on after a failure may call."""
    calls = {
        "step": lambda: runner.step(x, x),
        "evaluate": lambda: runner.evaluate(x, x),
        "load": lambda: runner.load(folder / "nothing"),
        "save": lambda: runner.save(folder / "new"),
    }
    return [calls[name] for name in names]


def _refused(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
