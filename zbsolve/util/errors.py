"""Types of errors. Every message is one line that names a file, field, pass or rank; and where in the user's own code an
error was raised."""

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
    """Any error that a user can cause. The CLI prints it as one line; exit code `exit_code`. details: the traceback of its
    origin, if the error's own does not have that: in another process, or below a pipeline's step. others: later errors of
    the same command."""

    exit_code = 2
    details = ""
    others: tuple[ZbsolveError, ...] = ()


class BadInput(ZbsolveError):
    """A value, field or file that cannot be used."""


class Unfit(BadInput):
    """Settings of a step that do not go with each other, or with its profile; a search continues with other steps."""


class CannotRead(BadInput):
    """A file that does not exist, or cannot be read."""


class Infeasible(ZbsolveError):
    """No schedule exists (for example: one microbatch does not fit a rank's capacity)."""

    exit_code = 1


class NotFound(ZbsolveError):
    """No schedule was found in the time limit; whether one exists is open."""

    exit_code = 1


class WrongBound(ZbsolveError):
    """A supposedly proven bound exceeds the value of a verified schedule: a defect in zbsolve, never the user's."""

    exit_code = 1


class Deadlock(ZbsolveError):
    """The order of a schedule contradicts the graph; `cycle` names the passes that wait for each other."""

    exit_code = 1

    def __init__(self, cycle: tuple[str, ...]) -> None:
        super().__init__("deadlock: " + " → ".join((*cycle, cycle[0])) if cycle else "deadlock")
        self.cycle = cycle


class RunFailed(ZbsolveError):
    """A rank died, raised or was too slow. The line names rank, pass and cause. told: the other ranks know of it."""

    exit_code = 1
    told = False


class LostRank(RunFailed):
    """No message arrived from another rank, or none could be sent. That is usually a consequence and not the cause. peer:
    the rank that did not answer, if known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


@contextmanager
def prefixed(where: str) -> Iterator[None]:
    """Prefix a BadInput raised inside the block with `where`: the name of a file or a field."""
    try:
        yield
    except BadInput as error:
        raise error if str(error).startswith(where) else BadInput(f"{where}: {error}") from None


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that `error` is or results from, or None. Compiled code that it ends raises SystemError."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error


MEMORY = re.compile(r"(tried to allocate [\d.]+ \w+)", re.IGNORECASE)
ROOT = Path(__file__).resolve().parents[2]
MAX_CHARACTERS = 300  # of a line; a library's message can fill pages


def own_line(error: BaseException) -> str:
    """`file.py:12`: the traceback's innermost line in the user's own code, outside zbsolve and libraries; "": none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}"
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [(name, line) for name, line in frames if _own(name)]
    return f"{_short(own[-1][0])}:{own[-1][1]}" if own else ""


def raised(error: BaseException) -> str:
    """Type, the user's own line and message, `ValueError at model.py:12: wrong width`, without line breaks."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    place = own_line(error)
    head = type(error).__name__ + (f" at {place}" if place else "")
    text = " ".join(message.split())
    return f"{head}: {text}"[:MAX_CHARACTERS] if text else head


def one_line(error: BaseException) -> str:
    """Type, the user's own line, and message, without line breaks. For our own errors only the message, and for a lack of
    memory how much was requested."""
    text = " ".join(str(error).split())
    if isinstance(error, ZbsolveError):
        return text
    if is_out_of_memory(error):
        size = MEMORY.search(text)
        return f"out of memory: {size[1]}" if size else "out of memory"
    return raised(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out: Python and CUDA have a type for that (torch.OutOfMemoryError), but torch's
    allocator on the CPU raises a bare RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))


def _own(name: str) -> bool:
    """Whether a file is the user's: neither zbsolve's nor a library's. Generated code has no file."""
    path = os.path.realpath(name)
    return os.path.isfile(path) and not path.startswith(_libraries())


@cache
def _libraries() -> tuple[str, ...]:
    """Folders of code that is not the user's."""
    known = sysconfig.get_paths()
    folders = [known[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages(), str(ROOT / "zbsolve"), str(ROOT / "profiler")]
    return tuple(os.path.realpath(name) + os.sep for name in folders)


def _short(name: str) -> str:
    """The path relative to the current folder, if the file is in it."""
    path, folder = os.path.realpath(name), os.getcwd() + os.sep
    return path.removeprefix(folder)
