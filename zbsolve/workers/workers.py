"""What runs tasks: `Workers`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from ..util.errors import ZbsolveError
from ..util.machine import cores

Rival = Callable[[], float]  # what others have reached, read at any time; −∞: end now
Answering = Callable[[str, Rival], str]  # a task's text → its answer's; a function of a module, so that workers find it
Notice = Callable[[str], None]
MAX_DEATHS = 3  # workers that one task may end before it is given up


class WorkersLost(ZbsolveError):
    """No worker is left, or one task ended too many of them: the search ends."""

    exit_code = 1


class Workers(Protocol):
    """Workers that answer tasks, several at a time."""

    @property
    def count(self) -> int:
        """Tasks at a time."""

    def run(self, tasks: Iterator[str]) -> Iterator[tuple[int, str]]:
        """Number and answer of each task, as they end. A task is drawn when a worker is free for it. On KeyboardInterrupt
        what runs is told to end, its answers come, then KeyboardInterrupt is raised. Raises WorkersLost."""

    def tell(self, value: float) -> None:
        """All workers know from now on, until the next `run`, that others have reached `value`; −∞ ends what they do."""


def threads_each(count: int) -> int:
    """Threads for each of so many workers on this machine; a search needs two: one finds, one proves."""
    return max(2, cores() // count)
