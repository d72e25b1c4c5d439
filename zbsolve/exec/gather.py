"""What each rank saw → one timeline a step, one trace a run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch

from ..problem import KINDS
from ..schedule import Schedule
from ..timeline import Floats, Timeline
from ..trace import Trace
from .groups import ALL_TO_ALL
from .lower import Program
from .memory import Memory
from .peers import Peers
from .walk import Record

HEAD = 3  # words before the columns: when the step began, its losses' sum (a float64's bits) and their number


class Exchange:
    """Sends every rank's times and losses to all, after each step and beside the next."""

    def __init__(self, schedule: Schedule, programs: Sequence[Program], peers: Peers, offset: int) -> None:
        """`offset`: ns that this rank's clock is ahead of rank 0's."""
        index = schedule.problem.index
        self.schedule = schedule
        self.rows = [np.array([index[action.name] for action in p.actions], np.int64) for p in programs]
        self.peers = peers
        self._offset = offset
        self._width = HEAD + 4 * max(len(rows) for rows in self.rows)

    def start(self, record: Record, loss: torch.Tensor | None) -> Seen:
        """Hand over one step; all ranks call. Nothing waits. `loss`: the sum of this rank's losses."""
        columns = np.array([record.began, *record.start, *record.end, *record.arrived, *record.waited], np.int64)
        if self._offset:
            times = columns[: len(columns) - len(record.waited)]
            times[times > 0] -= self._offset
        words = np.zeros(self._width, np.int64)
        words[0], words[2] = columns[0], len(record.losses)
        words[1:2].view(np.float64)[0] = 0.0 if loss is None else float(loss)
        words[HEAD : HEAD + len(columns) - 1] = columns[1:]
        mine = torch.from_numpy(words)
        everything = torch.empty((self.peers.wires.size, self._width), dtype=torch.int64)
        work = self.peers.wires.control.allgather([list(everything.unbind())], [mine])
        return Seen(self, work, everything, mine)


class Seen:
    """One step as all ranks saw it; complete after `wait`."""

    def __init__(self, exchange: Exchange, work: Any, everything: torch.Tensor, mine: torch.Tensor) -> None:
        self._exchange = exchange
        self._work = work
        self._everything = everything
        self._mine = mine

    def wait(self) -> None:
        """Until every rank's share is here. Raises RunFailed where one failed."""
        if self._work is not None:
            self._exchange.peers.wait(self._work, "end of the step")
            self._work = None

    @cached_property
    def loss(self) -> float:
        """The mean over the microbatches."""
        self.wait()
        total = float(self._everything[:, 1].contiguous().view(torch.float64).sum())
        return total / max(1, int(self._everything[:, 2].sum()))

    @cached_property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Start, end and ready of every pass, µs since the first rank began, and the host time before it (see
        `Trace.host`), µs; in the problem's table order."""
        self.wait()
        problem = self._exchange.schedule.problem
        words = self._everything.numpy()
        start, end, arrived, host = (np.zeros(len(problem.passes)) for _ in range(4))
        exchange = problem.passes.kind == KINDS.index("C")
        around = np.isin(problem.passes.kind, [KINDS.index(kind) for kind in ALL_TO_ALL])
        zero = int(words[:, 0].min())
        began = (words[:, 0] - zero) / 1000
        for rank, rows in enumerate(self._exchange.rows):
            n = len(rows)
            for i, column in enumerate((start, end, arrived)):
                column[rows] = (words[rank, HEAD + i * n : HEAD + (i + 1) * n] - zero) / 1000
            waited = words[rank, HEAD + 3 * n : HEAD + 4 * n] / 1000
            left = np.where(exchange[rows], start[rows], end[rows])  # when this rank went on
            walked = np.flatnonzero(~around[rows])  # an all-to-all may be recorded beside what the rank did
            host[rows[walked]] = start[rows[walked]] - np.append(began[rank], left[walked][:-1]) - waited[walked]
        for stage in np.unique(problem.passes.stage[exchange]):  # an exchange begins when the last of its ranks joins
            rows = np.flatnonzero(exchange & (problem.passes.stage == stage))
            start[rows] = start[rows].max()
        ready = np.maximum(arrived, began[problem.passes.rank])
        before, after = problem.edges.before, problem.edges.after
        here = problem.passes.rank[before] == problem.passes.rank[after]
        np.maximum.at(ready, after[here], end[before[here]])
        ready[exchange] = start[exchange]
        return start, end, ready, host

    @cached_property
    def timeline(self) -> Timeline:
        """When each pass of every rank ran."""
        start, end, *_ = self.columns
        return Timeline(self._exchange.schedule.problem, start, end)


class Step(Protocol):
    """What a trace needs of a step; `columns`: start, end, ready and host time of every pass, µs."""

    @property
    def timeline(self) -> Timeline: ...

    @property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats]: ...

    @property
    def loss(self) -> float: ...


def trace_of(schedule: Schedule, steps: Sequence[Step], memory: Sequence[Memory], facts: dict[str, Any]) -> Trace:
    """A trace of these steps; `memory[r]` is rank r's, of one step like them."""
    held = {name: size for one in memory for name, size in zip(one.names, one.held, strict=True)}
    return Trace(
        schedule.problem,
        dict(schedule.order),
        tuple(seen.timeline for seen in steps),
        tuple(seen.columns[2] for seen in steps),
        tuple(seen.loss for seen in steps),
        (tuple(one.peak for one in memory),) * len(steps),
        {
            **facts,
            "predicted_peaks": [one.predicted_peak for one in memory],
            "transient_peaks": [one.most for one in memory],
            "predicted_held": {name: size for one in memory for name, size in zip(one.names, one.predicted, strict=True)},
        },
        tuple(seen.columns[3] for seen in steps),
        np.array([held[name] for name in schedule.problem.names]),
        schedule.syncs,
    )
