"""`what_if`: a plan again with one number changed, and what of the difference is proven."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..schedule import relative_gap
from ..util.clock import Clock
from ..util.errors import BadInput, Infeasible, NotFound, interruption
from .bounds.bound_kernels import NEVER
from .candidate import Candidate, retimed
from .case import Case, case_of, changed, no_harder
from .layout import rows_of
from .plan_file import Plan
from .planning import plan
from .race.space_race import Progress
from .space import layouts

Known = Sequence[tuple[Case, Plan]]
SECONDS = 15.0  # for each change, where nothing is said
LINKS = "links"  # stands for each of these
LINK_CHANGES = ("inside.bandwidth=2x", "between.bandwidth=2x", "messages=2x")


@dataclass(frozen=True, eq=False)
class Answer:
    """One change. plan: the plan with it, None where `reason` says why there is none. bound: µs that no plan with it
    undercuts, and what says so: its own, or that of a case which is nowhere harder; 0 without a plan. seconds: what it took
    (0 where effort is counted)."""

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
    """The plan again for each change; and the plan itself, with the best order that was found on the way.

    before: the plan.
    changes: texts, see `case.changed`; "links": each link twice as fast.
    others: answers about the same plan, which count too.
    progress: called with a line.
    stop: once it says True, and after KeyboardInterrupt, no further change is looked at.
    search: seconds or effort for each change, and the seed, as `plan` takes them.

    Orders of the plans before are tried first, where their layouts are in the space: so a change that makes nothing harder
    gives no longer step. A bound also holds for every case that is nowhere easier. Raises BadInput naming the change, before
    any search.
    """
    cases = changed_cases(case_of(before), changes)
    known = [(case_of(before), before), *((one.case, one.plan) for one in others if one.plan)]
    limits: dict[str, Any] = {"seconds": SECONDS, **search, "stop": stop}
    found: list[Answer] = []
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
        found.append(answer)
    return _shared(before, found, others)


def changed_cases(base: Case, changes: Sequence[str]) -> list[tuple[str, Case]]:
    """Each change, and the case with it, which has a layout. Raises BadInput naming the change."""
    return [(text, _legal(base, text)) for text in _expanded(changes)]


def _expanded(changes: Sequence[str]) -> list[str]:
    return [one for text in changes for one in (LINK_CHANGES if text.strip() == LINKS else (text,))]


def _legal(base: Case, text: str) -> Case:
    """The changed case, which has a layout. Raises BadInput naming the change."""
    case = changed(base, text)
    try:
        layouts(*case[:4], case.only)
    except BadInput as error:
        raise BadInput(f"change '{text[:40]}': {error}") from None
    return case


def _answer(text: str, case: Case, known: Known, limits: dict[str, Any]) -> Answer:
    """The plan of a case, from the candidates of those that are known: of cases that are no easier first."""
    nearest = sorted(known, key=lambda one: (not no_harder(case, one[0]), one[1].best.value))
    start = [candidate for _, plan_there in nearest for candidate in plan_there.near[:2]]
    clock = Clock(limits["seconds"], limits.get("effort"))
    try:
        found = plan(*case[:4], memory=case.memory, only=case.only, start=start, **limits)
    except (Infeasible, NotFound) as error:
        return Answer(text, case, None, str(error))
    return Answer(text, case, found, seconds=0.0 if clock.counted else round(clock.used, 3))


def as_it_is(before: Plan, answers: Sequence[Answer]) -> Answer:
    """The plan that nothing is changed of, with the bound that answers about it leave."""
    base = case_of(before)
    return _bounded(Answer("", base, before), [(one.case, one.plan) for one in answers if one.plan])


def _shared(before: Plan, found: Sequence[Answer], others: Sequence[Answer]) -> tuple[Plan, tuple[Answer, ...]]:
    """The plan and the answers, each with what the others found: what a change brings is no luck of its search."""
    known = [(case_of(before), before), *((one.case, one.plan) for one in (*found, *others) if one.plan)]
    orders = [there.best for _, there in known]
    again = [replace(one, plan=one.plan and _with_orders(one.plan, one.case, orders)) for one in found]
    return _with_orders(before, case_of(before), orders), tuple(_bounded(one, known) for one in again)


def _with_orders(there: Plan, case: Case, orders: Sequence[Candidate]) -> Plan:
    """The plan with those orders of others that are shorter in its case."""
    for one in orders:
        rows = rows_of(there.bounds.layout, one.layout)
        if one is there.best or not len(rows) or there.bounds.pipeline[rows[0]] == NEVER:
            continue
        again = retimed(one, case.model, case.cluster, case.memory, there.best.value)
        if again is not None:
            further = (other for other in there.candidates if other.layout != again.layout)
            there = replace(there, candidates=(again, *further))
    return there


def _bounded(answer: Answer, known: Known) -> Answer:
    """The answer with the highest bound of all cases that are nowhere harder than its own."""
    if answer.plan is None:
        return answer
    plans = [answer.plan, *(there for case, there in known if no_harder(case, answer.case))]
    best = max(plans, key=lambda one: one.bound)
    proof = best.bound_by if best is answer.plan else f"{best.bound_by}, where less is in the way"
    return replace(answer, bound=min(best.bound, answer.plan.best.value), proof=proof)
