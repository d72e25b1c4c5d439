"""`what_if`: the plan again with one number changed, and how much of the difference is proven. `plan_front`: the least step
over the memory of a device, or over the number of devices, with a lower bound at each point."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ..schedule import relative_gap
from ..search.memory_limits import Point
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, NotFound, interruption, prefixed
from ..util.text import parse_bytes
from .bounds.layout_rules import NEVER
from .candidate import Candidate, retimed
from .case import Case, carried_until, case_of, changed, no_harder
from .costs.rank_costs import least_bytes
from .layout import rows_of
from .plan_file import Plan
from .planning import plan
from .searches import Progress
from .solved_space import SAME_US
from .space import layouts

# --- One number changed ---


Known = Sequence[tuple[Case, Plan]]
SECONDS = 15.0  # for each change, by default
LINKS = "links"  # stands for each of `LINK_CHANGES`
LINK_CHANGES = ("inside.bandwidth=2x", "between.bandwidth=2x", "messages=2x")


@dataclass(frozen=True, eq=False)
class Answer:
    """The answer to one change. plan: the plan with the change; None where there is none, and `reason` says why. bound: a
    lower bound, µs, on every plan with the change, 0 without a plan; proof: the rule it comes from, of this plan or of one
    whose case is nowhere harder. seconds: time it took (0 where effort is counted)."""

    change: str
    case: Case
    plan: Plan | None
    reason: str = ""
    bound: float = 0.0
    proof: str = ""
    seconds: float = 0.0

    @property
    def gap(self) -> float:
        """(step − bound) / step, of a plan."""
        return relative_gap(self.plan.best.value, self.bound) if self.plan else 0.0


def what_if(
    before: Plan,
    changes: Sequence[str],
    *,
    others: Sequence[Answer] = (),
    progress: Progress = lambda line: None,
    stop: Callable[[], bool] = lambda: False,
    **search: Any,
) -> tuple[Plan, tuple[Answer, ...]]:
    """Plan again for each change. Returns the plan before, with the best order found meanwhile, and each change's answer.

    before: the plan to change.
    changes: texts as `case.changed` takes them; "links" stands for each of `LINK_CHANGES`.
    others: earlier answers about the same plan, whose orders and bounds are used too.
    progress: called with each line of progress.
    stop: called now and then. Once it returns True, or after KeyboardInterrupt, the remaining changes are skipped.
    search: seconds or effort for each change, and the seed, as `plan` takes them.

    Orders of known plans are tried first where their layouts are in the space, so a change that makes nothing harder never
    gives a longer step, except in slices (see `OF_LAYERS`). A bound also holds for cases nowhere easier. Raises BadInput,
    naming the change, before any search.
    """
    cases = changed_cases(case_of(before), changes)
    known = [(case_of(before), before), *((key.case, key.plan) for key in others if key.plan)]
    limits: dict[str, Any] = {"seconds": SECONDS, **search, "stop": stop}
    answers: list[Answer] = []
    for text, case in cases:
        if stop():
            break
        try:
            answer = _answer(text, case, known, {**limits, "progress": lambda line, text=text: progress(f"{text}: {line}")})
        except (KeyboardInterrupt, SystemError) as error:
            if interruption(error) is None:
                raise
            break
        known += [(case, answer.plan)] if answer.plan else []
        answers.append(answer)
    return _shared(before, answers, others)


def changed_cases(base: Case, changes: Sequence[str]) -> list[tuple[str, Case]]:
    """Each change with its case. Raises BadInput naming the change, also where its case has no layout."""
    cases = []
    for text in (each for change in changes for each in (LINK_CHANGES if change.strip() == LINKS else (change,))):
        cases.append((text, case := changed(base, text)))
        with prefixed(f"change '{text[:40]}'"):
            layouts(*case[:4], case.only)
    return cases


def _answer(text: str, case: Case, known: Known, limits: dict[str, Any]) -> Answer:
    """The answer for a case. The search starts from candidates of known plans, those first whose case is no easier."""
    nearest = sorted(known, key=lambda pair: (not no_harder(case, pair[0]), pair[1].best.value))
    start = [candidate for _, plan_there in nearest for candidate in plan_there.near[:2]]
    clock = Clock(limits["seconds"], limits.get("effort"))
    try:
        planned = plan(*case[:4], memory=case.memory, only=case.only, start=start, **limits)
    except (Infeasible, NotFound) as error:
        return Answer(text, case, None, str(error))
    return Answer(text, case, planned, seconds=0.0 if clock.counted else round(clock.used, 3))


def _shared(before: Plan, answers: Sequence[Answer], others: Sequence[Answer]) -> tuple[Plan, tuple[Answer, ...]]:
    """The plan and the answers, each with the orders and bounds of the others, so that differences come less from luck."""
    known = [(case_of(before), before), *((answer.case, answer.plan) for answer in (*answers, *others) if answer.plan)]
    orders = [there.best for _, there in known]
    again = [replace(answer, plan=answer.plan and _with_orders(answer.plan, answer.case, orders)) for answer in answers]
    return _with_orders(before, case_of(before), orders), tuple(_bounded(answer, known) for answer in again)


def _with_orders(there: Plan, case: Case, orders: Sequence[Candidate]) -> Plan:
    """The plan with each of these orders that gives a shorter step in its case."""
    for order in orders:
        rows = rows_of(there.bounds.layout, order.layout)
        if order is there.best or not len(rows) or there.bounds.pipeline[rows[0]] == NEVER:
            continue
        again = retimed(order, case.model, case.cluster, case.memory, there.best.value)
        if again is not None:
            further = (other for other in there.candidates if other.layout != again.layout)
            there = replace(there, candidates=(again, *further))
    return there


def _bounded(answer: Answer, known: Known) -> Answer:
    """The answer with the highest lower bound among its own and those of all cases nowhere harder than its case."""
    if answer.plan is None:
        return answer
    own = answer.plan.bounds
    bounds = [(min(there.bound, carried_until(case, answer.case, own)), there) for case, there in known]
    bound, best = max([(answer.plan.bound, answer.plan), *bounds], key=lambda pair: pair[0])
    proof = best.space.bound_by + ("" if best is answer.plan else ", where less is in the way")
    return replace(answer, bound=min(bound, answer.plan.best.value), proof=proof)


# --- Fronts ---


Front = tuple[str, Sequence[int] | None]  # a name in `OVER`, and the values (None: chosen by `plan_front`)
OVER = ("memory", "devices")
AMPLE = 1 << 49  # bytes: more than any device has
POINTS = 6
FACTORS = (0.25, 0.5, 1, 2, 4)  # of the plan's devices


@dataclass(frozen=True, eq=False)
class PlanFront:
    """A front of plans. plan: the unchanged plan, with the best order found meanwhile. over: "memory" or "devices". at:
    bytes of a device, or devices, ascending. points: the plan at each, as on the frontier of a step (`choice`: its layout).
    missing: values without a plan, each with the reason."""

    plan: Plan
    over: str
    at: tuple[int, ...]
    points: tuple[Point, ...]
    missing: tuple[tuple[int, str], ...]

    @property
    def efficient(self) -> tuple[bool, ...]:
        """Whether each point is on the Pareto front: its step is shorter than those of all points that need less."""
        values = [point.value for point in self.points]
        return tuple(all(value < other for other in values[:i]) for i, value in enumerate(values))

    def to_json(self) -> dict[str, Any]:
        """The points as in a frontier file, each with its memory or devices and whether it is on the Pareto front."""
        rows = zip(self.at, self.points, self.efficient, strict=True)
        points = [{**point.to_json(), self.over: at, "efficient": efficient} for at, point, efficient in rows]
        return {"over": self.over, "points": points, "missing": [{self.over: at, "reason": why} for at, why in self.missing]}


def parse_front(text: str) -> Front:
    """Parse `memory`, `devices`, `memory=40GiB,60GiB` or `devices=32,64`. Raises BadInput."""
    over, sign, values = (part.strip() for part in text.partition("="))
    if over not in OVER:
        raise BadInput(f"front '{text[:40]}': one of {', '.join(OVER)}")
    if not sign:
        return over, None
    where = f"front '{text[:40]}': {over}"
    numbers = [parse_bytes(word, where) for word in values.split(",")]
    if min(numbers) < 1:
        raise BadInput(f"{where} '{min(numbers)}': at least 1 is needed")
    return over, numbers


def plan_front(before: Plan, over: str, at: Sequence[int] | None = None, **search: Any) -> PlanFront:
    """Plan again at other memory sizes, or other numbers of devices, and put the plan before among the points.

    before: the plan.
    over: "memory" or "devices".
    at: bytes of a device, or devices. None: `POINTS` sizes from the least memory of any layout to what the best plan found
        without a limit needs, in equal ratios; or the plan's devices times `FACTORS`.
    search: seconds or effort for each point, seed, progress and stop, as `what_if` takes them.

    A schedule that fits less memory also fits more, and a bound for more memory also holds for less. Raises BadInput.
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
    asked = [f"{over}={number}" for number in sorted(set(numbers)) if number != here]
    before, fresh = what_if(before, asked, others=free, **search)
    known = [(answer.case, answer.plan) for answer in (*free, *fresh) if answer.plan]
    answers = sorted([*fresh, _bounded(Answer("", base, before), known)], key=lambda entry: getattr(entry.case, over))
    pool = [candidate for solved in (*answers, *free) if solved.plan for candidate in solved.plan.candidates]
    points, missing = dict[int, Point](), list[tuple[int, str]]()
    for answer in answers:
        at_one, point = getattr(answer.case, over), _point(answer, pool if over == "memory" else ())
        if point is None:
            missing.append((at_one, answer.reason))
        else:
            points[at_one] = point
    return PlanFront(before, over, tuple(points), tuple(points.values()), tuple(missing))


def _point(answer: Answer, pool: Sequence[Candidate]) -> Point | None:
    """The point of an answer: its plan, or the best candidate of the pool that fits its memory. None: there is neither."""
    case = answer.case
    fitting = sorted((entry for entry in pool if sum(entry.memory().values()) <= case.memory), key=lambda entry: entry.value)
    again = (retimed(candidate, case.model, case.cluster, case.memory) for candidate in fitting[:1])
    able = (*filter(None, again), *(answer.plan.near if answer.plan else ()))
    best = min(able, key=lambda candidate: candidate.value, default=None)
    if best is None:
        return None
    value, bound = ceil(best.value - SAME_US), answer.bound
    whole = value if bound >= best.value - SAME_US else int(bound)
    peak, solver = sum(best.memory().values()), best.schedule.certificate.solver if best.schedule.certificate else ""
    columns = (case.memory, peak, value, whole, answer.proof, solver, answer.seconds)
    return Point(*columns, best.schedule, best.layout.title)


def _ladder(before: Plan, free: Plan | None) -> list[int]:
    """Bytes in equal ratios, from the least that any layout needs to what the best plan without a limit needs."""
    least = int(least_bytes(before.bounds.costs, before.bounds.layout).min())
    top = max(least, sum((free or before).best.memory().values()))
    return [round(least * (top / least) ** (i / (POINTS - 1))) for i in range(POINTS)]


def _numbers_of_devices(base: Case) -> list[int]:
    """The plan's devices times each of `FACTORS`, where that number has a layout."""
    numbers = []
    for devices in (int(base.devices * factor) for factor in FACTORS):
        with suppress(BadInput):
            layouts(base.model, devices, base.batch, base.cluster, base.only)
            numbers.append(devices)
    return numbers
