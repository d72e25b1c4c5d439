"""Jobs at the same time, a thread each: compiled kernels and CP-SAT release the interpreter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

POLL = 0.02  # seconds between two looks at whether all is over
GRACE = 1.0  # seconds for all to end; one in the middle of a kernel may end later


def run_threads(jobs: Sequence[Callable[[], None]], over: Callable[[], bool], stop: Callable[[], None]) -> None:
    """Run all until each has ended, or one has failed, or `over()`; `stop` ends them. Raises what one of them raised."""
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                job()
            except BaseException as error:
                failed.append(error)

        return run

    # No daemons: at exit Python waits for them, and they end soon.
    threads = [threading.Thread(target=guarded(job)) for job in jobs]
    for thread in threads:
        thread.start()
    try:
        while not over() and not failed:
            alive = [thread for thread in threads if thread.is_alive()]
            if not alive:
                break
            alive[0].join(POLL)
    finally:
        stop()
        until = time.monotonic() + GRACE
        for thread in threads:
            thread.join(max(0.0, until - time.monotonic()))
    if failed:
        raise failed[0]
