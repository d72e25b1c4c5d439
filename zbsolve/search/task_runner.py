"""Solves many tasks, in this process or by workers.

If time is the limit, answers count as they come, and searches end that cannot beat the best answer of others. If effort is,
tasks are drawn in rounds of fixed size, before any answer of the round counts, so the result is independent of workers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import islice, takewhile
from threading import TIMEOUT_MAX, Timer

from ..ilp.bounds.bound import Bound
from ..util.clock import Clock
from ..util.dask_workers import workers_on
from ..util.workers import Notice, Rival, Workers
from .state import Contest, State
from .task import Answer, Task, answer_from, answer_task, solve_task, task_text

LATE = 0.05  # seconds after the end of the time at which workers are told, so that the clock surely is over
ROUND = 8  # tasks that are drawn at once if effort is the limit


@dataclass
class TaskRunner:
    """How tasks are solved. workers: who solves; None: this process, one task after the other. counted: whether effort is
    the limit. rival: the best value so far, µs; −∞ ends running searches. progress: called with a task's label and the
    state of its search. stop: whether no further task should begin. left: seconds until workers are told `rival` anyway."""

    workers: Workers | None
    counted: bool
    rival: Rival = lambda: math.inf
    progress: Callable[[str, State], None] | None = None
    stop: Callable[[], bool] = lambda: False
    left: Callable[[], float] = lambda: math.inf

    @property
    def count(self) -> int:
        """How many tasks run at a time; 1 if effort is the limit, since the result must not depend on it."""
        return 1 if self.workers is None or self.counted else max(1, self.workers.count)

    def answers(self, tasks: Iterable[Task], size: int = ROUND) -> Iterator[Answer]:
        """The answer of each task.

        A task is drawn when a worker is free. If effort is the limit, tasks are drawn in rounds of `size`, and answers come
        in their order. On Ctrl-C answers that were found come first, then KeyboardInterrupt is raised. Raises what `solve`
        raises, except Infeasible and NotFound, which are answers; WorkersLost.
        """
        tasks = takewhile(lambda task: not self.stop(), tasks)
        if not self.counted:
            yield from self._here(tasks) if self.workers is None else self._there(tasks, self.workers)
            return
        while drawn := list(islice(tasks, size)):
            yield from self._here(drawn) if self.workers is None else self._in_order(drawn, self.workers)

    def _here(self, tasks: Iterable[Task]) -> Iterator[Answer]:
        pressed: list[bool] = []
        for task in takewhile(lambda task: not self.stop(), tasks):  # asked again, since a whole round was drawn
            callbacks = {} if self.progress is None else {"progress": partial(self.progress, task.label)}
            yield solve_task(task, Contest(None, partial(self._rival_of, task), partial(pressed.append, True)), callbacks)
            if pressed:
                raise KeyboardInterrupt

    def _there(self, tasks: Iterator[Task], workers: Workers) -> Iterator[Answer]:
        """Answers of workers, as they come."""
        drawn: list[Task] = []
        sent = math.inf

        def texts() -> Iterator[str]:
            for task in tasks:
                drawn.append(task)
                yield task_text(task, workers.count)

        alarm = Timer(min(self.left() + LATE, TIMEOUT_MAX), lambda: workers.tell(self.rival()))
        alarm.daemon = True  # the process need not wait for it
        if not self.counted and math.isfinite(self.left()):
            alarm.start()
        try:
            for number, text in workers.run(texts()):
                yield self._shown(answer_from(drawn[number], text))
                if not self.counted and (now := self.rival()) < sent:
                    workers.tell(sent := now)
        finally:
            alarm.cancel()

    def _in_order(self, drawn: list[Task], workers: Workers) -> Iterator[Answer]:
        """Answers of workers in the order of the tasks; after an interruption those that came."""
        came: dict[int, Answer] = {}
        numbers = {id(task): number for number, task in enumerate(drawn)}
        try:
            for answer in self._there(iter(drawn), workers):
                came[numbers[id(answer.task)]] = answer
        finally:
            yield from (came[number] for number in sorted(came))

    def _rival_of(self, task: Task) -> float:
        return math.inf if self.counted or task.offset is None else self.rival() - task.offset

    def _shown(self, answer: Answer) -> Answer:
        """The answer, after reporting it to `progress`."""
        schedule = answer.schedule
        if self.progress is not None and schedule is not None and (proven := schedule.certificate) is not None:
            bound = Bound(proven.bound, proven.proof, proven.relaxation, proven.ranks)
            state = State(schedule.problem, Clock(1.0), bound, schedule, proven.value, solver=proven.solver)
            self.progress(answer.task.label, state)
        return answer


def solvers_on(on: str | int | None, notice: Notice = lambda line: None) -> AbstractContextManager[Workers | None]:
    """A context with workers for the option `workers` of `solve_auto`, `frontier` and `plan`.

    on: a number of processes on this machine, or a Dask scheduler's `tcp://host:port`; 1 or None: this process.
    notice: called with a line when a worker dies.

    All processes that it started end with the context. Raises BadInput.
    """
    return workers_on(on, answer_task, notice)
