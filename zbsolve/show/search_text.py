"""A search as text: one line while it runs, and what became of each placement and partition that it tried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..schedule import relative_gap
from ..util.text import aligned, counted, format_bytes, format_time, time_unit

if TYPE_CHECKING:
    from ..search.auto import Tried
    from ..search.state import State


def state_as_text(state: State, elapsed: float) -> str:
    """`makespan 12.40 ms, bound 12.10 ms, gap 2.42%, 3 s, by annealing`; elapsed: seconds since the search began."""
    bound = f"bound {format_time(state.bound.value)}"
    if state.schedule is None:
        return f"no schedule yet, {bound}, {elapsed:.0f} s"
    objective, gap = state.schedule.problem.objective, relative_gap(state.value, state.bound.value)
    return f"{objective} {format_time(state.value)}, {bound}, gap {gap:.2%}, {elapsed:.0f} s, by {state.solver}"


def tried_as_text(tried: Sequence[Tried], objective: str) -> str:
    """What each placement and partition reached and why it lost, a row each, all times in one unit; the memory of the
    fullest rank where any is known."""
    split, full = len({one.partition for one in tried}) > 1, any(one.memory for one in tried)
    head = "placement, partition" if split else "placement"
    unit, show = time_unit(max(one.value for one in tried if one.value is not None), digits=3)
    rows = [(head, f"{objective}, {unit}", f"bound, {unit}", "gap", *["fullest rank"] * full, "seconds", "")]
    for one in tried:
        name = f"{one.placement} {one.partition}" if split else one.placement
        gap = "–" if one.value is None or one.bound is None else f"{relative_gap(one.value, one.bound):.2%}"
        numbers = (*("–" if us is None else show(us) for us in (one.value, one.bound)), gap)
        if full:
            numbers = (*numbers, format_bytes(one.memory) if one.memory else "–")
        layers = f"  {counted(one.layers)}" if split and one.layers else ""
        rows.append((name, *numbers, f"{one.seconds:.1f}" if one.seconds else "–", f"{one.why or 'best'}{layers}"))
    return "\n".join(aligned(rows, left=(0, -1))) + "\n"
