"""What goes wrong while a schedule runs, in one line each."""

from __future__ import annotations

import re

from ...util.errors import ZbsolveError, raised

MEMORY = re.compile(r"(tried to allocate [\d.]+ \w+)", re.IGNORECASE)


class RunFailed(ZbsolveError):
    """A rank died, raised or was too slow. The line names rank, pass and cause. told: the other ranks have heard of it."""

    exit_code = 1
    told = False


class LostRank(RunFailed):
    """Nothing came from another rank, or nothing went there. That is most often a consequence and not the cause. peer: the
    rank that did not answer, where one is known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


def one_line(error: BaseException) -> str:
    """Type, the line of the person's own code, and message, without line breaks. Of our own errors the message alone, and of
    a lack of memory how much was asked for."""
    text = " ".join(str(error).split())
    if isinstance(error, ZbsolveError):
        return text
    if is_out_of_memory(error):
        size = MEMORY.search(text)
        return f"out of memory: {size[1]}" if size else "out of memory"
    return raised(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Does an error say that memory ran out? Python has a type for that, CUDA has one (torch.OutOfMemoryError), and torch's
    allocator on the CPU raises a bare RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
