"""`plan_front`: the least step over the memory of a device, or over the number of devices, with a bound at each point."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from ..search.memory_limits import Point
from ..util.errors import BadInput
from ..util.text import parse_bytes
from .answers import Answer, as_it_is, what_if
from .candidate import Candidate, retimed
from .case import Case, case_of
from .costs.rank_costs import least_bytes
from .plan_file import Plan
from .solved_space import SAME_US
from .space import layouts

Front = tuple[str, Sequence[int] | None]  # over what, and where
OVER = ("memory", "devices")
AMPLE = 1 << 49  # bytes: more than any device has
POINTS = 6
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the plan's devices


@dataclass(frozen=True, eq=False)
class PlanFront:
    """plan: what nothing is changed of, with the best order that was found on the way. over: "memory" or "devices"; at:
    bytes a device, or devices, rising; points: the plan there, as on the frontier of a step (`choice`: its layout); missing:
    where there is none, and why."""

    plan: Plan
    over: str
    at: tuple[int, ...]
    points: tuple[Point, ...]
    missing: tuple[tuple[int, str], ...]

    @property
    def efficient(self) -> tuple[bool, ...]:
        """Whether each point is shorter than all that need less: the others are not on the Pareto front."""
        values = [point.value for point in self.points]
        return tuple(all(value < other for other in values[:i]) for i, value in enumerate(values))

    def to_json(self) -> dict[str, Any]:
        """Points as of a frontier file, each with where it is, and whether it is on the Pareto front."""
        rows = zip(self.at, self.points, self.efficient, strict=True)
        points = [{**point.to_json(), self.over: at, "efficient": efficient} for at, point, efficient in rows]
        return {"over": self.over, "points": points, "missing": [{self.over: at, "reason": why} for at, why in self.missing]}


def parse_front(text: str) -> Front:
    """`memory`, `devices`, `memory=40GiB,60GiB` or `devices=32,64`. Raises BadInput."""
    over, given, said = (part.strip() for part in text.partition("="))
    if over not in OVER:
        raise BadInput(f"front '{text[:40]}': one of {', '.join(OVER)}")
    if not given:
        return over, None
    where = f"front '{text[:40]}': {over}"
    numbers = [parse_bytes(one, where) for one in said.split(",")]
    if min(numbers) < 1:
        raise BadInput(f"{where} '{min(numbers)}': at least 1 is needed")
    return over, numbers


def plan_front(before: Plan, over: str, at: Sequence[int] | None = None, **search: Any) -> PlanFront:
    """The plan with other memory, or other numbers of devices, beside the plan as it is.

    before: the plan.
    over: "memory" or "devices".
    at: bytes a device, or devices. None: from the least memory in which any layout fits to what the best plan without a
        limit needs, evenly by ratio; or a quarter to four times the devices.
    search: seconds or effort for each point, seed, progress and stop, as `what_if` takes them.

    What is found in less memory holds in more, what is proven of more holds of less. Raises BadInput.
    """
    if over not in OVER:
        raise BadInput(f"front '{over[:20]}': one of {', '.join(OVER)}")
    base = case_of(before)
    free: tuple[Answer, ...] = ()
    if over == "memory" and at is None:
        before, free = what_if(before, [f"memory={AMPLE}"], **search)
        at = _ladder(before, free[0].plan if free else None)
    numbers = _numbers_of_devices(base) if at is None else at
    here = base.memory if over == "memory" else base.devices
    asked = [f"{over}={one}" for one in sorted(set(numbers)) if one != here]
    before, found = what_if(before, asked, others=free, **search)
    answers = sorted((*found, as_it_is(before, (*free, *found))), key=lambda one: getattr(one.case, over))
    pool = [candidate for one in (*answers, *free) if one.plan for candidate in one.plan.candidates]
    points = [_point(one, pool if over == "memory" else ()) for one in answers]
    return PlanFront(
        before,
        over,
        tuple(getattr(one.case, over) for one, point in zip(answers, points, strict=True) if point),
        tuple(point for point in points if point),
        tuple((getattr(one.case, over), one.reason) for one, point in zip(answers, points, strict=True) if not point),
    )


def _point(answer: Answer, pool: Sequence[Candidate]) -> Point | None:
    """The point of an answer: its plan, or the best of the pool that fits its memory."""
    case = answer.case
    fitting = sorted((one for one in pool if sum(one.memory().values()) <= case.memory), key=lambda one: one.value)
    again = (retimed(one, case.model, case.cluster, case.memory) for one in fitting[:1])
    best = min((*(one for one in again if one), *(answer.plan.near if answer.plan else ())), key=_value, default=None)
    if best is None:
        return None
    value, bound = ceil(best.value - SAME_US), answer.bound
    whole = value if bound >= best.value - SAME_US else int(bound)
    peak, solver = sum(best.memory().values()), best.schedule.certificate.solver if best.schedule.certificate else ""
    found = (case.memory, peak, value, whole, answer.proof, solver, answer.seconds)
    return Point(*found, best.schedule, best.layout.title)


def _value(one: Candidate) -> float:
    return one.value


def _ladder(before: Plan, free: Plan | None) -> list[int]:
    """Memory from the least need of any layout to that of the best plan without a limit."""
    least = int(least_bytes(before.bounds.costs, before.bounds.layout).min())
    top = max(least, sum((free or before).best.memory().values()))
    return [round(least * (top / least) ** (i / (POINTS - 1))) for i in range(POINTS)]


def _numbers_of_devices(base: Case) -> list[int]:
    """Those near the plan's that make a layout."""
    found = []
    for factor in FACTORS:
        try:
            devices = int(base.devices * factor)
            layouts(base.model, devices, base.batch, base.cluster, base.only)
            found.append(devices)
        except BadInput:
            continue
    return found
