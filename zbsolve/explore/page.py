"""The HTML of the playground: the page with its controls, and its two parts that depend on the state."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..profile.profile import Profile
from ..show.pages import picture, render
from ..show.pictures.drawing import Style, to_svg
from ..show.pictures.schedule import schedule_drawing
from ..show.sentences import by_microbatch
from ..systems.table import system
from ..util.text import format_bytes, format_gap, format_time, printable
from .playground import MORE_SECONDS, Answer, Row
from .state import BEST, CONTROLS, EXAMPLES, GROUPS, HIDDEN, SYSTEM_NAMES, Choice, Slider, State, own_placement

MIN_WIDTH, MAX_WIDTH = 560, 2400  # pixels of the chart; a narrower window scrolls it


def controls_page(state: State, profile: Profile | None, wrong: str = "") -> str:
    """The page with its controls set to `state`; its script requests the other parts. wrong: an error in the address."""
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
        groups=[(name, [_control(row, state, profile) for row in CONTROLS if row.group == name]) for name in groups],
        facts={
            "usual": {control.name: control.print(control.usual) for control in CONTROLS},
            "placements": {name: system(name).placement for name in SYSTEM_NAMES},
        },
    )


def _control(slider: Slider | Choice, state: State, profile: Profile | None) -> dict[str, Any]:
    """One control for the template."""
    value = getattr(state, slider.name)
    fields = {"name": slider.name, "label": slider.label, "value": slider.print(value)}
    if isinstance(slider, Slider):
        zero = slider.zero
        if slider.name == "memory" and profile is not None and profile.capacity is not None:
            zero = f"the profile's {format_bytes(int(profile.capacity))}"
        if zero:
            fields["label"] += f" (0: {zero})"
        limits = {name: slider.print(getattr(slider, name)) for name in ("least", "most", "upto", "step")}
        return {**fields, "unit": slider.unit, "typed": "1" if slider.whole else "any", **limits}
    return {**fields, "options": slider.options if value in dict(slider.options) else (*slider.options, (value, value))}


def answer_part(answer: Answer, seconds: float, lines: Sequence[str], width: int) -> str:
    """Figures, chart, peaks and command lines of an answer. seconds: the time that it took. width: pixels of the chart."""
    certificate, over = answer.certificate, answer.over
    style = Style(width=min(MAX_WIDTH, max(MIN_WIDTH, width)), notes=False)
    return render(
        "explore_answer.html",
        figures=_figures(answer),
        over=printable(over),
        chart=picture(to_svg(schedule_drawing(answer.schedule, style=style))),
        bars=_bars(answer),
        limit="" if answer.capacity is None else format_bytes(max(answer.capacity)),
        proof=printable(certificate.proof),
        found=f"found by {printable(certificate.solver)}; answered in {seconds:.2f} s",
        searched=answer.state.system == BEST and certificate.status != "optimal",
        more=f"{MORE_SECONDS:g}",
        commands="\n".join(lines),
    )


def _figures(answer: Answer) -> list[tuple[str, str, str]]:
    """The key figures at the top: (label, value, note)."""
    timeline, certificate = answer.schedule.timeline(), answer.certificate
    rank = max(range(len(answer.peaks)), key=answer.peaks.__getitem__)
    room = "" if answer.capacity is None else f", which has {format_bytes(answer.capacity[rank])}"
    no_order = f"proven: no order of these passes{by_microbatch(certificate.proof)} is shorter"
    proven = f"{no_order} than this" if certificate.gap else no_order
    left = "optimal" if not certificate.gap else f"at most {certificate.gap:.2%} could be saved"
    return [
        (certificate.objective, format_time(certificate.value), left),
        ("bound", format_time(certificate.bound), proven),
        ("bubble", f"{timeline.bubble_rate:.2%}", f"work {format_time(answer.schedule.problem.work)}"),
        ("peak of activations", format_bytes(answer.peaks[rank]), f"on rank {rank}{room}"),
    ]


def _bars(answer: Answer) -> list[dict[str, str]]:
    """A bar for each rank: its peak and its capacity, relative to the largest."""
    room = answer.capacity or (0,) * len(answer.peaks)
    most = max(*answer.peaks, *room, 1)
    return [
        {
            "text": f"rank {rank}: {format_bytes(peak)}" + (f" of {format_bytes(room[rank])}" if answer.capacity else ""),
            "rank": str(rank),
            "share": f"{100 * peak / most:.1f}",
            "room": f"{100 * room[rank] / most:.1f}" if answer.capacity else "",
            "over": "over" if answer.capacity and peak > room[rank] else "",
        }
        for rank, peak in enumerate(answer.peaks)
    ]


def table_part(rows: Sequence[Row]) -> str:
    """The comparison as a table, first what the page shows. Systems without an answer for the same reason share a row."""
    own, lines = rows[0].answer, dict[object, dict[str, Any]]()
    for place, row in enumerate(rows):
        shared = place if row.answer or not place else (own_placement(row.state), row.why)
        if shared in lines:
            lines[shared]["names"].append(_name(row.state))
        else:
            lines[shared] = _cells(row, own)
    return render("explore_table.html", rows=list(lines.values()), shorter=_shorter(rows))


def _shorter(rows: Sequence[Row]) -> dict[str, str] | None:
    """The shortest schedule on another placement than the page's, if it fits and is shorter."""
    own, placement = rows[0].answer, own_placement(rows[0].state)
    fitting = [row for row in rows if row.state.system == BEST and row.answer is not None and not row.answer.over]
    best = min(fitting, key=lambda row: row.answer.certificate.value, default=None)  # type: ignore[union-attr]
    if own is None or best is None or best.answer is None or own_placement(best.state) == placement:
        return None
    value = best.answer.certificate.value
    saved = 1 - value / own.certificate.value
    if saved <= 0:
        return None
    where = {"where": own_placement(best.state), "saved": f"{saved:.1%}", "value": format_time(value)}
    return {**_name(best.state), **where}


def _name(state: State) -> dict[str, str]:
    """A system's name, as a link to its state."""
    named = None if state.system == BEST else system(state.system)
    return {
        "system": state.system,
        "placement": state.placement,
        "name": state.system if named else "best found",
        "title": f"{named.title}, {named.paper}" if named else "the best that a short search finds",
    }


def _cells(row: Row, own: Answer | None) -> dict[str, Any]:
    cells = {
        "names": [_name(row.state)],
        "placement": own_placement(row.state),
        "why": printable(row.why or (_lacking(row.answer) if row.answer else "")),
        "fits": row.answer is not None and not row.answer.over,
        "answered": row.answer is not None,
    }
    if row.answer is None:
        return cells
    certificate, timeline = row.answer.certificate, row.answer.schedule.timeline()
    against = certificate.value / own.certificate.value - 1 if own and own.certificate.value else 0.0
    return {
        **cells,
        "value": format_time(certificate.value),
        "against": f"{against:+.1%}" if own and row.answer is not own else "",
        "bubble": f"{timeline.bubble_rate:.1%}",
        "peak": format_bytes(max(row.answer.peaks)),
        "bound": format_time(certificate.bound),
        "gap": format_gap(certificate.gap),
        "weights": f"{len(row.answer.schedule.problem.routes)}×",
    }


def _lacking(answer: Answer) -> str:
    """The capacity of the rank that lacks most memory; "" if no rank lacks any."""
    if not answer.over or answer.capacity is None:
        return answer.over
    rank = max(range(len(answer.peaks)), key=lambda r: answer.peaks[r] - (answer.capacity or ())[r])
    return f"rank {rank} has {format_bytes(answer.capacity[rank])}"


def wrong_part(message: str) -> str:
    """An error of a state in one line, with the control that it is about."""
    word = re.split(r"[: \[]", message)[0]
    about = "memory" if word == "capacity" else "system" if word in SYSTEM_NAMES else word
    known = about if about in {control.name for control in CONTROLS} else ""
    return render("explore_wrong.html", message=printable(message), control=known)
