"""What changes of a plan would bring, and a plan's front over memory or devices, as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..planner.answers import LINK_CHANGES, Answer, PlanFront
from ..planner.plan_file import Plan
from ..util.text import aligned, format_bytes, format_gap, format_time, printable

LEAST_SHARE = 1e-3  # of a step, that a link is said to limit
PROVEN = "against: step over this plan's; proven: between these lies the best step there is over the best without the change"


def what_if_as_text(before: Plan, answers: Sequence[Answer]) -> str:
    """A line a change, and which link limits where links were asked about."""
    head = ("what if", "step", "bound", "gap", "against", "proven", "layout")
    rows = [head, *(_row(before, one) for one in answers if one.plan)]
    lines = aligned(rows, left=(0, -1)) if len(rows) > 1 else []
    lines += [PROVEN] if lines else []
    lines += [f"{one.change}: {printable(one.reason)}" for one in answers if not one.plan]
    return "\n".join([*lines, *_limiting(before, answers)]) + "\n"


def what_if_as_json(before: Plan, answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """The same as fields."""
    return [_fields(before, one) for one in answers]


def front_as_text(front: PlanFront) -> str:
    """A line a point, as of a frontier, and what is not on the Pareto front."""
    head = (front.over, "needed", "step", "bound", "gap", "layout")
    rows = [head]
    for at, point, efficient in zip(front.at, front.points, front.efficient, strict=True):
        where = format_bytes(at) if front.over == "memory" else f"{at:,}"
        numbers = (format_bytes(point.peak), format_time(point.value), format_time(point.bound), format_gap(point.gap))
        rows.append((where, *numbers, point.choice if efficient else f"no shorter than with less: {point.choice}"))
    lines = [f"the front of step over {front.over}", *(aligned(rows, left=(-1,)) if front.points else [])]
    for at, why in front.missing:
        lines.append(f"{format_bytes(at) if front.over == 'memory' else at}: {printable(why)}")
    return "\n".join(lines) + "\n"


def _row(before: Plan, one: Answer) -> tuple[str, ...]:
    assert one.plan is not None
    best, (low, high) = one.plan.best, _proven(before, one)
    times = (format_time(best.value), format_time(one.bound), format_gap(one.gap))
    shares = f"{best.value / before.best.value - 1:+.1%}", f"{low:+.1%} to {high:+.1%}"
    return (one.change, *times, *shares, best.layout.title)


def _proven(before: Plan, one: Answer) -> tuple[float, float]:
    """Between which shares the best step with the change differs from the best without it."""
    assert one.plan is not None
    return one.bound / before.best.value - 1, one.plan.best.value / before.bound - 1


def _fields(before: Plan, one: Answer) -> dict[str, Any]:
    if one.plan is None:
        return {"change": one.change, "reason": one.reason}
    best = one.plan.best
    found = {"change": one.change, "step": best.value, "bound": one.bound, "gap": one.gap, "proof": one.proof}
    layout = {name: int(value) for name, value in best.layout._asdict().items()}
    return {**found, "against": best.value / before.best.value - 1, "proven": list(_proven(before, one)), "layout": layout}


def _limiting(before: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    """Which link limits, of those that were asked about twice as fast."""
    links = [(one.change, one.plan) for one in answers if one.plan and one.change in LINK_CHANGES]
    saved = {change: 1 - plan.best.value / before.best.value for change, plan in links}
    if len(saved) < 2:
        return
    most = max(saved, key=lambda one: saved[one])
    if saved[most] < LEAST_SHARE:
        yield f"no link limits: none that is twice as fast saves {LEAST_SHARE:.1%} here"
    else:
        yield f"the link that limits most is {most.partition('=')[0]}: twice as fast it saves {saved[most]:.1%} here"
