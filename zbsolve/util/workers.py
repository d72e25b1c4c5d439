"""`Workers`, which run tasks; and those on this machine, a process each: a process reads tasks as lines from standard input,
and writes answers to standard output."""

from __future__ import annotations

import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import wait
from types import TracebackType
from typing import Protocol

from .errors import ZbsolveError
from .machine import child_environment, cores

Rival = Callable[[], float]  # the best value that others have reached so far; −∞: end now
Answering = Callable[[str, Rival], str]  # task's text → answer's text; a module's function, so that workers can import it
Notice = Callable[[str], None]
MAX_DEATHS = 3  # a task during which more workers die ends the search
GRACE = 1.0  # seconds that tasks have to end early
KILL_SECONDS = 10.0  # to wait for a killed process
CHUNK = 1 << 16  # bytes of a pipe that are read at once


class WorkersLost(ZbsolveError):
    """No worker is left, or too many died during one task: the search ends."""

    exit_code = 1


class Workers(Protocol):
    """Workers that answer tasks, several at a time."""

    @property
    def count(self) -> int:
        """Tasks at a time."""

    def run(self, tasks: Iterator[str]) -> Iterator[tuple[int, str]]:
        """(number, answer) of each task, in the order in which they end. The next task is taken when a worker is free. On
        KeyboardInterrupt running tasks are told to end, and it is raised after their answers. Raises WorkersLost."""

    def tell(self, value: float) -> None:
        """Tell all workers that others have reached `value`, until the next `run`; −∞ ends their tasks."""


def threads_each(count: int) -> int:
    """Threads for each of `count` workers on this machine; a search needs two: one finds, one proves."""
    return max(2, cores() // count)


@dataclass
class Job:
    """A task. deaths: how many workers died during it."""

    number: int
    text: str
    deaths: int = 0


@dataclass(eq=False)
class Worker:
    """A worker process. job: its current task. received: the part of the answer that has arrived."""

    process: subprocess.Popen[bytes]
    job: Job | None = None
    received: bytearray = field(default_factory=bytearray)

    @property
    def output(self) -> int:
        """The descriptor of its standard output, for its answers."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def give(self, job: Job) -> None:
        """Send it a task. If the process has died, its closed output shows that."""
        self.job = job
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(job.text.encode() + b"\n")
            self.process.stdin.flush()

    def end(self) -> int:
        """End the process. Returns its exit code; negative: the signal that ended it."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):  # killed, but the kernel holds it
            self.process.wait(KILL_SECONDS)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        return self.process.returncode or 0


class Processes:
    """`Workers` on this machine. One that dies is replaced, and its task runs again."""

    def __init__(self, answering: Answering, count: int, notice: Notice) -> None:
        self.count, self._notice = count, notice
        self._name = f"{answering.__module__}:{answering.__qualname__}"
        self._shared = tempfile.TemporaryFile()  # one number, which workers map  # noqa: SIM115
        self._workers: list[Worker] = []
        self._again: deque[Job] = deque()

    def __enter__(self) -> Processes:
        self.tell(math.inf)
        try:
            for _ in range(self.count):
                self._workers.append(self._start())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.process.kill()  # all at once
        for worker in self._workers:
            worker.end()
        self._workers.clear()
        self._shared.close()

    def tell(self, value: float) -> None:
        """As `Workers.tell`."""
        os.pwrite(self._shared.fileno(), struct.pack("d", value), 0)

    def run(self, tasks: Iterator[str]) -> Iterator[tuple[int, str]]:
        """As `Workers.run`."""
        self.tell(math.inf)
        coming = (Job(number, text) for number, text in enumerate(tasks))
        try:
            while True:
                self._hand_out(coming)
                if not self._busy:
                    return
                yield from self._answers()
        except KeyboardInterrupt:
            self.tell(-math.inf)
            until = time.monotonic() + GRACE
            while self._busy and (left := until - time.monotonic()) > 0:
                yield from self._answers(left)
            raise
        finally:
            self._again.clear()
            for worker in self._busy:  # the caller no longer needs their answers
                worker.end()
                self._workers[self._workers.index(worker)] = self._start()

    @property
    def _busy(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.job is not None]

    def _hand_out(self, coming: Iterator[Job]) -> None:
        """Give a task to each free worker."""
        for worker in self._workers:
            if worker.job is None:
                job = self._again.popleft() if self._again else next(coming, None)
                if job is None:
                    return
                worker.give(job)

    def _answers(self, seconds: float | None = None) -> Iterator[tuple[int, str]]:
        """Wait until a worker has an answer or has died, and yield all complete answers."""
        busy = {worker.output: worker for worker in self._busy}
        for output in wait(list(busy), seconds):
            assert isinstance(output, int)
            worker, part = busy[output], os.read(output, CHUNK)
            worker.received += part
            if not part:
                self._died(worker)
            elif worker.received.endswith(b"\n"):
                assert worker.job is not None
                answer = worker.job.number, worker.received[:-1].decode()
                worker.job, worker.received = None, bytearray()
                yield answer

    def _died(self, worker: Worker) -> None:
        """Replace a worker that died, and run its task again. Raises WorkersLost."""
        job = worker.job
        assert job is not None
        job.deaths += 1
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(KILL_SECONDS)
        code = worker.end()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if job.deaths > MAX_DEATHS:
            self._notice(line := f"a task ended {job.deaths} workers, the last one {how}: the search ends")
            raise WorkersLost(line)
        self._notice(f"a worker {how}: its task runs again")
        self._again.append(job)
        self._workers[self._workers.index(worker)] = self._start()

    def _start(self) -> Worker:
        """A process. Its standard input ends with this process, so none outlives its parent; Ctrl-C does not reach it."""
        shared = self._shared.fileno()
        command = [sys.executable, "-m", "zbsolve.util.workers", self._name, str(shared), str(os.getpid())]
        pipe, environment = subprocess.PIPE, child_environment()
        started = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True, pass_fds=(shared,)
        )
        return Worker(started)


# --- A worker process ---

NUMBER_BYTES = 8


def main() -> None:
    """Answer tasks until standard input ends. shared: descriptor of a file with the value that others have reached. parent:
    id of the process that started this one; when that is gone, tasks end."""
    name, shared, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    module, function = name.split(":")
    answering = getattr(import_module(module), function)
    number = mmap.mmap(shared, NUMBER_BYTES, access=mmap.ACCESS_READ)

    def rival() -> float:
        return -math.inf if os.getppid() != parent else float(struct.unpack("d", number[:NUMBER_BYTES])[0])

    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(2, 1)  # libraries must not print among the answers
        for line in sys.stdin.buffer:
            answers.write(answering(line.decode().rstrip("\n"), rival).encode() + b"\n")
            answers.flush()


if __name__ == "__main__":
    main()
