"""What is said of a run whose passes no process knows all of: numbers a step and numbers a rank."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...trace import Trace
from ...util.files import read_document, write_document
from ..memory import Memory
from ..pipeline import Pipeline
from ..rank import StepResult
from ..reports import gathered
from ..splits import merged

KIND = "run"


@dataclass(frozen=True)
class RunNumbers:
    """Numbers of the steps of a run. makespan, span: of the step whose value is the median, µs. steps: how many there are.
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
        """Those of a trace."""
        step = trace.median()
        return cls(step.makespan, step.span, len(trace.steps), tuple(trace.losses), trace.peaks[0], trace.facts)

    def save(self, path: Path) -> None:
        """Write them to a file, whole or not at all."""
        write_document(path, KIND, asdict(self))

    @classmethod
    def load(cls, path: Path) -> RunNumbers:
        """What `save` wrote."""
        return read_document(path, KIND, cls)


def run_numbers(
    pipeline: Pipeline, results: Sequence[StepResult], memory: Memory, facts: dict[str, Any]
) -> RunNumbers | None:
    """Those of these steps on rank 0, None on the others; every rank calls it, with its own part of the step and its own
    `memory`."""
    part = pipeline.view.part
    assert part is not None
    mine = {"peak": memory.peak, "predicted": memory.predicted_peak, "most": memory.most, "window": part.window}
    said = [json.loads(one) for one in gathered(pipeline.wires, json.dumps([mine, pipeline.splits]).encode())]
    windows = [result.seen.windows for result in results]
    if not said:
        return None
    makespans = [float(one[:, 1].max() - one[:, 0].min()) for one in windows]
    spans = [float((one[:, 1] - one[:, 0]).max()) for one in windows]
    values = makespans if part.one.objective == "makespan" else spans
    median = sorted(range(len(values)), key=values.__getitem__)[(len(values) - 1) // 2]
    if splits := merged([rows for _, rows in said]):
        facts = facts | {"splits": splits}
    ranks = [one for one, _ in said]
    facts = facts | {
        "predicted_peaks": [one["predicted"] for one in ranks],
        "transient_peaks": [one["most"] for one in ranks],
        "windows": windows[median].tolist(),
        "predicted_windows": [one["window"] for one in ranks],
    }
    peaks = tuple(one["peak"] for one in ranks)
    losses = tuple(result.loss for result in results)
    return RunNumbers(makespans[median], spans[median], len(results), losses, peaks, facts)
