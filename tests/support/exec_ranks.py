"""Functions run on gloo ranks, a process each: `on_ranks(4, "tests.exec.test_x:job", argument)`."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any
from unittest import mock

from zbsolve.exec.run.launch import path_of
from zbsolve.util.machine import child_environment

LIMIT = 1000.0  # seconds for all that ranks do: only who hangs takes so long, also on a loaded machine
JOBS = [f"tests.support.{path.stem}" for path in Path(__file__).parent.glob("*_jobs*.py")]
# What ranks need, and tests beside which their jobs lie, imported once for all: torch takes seconds, its optimizers and FSDP
# import torch._dynamo when they are first used, and AOTAutograd networkx with its first graph.
HEAVY = [
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "functorch.compile",
    "pytest",
    "profiler.roofline",
    "profiler.stage_rounds",
    "zbsolve.cli",
    "zbsolve.exec.graphs.auto",
    "zbsolve.exec.run.job",
    "zbsolve.search.solver",
    "tests.support.trainings",
    *JOBS,
    "tests.support.preloaded",
]


@cache
def forking() -> ForkServerContext:
    """Forks ranks from one process that has done their imports and nothing else. It ends with this process."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(HEAVY)
    with mock.patch.dict(os.environ, child_environment()):
        forkserver.ensure_running()
    return context


def on_ranks(ranks: int, function: str, argument: Any = None, timeout: float = LIMIT) -> list[Any]:
    """What `function(rank, argument)` returned on each rank (JSON values); of a module alone, what its functions did that
    `argument` names, [(name, argument), …], one after the other. Fails where one does; no process stays."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = (folder, ranks, timeout, function, json.dumps(argument))
        for rank, code in enumerate(ended(function, [(main, (*given, rank)) for rank in range(ranks)], timeout)):
            assert code is None or code == 0, f"{function} on rank {rank}: {said(folder, 'stderr', rank)[-2000:]}"
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def jobs_on(ranks: int, module: str, jobs: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Function of `module` → what it did on each rank; one process group for all, since starting it takes longer than most.
    jobs: function → its argument."""
    found = on_ranks(ranks, module, list(jobs.items()))
    return {name: [one[i] for one in found] for i, name in enumerate(jobs)}


def torchrun(ranks: int, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line on ranks that find what torchrun gives: its variables, and a store for all. (Its own start takes
    seconds a process; test_run.py has one.) In `words` RANK is the rank's number."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as name:
        given = (Path(name), ranks, store.port, words)
        codes = ended("torchrun", [(member, (*given, rank)) for rank in range(ranks)], LIMIT)
        out, errors = ("".join(said(Path(name), what, rank) for rank in range(ranks)) for what in ("stdout", "stderr"))
    return subprocess.CompletedProcess(words, max(code or 0 for code in codes), out, errors)


def ended(what: str, calls: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], seconds: float) -> list[int | None]:
    """The exit codes of forked processes, once all have ended or one has failed; None of those that were ended for it."""
    children = [forking().Process(target=function, args=given) for function, given in calls]
    try:
        for child in children:
            child.start()
        until = time.monotonic() + seconds
        while any(one.exitcode is None for one in children) and not any(one.exitcode for one in children):
            assert time.monotonic() < until, f"{what}: not done after {seconds} s"
            wait([one.sentinel for one in children if one.exitcode is None], 0.1)
        return [one.exitcode for one in children]
    finally:
        for one in children:
            if one.pid is not None:
                one.kill()
                one.join(10.0)


def said(folder: Path, what: str, rank: int) -> str:
    """What a rank has written to a stream."""
    return (folder / f"{what}.{rank}").read_text(errors="replace")


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

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> None:
        self.process.join(timeout)


class ForkedModule(Forked):
    """`python -m module words`, forked where `Popen` would start it; both streams go to the file that it is given."""

    def __init__(self, command: Sequence[str], env: dict[str, str], stdout: Any, stderr: Any) -> None:
        assert stdout is stderr
        self.process = forking().Process(target=as_main, args=(command[2:], env, Path(stdout.name)))
        self.process.start()


def as_main(words: Sequence[str], environment: dict[str, str], output: Path) -> None:
    redirect(output, output)
    os.environ.update(environment)
    sys.argv = list(words)
    try:
        runpy.run_module(words[0], run_name="__main__")
        code: Any = 0
    except SystemExit as end:
        code = end.code
    sys.stderr.flush()
    os._exit(code or 0)


def work(folder: Path, rank: int) -> None:
    from zbsolve.exec.run.launch import run_rank_process

    redirect(path_of(folder, rank))
    code = run_rank_process(folder, rank)
    sys.stderr.flush()
    os._exit(code)


def redirect(errors: Path, output: Path = Path(os.devnull)) -> None:
    """Standard streams as a process started by `Popen` has them. Input ends when whoever asked for this process is gone,
    which is what `end_with_parent` looks at."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    os.dup2(parent.sentinel, 0)
    for number, path in enumerate((output, errors), 1):
        with open(path, "wb") as stream:
            os.dup2(stream.fileno(), number)


def main(folder: Path, ranks: int, timeout: float, function: str, argument: str, rank: int) -> None:
    """One rank."""
    redirect(folder / f"stderr.{rank}")
    run(folder, ranks, timeout, function, json.loads(argument), rank)
    sys.stderr.flush()
    os._exit(0)  # not through torch's and gloo's destructors


def member(folder: Path, ranks: int, port: int, words: Sequence[str], rank: int) -> None:
    """One rank of torchrun's."""
    from zbsolve.cli import main as command
    from zbsolve.exec.run.host import end_with_parent, local_network

    redirect(folder / f"stderr.{rank}", folder / f"stdout.{rank}")
    end_with_parent()
    local_network()
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    store = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in (places | store).items()})
    code = command([word.replace("RANK", str(rank)) for word in words])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(folder: Path, ranks: int, timeout: float, function: str, argument: Any, rank: int) -> None:
    import torch
    import torch.distributed as dist

    from zbsolve.exec.run.host import end_with_parent, local_network

    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=limit)
    module, _, name = function.partition(":")
    jobs = importlib.import_module(module)
    result = getattr(jobs, name)(rank, argument) if name else [getattr(jobs, one)(rank, given) for one, given in argument]
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(result))
