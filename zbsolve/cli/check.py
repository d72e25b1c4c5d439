"""`zbsolve check`: verify a schedule from its file; find its steady state; or check if it is still good on a profile."""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..schedule import GIVEN, Certificate, Schedule
from ..show.sentences import by_microbatch, verdict
from ..util.errors import BadInput
from ..util.files import document_kind
from ..util.text import format_gap, format_time, format_times, parse_share, plural
from ..verifier import verify
from .solve_many import check_repeated
from .tools import first_lines, profile_from, searching, tell, tell_other_model

if TYPE_CHECKING:
    from ..planner.plan_file import CheckedPlan

HOLDS = "each runs once, after all that it waits for, within the memory of its rank"
MIN_SECONDS = 0.1  # for a new bound, if proving the file's bound again took all of the time

USUAL_SHARE = "1%"  # default of --within: how much longer than the best found order is still good


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json or plan.json, or - for standard input (a schedule)")
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also prove the certificate's bound again, from the file alone; or, without a certificate, a bound. For a plan "
        "everything is proven again that needs no search; with --bound also a bound of its schedule that needs one",
    )
    parser.add_argument(
        "--period",
        action="store_true",
        help="for training without flushes (PipeDream, 2BW), or a step continued without end: the time of a round in the "
        "steady state, its bound, and the best found within --seconds in the same memory",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to prove the bound, or to search, at most")
    parser.add_argument(
        "-o",
        "--output",
        help="schedule.json, or - for a pipe: with --bound look for a higher bound too, and write it; with --period the "
        "best steady state found",
    )
    parser.add_argument(
        "--profile",
        help="profile.json: does the order still hold by these times, and is it still the best? Searches for a shorter one "
        "for --seconds at most; exit 1 if it does not hold, or one is found",
    )
    parser.add_argument("--within", metavar="SHARE", help="with --profile: how much longer the order may be (default: 1%%)")
    parser.add_argument("--replicas", type=int, help="with --profile: pipelines that sum gradients, if it has passes C")
    parser.add_argument("--json", action="store_true", help="the violations as JSON; with --bound value, bound and gap too")


def command(options: argparse.Namespace) -> int:
    """Verify a schedule. With --bound also prove the certificate's bound again, and a new one if there is none or for -o."""
    from ..search.certify import proven_again

    if options.output and not (options.bound or options.period):
        raise BadInput("-o writes the schedule with the bound that --bound proves, or that of --period: give one of them")
    if options.seconds < 0 or not (options.seconds or options.period):
        raise BadInput(f"seconds: {options.seconds:g} is not a positive time")
    if [options.bound, options.period, options.profile is not None].count(True) > 1:
        raise BadInput("--bound, --period and --profile ask different things: give one of them")
    if options.period:
        return check_period(options)
    if options.profile is not None:
        return check_again(options)
    if options.within is not None or options.replicas is not None:
        raise BadInput("--within and --replicas go with --profile")
    other = {"plan": _check_plan, "rounds": check_repeated}.get(document_kind(options.schedule) or "")
    if other is not None:
        return other(options)
    schedule = Schedule.load(options.schedule)
    violations = verify(schedule.problem, schedule)
    proofs, began, stated = list[str](), time.monotonic(), schedule.certificate
    if options.bound and not violations and stated is not None:
        proof = proven_again(schedule, stated, options.seconds)
        violations = () if isinstance(proof, str) else (proof,)
        if isinstance(proof, str):
            proofs, schedule = [f"proven again: {proof}"], schedule.certified(replace(stated, proof=proof))
    if options.bound and not violations and (schedule.certificate is None or options.output):
        schedule = _prove(schedule, max(options.seconds - (time.monotonic() - began), MIN_SECONDS))
        best = schedule.certificate
        assert best is not None
        proofs += [f"proven now: {best.proof}"] * (f"proven again: {best.proof}" not in proofs)
        if options.output:
            schedule.save(options.output)
    rows = [{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in violations]
    body = {"violations": rows, **_proven(None if violations else schedule.certificate)} if options.bound else rows
    wrong = first_lines([f"{options.schedule}: {violation}" for violation in violations])
    tell(options, lambda: body, lambda: wrong or _lines(options.schedule, schedule, proofs))
    return 1 if violations else 0


def _check_plan(options: argparse.Namespace) -> int:
    """Check a plan's file: its space, the bounds of all layouts, its profile and its schedule; and the schedule's bound, if
    that needs no search or with --bound."""
    from ..planner.plan_file import check_plan

    if options.output:
        raise BadInput("-o: nothing of a plan is written")
    plan = check_plan(options.schedule, options.seconds, search=options.bound)
    body = {"wrong": list(plan.wrong), "step": plan.step, "bound": plan.bound, "gap": 1 - plan.bound / plan.step}
    body["schedule"] = None if plan.proof is None else _proven(plan.schedule.certificate)
    tell(options, lambda: body, lambda: _plan_lines(options.schedule, plan))
    return 1 if plan.wrong else 0


def _plan_lines(name: str, checked_plan: CheckedPlan) -> list[str]:
    """The errors in a plan; or, if there are none, its gap over the space and what is proven about its schedule."""
    if checked_plan.wrong:
        return [f"{name}: {line}" for line in checked_plan.wrong]
    gap, passes = 1 - checked_plan.bound / checked_plan.step, len(checked_plan.schedule.problem.passes)
    step, bound = format_times(checked_plan.step, checked_plan.bound)
    lines = [
        f"{name}: holds: the schedule ({passes} passes), and the bounds of all {checked_plan.layouts:,} layouts",
        f"step {step}, bound over the space {bound} (gap {format_gap(gap)})",
    ]
    own = checked_plan.schedule.certificate
    if own is None:
        return lines
    if checked_plan.proof is None:
        return [*lines, f"of the schedule alone: {verdict(own.unchecked())}"]
    return [*lines, f"of the schedule alone: {verdict(own)}", f"proven again: {checked_plan.proof}"]


def _proven(certificate: Certificate | None) -> dict[str, Any]:
    """Value, bound, gap and status of a certificate; null if there is none, because the check failed."""
    names = ("value", "bound", "gap", "status")
    return {name: None if certificate is None else getattr(certificate, name) for name in names}


def _prove(schedule: Schedule, seconds: float) -> Schedule:
    """The schedule with the highest bound that is proven in `seconds`, or with its own bound if that is higher."""
    from ..search.certify import certified

    stated = schedule.certificate
    with searching("check") as (search, _):
        proven = certified(schedule, stated.solver if stated else GIVEN, seconds, lambda state: search.show("", state))
    assert proven.certificate is not None
    return schedule if stated is not None and stated.bound >= proven.certificate.bound else proven


def _lines(name: str, schedule: Schedule, proofs: list[str]) -> list[str]:
    """Lines for a schedule that holds: its rules, its certificate, and how the bound was proven or can be."""
    lines = [f"{name}: holds ({plural(pass_=len(schedule.problem.passes))}): {HOLDS}"]
    if schedule.certificate is None:
        return [*lines, "this file has no certificate, so how good it is is not known: --bound proves a bound"]
    return [*lines, verdict(schedule.certificate if proofs else schedule.certificate.unchecked()), *proofs]


def check_period(options: argparse.Namespace) -> int:
    """How long a round takes in the steady state, the bound, and the best that is found in the time."""
    from ..ilp.steady.periodic import least_period, lower_bound
    from ..ilp.steady.rounds import period, rounds_of

    schedule = Schedule.load(options.schedule)
    for violation in verify(schedule.problem, schedule):
        raise BadInput(f"{options.schedule}: {violation}")
    own, rounds = period(schedule), rounds_of(schedule.problem)
    bound, proof = lower_bound(rounds)
    body = {"microbatches": rounds.microbatches, "work": rounds.work, "period": float(own.time), "cycle": list(own.cycle)}
    body |= {"bound": float(bound), "proof": proof}

    def line(what: str, time: float) -> str:
        a_round = f" ({time:,.6g} µs a round of {rounds.microbatches})" if rounds.microbatches > 1 else ""
        return f"{what}: {time / rounds.microbatches:,.6g} µs a microbatch{a_round}, bubble {1 - rounds.work / time:.2%}"

    set_by = f"; set by {' → '.join(own.cycle)}" if own.cycle else ""
    lines = [line("this order", float(own.time)) + set_by, line("bound", float(bound)) + f"; {proof}"]
    if options.seconds:
        best = least_period(schedule.problem, options.seconds, known=[schedule])
        body |= {"found": float(best.time), "strictly_periodic_bound": best.strict}
        strict = f"; none that is strictly periodic takes less than {best.strict:,} µs a round"
        lines.append(line("best found", float(best.time)) + strict)
        schedule = best.schedule
    if options.output:
        schedule.save(options.output)
    tell(options, lambda: body, lambda: lines)
    return 0


@dataclass(frozen=True)
class StillGood:
    """An order with a profile's times. wrong: why it is not valid, or "". value: its step time, µs; before: that with its
    file's times; best: the shortest found; bound, proof: of all orders. within: how much longer than best is still good."""

    wrong: str
    value: int
    before: int
    best: int
    bound: int
    proof: str
    within: float

    @property
    def excess(self) -> float:
        """How much longer than the best it is, as a share of the best."""
        return self.value / self.best - 1 if self.best else 0.0

    @property
    def good(self) -> bool:
        """It holds, and is within the share."""
        return not self.wrong and self.excess <= self.within

    def to_json(self) -> dict[str, Any]:
        """All numbers; null if the order is not valid."""
        head = {"good": self.good, "holds": not self.wrong, "why": self.wrong, "within": self.within, "before": self.before}
        numbers = {name: None if self.wrong else getattr(self, name) for name in ("value", "best", "bound", "excess")}
        return head | numbers


def check_again(options: argparse.Namespace) -> int:
    """Time the order of a schedule's file with a profile, and search for a shorter one. Returns 1 if the order is no longer
    valid, or if it is longer than the best by more than `--within`. Raises BadInput."""
    within = parse_share(USUAL_SHARE if options.within is None else options.within, "--within")
    schedule, profile = Schedule.load(options.schedule), profile_from(options.profile, "check")
    tell_other_model(schedule, profile, "check")
    result = _still_good(schedule, profile, within, options)
    tell(options, result.to_json, lambda: _profile_lines(options, result))
    return 0 if result.good else 1


def _still_good(schedule: Schedule, profile: Any, within: float, options: argparse.Namespace) -> StillGood:
    from ..search.certify import certified
    from ..search.solver import solve
    from ..search.today import order_on, why_not

    timed, before = order_on(schedule, profile, replicas=options.replicas), int(schedule.timeline().value)
    wrong = why_not(timed)
    if wrong:
        return StillGood(wrong, 0, before, 0, 0, "", within)
    value, quick = int(timed.timeline().value), certified(timed, GIVEN).certificate
    assert quick is not None
    if value <= (1 + within) * quick.bound:
        return StillGood("", value, before, value, quick.bound, quick.proof, within)  # no order can be shorter by more
    with searching("check") as (search, _):
        best = solve(timed.problem, seconds=options.seconds, hint=timed, prefer=None, progress=lambda s: search.show("", s))
    assert best.certificate is not None
    highest = max(best.certificate, quick, key=lambda certificate: certificate.bound)
    return StillGood("", value, before, best.certificate.value, highest.bound, highest.proof, within)


def _profile_lines(options: argparse.Namespace, still: StillGood) -> list[str]:
    name, by = options.schedule, f"by the times of {options.profile}"
    if still.wrong:
        return [f"{name}: does not hold {by}: {still.wrong}"]
    lines = [f"{name}: holds {by}", f"it takes {format_time(still.value)}, and {format_time(still.before)} by its own times"]
    at_most = format_gap(1 - still.bound / still.value if still.value else 0.0)
    proven = f"proven: at most {at_most} less is possible{by_microbatch(still.proof)}"
    if still.bound >= still.value:
        proven = f"proven: no order of its passes{by_microbatch(still.proof)} is shorter"
    less = f"takes {1 - still.best / still.value:.2%} less" if still.value else ""
    if not still.good:
        return [*lines, f"another order {less}, {format_time(still.best)}: solve it again with this profile"]
    if still.best < still.value:
        proven = f"the best that was found {less}; {proven}"
    return [*lines, f"still within {still.within:.2%} of the best; {proven}"]
