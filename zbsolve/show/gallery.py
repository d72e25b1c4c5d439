"""Every system's schedule on one page and one time scale, with its published formulas and its bubble and peak here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..ilp.steady.rounds import period, rounds_of
from ..problem import Problem
from ..problem.placement import parse_routes
from ..schedule import Schedule
from ..systems.problems import problem_for
from ..systems.table import GROUPS, SYSTEMS, System, preset
from ..util.errors import BadInput
from ..util.text import aligned, plural
from .pages import picture, render
from .pictures.drawing import Style, to_svg
from .pictures.schedule import schedule_drawing

PASS_TIME = 600  # µs of each of F, B and W of one rank's share of a microbatch, however many chunks it is in
STEADY_ROUNDS = 6  # microbatches a rank: enough to see the period of the steady state
MAX_SIZE = 20_000  # ranks times microbatches: takes half a minute and 0.7 GB
HELD_BYTES = 600  # of a rank's share of a microbatch, half of them held until B, half until W
HEAD = ("system", "placement", "bubble", "activations", "weights", "of makespan", "of span", "peak")  # of `_cells`


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A system's schedule of the step. peak: the most microbatches that the fullest and the emptiest rank hold. Bubbles are
    shares of the makespan, of the span, and of the period of the steady state (None for systems without one)."""

    system: System
    schedule: Schedule
    peak: tuple[float, float]
    makespan_bubble: float
    span_bubble: float
    period_bubble: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The system's words, and the numbers."""
        return {
            **self.system.words,
            "makespan": int(self.schedule.timeline().makespan),
            "makespan_bubble": self.makespan_bubble,
            "span_bubble": self.span_bubble,
            "period_bubble": self.period_bubble,
            "peak_microbatches": list(self.peak),
        }


@dataclass(frozen=True, slots=True)
class Absent:
    """A system that has no schedule for so many ranks or microbatches, and why."""

    system: System
    why: str

    def to_json(self) -> dict[str, Any]:
        """Its name, and why."""
        return {"name": self.system.name, "absent": self.why}


def exhibits(ranks: int = 4, microbatches: int = 8) -> tuple[tuple[Exhibit, ...], tuple[Absent, ...]]:
    """Every system on the same step: F = B = W = 600 µs a rank and microbatch, no communication; and the systems that have
    no schedule for it. Raises BadInput for less than one rank or microbatch, and for too many."""
    if ranks < 1 or microbatches < 1:
        raise BadInput(f"systems: at least 1 rank and 1 microbatch are needed, got {ranks} and {microbatches}")
    if ranks * (many := max(microbatches, STEADY_ROUNDS * ranks)) > MAX_SIZE:
        least = f"for the steady state at least {STEADY_ROUNDS} a rank"
        raise BadInput(f"systems: {ranks} ranks times {many} microbatches ({least}): more than a gallery shows ({MAX_SIZE})")
    shown, absent = list[Exhibit](), list[Absent]()
    for system in SYSTEMS:
        try:
            shown.append(_exhibit(system, ranks, microbatches))
        except BadInput as error:
            absent.append(Absent(system, str(error)))
    return tuple(shown), tuple(absent)


def _exhibit(system: System, ranks: int, microbatches: int) -> Exhibit:
    chunks = len(parse_routes(system.placement, ranks)[0]) // ranks
    held, time = HELD_BYTES // chunks, PASS_TIME // chunks
    bytes_held = {"held_until_B": held // 2, "held_until_W": held - held // 2}

    def step(microbatches: int) -> Problem:
        return problem_for(system.name, ranks, microbatches, time, time, time, **bytes_held)

    problem = step(microbatches)
    schedule = preset(system.name, problem)
    timeline = schedule.timeline()
    peaks = [peak / HELD_BYTES for peak in timeline.peak_bytes]
    makespan, span = (1 - problem.work / value for value in (timeline.makespan, timeline.span))
    shown = Exhibit(system, schedule, (max(peaks), min(peaks)), float(makespan), float(span))
    if system.group != "asynchronous":
        return shown
    longer = step(STEADY_ROUNDS * ranks)
    return replace(shown, period_bubble=float(1 - rounds_of(longer).work / period(preset(system.name, longer)).time))


def gallery_as_text(shown: Sequence[Exhibit], absent: Sequence[Absent] = ()) -> str:
    """The systems as lines for a terminal; below, which are absent and why."""
    lines = aligned([HEAD, *(_cells(exhibit) for exhibit in shown)], left=range(len(HEAD)))
    lines += [
        f"{exhibit.system.name}: in the steady state, without an end, a bubble of {exhibit.period_bubble:.2%}"
        for exhibit in shown
        if exhibit.period_bubble is not None
    ]
    lines += [f"{absent_system.system.name}: not here: {absent_system.why}" for absent_system in absent]
    return "\n".join(lines) + "\n"


def _cells(exhibit: Exhibit) -> tuple[str, ...]:
    s = exhibit.system
    measured = (f"{exhibit.makespan_bubble:.2%}", f"{exhibit.span_bubble:.2%}", f"{exhibit.peak[0]:g}")
    return (s.name, s.placement, s.bubble, s.memory, s.weights, *measured)


def gallery_as_page(shown: Sequence[Exhibit], absent: Sequence[Absent] = ()) -> str:
    """One HTML page that loads no other file."""
    values = [float(exhibit.schedule.timeline().makespan) for exhibit in shown]
    longest = max(value for value in values if value <= 2 * min(values))  # longer schedules have their own time scale
    problem = shown[0].schedule.problem
    ranks, microbatches = problem.ranks, problem.microbatches
    title = f"Pipeline schedules: {plural(rank=ranks, microbatch=microbatches)}, F = B = W"
    groups = [(group, [_card(exhibit, longest) for exhibit in shown if exhibit.system.group == group]) for group in GROUPS]
    overview = [_cells(exhibit) for group in GROUPS for exhibit in shown if exhibit.system.group == group]
    return render("gallery.html", title=title, groups=groups, absent=absent, head=HEAD, overview=overview)


def _card(exhibit: Exhibit, longest: float) -> dict[str, Any]:
    """What the page shows of one system: name, numbers, and picture, on a scale of `longest` µs if the schedule fits."""
    s, timeline = exhibit.system, exhibit.schedule.timeline()
    facts = (
        ("placement", s.placement),
        ("bubble, published", s.bubble),
        ("bubble here", f"{exhibit.makespan_bubble:.2%}, of the span {exhibit.span_bubble:.2%}"),
        ("activations, published", s.memory),
        ("activations here", f"{exhibit.peak[0]:g} microbatches at most, {exhibit.peak[1]:g} on the emptiest rank"),
        *(("in host memory here", f"{peak / HELD_BYTES:g} microbatches' of all ranks") for peak in timeline.pool_peaks),
        *((("bubble in the steady state", f"{exhibit.period_bubble:.2%}"),) if exhibit.period_bubble is not None else ()),
        ("weights", s.weights),
        *((("needs", s.needs),) if s.needs else ()),
    )
    own = timeline.makespan > longest
    style = Style(1000, title="", notes=False, longest=None if own else longest, hover=True)
    chart = to_svg(schedule_drawing(exhibit.schedule, None, style))
    scale = " · on a time scale of its own" if own else ""
    return {"name": s.name, "title": s.title, "paper": s.paper, "scale": scale, "facts": facts, "picture": picture(chart)}
