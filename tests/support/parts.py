"""Parts of a benchmark (see `benchmarks.harness`), each a process: they import nothing that takes long."""

from __future__ import annotations

import os
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
    Path(note).write_text(str(os.getpid()))
    time.sleep(600)
    return {}
