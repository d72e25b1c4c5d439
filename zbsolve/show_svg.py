"""A still picture of a schedule for documents: SVG, light background, no scripts."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np

from .compare import check_trace, step_time
from .problem import KINDS
from .schedule import Schedule
from .show_style import (
    COLOURS,
    MEANING,
    Lane,
    cells,
    certificate_lines,
    chunks,
    format_time,
    headline,
    lanes,
    present_kinds,
    printable,
    value_line,
)
from .text import format_bytes
from .timeline import Timeline
from .trace import Trace

LEFT, RIGHT, TOP = 78.0, 112.0, 58.0
FONT = "font-family='system-ui,sans-serif'"


def svg(
    schedule: Schedule, trace: Trace | None = None, width: int = 1200, longest: float | None = None, notes: bool = True
) -> str:
    """A well-formed SVG document `width` pixels wide; with a `trace` its median step under the prediction, on one axis.

    longest: µs that the width stands for (default: this schedule's own). notes: the lines about value and certificate.

    Raises BadInput for a trace of another schedule, Deadlock for a schedule that has no times.
    """
    runs = [("predicted", schedule.timeline())]
    if trace is not None:
        check_trace(schedule, trace)
        runs.append(("measured", trace.steps[trace.median_step]))
    longest = longest or max(float(t.end.max() - t.start.min()) for _, t in runs) or 1.0
    scale = (width - LEFT - RIGHT) / longest
    height = _row_height(len(lanes(schedule.problem)) * len(runs))
    body, y = list[str](), TOP
    for name, timeline in runs:
        if len(runs) > 1:
            body.append(caption(LEFT, y + 12, f"{name}: {format_time(step_time(timeline))}", 12, weight="600"))
            y += 20
        drawn, y = _panel(schedule, timeline, y, height, scale)
        body += drawn
    body += _axis(longest, scale, y)
    below = [value_line(schedule), *certificate_lines(schedule)] if notes else []
    body += [caption(LEFT, y + 44 + 18 * i, line, 12, colour="#444") for i, line in enumerate(below)]
    total = y + 44 + 18 * len(below)
    head = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{total:.0f}' "
        f"viewBox='0 0 {width} {total:.0f}' role='img' {FONT}>",
        f"<title>{_safe(headline(schedule))}</title>",
        f"<desc>{_safe(' '.join([value_line(schedule), *certificate_lines(schedule)]))}</desc>",
        f"<rect width='{width}' height='{total:.0f}' fill='#fff'/>",
        caption(LEFT, 22, headline(schedule), 15, weight="600"),
        *_legend(schedule),
    ]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _row_height(rows: int) -> float:
    """Rows share about 640 pixels, between 6 and 26 each."""
    return float(min(26, max(6, 640 // rows)))


def _panel(schedule: Schedule, timeline: Timeline, y: float, height: float, scale: float) -> tuple[list[str], float]:
    """All lanes of one timeline from `y` down; the elements and where they end."""
    begin, body = float(timeline.start.min()), list[str]()
    holds, chunk = bool(schedule.problem.edges.bytes.any()), chunks(schedule.problem)
    width = (float(timeline.end.max()) - begin) * scale
    for lane in lanes(schedule.problem):
        tall = height if lane.kind == "compute" else max(4.0, height * 0.6)
        middle = y + tall / 2
        body.append(f"<rect x='{LEFT}' y='{y:.1f}' width='{width:.1f}' height='{tall - 1:.1f}' fill='#f1f2f4'/>")
        if height >= 9 or lane.rank % 4 == 0:
            label = f"rank {lane.rank}" if lane.kind == "compute" else lane.kind
            body.append(caption(LEFT - 8, middle, label, min(12, max(8, tall)), anchor="end"))
        if lane.first and holds and height >= 9:
            peak = format_bytes(timeline.peak_bytes[lane.rank])
            body.append(caption(LEFT + width + 8, middle, f"peak {peak}", 11, colour="#444"))
        body += _lane(timeline, lane, chunk.tolist(), begin, scale, y, tall)
        y += tall
    return body, y + 6


def _lane(
    timeline: Timeline, lane: Lane, chunk: list[int], begin: float, scale: float, y: float, tall: float
) -> Iterator[str]:
    """Passes as rectangles; where most are too narrow to see, half-pixel cells of the kind that fills most."""
    p = timeline.problem.passes
    digits = len(str(int(p.microbatch.max())))
    lengths = (timeline.end[lane.rows] - timeline.start[lane.rows]) * scale
    if np.median(lengths) < 1.5:
        count = int(np.ceil((float(timeline.end.max()) - begin) * scale * 2))
        kinds = cells(timeline, lane.rows, begin + np.arange(count + 1) / (2 * scale))
        cuts = [0, *(np.flatnonzero(np.diff(kinds)) + 1).tolist(), count]
        paths: dict[int, list[str]] = {}
        for a, b in zip(cuts, cuts[1:], strict=False):
            paths.setdefault(int(kinds[a]), []).append(
                f"M{LEFT + a / 2:g} {y:g}h{(b - a) / 2:g}v{tall - 1:g}h{(a - b) / 2:g}z"
            )
        for k in sorted(paths.keys() - {-1}):
            yield f"<path fill='{COLOURS[KINDS[k]]}' d='{''.join(paths[k])}'/>"
        return
    for row, wide in zip(lane.rows.tolist(), lengths.tolist(), strict=True):
        kind = KINDS[p.kind[row]]
        x = LEFT + (float(timeline.start[row]) - begin) * scale
        yield _block(x, y, max(wide - (0.6 if wide > 3 else 0), 0.3), tall, shade(COLOURS[kind], chunk[row]))
        label, size = str(p.microbatch[row]), min(11.0, tall * 0.6)
        if size >= 7 and wide > 0.62 * size * digits + 2:
            yield caption(
                x + wide / 2 - 0.3, y + tall / 2 - 0.5, label, size, ink(shade(COLOURS[kind], chunk[row])), "middle"
            )


def shade(colour: str, chunk: int) -> str:
    """A kind's colour on a rank's later stages: paler, so that chunks can be told apart."""
    share = min(0.45, 0.3 * chunk)
    levels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(level + (255 - level) * share):02x}" for level in levels)


def ink(colour: str) -> str:
    """Black or white, whichever reads better on `colour`."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#111" if 0.299 * red + 0.587 * green + 0.114 * blue > 125 else "#fff"


def _axis(longest: float, scale: float, y: float) -> Iterator[str]:
    """Ticks at round times, about one every 110 pixels."""
    unit, size = ("µs", 1.0) if longest < 1e4 else ("ms", 1e3) if longest < 1e7 else ("s", 1e6)
    wanted = 110 / scale
    base = 10 ** np.floor(np.log10(wanted))
    step = float(next(base * m for m in (1, 2, 5, 10) if base * m >= wanted))
    for i in range(int(longest / step) + 1):
        x = LEFT + i * step * scale
        yield f"<line x1='{x:.1f}' y1='{y - 4:.1f}' x2='{x:.1f}' y2='{y + 2:.1f}' stroke='#888'/>"
        yield caption(x, y + 12, f"{i * step / size:g} {unit}", 11, "#444", "middle")


def _legend(schedule: Schedule) -> Iterator[str]:
    x = LEFT
    for kind in present_kinds(schedule.problem):
        label = f"{kind} {MEANING[kind]}"
        yield f"<rect x='{x:.0f}' y='34' width='12' height='12' rx='2' fill='{COLOURS[kind]}'/>"
        yield caption(x + 17, 41, label, 12)
        x += 34 + 6.6 * len(label)


def _block(x: float, y: float, width: float, tall: float, colour: str) -> str:
    return f"<rect x='{x:.2f}' y='{y:.1f}' width='{width:.2f}' height='{tall - 1:.1f}' fill='{colour}'/>"


def caption(
    x: float, y: float, text: str, size: float, colour: str = "#111", anchor: str = "start", weight: str = "400"
) -> str:
    """A line of text, middle at `y`; control characters and markup in it stay text."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' font-size='{size:g}' fill='{colour}' text-anchor='{anchor}' "
        f"font-weight='{weight}' dominant-baseline='central'>{_safe(text)}</text>"
    )


def _safe(text: str) -> str:
    return escape(printable(text))
