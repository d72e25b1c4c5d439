"""What goes wrong while a schedule runs."""

from __future__ import annotations

from ..errors import ZbsolveError


class RunFailed(ZbsolveError):
    """A rank died, raised or was too slow; the line names rank, pass and cause."""

    exit_code = 1


class LostRank(RunFailed):
    """The connection to another rank broke: most often a consequence, not the cause."""


def one_line(error: BaseException) -> str:
    """Type and message without line breaks, at most 300 characters."""
    text = " ".join(str(error).split())
    if isinstance(error, ZbsolveError):
        return text
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__
