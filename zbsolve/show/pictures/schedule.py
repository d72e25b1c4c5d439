"""One schedule as a Gantt chart, or several below each other on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ...schedule import Schedule
from ...schedule.timeline import Timeline
from ...schedule.trace import Trace
from ...util.errors import BadInput
from ...util.text import format_bytes, format_time, printable
from ..comparison import NOT_COUNTED, check_trace, step_time
from ..sentences import by_microbatch, certificate_lines, headline, pool_lines, value_line, without_notes
from .drawing import (
    LINE,
    SOFT,
    TICK,
    USUAL,
    Drawing,
    Line,
    Mark,
    Style,
    Words,
    legend,
    paragraph,
    short_time,
    text_width,
    wrapped,
)
from .gantt import Axis, Gantt, MemoryStrips, legend_entries, rows_height


def schedule_drawing(schedule: Schedule, trace: Trace | None = None, style: Style = USUAL) -> Drawing:
    """The chart; with a `trace` its median step below the prediction, on the same time axis.

    Raises BadInput for a trace of another schedule and for an impossible style, Deadlock for a schedule that deadlocks.
    """
    runs = [("", schedule.timeline())]
    if trace is not None:
        check_trace(schedule, trace)
        measured = trace.median()
        unsure = measured.held is None and schedule.problem.edges.bytes.any()
        both = ("predicted", "", runs[0][1]), ("measured", f" (memory: {NOT_COUNTED})" if unsure else "", measured)
        runs = [(f"{name}: {format_time(step_time(timeline))}{note}", timeline) for name, note, timeline in both]
    notes = [value_line(schedule), *pool_lines(schedule), *certificate_lines(schedule)]
    return _Chart(runs, style).drawing(without_notes(headline(schedule)), notes)


def comparison_drawing(named: Sequence[tuple[str, Schedule]], style: Style = USUAL) -> Drawing:
    """Schedules with their names, below each other on one time axis. The difference in time of each to the first one is
    marked. Raises BadInput for an empty list, and as `schedule_drawing`."""
    if not named:
        raise BadInput("comparison: no schedule is there to draw")
    base = named[0][1].timeline()
    bases = [None, *[named[0]] * (len(named) - 1)]
    runs = [(_caption(*row, base), row[1].timeline()) for row, base in zip(named, bases, strict=True)]
    objective = named[0][1].problem.objective
    title = f"{len(named)} schedules on one axis of time ({objective}): {without_notes(headline(named[0][1], of_all=True))}"
    return _Chart(runs, style, base).drawing(title, [], " ".join(caption for caption, _ in runs))


def _caption(name: str, schedule: Schedule, base: tuple[str, Schedule] | None) -> str:
    """A schedule in one line: step time, difference to `base`, bubble, peak memory, what is proven."""
    timeline, certificate = schedule.timeline(), schedule.certificate
    parts = [f"{printable(name)}: {short_time(timeline.value)} a step", f"bubble {timeline.bubble_rate:.1%}"]
    if base is not None and (usual := base[1].timeline().value):
        share = timeline.value / usual - 1
        parts.insert(1, f"{abs(share):.1%} {'less' if share < 0 else 'more'}" if round(share, 3) else "as long")
    if schedule.problem.edges.bytes.any():
        parts.append(f"peak {format_bytes(max(timeline.peak_bytes))}")
    if certificate is not None:
        says = "proven optimal" if certificate.checked else "a file says"
        proven = f"{says}: no order{by_microbatch(certificate.proof)} is shorter"
        parts.append(proven if certificate.status == "optimal" else f"gap {certificate.gap:.2%}")
    return ", ".join(parts)


class _Chart:
    """Timelines with captions, below each other. base: in a comparison, the timeline whose end is marked in the others."""

    def __init__(self, runs: Sequence[tuple[str, Timeline]], style: Style, base: Timeline | None = None) -> None:
        self.style, self.size, self.base = style, style.size, base
        gantts = [Gantt(timeline, style) for _, timeline in runs]
        longest = max(_length(timeline) for _, timeline in runs) or 1.0
        first, last = style.window or (0.0, style.longest or longest)
        if first >= longest:
            raise BadInput(f"time range: the step ends at {format_time(longest)}, before {format_time(first)}")
        last = min(last, longest) if style.window else last
        left = self.size + max(gantt.label_width for gantt in gantts)
        peaks = [text_width(text, 0.92 * self.size) for gantt in gantts for text in gantt.peak_texts()]
        wide = max(peaks, default=0.0) + 0.8 * self.size
        self.peaks = bool(peaks) and wide < 0.14 * style.width
        right = wide if self.peaks else text_width("0,000 ms", self.size) / 2
        self.axis = Axis(first, last, left, style.width - right - 0.4 * self.size)
        if self.axis.right < self.axis.left + 10:
            raise BadInput(f"width of {style.width:.0f} pixels: too little beside letters of {self.size:.1f} pixels")
        self.width = style.width - left - 0.4 * self.size  # of texts
        captions = [wrapped(text, 1.05 * self.size, self.width, bold=True) for text, _ in runs]
        strips = [MemoryStrips(gantt.timeline, style) if style.memory and gantt.holds else None for gantt in gantts]
        self.rows = list(zip(captions, gantts, strips, strict=True))

    def drawing(self, headline: str, sentences: Sequence[str], description: str = "") -> Drawing:
        """The picture with the headline above and the sentences below."""
        size, left = self.size, self.axis.left
        title = headline if self.style.title is None else self.style.title
        heading = wrapped(printable(title), 1.25 * size, self.width, bold=True)
        marks: list[Mark] = [*paragraph(heading, left, 0.5 * size, Words(0, 0, "", 1.25 * size, bold=True))]
        y = 0.5 * size + len(heading) * LINE * 1.25 * size
        entries = legend_entries([gantt for _, gantt, _ in self.rows])
        keys, y = legend(entries, left, y, 0.96 * size, self.width)
        notes = [line for text in (sentences if self.style.notes else ()) for line in wrapped(text, size, self.width)]
        tall = rows_height(self.style, sum(gantt.units for _, gantt, _ in self.rows))
        body, y = self._body(y + 0.4 * size, tall)
        marks += [*keys, *body]
        y += (LINE + 0.4) * size  # the axis' ticks and their texts
        marks += paragraph(notes, left, y, Words(0, 0, "", size, SOFT))
        y += len(notes) * LINE * size
        height = round(y + 0.5 * size)
        words = description or " ".join(sentences)
        return Drawing(self.style.width, height, printable(title) or headline, words, tuple(marks), self.style.unit)

    def _body(self, y: float, tall: float) -> tuple[list[Mark], float]:
        """The marks of all timelines with their captions, and the height at which the axis' labels begin."""
        marks, spans = list[Mark](), list[tuple[float, float]]()
        for caption, gantt, strips in self.rows:
            marks += paragraph(caption, self.axis.left, y, Words(0, 0, "", 1.05 * self.size, bold=True))
            y += len(caption) * LINE * 1.05 * self.size
            marks += gantt.marks(self.axis, y, tall, self.peaks)
            spans.append((y, y + tall * gantt.units))
            y = spans[-1][1]
            if strips:
                marks += strips.marks(self.axis, y, self.peaks)
            y += (0.5 if len(self.rows) > 1 else 0.1) * self.size + (strips.height if strips else 0.0)
        return [*self.axis.marks(spans[0][0], y, self.size), *marks, *self._ends(spans)], y

    def _ends(self, spans: Sequence[tuple[float, float]]) -> list[Mark]:
        """In a comparison: a vertical line at the first timeline's end, and the others' difference to it, if it has room."""
        if self.base is None:
            return []
        usual, marks = _length(self.base), list[Mark]()
        if not self.axis.first < usual <= self.axis.last:
            return []
        x = self.axis.x(usual)
        for ((_, above), (below, foot)), (_, gantt, _) in zip(pairwise(spans), self.rows[1:], strict=True):
            own = _length(gantt.timeline)
            at, middle = self.axis.x(own), (below + foot) / 2
            marks.append(Line(((x, above), (x, foot)), TICK, 0.1 * self.size, dashes=(3, 2)))
            text = f"{'−' if own < usual else '+'}{short_time(abs(own - usual))}"
            if abs(at - x) > text_width(text, self.size, bold=True) + self.size:
                marks.append(Line(((min(at, x), middle), (max(at, x), middle)), TICK, 0.1 * self.size))
                place = (at + x) / 2, middle - 0.8 * self.size
                marks.append(Words(*place, text, self.size, anchor="middle", bold=True, halo=True))
        return marks


def _length(timeline: Timeline) -> float:
    """First start to last end, µs."""
    return float(timeline.end.max() - timeline.start.min())
