"""What can go wrong, as types. Every message is one line that names a file, field, pass or rank."""

from __future__ import annotations


class ZbsolveError(Exception):
    """Anything a user can cause. The CLI prints it as one line; exit code `exit_code`. details: the traceback of where it
    arose, where the error's own does not have that: in another process, or below a pipeline's step. others: those of the
    same command that came after it."""

    exit_code = 2
    details = ""
    others: tuple[ZbsolveError, ...] = ()


class BadInput(ZbsolveError):
    """A value, field or file that cannot be used."""


class CannotRead(BadInput):
    """A file that is not there, or that nobody may read."""


class Infeasible(ZbsolveError):
    """No schedule exists (for example: one microbatch does not fit a rank's capacity)."""

    exit_code = 1


class NotFound(ZbsolveError):
    """No schedule was found in the time given; whether one exists is open."""

    exit_code = 1


class WrongBound(ZbsolveError):
    """A bound said to be proven is above the value of a verified schedule: a defect in zbsolve, never the user's."""

    exit_code = 1


class Deadlock(ZbsolveError):
    """The order of a schedule contradicts the graph; `cycle` names the passes that wait for each other."""

    exit_code = 1

    def __init__(self, cycle: tuple[str, ...]) -> None:
        super().__init__("deadlock: " + " → ".join((*cycle, cycle[0])) if cycle else "deadlock")
        self.cycle = cycle


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The KeyboardInterrupt that `error` is or comes from; None where there is none. Compiled code that a signal ends raises
    SystemError from it."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error
