"""Every system's schedule on one page and one time scale, with its formulas and what it measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

from .errors import BadInput
from .greedy.presets import preset
from .placement import parse_routes
from .problem import KINDS, Problem
from .rounds import period, rounds_of
from .schedule import Schedule
from .show_svg import svg
from .systems import GROUPS, SYSTEMS, System, problem_for
from .text import html_page

PASS = 600  # µs of each of F, B and W of one rank's share of a microbatch, however many chunks it is in
ROUNDS = 6  # microbatches a rank: enough of the steady state to see what repeats
MOST = 20_000  # ranks times microbatches: half a minute, 0.7 GB
HELD = 600  # bytes that a rank's share of a microbatch holds, half of them until B


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One system at work: `peak`, microbatches held at most on the fullest and emptiest rank; bubbles as a share of the
    makespan, of the span and, where training goes on without an end, of the steady state's period."""

    system: System
    schedule: Schedule
    peak: tuple[float, float]
    makespan_bubble: float
    span_bubble: float
    period_bubble: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The system's words, and the numbers."""
        words = {name: getattr(self.system, name) for name in self.system.__dataclass_fields__}
        return {
            **words,
            "makespan": int(self.schedule.timeline().makespan),
            "makespan_bubble": self.makespan_bubble,
            "span_bubble": self.span_bubble,
            "period_bubble": self.period_bubble,
            "peak_microbatches": list(self.peak),
        }


@dataclass(frozen=True, slots=True)
class Absent:
    """A system that does not allow the numbers of the step, and why."""

    system: System
    why: str

    def to_json(self) -> dict[str, Any]:
        """Its name, and why."""
        return {"name": self.system.name, "absent": self.why}


def exhibits(ranks: int = 4, microbatches: int = 8, all_to_all: int = 0) -> tuple[tuple[Exhibit, ...], tuple[Absent, ...]]:
    """Every system on the same step: F = B = W = 600 µs a rank and microbatch, `all_to_all` µs of a rank behind each F and
    each backward, no other communication; and those that do not allow so many ranks or microbatches. Raises BadInput for
    none of either."""
    if all_to_all < 0:
        raise BadInput(f"systems: all-to-all of {all_to_all} µs: it cannot be negative")
    if ranks < 1 or microbatches < 1:
        raise BadInput(f"systems: at least 1 rank and 1 microbatch are needed, got {ranks} and {microbatches}")
    if (size := ranks * max(microbatches, ROUNDS * ranks)) > MOST:
        at_most = f"{ranks} ranks and {microbatches} microbatches make {size} of both multiplied"
        raise BadInput(f"systems: {at_most} ({ROUNDS} a rank for the steady state), more than a gallery shows ({MOST})")
    shown, absent = list[Exhibit](), list[Absent]()
    for one in SYSTEMS:
        try:
            shown.append(_exhibit(one, ranks, microbatches, all_to_all))
        except BadInput as error:
            absent.append(Absent(one, str(error)))
    return tuple(shown), tuple(absent)


def _exhibit(one: System, ranks: int, microbatches: int, all_to_all: int) -> Exhibit:
    chunks = len(parse_routes(one.placement, ranks)[0]) // ranks
    held, time = HELD // chunks, PASS // chunks
    bytes_held = {"held_until_B": held // 2, "held_until_W": held - held // 2}

    def step(microbatches: int) -> Problem:
        return problem_for(one.name, ranks, microbatches, time, time, time, AF=all_to_all // chunks, **bytes_held)

    problem = step(microbatches)
    schedule = preset(one.name, problem)
    timeline = schedule.timeline()
    peaks = [peak / HELD for peak in timeline.peak_bytes]
    makespan, span = (1 - problem.work / value for value in (timeline.makespan, timeline.span))
    shown = Exhibit(one, schedule, (max(peaks), min(peaks)), float(makespan), float(span))
    if one.group != "asynchronous":
        return shown
    longer = step(ROUNDS * ranks)
    return replace(shown, period_bubble=float(1 - rounds_of(longer).work / period(preset(one.name, longer)).time))


def table(shown: Sequence[Exhibit], absent: Sequence[Absent] = ()) -> str:
    """The systems as lines for a terminal; below, which are absent and why."""
    head = ("system", "placement", "bubble", "activations", "weights", "of makespan", "of span", "peak")
    rows = [head, *(_cells(one) for one in shown)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [
        f"{one.system.name}: in the steady state, without an end, a bubble of {one.period_bubble:.2%}"
        for one in shown
        if one.period_bubble is not None
    ]
    lines += [f"{one.system.name}: not here: {one.why}" for one in absent]
    return "\n".join(lines) + "\n"


def _cells(one: Exhibit) -> tuple[str, ...]:
    s = one.system
    measured = (f"{one.makespan_bubble:.2%}", f"{one.span_bubble:.2%}", f"{one.peak[0]:g}")
    return (s.name, s.placement, s.bubble, s.memory, s.weights, *measured)


def page(shown: Sequence[Exhibit], absent: Sequence[Absent] = ()) -> str:
    """One HTML page that loads nothing."""
    values = [float(one.schedule.timeline().makespan) for one in shown]
    longest = max(value for value in values if value <= 2 * min(values))  # longer ones have a scale of their own
    problem = shown[0].schedule.problem
    ranks, microbatches = problem.ranks, int(problem.passes.microbatch.max()) + 1
    title = f"Pipeline schedules: {ranks} ranks, {microbatches} microbatches, F = B = W"
    if any(KINDS[kind] == "AF" for one in shown for kind in one.schedule.problem.passes.kind.tolist()):
        title += ", an all-to-all behind each F and each backward"
    parts = []
    for group in GROUPS:
        parts.append(f"<h2>{escape(group.capitalize())}</h2>")
        parts += [_card(one, longest) for one in shown if one.system.group == group]
    parts += [f"<p>{escape(one.system.title)}: not on this step: {escape(one.why)}</p>" for one in absent]
    style = (
        "section{background:#fff;border:1px solid #dfe3e9;border-radius:10px;padding:14px 18px;margin:0 0 16px}"
        "h1{font-size:20px}h2{font-size:16px;margin:26px 0 10px}h3{font-size:15px;margin:0 0 4px}"
        "svg{max-width:100%;height:auto}dl{display:grid;grid-template-columns:repeat(auto-fit,minmax(160px,1fr));"
        "margin:6px 0;gap:2px 18px}dt{color:#5a6270;font-size:12px}dd{margin:0;font-variant-numeric:tabular-nums}"
        "div.f{margin-bottom:4px}"
    )
    return html_page(title, style, f"<h1>{escape(title)}</h1>{''.join(parts)}")


def _card(one: Exhibit, longest: float) -> str:
    s = one.system
    facts = (
        ("placement", s.placement),
        ("bubble, published", s.bubble),
        ("bubble here", f"{one.makespan_bubble:.2%} of the makespan, {one.span_bubble:.2%} of the span"),
        ("activations, published", s.memory),
        ("activations here", f"{one.peak[0]:g} microbatches at most, {one.peak[1]:g} on the emptiest rank"),
        *((("bubble in the steady state", f"{one.period_bubble:.2%}"),) if one.period_bubble is not None else ()),
        ("weights", s.weights),
        *((("needs", s.needs),) if s.needs else ()),
    )
    own = one.schedule.timeline().makespan > longest
    scale = " · on a time scale of its own" if own else ""
    cells = "".join(f"<div class='f'><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts)
    picture = svg(one.schedule, width=1200, longest=None if own else longest, notes=False)
    title = f"<h3>{escape(s.title)} <small>({escape(s.paper)}){scale}</small></h3>"
    return f"<section>{title}<dl>{cells}</dl>{picture}</section>"
