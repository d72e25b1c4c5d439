"""Compares measured steps with the prediction: step times, and how each rank's parts of the difference add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kinds import KINDS
from ..problem import Ints, Problem
from ..schedule import Schedule
from ..schedule.timeline import Timeline
from ..schedule.trace import Trace
from ..util.columns import quartiles
from ..util.errors import BadInput
from ..util.text import aligned, first_difference, format_time, plural, times_note

MOST_NAMED = 6  # kinds of passes that a line names
NOT_COUNTED = "predicted bytes at measured times"  # the memory of a run whose trace counts no bytes


@dataclass(frozen=True, slots=True)
class Parts:
    """How one rank spent a step, whole µs; the parts add up to the step time (`total`) exactly.

    passes: kind → time in compute passes. waiting: idle until the next pass had its inputs. launch: from then until that
    pass started. before: from the step's start to the rank's first compute pass. after: from its last to the step's end.
    """

    passes: dict[str, int]
    waiting: int
    launch: int
    before: int
    after: int

    @property
    def total(self) -> int:
        """The step time, µs."""
        return sum(self.passes.values()) + self.waiting + self.launch + self.before + self.after


@dataclass(frozen=True, slots=True)
class RankParts:
    """The parts of one rank, predicted and measured (in the median step)."""

    rank: int
    predicted: Parts
    measured: Parts

    @property
    def difference(self) -> Parts:
        """Measured − predicted, part by part; its total is the difference of the totals."""
        ran, plan = self.measured, self.predicted
        passes = {kind: ran.passes.get(kind, 0) - plan.passes.get(kind, 0) for kind in {**ran.passes, **plan.passes}}
        return Parts(
            passes, *(getattr(ran, name) - getattr(plan, name) for name in ("waiting", "launch", "before", "after"))
        )


@dataclass(frozen=True, slots=True)
class KindTimes:
    """Times of a kind's passes, µs: predicted mean; measured mean and quartiles (low, high) over all passes and steps."""

    kind: str
    passes: int
    predicted: float
    measured: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Speedup:
    """The baseline's step time over this schedule's: predicted, measured (medians), and by quartiles (low, high)."""

    baseline_predicted: int
    baseline_measured: int
    predicted: float
    measured: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """Predicted and measured step times, whole µs. steps: all measured ones, in order. median_step: the number of the median
    step, the shorter of two; measured: its time. limiting: the rank with the longest time from first start to last end.
    emulated: a line if devices were emulated, with the number of passes for which this machine was late. launching: a line
    for a run on GPUs, on the effect of the hosts' launch times. later: a line for each order that replaced the schedule's
    during the run; everything else is about the steps before that."""

    digest: str
    source: str
    objective: str
    predicted: int
    measured: int
    steps: tuple[int, ...]
    median_step: int
    limiting: int
    ranks: tuple[RankParts, ...]
    kinds: tuple[KindTimes, ...]
    speedup: Speedup | None = None
    emulated: str | None = None
    launching: str | None = None
    later: tuple[str, ...] = ()

    @property
    def difference(self) -> int:
        """Measured − predicted, µs."""
        return self.measured - self.predicted

    def to_json(self) -> dict[str, Any]:
        """All fields, and each rank's differences."""
        body = asdict(self)
        body["difference"] = self.difference
        for row, rank in zip(body["ranks"], self.ranks, strict=True):
            row["difference"] = asdict(rank.difference)
        return body


def compare(schedule: Schedule, trace: Trace, baseline: tuple[Schedule, Trace] | None = None) -> Comparison:
    """Compare a run with its prediction. Step times are of the problem's objective, makespan or span.

    schedule: the predicted schedule.
    trace: a run of it.
    baseline: another schedule and its run, to compute the speed-up over it.

    Raises BadInput where a trace is of another problem or order, or the baseline has other microbatches or layers.
    """
    check_trace(schedule, trace)
    later, trace = switch_lines(trace), trace.by_order()[0]
    predicted = schedule.timeline()
    step = trace.median_step
    steps = tuple(step_time(timeline) for timeline in trace.steps)
    measured = trace.steps[step]
    first, last = measured.windows
    shares = [
        RankParts(rank, _parts(predicted, predicted.start, rank), _parts(measured, trace.ready[step], rank))
        for rank in range(schedule.problem.ranks)
    ]
    return Comparison(
        schedule.problem.digest,
        schedule.problem.source,
        schedule.problem.objective,
        step_time(predicted),
        steps[step],
        steps,
        step,
        int((last - first).argmax()),
        tuple(shares),
        tuple(_kind_times(schedule.problem, trace)),
        None if baseline is None else _speedup(schedule, trace, *baseline),
        _emulated(trace.facts.get("emulated")),
        _launching(trace, step, shares[int((last - first).argmax())]),
        tuple(later),
    )


def switch_lines(trace: Trace) -> list[str]:
    """A line for each order that replaced the schedule's, with its median step and that of the order before."""
    runs = trace.by_order()
    medians = [step_time(run.median()) for run in runs]
    return [
        f"after {switch.step} steps another order ran: {len(run.steps)} steps, median {format_time(now)} in place of "
        f"{format_time(before)} ({now / before - 1:+.1%})"
        for switch, run, (before, now) in zip(trace.switches, runs[1:], pairwise(medians), strict=True)
    ]


def _launching(trace: Trace, step: int, limiting: RankParts) -> str | None:
    """The effect of the hosts' launch times on a run on GPUs: the time to launch a step, the passes that took longer to
    launch than to compute, and how long the limiting rank was idle although its next pass had all inputs."""
    if not str(trace.facts.get("on", "")).startswith("cuda") or not trace.host:
        return None
    problem, timeline, host = trace.problem, trace.steps[step], trace.host[step]
    took, rank = timeline.end - timeline.start, problem.passes.rank
    most = max(float(host[rank == r].sum()) for r in range(problem.ranks))
    text = f"launching a step took a rank's host {most / 1e3:,.2f} ms of {step_time(timeline) / 1e3:,.2f} ms"
    if any(str(line).startswith("captured") for line in trace.facts.get("captured", ())):
        return f"{text}, by one graph a rank"
    late = np.flatnonzero((host > took) & problem.computing)
    if len(late):
        kinds = sorted({f"{problem.passes.stage[row]}{problem.passes[int(row)].kind}" for row in late})
        named = ", ".join(kinds[:MOST_NAMED]) + (", …" if len(kinds) > MOST_NAMED else "")
        text += f"; {len(late)} of {len(took)} passes took longer to launch than to compute ({named}): --capture"
    idle = limiting.measured.launch / max(1, step_time(timeline))
    return f"{text}; rank {limiting.rank} stood idle for {idle:.1%} of the step because its host was late"


def _emulated(facts: Any) -> str | None:
    if not isinstance(facts, dict):
        return None
    late = f"{facts.get('late')} of {facts.get('passes')} passes came late, devices waited for {facts.get('waited')}"
    return f"measured on emulated devices, times of {facts.get('times')}: {late}"


def check_trace(schedule: Schedule, trace: Trace, what: str = "trace") -> None:
    """Raise BadInput, in one line that starts with `what`, unless `trace` is a run of `schedule`."""
    digest, other = schedule.problem.digest, trace.problem.digest
    if digest != other:
        raise BadInput(f"{what}: a run of problem {other}, but the schedule is for problem {digest}")
    for stream in sorted({*schedule.order, *trace.schedule}):
        if other_pass := first_difference(schedule.order.get(stream, ()), trace.schedule.get(stream, ())):
            place, planned, ran = other_pass
            order = f"{stream} ran {ran} at place {place}, not {planned}"
            raise BadInput(f"{what}: a run of another order of problem {digest}: {order}")
    if not trace.steps or len(trace.ready) != len(trace.steps):
        raise BadInput(f"{what}: {len(trace.steps)} steps with {len(trace.ready)} columns of ready times")


def _whole(times: NDArray[Any]) -> Ints:
    """Times rounded to whole µs, so that sums are exact in any order."""
    return np.rint(times).astype(np.int64)


def step_time(timeline: Timeline) -> int:
    """The objective (makespan or span) in whole µs, rounded in one place so that all commands show the same."""
    return int(np.rint(timeline.value))


def _parts(timeline: Timeline, ready: NDArray[Any], rank: int) -> Parts:
    """The parts of one rank. Time between two compute passes is waiting until the second has its inputs, then launch."""
    problem = timeline.problem
    starts = timeline.start if problem.objective == "makespan" else timeline.start[problem.passes.rank == rank]
    origin = starts.min()  # times count from here, so that the last end is the step time, rounded once
    start, end = _whole(timeline.start - origin), _whole(timeline.end - origin)
    rows = np.flatnonzero((problem.passes.rank == rank) & problem.computing)
    rows = rows[np.lexsort((end[rows], start[rows]))]
    inputs = _whole(np.nan_to_num(ready[rows] - origin, nan=-1.0))
    passes = {KINDS[k]: 0 for k in np.unique(problem.passes.kind[rows])}
    at, waiting, launch = int(start[rows[0]]) if len(rows) else 0, 0, 0
    before = at
    kinds = problem.passes.kind[rows].tolist()
    for kind, s, e, r in zip(kinds, start[rows].tolist(), end[rows].tolist(), inputs.tolist(), strict=True):
        # Passes may overlap (inexact clocks, two compute streams); time before `at` is counted already.
        begin, stop = max(s, at), max(e, at)
        had = min(max(r, at), begin)
        waiting, launch = waiting + had - at, launch + begin - had
        passes[KINDS[kind]] += stop - begin
        at = stop
    return Parts(passes, waiting, launch, before, step_time(timeline) - at)


def _kind_times(problem: Problem, trace: Trace) -> list[KindTimes]:
    kind = problem.passes.kind
    durations = np.stack([step.end - step.start for step in trace.steps])
    result = []
    for k in np.unique(kind):
        times = durations[:, kind == k]
        predicted = float(problem.passes.duration[kind == k].mean())
        result.append(KindTimes(KINDS[k], int((kind == k).sum()), predicted, float(times.mean()), *quartiles(times)))
    return result


def _speedup(schedule: Schedule, trace: Trace, other: Schedule, run: Trace) -> Speedup:
    """The speed-up over another schedule's run. Problems may differ (placement, fused backward), but not their work."""
    check_trace(other, run, "baseline")
    run = run.by_order()[0]
    count, theirs = (each_schedule.problem.microbatches for each_schedule in (schedule, other))
    if count != theirs:
        raise BadInput(f"baseline: a step of {theirs} microbatches, not {count}: not the same work")
    layers, others = sum(schedule.problem.layers), sum(other.problem.layers)
    if layers and others and layers != others:
        raise BadInput(f"baseline: a model of {others} layers, not {layers}: not the same work")
    ours, base = ([step_time(step) for step in each_trace.steps] for each_trace in (trace, run))
    step, base_step = ours[trace.median_step], base[run.median_step]
    (quick, slow), (base_quick, base_slow) = quartiles(ours), quartiles(base)
    predicted, base_predicted = step_time(schedule.timeline()), step_time(other.timeline())
    return Speedup(
        base_predicted,
        base_step,
        _ratio(base_predicted, predicted),
        _ratio(base_step, step),
        _ratio(base_quick, slow),
        _ratio(base_slow, quick),
    )


def _ratio(base: float, ours: float) -> float:
    if ours <= 0:
        raise BadInput("compare: a step of 0 µs has no speed-up")
    return float(base / ours)


def comparison_as_text(comparison: Comparison) -> str:
    """The comparison as text: step times, times of each kind of pass, and the parts of the difference for each rank."""
    c = comparison
    steps, unit, scale = sorted(c.steps), *(("ms", 1e3) if max(c.measured, c.predicted) >= 10_000 else ("µs", 1.0))

    def show(us: float) -> str:
        return f"{us / scale:,.2f}" if scale > 1 else f"{us:,.0f}"

    share = f" ({c.difference / c.predicted:+.2%})" if c.predicted else ""
    lines = [
        *([f"predicted: {note}"] if (note := times_note(c.source)) else []),
        *([c.emulated] if c.emulated else []),
        *([c.launching] if c.launching else []),
        f"step time ({c.objective})  predicted {show(c.predicted)} {unit}, measured {show(c.measured)} {unit}{share}",
        f"  median of {plural(step=len(steps))}, from {show(steps[0])} to {show(steps[-1])} {unit}",
        *(f"  {line}" for line in c.later),
        "",
        *_kind_rows(c.kinds),
        "",
        f"measured − predicted, {unit} a rank; each row adds up ('*': the rank with the longest window;",
        "fill, drain: before the rank's first compute pass and after its last)",
        *_rank_rows(c, show),
    ]
    if c.speedup is not None:
        s = c.speedup
        lines += [
            "",
            f"speed-up over the baseline  predicted {s.predicted:.3f}×, measured {s.measured:.3f}× "
            f"(quartiles {s.low:.3f}× to {s.high:.3f}×)",
            f"  baseline  predicted {show(s.baseline_predicted)} {unit}, measured {show(s.baseline_measured)} {unit}",
        ]
    return "\n".join(lines) + "\n"


def _kind_rows(kinds: Sequence[KindTimes]) -> list[str]:
    rows = [("one pass, µs", "predicted", "measured", "", "quartiles", "passes")]
    for k in kinds:
        ratio = f"{k.measured / k.predicted - 1:+.1%}" if k.predicted else ""
        spread = f"{k.low:,.1f} … {k.high:,.1f}"
        rows.append((f"  {k.kind}", f"{k.predicted:,.1f}", f"{k.measured:,.1f}", ratio, spread, f"{k.passes:,}"))
    return aligned(rows)


def _rank_rows(c: Comparison, show: Callable[[float], str]) -> list[str]:
    kinds = [k.kind for k in c.kinds if any(k.kind in rank.measured.passes for rank in c.ranks)]
    rows = [("  rank", *kinds, "waiting", "launch", "fill", "drain", "total")]
    for rank in c.ranks:
        d = rank.difference
        parts = (*(d.passes.get(kind, 0) for kind in kinds), d.waiting, d.launch, d.before, d.after, d.total)
        mark = "*" if rank.rank == c.limiting else " "
        rows.append((f"{mark} {rank.rank}", *("0" if p == 0 else ("+" if p > 0 else "") + show(p) for p in parts)))
    return aligned(rows)
