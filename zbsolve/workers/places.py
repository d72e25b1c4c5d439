"""Where tasks run, by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

from ..util.errors import BadInput
from .workers import Answering, Notice, Workers

SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://")  # of a Dask scheduler's address
MAX_PROCESSES = 1000


@contextmanager
def workers_on(on: str | int | None, answering: Answering, notice: Notice = lambda line: None) -> Iterator[Workers | None]:
    """The workers at `on`: a number of processes on this machine, or a Dask scheduler's address; None for one process, which
    is this one. Nothing that was started here stays behind. notice: told in a line where a worker dies. Raises BadInput."""
    said = "1" if on is None else str(on)
    if said.isdecimal() and 1 <= int(said) <= MAX_PROCESSES:
        if int(said) == 1:
            yield None
            return
        from .processes import Processes

        made: AbstractContextManager[Workers] = Processes(answering, int(said), notice)
    elif said.startswith(SCHEMES):
        from .dask_workers import dask_cluster

        made = dask_cluster(said, answering, notice)
    else:
        raise BadInput(f"on '{said[:60]}': a number of processes (1 to {MAX_PROCESSES}), or tcp://host:port of a scheduler")
    with made as workers:
        yield workers
