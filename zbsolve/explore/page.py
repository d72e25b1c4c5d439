"""What the browser gets: the page with its controls, and the two parts of it that follow from a state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..profile.profile import Profile
from ..show.pages import picture, render
from ..show.pictures.schedule import schedule_as_svg
from ..systems.table import system
from ..util.text import format_bytes, format_gap, format_time, printable
from .playground import MORE_SECONDS, Answer, Row
from .state import BEST, CONTROLS, EXAMPLES, GROUPS, HIDDEN, SYSTEM_NAMES, Choice, Slider, State, own_placement

MIN_WIDTH, MAX_WIDTH = 560, 2400  # pixels of the chart; a narrower window scrolls it


def controls_page(state: State, profile: Profile | None, wrong: str = "") -> str:
    """The page with its controls at `state`; its script asks for the rest. wrong: a line about the address."""
    groups = [name for name in GROUPS if name not in HIDDEN[profile is not None]]
    model = (
        f"{len(profile.layers)} layers of {printable(profile.title)}" if profile else "a model of equal parts, one a rank"
    )
    return render(
        "explore.html",
        title="zbsolve explore",
        wrong=printable(wrong),
        examples=() if profile else EXAMPLES,
        model=model,
        groups=[(name, [_control(one, state, profile) for one in CONTROLS if one.group == name]) for name in groups],
        facts={
            "usual": {one.name: one.print(one.usual) for one in CONTROLS},
            "placements": {name: system(name).placement for name in SYSTEM_NAMES},
        },
    )


def _control(one: Slider | Choice, state: State, profile: Profile | None) -> dict[str, Any]:
    """One control for the template."""
    value = getattr(state, one.name)
    said = {"name": one.name, "label": one.label, "value": one.print(value)}
    if isinstance(one, Slider):
        zero = one.zero
        if one.name == "memory" and profile is not None and profile.capacity is not None:
            zero = f"the profile's {format_bytes(int(profile.capacity))}"
        if zero:
            said["label"] += f" (0: {zero})"
        limits = {name: one.print(getattr(one, name)) for name in ("least", "most", "upto", "step")}
        return {**said, "unit": one.unit, "typed": "1" if one.whole else "any", **limits}
    return {**said, "options": one.options if value in dict(one.options) else (*one.options, (value, value))}


def answer_part(found: Answer, seconds: float, lines: Sequence[str], width: int) -> str:
    """Figures, chart, peaks and command lines of an answer that took so many seconds; width: pixels of the chart."""
    certificate, over = found.certificate, found.over
    chart = schedule_as_svg(found.schedule, width=min(MAX_WIDTH, max(MIN_WIDTH, width)), notes=False)
    return render(
        "explore_answer.html",
        figures=_figures(found),
        over=printable(over),
        chart=picture(chart),
        bars=_bars(found),
        limit="" if found.capacity is None else format_bytes(max(found.capacity)),
        proof=printable(certificate.proof),
        found=f"found by {printable(certificate.solver)}; answered in {seconds:.2f} s",
        searched=found.state.system == BEST and certificate.status != "optimal",
        more=f"{MORE_SECONDS:g}",
        commands="\n".join(lines),
    )


def _figures(found: Answer) -> list[tuple[str, str, str]]:
    """What stands large at the top: (label, value, note)."""
    timeline, certificate = found.schedule.timeline(), found.certificate
    rank = max(range(len(found.peaks)), key=found.peaks.__getitem__)
    room = "" if found.capacity is None else f", which has {format_bytes(found.capacity[rank])}"
    proven = "proven: no order of these passes is shorter" if not certificate.gap else "proven: none is shorter than this"
    left = "optimal" if not certificate.gap else f"at most {certificate.gap:.2%} could be saved"
    return [
        (certificate.objective, format_time(certificate.value), left),
        ("bound", format_time(certificate.bound), proven),
        ("bubble", f"{timeline.bubble_rate:.2%}", f"work {format_time(found.schedule.problem.work)}"),
        ("peak of activations", format_bytes(found.peaks[rank]), f"on rank {rank}{room}"),
    ]


def _bars(found: Answer) -> list[dict[str, str]]:
    """A bar a rank: its peak, and what it has, as shares of the largest."""
    room = found.capacity or (0,) * len(found.peaks)
    most = max(*found.peaks, *room, 1)
    return [
        {
            "text": f"rank {rank}: {format_bytes(peak)}" + (f" of {format_bytes(room[rank])}" if found.capacity else ""),
            "rank": str(rank),
            "share": f"{100 * peak / most:.1f}",
            "room": f"{100 * room[rank] / most:.1f}" if found.capacity else "",
            "over": "over" if found.capacity and peak > room[rank] else "",
        }
        for rank, peak in enumerate(found.peaks)
    ]


def table_part(rows: Sequence[Row]) -> str:
    """The comparison as a table; the first row is what the page shows. Systems that have no answer in a placement for the
    same reason share a row."""
    own, lines = rows[0].answer, dict[object, dict[str, Any]]()
    for place, row in enumerate(rows):
        shared = place if row.answer or not place else (own_placement(row.state), row.why)
        if shared in lines:
            lines[shared]["names"].append(_name(row.state))
        else:
            lines[shared] = _cells(row, own)
    return render("explore_table.html", rows=list(lines.values()), shorter=_shorter(rows))


def _shorter(rows: Sequence[Row]) -> dict[str, str] | None:
    """The shortest that was found in another placement than the page's, where it fits and is shorter."""
    own, here = rows[0].answer, own_placement(rows[0].state)
    found = [row for row in rows if row.state.system == BEST and row.answer is not None and not row.answer.over]
    best = min(found, key=lambda row: row.answer.certificate.value, default=None)  # type: ignore[union-attr]
    if own is None or best is None or best.answer is None or own_placement(best.state) == here:
        return None
    value = best.answer.certificate.value
    saved = 1 - value / own.certificate.value
    if saved <= 0:
        return None
    where = {"where": own_placement(best.state), "saved": f"{saved:.1%}", "value": format_time(value)}
    return {**_name(best.state), **where}


def _name(state: State) -> dict[str, str]:
    """A system's name, which shows it when pressed."""
    named = None if state.system == BEST else system(state.system)
    return {
        "system": state.system,
        "placement": state.placement,
        "name": state.system if named else "best found",
        "title": f"{named.title}, {named.paper}" if named else "the best that a short search finds",
    }


def _cells(row: Row, own: Answer | None) -> dict[str, Any]:
    said = {
        "names": [_name(row.state)],
        "placement": own_placement(row.state),
        "why": printable(row.why or (_lacking(row.answer) if row.answer else "")),
        "fits": row.answer is not None and not row.answer.over,
        "answered": row.answer is not None,
    }
    if row.answer is None:
        return said
    certificate, timeline = row.answer.certificate, row.answer.schedule.timeline()
    against = certificate.value / own.certificate.value - 1 if own and own.certificate.value else 0.0
    return {
        **said,
        "value": format_time(certificate.value),
        "against": f"{against:+.1%}" if own and row.answer is not own else "",
        "bubble": f"{timeline.bubble_rate:.1%}",
        "peak": format_bytes(max(row.answer.peaks)),
        "bound": format_time(certificate.bound),
        "gap": format_gap(certificate.gap),
        "weights": f"{len(row.answer.schedule.problem.routes)}×",
    }


def _lacking(found: Answer) -> str:
    """What the rank that lacks most has; "" where every rank has what it needs."""
    if not found.over or found.capacity is None:
        return found.over
    rank = max(range(len(found.peaks)), key=lambda r: found.peaks[r] - (found.capacity or ())[r])
    return f"rank {rank} has {format_bytes(found.capacity[rank])}"


def wrong_part(message: str) -> str:
    """One line for what a state asks and cannot have, and the control that it is about."""
    word = re.split(r"[: \[]", message)[0]
    about = "memory" if word == "capacity" else "system" if word in SYSTEM_NAMES else word
    known = about if about in {one.name for one in CONTROLS} else ""
    return render("explore_wrong.html", message=printable(message), control=known)
