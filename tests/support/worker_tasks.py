"""Tasks of `tests/util/test_workers.py` that need no solver."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def answer(text: str, rival: Callable[[], float]) -> str:
    """`die PATH`: the first time PATH is made and the worker dies; `die`: it dies each time; `wait`: until others have
    reached less than 1, which it answers; else the text itself."""
    what, _, path = text.partition(" ")
    if what == "die" and not (path and Path(path).exists()):
        if path:
            Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "wait":
        while rival() >= 1:
            time.sleep(0.01)
        return "ended" if rival() == -math.inf else f"told {rival():g}"
    return text
