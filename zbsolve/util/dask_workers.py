"""Workers of a Dask cluster (`dask.distributed`, Rocklin 2015). The scheduler assigns tasks, and assigns them again if a
worker dies. Dask's protocol pickles messages, so the whole cluster must be trusted. `workers_on` makes workers of any
kind from the value of `--on`."""

from __future__ import annotations

import logging
import math
import queue
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from .errors import BadInput, ZbsolveError, raised
from .workers import Answering, Notice, Processes, Workers, WorkersLost

if TYPE_CHECKING:
    from distributed import Client, Future

CONNECT_SECONDS = 10.0  # for a scheduler to answer, and for a first worker
LOST_SECONDS = 30.0  # without any worker, until the search ends
GRACE = 3.0  # seconds that tasks have to end early
POLL = 1.0  # seconds between two counts of the workers


class Incumbents:
    """A plugin of each worker (`WorkerPlugin`): the best values of others, for each run. Removing it ends all tasks."""

    def __init__(self) -> None:
        self.reached: dict[int, float] = {}
        self.over = False

    def setup(self, worker: Any) -> None:
        """Nothing has been reached yet."""

    def teardown(self, worker: Any) -> None:
        """End running tasks."""
        self.over = True

    def rival(self, run: int) -> float:
        """What others have reached in this run."""
        return -math.inf if self.over else self.reached.get(run, math.inf)


@contextmanager
def dask_cluster(address: str, answering: Answering, notice: Notice) -> Iterator[DaskCluster]:
    """The workers of the scheduler at `address`. Raises BadInput if Dask is missing, or the scheduler does not answer."""
    if find_spec("distributed") is None:
        raise BadInput(f"on '{address}': dask.distributed is missing: pip install zbsolve[cluster]")
    from distributed import Client

    with _quiet():
        try:
            client = Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
        except (OSError, ValueError) as error:
            raise BadInput(f"on '{address}': no scheduler answers there ({raised(error)})") from None
        cluster = DaskCluster(client, address, answering, notice)
        try:
            cluster.join()
            yield cluster
        finally:
            with suppress(Exception):  # the scheduler may be gone
                cluster.leave()
            with suppress(Exception):
                client.close(timeout=GRACE)


@contextmanager
def _quiet() -> Iterator[None]:
    """A context without Dask's long warnings: zbsolve reports errors in a line, and tasks check the versions they need."""
    from distributed.versions import VersionMismatchWarning

    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", VersionMismatchWarning)
            yield
    finally:
        logger.setLevel(before)


class DaskCluster:
    """`Workers` of a Dask cluster; as many tasks at a time as the workers have threads."""

    def __init__(self, client: Client, address: str, answering: Answering, notice: Notice) -> None:
        self._client, self._address, self._answering, self._notice = client, address, answering, notice
        self._token, self._runs, self._looked, self._count = f"zbsolve-{uuid4().hex}", 0, 0.0, 0

    def join(self) -> None:
        """Wait for a worker, and put the plugin on each. Raises BadInput if there is none."""
        from distributed.diagnostics.plugin import WorkerPlugin

        try:
            self._client.wait_for_workers(1, timeout=CONNECT_SECONDS)
        except TimeoutError:
            raise BadInput(f"on '{self._address}': the scheduler has no workers") from None
        self._client.register_plugin(type("Incumbent", (Incumbents, WorkerPlugin), {})(), name=self._token)
        self._client.subscribe_topic("all", self._on_event)

    def leave(self) -> None:
        """Remove the plugin and the subscription from the cluster."""
        self._client.unsubscribe_topic("all")
        self._client.unregister_worker_plugin(self._token)

    @property
    def count(self) -> int:
        """Threads of all workers, counted at most `POLL` ago."""
        if time.monotonic() - self._looked > POLL:
            self._count, self._looked = sum(self._client.nthreads().values()), time.monotonic()
        return self._count

    def tell(self, value: float) -> None:
        """As `Workers.tell`."""
        self._client.run(_tell, self._token, self._runs, value, wait=False, on_error="ignore")

    def run(self, tasks: Iterator[str]) -> Iterator[tuple[int, str]]:
        """As `Workers.run`."""
        self._runs += 1  # values are kept by run, so that late tasks do not read those of another run
        running: dict[Future, int] = {}
        ended: queue.SimpleQueue[Future] = queue.SimpleQueue()
        coming, seen = enumerate(tasks), time.monotonic()
        try:
            while True:
                more = self._hand_out(coming, running, ended)
                if not running and not more:
                    return
                if self._client.status == "running" and self.count:
                    seen = time.monotonic()
                elif time.monotonic() - seen > LOST_SECONDS:
                    raise self._over("no worker is left")
                with suppress(queue.Empty):  # workers may have come or gone
                    future = ended.get(timeout=POLL)
                    yield running.pop(future), self._answer_of(future)
        except KeyboardInterrupt:
            self.tell(-math.inf)
            until = time.monotonic() + GRACE
            with suppress(queue.Empty):
                while running:
                    future = ended.get(timeout=max(0.0, until - time.monotonic()))
                    yield running.pop(future), self._answer_of(future)
            raise
        finally:
            if running:
                with suppress(Exception):  # the scheduler may be gone
                    self.tell(-math.inf)
                    self._client.cancel(list(running))

    def _hand_out(
        self, coming: Iterator[tuple[int, str]], running: dict[Future, int], ended: queue.SimpleQueue[Future]
    ) -> bool:
        """Give a task to each free thread. Returns whether there may be more tasks."""
        while len(running) < self.count:
            number, text = next(coming, (-1, ""))
            if number < 0:
                return False
            future = self._client.submit(_answer, self._token, self._runs, self._answering, text, pure=False)
            running[future] = number
            future.add_done_callback(ended.put)
        return True

    def _answer_of(self, future: Future) -> str:
        """The answer of a task. Raises WorkersLost, or ZbsolveError if it failed."""
        from distributed.scheduler import KilledWorker

        if future.status == "finished":
            return str(future.result())
        error = future.exception() if future.status == "error" else None
        if isinstance(error, KilledWorker):
            ended = f"a task ended {error.allowed_failures + 1} workers, the last one {error.last_worker.address}"
            raise self._over(ended) from None
        why = f"a worker failed: {raised(error)}" if error else f"a task was {future.status}"
        raise ZbsolveError(f"{self._address}: {why}") from None

    def _over(self, why: str) -> WorkersLost:
        """Report why the search ends, and return the error for it. A search that has found a schedule keeps it."""
        self._notice(line := f"{self._address}: {why}: the search ends")
        return WorkersLost(line)

    def _on_event(self, event: tuple[float, Any]) -> None:
        """Report a lost worker, from an event of the scheduler."""
        _, message = event
        if isinstance(message, dict) and message.get("action") == "remove-worker" and message.get("processing-tasks"):
            self._notice(f"worker {message.get('worker')} is gone: its tasks run again elsewhere")


async def _tell(token: str, run: int, value: float, dask_worker: Any) -> None:
    """On a worker: note what others have reached."""
    if token in dask_worker.plugins:
        dask_worker.plugins[token].reached[run] = value


def _answer(token: str, run: int, answering: Answering, text: str) -> str:
    """On a worker: answer a task."""
    from distributed import get_worker

    incumbents: Incumbents = get_worker().plugins.get(token) or Incumbents()
    return answering(text, partial(incumbents.rival, run))


SCHEMES = ("tcp://", "tls://", "ucx://", "ws://", "wss://")  # of a Dask scheduler's address
MAX_PROCESSES = 1000


@contextmanager
def workers_on(on: str | int | None, answering: Answering, notice: Notice = lambda line: None) -> Iterator[Workers | None]:
    """The workers at `on`: a number of processes on this machine, or a Dask scheduler's address. Gives None for 1: this
    process. At the end all started processes are stopped. notice: called with a line if a worker dies. Raises BadInput."""
    place = "1" if on is None else str(on)
    if place.isdecimal() and 1 <= int(place) <= MAX_PROCESSES:
        if int(place) == 1:
            yield None
            return
        made: AbstractContextManager[Workers] = Processes(answering, int(place), notice)
    elif place.startswith(SCHEMES):
        made = dask_cluster(place, answering, notice)
    else:
        raise BadInput(f"on '{place[:60]}': a number of processes (1 to {MAX_PROCESSES}), or tcp://host:port of a scheduler")
    with made as workers:
        yield workers
