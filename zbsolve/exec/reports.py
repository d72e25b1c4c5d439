"""What each rank saw → one timeline a step, one trace a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..schedule import Schedule
from ..timeline import Floats, Timeline
from ..trace import Trace
from .handlers.table import passes_where
from .interpreter import Record
from .memory import Memory
from .program import Program
from .transport.peers import Peers

HEAD_WORDS = 2  # before the columns: when the step began, and the sum of its losses (a float64's bits)


class Reports:
    """Sends every rank's times and losses to all ranks, after each step and while the next one runs. offset: ns that this
    rank's clock is ahead of rank 0's. emulated: devices are, and say by themselves when a collective started."""

    def __init__(
        self, schedule: Schedule, programs: Sequence[Program], peers: Peers, offset: int, emulated: bool = False
    ) -> None:
        index = schedule.problem.index
        self.schedule = schedule
        self.rows = [np.array([index[action.name] for action in p.actions], np.int64) for p in programs]
        self.goes_on = [np.array([action.goes_on for action in p.actions], bool) for p in programs]
        self.peers, self.emulated = peers, emulated
        self._offset = offset
        self._width = HEAD_WORDS + 4 * max(len(rows) for rows in self.rows)

    def start(self, record: Record, loss: torch.Tensor | None) -> StepReport:
        """Hand over one step. All ranks call this; nothing waits. loss: the sum of this rank's losses."""
        columns = np.array([record.began, *record.start, *record.end, *record.arrived, *record.waited], np.int64)
        if self._offset:
            times = columns[: len(columns) - len(record.waited)]
            times[times > 0] -= self._offset
        words = np.zeros(self._width, np.int64)
        words[0] = columns[0]
        words[1:2].view(np.float64)[0] = 0.0 if loss is None else float(loss)
        words[HEAD_WORDS : HEAD_WORDS + len(columns) - 1] = columns[1:]
        mine = torch.from_numpy(words)
        everything = torch.empty((self.peers.wires.size, self._width), dtype=torch.int64)
        work = self.peers.wires.control.allgather([list(everything.unbind())], [mine])
        return StepReport(self, work, everything, mine)


class StepReport:
    """One step as all ranks saw it. It is complete after `wait`; all else waits for it."""

    def __init__(self, reports: Reports, work: Any, everything: torch.Tensor, mine: torch.Tensor) -> None:
        self._reports = reports
        self._work = work
        self._everything = everything
        self._mine = mine

    def wait(self) -> None:
        """Wait until every rank's part is here. Raises RunFailed where a rank failed."""
        if self._work is not None:
            self._reports.peers.wait(self._work, "end of the step")
            self._work = None

    @cached_property
    def loss(self) -> float:
        """The mean of the microbatches' losses."""
        self.wait()
        total = float(self._everything[:, 1].contiguous().view(torch.float64).sum())
        return total / self._reports.schedule.problem.microbatches

    @cached_property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Start, end and ready of every pass, µs since the first rank began, and the host time before it (see `Trace.host`),
        µs. Each has shape (passes,), in the problem's table order."""
        self.wait()
        problem = self._reports.schedule.problem
        words = self._everything.numpy()
        start, end, arrived, host = (np.zeros(len(problem.passes)) for _ in range(4))
        joined, only_time = passes_where(problem, "ends_with_step"), passes_where(problem, "only_time")
        joins = passes_where(problem, "joins")
        zero = int(words[:, 0].min())
        began = (words[:, 0] - zero) / 1000
        for rank, rows in enumerate(self._reports.rows):
            n = len(rows)
            for i, column in enumerate((start, end, arrived)):
                column[rows] = (words[rank, HEAD_WORDS + i * n : HEAD_WORDS + (i + 1) * n] - zero) / 1000
            waited = words[rank, HEAD_WORDS + 3 * n : HEAD_WORDS + 4 * n] / 1000
            left = np.where(self._reports.goes_on[rank], start[rows], end[rows])  # when this rank went on
            # The others may be recorded while the rank did something else.
            ran = np.flatnonzero(~(only_time | joins | joined)[rows])
            host[rows[ran]] = start[rows[ran]] - np.append(began[rank], left[ran][:-1]) - waited[ran]
        for stage in np.unique(problem.passes.stage[joined]):  # they begin when the last of their ranks joins
            rows = np.flatnonzero(joined & (problem.passes.stage == stage))
            start[rows] = start[rows].max()
        ready = np.maximum(arrived, began[problem.passes.rank])
        before, after = problem.edges.before, problem.edges.after
        together = joins[after] & (not self._reports.emulated)  # it begins when all is there that goes into it
        np.maximum.at(start, after[together], end[before[together]])
        end = np.maximum(start, end)
        here = problem.passes.rank[before] == problem.passes.rank[after]
        np.maximum.at(ready, after[here], end[before[here]])
        ready[joined] = start[joined]
        return start, end, ready, host

    @cached_property
    def timeline(self) -> Timeline:
        """When each pass of every rank ran."""
        start, end, *_ = self.columns
        return Timeline(self._reports.schedule.problem, start, end)


class MeasuredStep(Protocol):
    """What a trace needs of a step."""

    @property
    def timeline(self) -> Timeline:
        """When each pass ran."""

    @property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Start, end, ready and host time of every pass, µs, shape (passes,) each."""

    @property
    def loss(self) -> float:
        """The mean of the microbatches' losses."""


def trace_of(schedule: Schedule, steps: Sequence[MeasuredStep], memory: Sequence[Memory], facts: dict[str, Any]) -> Trace:
    """A trace of these steps. memory: of each rank, from one step like them."""
    held = {name: size for one in memory for name, size in zip(one.names, one.held, strict=True)}
    host: dict[str, Any] = {}
    if any(one.host for one in memory):
        host["host_peaks"] = [one.host_peak for one in memory]
        host["predicted_host_peaks"] = [one.predicted_host_peak for one in memory]
    return Trace(
        schedule.problem,
        dict(schedule.order),
        tuple(seen.timeline for seen in steps),
        tuple(seen.columns[2] for seen in steps),
        tuple(seen.loss for seen in steps),
        (tuple(one.peak for one in memory),) * len(steps),
        {
            **facts,
            **host,
            "predicted_peaks": [one.predicted_peak for one in memory],
            "transient_peaks": [one.most for one in memory],
            "predicted_held": {name: size for one in memory for name, size in zip(one.names, one.predicted, strict=True)},
        },
        tuple(seen.columns[3] for seen in steps),
        np.array([held[name] for name in schedule.problem.names]),
        schedule.syncs,
    )
