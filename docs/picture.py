"""Draws docs/picture.svg, the README's picture: `python docs/picture.py` writes it anew.

One training step of Llama 3 8B on eight ranks, estimated for an H100, twice on one time axis: in the order of 1F1B, with its
backward split too, and in the order that `solve` finds. Both are orders of the same passes. The search counts its work in
place of time, so the file is the same on every machine; a test holds that.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from zbsolve import Profile, Schedule, Step, preset, solve
from zbsolve.show.drawing import Area, Drawing, Line, Mark, Words
from zbsolve.show.schedule_svg import LEFT, schedule_drawing
from zbsolve.show.svg import to_svg

DOCS = Path(__file__).parent
PROFILE = DOCS.parent / "benchmarks" / "profiles" / "estimated-llama3-8b-h100.json"
WIDTH = 1000  # pixels; a page of GitHub shows about 850
LEGEND = 52  # pixels: title and legend at the top of a chart, shown once
TITLE = 26  # pixels of the line above each schedule
FOOT = 24  # pixels at the foot of a chart that nothing is in


def schedules() -> tuple[Schedule, Schedule]:
    """1F1B's order with a split backward and the solved one, of one problem."""
    problem = Step(ranks=8, microbatches=16).problem(Profile.load(PROFILE))
    return preset("1f1b-split", problem), solve(problem, effort=0.3)


def picture() -> str:
    """Both schedules as one SVG document."""
    first, second = schedules()
    longest = max(float(one.timeline().makespan) for one in (first, second))
    upper, lower = (schedule_drawing(one, width=WIDTH, longest=longest, notes=False) for one in (first, second))
    certificate = second.certificate
    assert certificate is not None
    said = "proven optimal: no order is shorter" if certificate.status == "optimal" else f"gap {certificate.gap:.2%}"
    above, below = f"1F1B with a split backward: {_told(first)}", f"zbsolve: {_told(second)}; {said}"
    turn = upper.height + TITLE - FOOT
    marks = [
        *_between(upper, 0, LEGEND, 0),
        Words(LEFT, LEGEND + TITLE / 2, above, 15, bold=True),
        *_between(upper, LEGEND, upper.height, TITLE),
        Words(LEFT, turn + TITLE / 2, below, 15, bold=True),
        *_between(lower, LEGEND, lower.height, turn + TITLE - LEGEND),
    ]
    height = turn + TITLE - LEGEND + lower.height - FOOT / 2
    title = "A training step in two orders of the same passes"
    return to_svg(Drawing(WIDTH, height, title, f"{above}. {below}.", tuple(marks)))


def _told(schedule: Schedule) -> str:
    timeline = schedule.timeline()
    return f"{timeline.makespan / 1e3:,.0f} ms a step, bubble {timeline.bubble_rate:.1%}"


def _between(drawing: Drawing, top: float, bottom: float, by: float) -> Iterator[Mark]:
    """The marks of a drawing from one height to another, lower on the page by so many pixels."""
    for mark in drawing.marks:
        if isinstance(mark, Area | Line):
            if top <= mark.points[0][1] < bottom:
                yield replace(mark, points=tuple((x, y + by) for x, y in mark.points))
        elif top <= mark.y < bottom:
            yield replace(mark, y=mark.y + by)


if __name__ == "__main__":
    (DOCS / "picture.svg").write_text(picture(), encoding="utf-8")
