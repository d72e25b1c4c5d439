"""What goes wrong while a schedule runs, in one line each."""

from __future__ import annotations

import re

from ..errors import ZbsolveError

MEMORY = re.compile(r"(tried to allocate [\d.]+ \w+)", re.IGNORECASE)


class RunFailed(ZbsolveError):
    """A rank died, raised or was too slow; the line names rank, pass and cause."""

    exit_code = 1
    told = False  # the other ranks have heard of it


class LostRank(RunFailed):
    """Nothing came from another rank, or nothing went there: most often a consequence, not the cause. `peer`: the rank
    that did not answer, where one is known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


def one_line(error: BaseException) -> str:
    """Type and message without line breaks, at most 300 characters."""
    text = " ".join(str(error).split())
    if isinstance(error, ZbsolveError):
        return text
    if _out_of_memory(error, text):
        size = MEMORY.search(text)
        return f"out of memory: {size[1]}" if size else "out of memory"
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def _out_of_memory(error: BaseException, text: str) -> bool:
    """Python's own, CUDA's (torch.OutOfMemoryError), and torch's on the CPU, which is a bare RuntimeError."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or (isinstance(error, RuntimeError) and "can't allocate memory" in text)
