"""The types of errors. Every message is one line that names a file, field, pass or rank. Also finds the line of the user's
code that raised an error."""

from __future__ import annotations

import os
import re
import site
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path


class ZbsolveError(Exception):
    """Anything a user can cause. The CLI prints it as one line, and exits with `exit_code`. details: the traceback of the
    cause, if it was in another process or inside a pipeline's step. others: further errors of the same command."""

    exit_code = 2
    details = ""
    others: tuple[ZbsolveError, ...] = ()


class BadInput(ZbsolveError):
    """A value, field or file that cannot be used."""


class Unfit(BadInput):
    """Options of a step that do not go together, or not with its profile. A search skips such a choice."""


class CannotRead(BadInput):
    """A file that does not exist, or cannot be read."""


class Infeasible(ZbsolveError):
    """No schedule exists (for example: one microbatch does not fit a rank's capacity)."""

    exit_code = 1


class NotFound(ZbsolveError):
    """No schedule was found in the time given; whether one exists is open."""

    exit_code = 1


class WrongBound(ZbsolveError):
    """A proven bound is above the value of a verified schedule: an error in zbsolve, not of the user."""

    exit_code = 1


class Deadlock(ZbsolveError):
    """The order of a schedule contradicts the graph; `cycle` names the passes that wait for each other."""

    exit_code = 1

    def __init__(self, cycle: tuple[str, ...]) -> None:
        super().__init__("deadlock: " + " → ".join((*cycle, cycle[0])) if cycle else "deadlock")
        self.cycle = cycle


class RunFailed(ZbsolveError):
    """A rank died, raised or was too slow. The line names rank, pass and cause. told: the other ranks were informed."""

    exit_code = 1
    told = False


class LostRank(RunFailed):
    """A message from or to another rank failed, usually as a consequence of another error. peer: the rank that did not
    answer, if known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """BadInput that is raised inside begins with `where` it is, a file or a field."""
    try:
        yield
    except BadInput as error:
        raise error if str(error).startswith(where) else BadInput(f"{where}: {error}") from None


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that `error` is or was caused by; None if there is none. Compiled code that a signal interrupts
    raises SystemError from it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


MEMORY = re.compile(r"(tried to allocate [\d.]+ \w+)", re.IGNORECASE)
ROOT = Path(__file__).resolve().parents[2]
MAX_CHARACTERS = 300  # of a line; a message of a library can have pages


def own_line(error: BaseException) -> str:
    """`file.py:12`: the innermost line of the traceback that is in the user's code, not in zbsolve or an installed library;
    "" if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if _own(name)]
    return f"{_short(own[-1][0])}:{own[-1][1]}" if own else ""


def raised(error: BaseException) -> str:
    """Type, own line and message, `ValueError at model.py:12: wrong width`, without line breaks."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = own_line(error)
    head = type(error).__name__ + (f" at {place}" if place else "")
    text = " ".join(message.split())
    return f"{head}: {text}"[:MAX_CHARACTERS] if text else head


def one_line(error: BaseException) -> str:
    """An error in one line: its type, the line of the user's code, and the message. For zbsolve's errors only the message;
    for a lack of memory the requested size."""
    text = " ".join(str(error).split())
    if isinstance(error, ZbsolveError):
        return text
    if is_out_of_memory(error):
        size = MEMORY.search(text)
        return f"out of memory: {size[1]}" if size else "out of memory"
    return raised(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Is it an out-of-memory error? Python has a type for it, and so has CUDA (torch.OutOfMemoryError), but torch's CPU
    allocator raises a plain RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))


def _own(name: str) -> bool:
    """Whether a file is neither zbsolve's nor a library's. Generated code has no file."""
    path = os.path.realpath(name)
    return os.path.isfile(path) and not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the person's."""
    known = sysconfig.get_paths()
    folders = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(ROOT / "zbsolve"), str(ROOT / "profiler")]
    return tuple(os.path.realpath(name) + os.sep for name in folders)


def _short(name: str) -> str:
    """The path from the current folder, where the file is in it."""
    path, here = os.path.realpath(name), os.getcwd() + os.sep
    return path.removeprefix(here)
