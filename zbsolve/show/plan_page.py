"""The space of a plan as one HTML page: every layout where its bound lies, by any of its fields, and the same in words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..planner.bounds.layout_rules import NO_ROOM
from ..planner.bounds.space_bounds import DOMINATED, RULES
from ..planner.costs.rank_costs import least_bytes
from ..planner.layout import FIELDS, NAMES, Layout
from ..planner.solved_space import MFU_COUNTS, SolvedSpace, families
from ..tables import Ints
from ..util.text import format_gap, format_time, printable
from .pages import packed, render
from .plan_text import bound_line, honest_line, lost_share, share_or_dash, space_lines, steps_and_bounds, unit_of

WORDS = {**FIELDS, "dp": "replicas", "chunks": "stages a rank", "count": "microbatches a replica"}
MOST_SOLVED = 60  # layouts in the table of those that were solved


def plan_as_page(space: SolvedSpace) -> str:
    """The page as text; it loads nothing."""
    title = f"{space.shape.name} on {space.devices:,} devices, {space.batch:,} sequences a step"
    return render(
        "plan.html",
        title=printable(title),
        figures=_figures(space),
        sentences=[
            printable(one) for one in (*space_lines(space), bound_line(space), honest_line(space.shape, space.cluster))
        ],
        solved=_solved_rows(space),
        further=max(0, len(space.solved) - MOST_SOLVED),
        rules=_rule_rows(space),
        families=_family_rows(space),
        data=_data(space),
    )


def _figures(space: SolvedSpace) -> list[tuple[str, str, str]]:
    """What stands large at the top: (label, value, note)."""
    return [
        ("step", format_time(space.value), space.bounds.layout.row(space.best).title),
        ("proven bound", format_time(space.bound), f"gap {format_gap(space.gap)} over the space"),
        (
            "MFU",
            share_or_dash(space.mfu(space.value)),
            f"{space.tokens(space.value):,.0f} {unit_of(space.shape)}/s a device; MFU counts {MFU_COUNTS}",
        ),
        ("layouts", f"{len(space.bounds.rule):,}", f"{len(space.solved):,} solved, {space.open:,} open"),
    ]


def _solved_rows(space: SolvedSpace) -> list[tuple[str, ...]]:
    """A header and the layouts that were solved, the best first."""
    head = ("layout", "step", "above the best", "bound", "MFU", f"{unit_of(space.shape)}/s a device")
    rows = sorted(space.solved.items(), key=lambda one: one[1])[:MOST_SOLVED]
    times = steps_and_bounds([(step, min(float(space.bounds.step[row]), step)) for row, step in rows])
    return [head, *(_solved_row(space, *row, *both) for row, both in zip(rows, times, strict=True))]


def _solved_row(space: SolvedSpace, row: int, step: float, shown: str, bound: str) -> tuple[str, ...]:
    rates = (share_or_dash(space.mfu(step)), f"{space.tokens(step):,.0f}")
    return (space.bounds.layout.row(row).title, shown, f"{step / space.value - 1:.2%}", bound, *rates)


def _rule_rows(space: SolvedSpace) -> list[tuple[str, ...]]:
    """A header and each rule: how many layouts' bounds it decides, and how far above the best step they lie."""
    above = space.bounds.step / space.value - 1
    found: list[tuple[str, ...]] = [("what decides the bound", "layouts", "bound above the best step: least", "median")]
    for number, rule in enumerate(RULES):
        mine = above[space.bounds.rule == number]
        if len(mine):
            shown = (f"{mine.min():+.1%}", f"{np.median(mine):+.1%}") if np.isfinite(mine).all() else ("", "")
            found.append((rule, f"{len(mine):,}", *shown))
    return found


def _family_rows(space: SolvedSpace) -> list[tuple[str, ...]]:
    """A header and each family of layouts: what it loses at least."""
    rows = [(FIELDS[one.field], one.value, f"{one.layouts:,}", lost_share(one.lost)) for one in families(space)]
    return [("field", "value", "layouts", "loses at least"), *rows]


def _data(space: SolvedSpace) -> dict[str, Any]:
    """Everything the script draws: words, and packed columns in the order of the space."""
    columns = {name: np.asarray(column, np.int64) for name, column in space.bounds.layout._asdict().items()}
    varying = [name for name, column in columns.items() if len(column) and (column != column[0]).any()]
    return {
        "fields": [{"name": name, "words": WORDS.get(name, name), "names": NAMES.get(name)} for name in Layout._fields],
        "varying": varying,
        "groups": [name for name in FIELDS if name in varying],
        "rules": list(RULES),
        "dominated": RULES.index(DOMINATED),
        "no_room": RULES.index(NO_ROOM),
        "step": space.value,
        "memory": space.memory,
        "solved": [[row, round(step, 3)] for row, step in space.solved.items()],
        "packed": packed({**columns, **_judged(space)}),
    }


def _judged(space: SolvedSpace) -> dict[str, Ints]:
    """What is known of each layout: its bound, the rule, what dominates it, whether it is open, and the bytes that its
    fullest rank needs at least."""
    bounds = space.bounds
    need = least_bytes(bounds.costs, bounds.layout)
    return {
        "bound": _whole(bounds.step),
        "rule": bounds.rule,
        "by": bounds.by,
        "open": space.is_open.astype(int),
        "need": need,
    }


def _whole(step: NDArray[np.float64]) -> Ints:
    """Bounds in whole µs, rounded down; −1 where there is none."""
    found: Ints = np.where(np.isfinite(step), np.floor(np.where(np.isfinite(step), step, 0)), -1).astype(np.int64)
    return found
