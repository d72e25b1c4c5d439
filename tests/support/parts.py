"""Parts of a benchmark (see `benchmarks.harness`), each a process: they import nothing that takes long."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from zbsolve.util.errors import BadInput


def works(number: int) -> dict[str, Any]:
    return {"number": number}


def fails() -> dict[str, Any]:
    raise BadInput("stage 3: no such thing")


def finds_wrong() -> dict[str, Any]:
    return {"number": 2, "wrong": ["a is not b", "c is not d"]}


def hangs(note: str) -> dict[str, Any]:
    """It writes its number as one."""
    Path(f"{note}.part").write_text(str(os.getpid()))
    Path(f"{note}.part").rename(note)
    time.sleep(600)
    return {}


def ends_early() -> dict[str, Any]:
    os.write(1, b"a library " + b"x" * 10_000 + b"\n")
    os._exit(0)


def garbage() -> Any:
    os.write(1, b"\xff\xfe\x00 no text\n")
    return ["no", "dict"]


def leaves_a_server(note: str) -> dict[str, Any]:
    """Its MPS lives on, and it ends by no signal that it can hear of."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = Path(tempfile.mkdtemp())
    (folder / "control").touch()
    return hangs(note)
