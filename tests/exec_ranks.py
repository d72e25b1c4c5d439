"""Functions run on gloo ranks, a process each: `on_ranks(4, "tests.exec_jobs:name", argument)`."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from zbsolve.exec.launch import child_environment


def on_ranks(ranks: int, function: str, argument: Any = None, timeout: float = 60.0) -> list[Any]:
    """What `function(rank, argument)` returned on each rank (JSON values). Fails where one does; no process stays."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "tests.exec_ranks",
            folder,
            str(ranks),
            str(timeout),
            function,
            json.dumps(argument),
        ]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        children = [subprocess.Popen([*command, str(r)], env=child_environment(), **pipes) for r in range(ranks)]
        try:
            until = time.monotonic() + timeout
            while any(one.poll() is None for one in children) and not any(one.poll() for one in children):
                assert time.monotonic() < until, f"{function}: not done after {timeout} s"
                time.sleep(0.01)
            for rank, one in enumerate(children):
                if one.poll():
                    assert one.stderr is not None
                    raise AssertionError(f"{function} on rank {rank}: {one.stderr.read().decode(errors='replace')[-2000:]}")
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
        finally:
            for one in children:
                one.kill()
                one.communicate()


def main(folder: Path, ranks: int, timeout: float, function: str, argument: Any, rank: int) -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from zbsolve.exec.worker import end_with_parent, local_network

    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    limit = timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks, timeout=limit)
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(rank, argument)
    dist.barrier()
    (folder / f"{rank}.json").write_text(json.dumps(result))
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4], json.loads(sys.argv[5]), int(sys.argv[6]))
