"""From the reports of all ranks to timelines of steps and a trace, or for very long steps only to numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..problem.tables import Bools, Ints
from ..schedule import Schedule
from ..schedule.timeline import Floats, Timeline
from ..schedule.trace import Trace
from ..util.errors import BadInput
from ..util.files import read_document, write_document
from .base.part import Record
from .base.program import Program
from .choices import merged
from .handlers import passes_where
from .memory import Memory
from .step_view import StepView
from .transport.format import receive_value, send_value
from .transport.peers import Peers
from .transport.wires import Wires

# Before the columns: when the step began, the sum of its losses (a float64's bits), its first start and its last end.
HEAD_WORDS = 4
RUN_KIND = "run"  # of the document with the numbers of a run


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step. columns: start, end, ready time and host time of every pass, µs since the first rank began, in the
    order of the problem's table; shape (passes,) each. loss: the mean of the microbatches' losses."""

    timeline: Timeline
    columns: tuple[Floats, Floats, Floats, Floats] = field(repr=False)
    loss: float


@dataclass(frozen=True, eq=False)
class Table:
    """Maps ranks' reports to a schedule's table of passes. rows, goes_on: for each rank, the rows of its passes in program
    order, and whether it goes on beside their work. emulated: devices are, and report the start of collectives themselves.
    gpu: times are a GPU's, and a column has the times of launching. Without rows, ranks report their losses alone."""

    schedule: Schedule
    rows: Sequence[Ints]
    goes_on: Sequence[Bools]
    emulated: bool
    gpu: bool = False

    @classmethod
    def of(cls, schedule: Schedule, programs: Sequence[Program], emulated: bool, gpu: bool = False) -> Table:
        """The table for the passes of these programs."""
        index = schedule.problem.index
        rows = [np.array([index[action.name] for action in p.actions], np.int64) for p in programs]
        goes_on = [np.array([action.goes_on for action in p.actions], bool) for p in programs]
        return cls(schedule, rows, goes_on, emulated, gpu)

    @property
    def width(self) -> int:
        """How many numbers a rank's report has at least."""
        return HEAD_WORDS + 4 * max(map(len, self.rows), default=0)

    def words(self, record: Record, loss: torch.Tensor | None, offset: int = 0) -> Ints:
        """A rank's report of a step. loss: the sum of its losses. offset: see `Reports`."""
        last = record.launched if self.gpu else record.waited
        columns = np.array([record.began, *record.start, *record.end, *record.arrived, *last], np.int64)
        if offset:
            times = columns[: len(columns) - len(record.waited)]
            times[times > 0] -= offset
        n = len(record.start)
        words = np.zeros(max(self.width, HEAD_WORDS + 4 * n), np.int64)
        words[0] = columns[0]
        words[1:2].view(np.float64)[0] = 0.0 if loss is None else float(loss)
        words[2:4] = columns[1 : n + 1].min(), columns[n + 1 : 2 * n + 1].max()
        words[HEAD_WORDS : HEAD_WORDS + len(columns) - 1] = columns[1:]
        return words

    def columns(self, words: Ints) -> tuple[Floats, Floats, Floats, Floats]:
        """`StepResult.columns` from the reports of all ranks, shape (ranks, width)."""
        problem = self.schedule.problem
        start, end, arrived, host = (np.zeros(len(problem.passes)) for _ in range(4))
        joined, only_time = passes_where(problem, "ends_with_step"), passes_where(problem, "only_time")
        joins = problem.passes.that(together=True)
        zero = int(words[:, 0].min())
        began = (words[:, 0] - zero) / 1000
        for rank, rows in enumerate(self.rows):
            n = len(rows)
            for i, column in enumerate((start, end, arrived)):
                column[rows] = (words[rank, HEAD_WORDS + i * n : HEAD_WORDS + (i + 1) * n] - zero) / 1000
            waited = words[rank, HEAD_WORDS + 3 * n : HEAD_WORDS + 4 * n] / 1000
            if self.gpu:
                host[rows] = waited  # the host's time of launching, beside the device
                continue
            left = np.where(self.goes_on[rank], start[rows], end[rows])  # when this rank went on
            # These three kinds may be recorded while the rank ran something else.
            ran = np.flatnonzero(~(only_time | joins | joined)[rows])
            ran = ran[np.argsort(start[rows][ran], kind="stable")]  # a W may have run before its turn
            host[rows[ran]] = start[rows[ran]] - np.append(began[rank], left[ran][:-1]) - waited[ran]
        for stage in np.unique(problem.passes.stage[joined]):  # a sum begins when its last rank joins
            rows = np.flatnonzero(joined & (problem.passes.stage == stage))
            start[rows] = start[rows].max()
        ready = np.maximum(arrived, began[problem.passes.rank])
        before, after = problem.edges.before, problem.edges.after
        together = joins[after] & (not self.emulated)  # a collective begins when all of its inputs are ready
        np.maximum.at(start, after[together], end[before[together]])
        end = np.maximum(start, end)
        here = problem.passes.rank[before] == problem.passes.rank[after]
        np.maximum.at(ready, after[here], end[before[here]])
        ready[joined] = start[joined]
        return start, end, ready, host


@dataclass(frozen=True, eq=False)
class Reports:
    """Sends every rank's times and losses to all ranks after each step, while the next one runs. In very long steps, where a
    rank knows its own passes alone, only losses and the first and last times are sent. table: of the view's passes. offset:
    ns by which this rank's clock is ahead of rank 0's."""

    view: StepView
    table: Table
    peers: Peers
    offset: int

    def of(self, view: StepView, programs: Sequence[Program]) -> Reports:
        """The reports for another order of the same passes."""
        return replace(self, view=view, table=Table.of(view.schedule, programs, self.table.emulated, self.table.gpu))

    @cached_property
    def width(self) -> int:
        """How many numbers each rank sends."""
        return HEAD_WORDS if self.view.part else self.table.width

    def start(self, record: Record, loss: torch.Tensor | None, memory: Memory | None) -> StepResult:
        """Start to report one step. All ranks call this; nothing waits. loss: the sum of this rank's losses."""
        words = self.table.words(record, loss, self.offset)
        return StepResult(self, *self.peers.wires.gather(torch.from_numpy(words[: self.width])), words, memory)


class StepResult:
    """One training step, from the reports of all ranks. memory: of this rank, if requested. Everything else is complete
    after `wait`, which it calls. mine: this rank's report."""

    def __init__(self, reports: Reports, work: Any, everything: torch.Tensor, mine: Ints, memory: Memory | None) -> None:
        self._reports, self._work, self._everything, self.mine, self.memory = reports, work, everything, mine, memory
        self.table = reports.table

    def wait(self) -> None:
        """Wait until all ranks' reports have arrived. Raises RunFailed where a rank has failed."""
        if self._work is not None:
            self._reports.peers.wait(self._work, "end of the step")
            self._work = None

    @cached_property
    def loss(self) -> float:
        """The mean of the microbatches' losses, on every rank."""
        return self.total / self._reports.view.microbatches

    @property
    def total(self) -> float:
        """The sum of all ranks' losses, the same bits on each."""
        self.wait()
        return float(self._everything[:, 1].contiguous().view(torch.float64).sum())

    @cached_property
    def windows(self) -> Floats:
        """When each rank started its first pass and ended its last one, µs since the first rank began, shape (ranks, 2)."""
        self.wait()
        words = self._everything.numpy()
        return np.asarray((words[:, 2:HEAD_WORDS] - words[:, 0].min()) / 1000)

    @cached_property
    def columns(self) -> tuple[Floats, Floats, Floats, Floats]:
        """Start, end and ready of every pass, µs since the first rank began, and the host time before it (see `Trace.host`),
        µs. Each has shape (passes,), in the problem's table order."""
        self.wait()
        if self._reports.view.part is not None:
            raise BadInput("step: of a file of rounds each rank knows its own passes' times alone")
        return self.table.columns(self._everything.numpy())

    @cached_property
    def timeline(self) -> Timeline:
        """When each pass of every rank ran, µs since the first rank began."""
        start, end, *_ = self.columns
        return Timeline(self._reports.view.schedule.problem, start, end)


def gathered(wires: Wires, value: Any) -> list[Any]:
    """The values of all ranks, on rank 0; nothing on the others. All ranks call this. Raises LostRank."""
    if wires.rank:
        send_value(wires, value, 0)
        return []
    return [value, *(receive_value(wires, rank) for rank in range(1, wires.size))]


def put_together(steps: Sequence[StepResult], wires: Wires, schedule: Schedule | None) -> list[MeasuredStep]:
    """Steps from reports of which each rank knows its own, on rank 0, which has the schedule of the whole step; nothing on
    other ranks. All ranks call this. Raises LostRank."""
    reported = gathered(wires, torch.from_numpy(np.stack([step.mine for step in steps])))
    losses = [step.loss for step in steps]
    if not reported or schedule is None:
        return []
    rows = list(schedule.sequences.values())
    whole = [np.zeros(len(own), bool) for own in rows]
    table = replace(steps[0].table, schedule=schedule, rows=rows, goes_on=whole)
    words = np.zeros((len(steps), len(rows), HEAD_WORDS + 4 * max(map(len, rows))), np.int64)
    for rank, columns in enumerate(reported):
        words[:, rank, : columns.shape[1]] = columns
    measured = [table.columns(word) for word in words]
    problem = schedule.problem
    return [MeasuredStep(Timeline(problem, *times[:2]), times, loss) for times, loss in zip(measured, losses, strict=True)]


def trace_of(
    schedule: Schedule, steps: Sequence[MeasuredStep | StepResult], memory: Sequence[Memory], facts: dict[str, Any]
) -> Trace:
    """A trace of these steps; the first of them ran `schedule`. memory: of each rank, from one such step, or ()."""
    trace = Trace(
        schedule.problem,
        dict(schedule.order),
        tuple(Timeline(schedule.problem, *seen.columns[:2]) for seen in steps),
        tuple(seen.columns[2] for seen in steps),
        tuple(seen.loss for seen in steps),
        ((0,) * schedule.problem.ranks,) * len(steps),
        facts,
        tuple(seen.columns[3] for seen in steps),
        syncs=schedule.syncs,
    )
    if not memory:
        return trace
    held = {name: size for of_rank in memory for name, size in zip(of_rank.names, of_rank.held, strict=True)}
    host: dict[str, Any] = {}
    if any(of_rank.device for of_rank in memory):
        host["device_peaks"] = [of_rank.device for of_rank in memory]
    if any(of_rank.host for of_rank in memory):
        host["host_peaks"] = [max(of_rank.host, default=0) for of_rank in memory]
        host["predicted_host_peaks"] = [max(of_rank.predicted_host, default=0) for of_rank in memory]
    host |= {
        "predicted_peaks": [of_rank.predicted_peak for of_rank in memory],
        "transient_peaks": [of_rank.most for of_rank in memory],
        "predicted_held": {name: size for rank in memory for name, size in zip(rank.names, rank.predicted, strict=True)},
    }
    peaks, bytes_held = tuple(of_rank.peak for of_rank in memory), np.array([held[name] for name in schedule.problem.names])
    return replace(trace, peaks=(peaks,) * len(steps), facts=facts | host, held=bytes_held)


@dataclass(frozen=True)
class RunNumbers:
    """The results of a run without a trace. makespan, span: of the step with the median value, µs. steps: their number.
    losses: the mean loss of each step. peaks: the most activation bytes that each rank held. facts: as `Trace.facts`, here
    also `windows` and `predicted_windows`: when each rank's first pass started and its last one ended in that step, µs."""

    makespan: float
    span: float
    steps: int
    losses: tuple[float, ...]
    peaks: tuple[int, ...]
    facts: dict[str, Any]

    @classmethod
    def of(cls, trace: Trace) -> RunNumbers:
        """The results of a trace."""
        step = trace.median()
        return cls(step.makespan, step.span, len(trace.steps), tuple(trace.losses), trace.peaks[0], trace.facts)

    def save(self, path: Path) -> None:
        """Write the results to a file, whole or not at all."""
        write_document(path, RUN_KIND, asdict(self))

    @classmethod
    def load(cls, path: Path) -> RunNumbers:
        """Read what `save` wrote."""
        return read_document(path, RUN_KIND, cls)


def run_numbers(pipeline: Any, results: Sequence[StepResult], memory: Memory, facts: dict[str, Any]) -> RunNumbers | None:
    """These numbers on rank 0, None on the others. Every rank calls it, with its part of the step and its `memory`."""
    part = pipeline.view.part
    assert part is not None
    own = {"peak": memory.peak, "predicted": memory.predicted_peak, "most": memory.most, "window": part.window}
    told = pipeline.wires.told([own, pipeline.splits])
    windows = [result.windows for result in results]
    if pipeline.rank:
        return None
    makespans = [float(window[:, 1].max() - window[:, 0].min()) for window in windows]
    spans = [float((window[:, 1] - window[:, 0]).max()) for window in windows]
    values = makespans if part.one.objective == "makespan" else spans
    median = sorted(range(len(values)), key=values.__getitem__)[(len(values) - 1) // 2]
    if splits := merged([rows for _, rows in told]):
        facts = facts | {"splits": splits}
    ranks = [numbers for numbers, _ in told]
    facts = facts | {
        "predicted_peaks": [rank["predicted"] for rank in ranks],
        "transient_peaks": [rank["most"] for rank in ranks],
        "windows": windows[median].tolist(),
        "predicted_windows": [rank["window"] for rank in ranks],
    }
    peaks = tuple(rank["peak"] for rank in ranks)
    losses = tuple(result.loss for result in results)
    return RunNumbers(makespans[median], spans[median], len(results), losses, peaks, facts)
