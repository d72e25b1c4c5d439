"""One local rank: `python -m zbsolve.exec.run.worker FOLDER RANK`, started by `launch.run_local`."""

from __future__ import annotations

import json
import mmap
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ...util.errors import ZbsolveError
from ...util.files import write_text
from ..reports import RunNumbers
from ..transport.failure import LostRank, RunFailed, one_line
from .host import asked_to_stop
from .job import Options
from .launch import NOTE_BYTES
from .torchrun import Place, read_schedule, run_group

MAX_DETAILS = 100_000  # characters of a traceback; those of the innermost lines are kept


def main(folder: Path, rank: int) -> int:
    """Run the rank; the exit code. Rank 0 leaves `trace.json` or `numbers.json`, and a rank that fails `failure.RANK`; each
    whole or not at all."""
    end_with_parent()
    local_network()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # what a model prints is told as it comes
    try:
        _run(folder, rank)
    except Exception as error:
        text = str(error) if isinstance(error, ZbsolveError) else f"rank {rank}: {one_line(error)}"
        kind = type(error).__name__ if isinstance(error, ZbsolveError) else RunFailed.__name__
        peer = error.peer if isinstance(error, LostRank) else None
        told = error.details if isinstance(error, ZbsolveError) else ""
        details = (told or "".join(traceback.format_exception(error)))[-MAX_DETAILS:]
        body = {"kind": kind, "text": " ".join(text.split()), "peer": peer, "time": time.monotonic_ns(), "details": details}
        write_text(folder / f"failure.{rank}", json.dumps(body))
        return 1
    return 0


def _run(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    announce = _announcer(folder, rank)
    announce("start")
    trace = run_group(
        Place(rank, job["ranks"], rank, job["ranks"]),
        f"file://{folder / 'store'}",
        partial(read_schedule, str(folder / "schedule.json"), rank),
        job["spec"],
        Options(**job["options"]),
        announce,
    )
    if isinstance(trace, RunNumbers):
        trace.save(folder / "numbers.json")
    elif trace is not None:
        trace.save(folder / "trace.json")


def _announcer(folder: Path, rank: int) -> Callable[[str], None]:
    """What notes the work of this rank in a file that its parent can read when it has died. It takes under a microsecond."""
    with open(folder / "now", "r+b") as stream:
        notes = mmap.mmap(stream.fileno(), 0)
    a, b = rank * NOTE_BYTES, (rank + 1) * NOTE_BYTES

    def announce(name: str) -> None:
        notes[a:b] = name.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    return announce


def end_with_parent() -> None:
    """End this process when its parent is gone, which holds the other end of standard input. What it writes there asks to
    end after a step."""

    def wait() -> None:
        while os.read(0, 1):
            asked_to_stop.set()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def local_network() -> None:
    """Let gloo use the loopback device, so that a machine without a working name for itself will do."""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        names = {name for _, name in socket.if_nameindex()}
        for name in ("lo", "lo0"):
            if name in names:
                os.environ["GLOO_SOCKET_IFNAME"] = name
                break


if __name__ == "__main__":
    code = main(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # not through torch's and gloo's destructors, which may wait for ranks that are gone
