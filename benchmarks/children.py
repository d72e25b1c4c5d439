"""Ranks of a benchmark, as processes of their own: `found_by` starts them, and this module is what they run."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from zbsolve.exec.run.launch import child_environment
from zbsolve.exec.run.worker import end_with_parent, local_network

MESSAGE_LIMIT = timedelta(seconds=60)


def found_by(work: Callable[..., Any], ranks: int, seconds: float, **arguments: Any) -> list[Any]:
    """What `work(rank, **arguments)` returns on each of `ranks` processes, by rank.

    They have one thread each and are in a process group on gloo. Arguments and what is returned go through JSON. The
    processes end with this one, and after `seconds`. Raises SystemExit where one of them fails.
    """
    spec = sys.modules[work.__module__].__spec__  # its name is the module's, also where that runs as `__main__`
    assert spec is not None
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        command = [sys.executable, "-m", "benchmarks.children", f"{spec.name}:{work.__name__}", folder, str(ranks)]
        children = [
            subprocess.Popen([*command, str(rank), json.dumps(arguments)], stdin=subprocess.PIPE, env=child_environment())
            for rank in range(ranks)
        ]
        try:
            codes = [one.wait(seconds) for one in children]
        finally:
            for one in children:
                one.kill()
                one.communicate()
        if any(codes):
            raise SystemExit(f"ranks ended with {codes}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(ranks)]


def main() -> None:
    """One rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="module:function")
    parser.add_argument("folder", type=Path)
    parser.add_argument("ranks", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("arguments", type=json.loads)
    options = parser.parse_args()
    import torch
    import torch.distributed as dist

    end_with_parent()
    local_network()
    torch.set_num_threads(1)
    store = f"file://{options.folder / 'store'}"
    place = {"rank": options.rank, "world_size": options.ranks}
    dist.init_process_group("gloo", init_method=store, timeout=MESSAGE_LIMIT, **place)
    module, _, name = options.work.partition(":")
    found = getattr(import_module(module), name)(options.rank, **options.arguments)
    (options.folder / f"{options.rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    os._exit(0)  # not through torch's and gloo's destructors, which may wait for ranks that are gone


if __name__ == "__main__":
    main()
