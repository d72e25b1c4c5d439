"""Functions run on gloo ranks, a process each: `on_ranks(4, "tests.support.exec_jobs:name", argument)`."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from zbsolve.exec.run.launch import path_of
from zbsolve.util.machine import child_environment

# What ranks need, imported once for all: torch takes seconds, its optimizers import torch._dynamo at their first step, and
# AOTAutograd networkx with its first graph.
HEAVY = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "functorch.compile",
    "pytest",
    "zbsolve.exec.graphs.auto",
    "zbsolve.exec.run.job",
    "tests.support.exec_jobs",
    "tests.support.exec_jobs_local",
    "tests.support.exec_jobs_optimizer",
]
HEAVY += ["tests.support.exec_jobs_replicas", "tests.support.exec_jobs_sharded", "tests.support.systems_jobs"]


@cache
def forking() -> ForkServerContext:
    """Forks ranks from one process that has done their imports and nothing else. It ends with this process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    with mock.patch.dict(os.environ, child_environment()):
        forkserver.ensure_running()
    return context


def on_ranks(ranks: int, function: str, argument: Any = None, timeout: float = 60.0) -> list[Any]:
    """What `function(rank, argument)` returned on each rank (JSON values). Fails where one does; no process stays."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (folder, ranks, timeout, function, json.dumps(argument))
        children = [forking().Process(target=main, args=(*given, rank)) for rank in range(ranks)]
        try:
            for child in children:
                child.start()
            until = time.monotonic() + timeout
            while any(one.exitcode is None for one in children) and not any(one.exitcode for one in children):
                assert time.monotonic() < until, f"{function}: not done after {timeout} s"
                wait([one.sentinel for one in children if one.exitcode is None], 0.1)
            for rank, one in enumerate(children):
                if one.exitcode:
                    said = (folder / f"stderr.{rank}").read_text(errors="replace")
                    raise AssertionError(f"{function} on rank {rank}: {said[-2000:]}")
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
        finally:
            for one in children:
                if one.pid is not None:
                    one.kill()
                    one.join(10.0)


class Forked:
    """A rank of `run_local`, forked instead of started; to the launcher it is a `Popen`."""

    stdin = None

    def __init__(self, folder: Path, rank: int, more: dict[str, str]) -> None:
        assert not more  # ranks on CPUs need nothing of their own
        path_of(folder, rank).touch()
        self.process = forking().Process(target=work, args=(folder, rank))
        self.process.start()

    def poll(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float) -> None:
        self.process.join(timeout)


def work(folder: Path, rank: int) -> None:
    from zbsolve.exec.run import worker

    redirect(path_of(folder, rank))
    code = worker.main(folder, rank)
    sys.stderr.flush()
    os._exit(code)


def redirect(errors: Path) -> None:
    """Standard streams as a process started by `Popen` has them. Input ends when whoever asked for this process is gone,
    which is what `end_with_parent` looks at."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.dup2(parent.sentinel, 0)
    with open(os.devnull, "wb") as nothing, open(errors, "wb") as stream:
        os.dup2(nothing.fileno(), 1)
        os.dup2(stream.fileno(), 2)


def main(folder: Path, ranks: int, timeout: float, function: str, argument: str, rank: int) -> None:
    """One rank."""
    redirect(folder / f"stderr.{rank}")
    run(folder, ranks, timeout, function, json.loads(argument), rank)
    sys.stderr.flush()
    os._exit(0)  # not through torch's and gloo's destructors


def run(folder: Path, ranks: int, timeout: float, function: str, argument: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from zbsolve.exec.run.worker import end_with_parent, local_network

    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=limit)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, argument)
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(result))
