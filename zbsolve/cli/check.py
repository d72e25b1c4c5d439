"""`zbsolve check`: verify a schedule from its file alone."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from .tools import print_json, searching

if TYPE_CHECKING:
    from ..schedule import Certificate, Schedule
    from ..verifier import Violation

MIN_SECONDS = 0.1  # for a new bound, where proving the stated one again took all of the time


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument(
        "--bound",
        action="store_true",
        help="also prove the certificate's bound again, from the file alone; or, where there is no certificate, a bound",
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to prove the bound at most")
    parser.add_argument(
        "-o", "--output", help="with --bound: look for a higher bound too, and write schedule.json with it, or - for a pipe"
    )
    parser.add_argument("--json", action="store_true", help="the violations as JSON on standard output")


def command(options: argparse.Namespace) -> int:
    """Verify, and with --bound prove the certificate's bound again, or a bound where none is stated or -o is given."""
    from ..schedule import Schedule
    from ..verifier import verify

    if options.output and not options.bound:
        raise BadInput("-o writes the schedule with the bound that --bound proves: give both")
    if not options.seconds > 0:
        raise BadInput(f"seconds: {options.seconds:g} is not a positive time")
    schedule = Schedule.load(options.schedule)
    violations = verify(schedule.problem, schedule)
    proven, began = "", time.monotonic()
    if options.bound and not violations and schedule.certificate is not None:
        proven, *failed = _prove_again(schedule, schedule.certificate, options.seconds)
        violations = tuple(failed)
    if options.bound and not violations and (schedule.certificate is None or options.output):
        schedule = _prove(schedule, max(options.seconds - (time.monotonic() - began), MIN_SECONDS))
        proven += f"; {_found(schedule)}"
        if options.output:
            schedule.save(options.output)
    if options.json:
        print_json([{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in violations])
    elif options.output != "-":
        for violation in violations:
            print(f"{options.schedule}: {violation}")
        if not violations:
            print(f"{options.schedule}: holds ({len(schedule.problem.passes)} passes){proven}")
    return 1 if violations else 0


def _prove(schedule: Schedule, seconds: float) -> Schedule:
    """The schedule with the highest bound that is proven in so many seconds, or with its own where that is higher."""
    from ..search.certify import GIVEN, certified

    stated = schedule.certificate
    with searching("check") as (search, _):
        found = certified(schedule, stated.solver if stated else GIVEN, seconds, lambda state: search.show("", state))
    assert found.certificate is not None
    return schedule if stated is not None and stated.bound >= found.certificate.bound else found


def _found(schedule: Schedule) -> str:
    """Value, bound and gap in words."""
    c = schedule.certificate
    assert c is not None
    left = "optimal" if c.status == "optimal" else f"at most {c.gap:.2%} of the step could still be saved"
    return f"{c.objective} {c.value} µs, bound {c.bound} µs proven: {left} ({c.proof})"


def _prove_again(schedule: Schedule, stated: Certificate, seconds: float) -> tuple[str] | tuple[str, Violation]:
    """The words for a bound that was proven again; with a violation where it was not."""
    from ..ilp.bounds.bound import Bound
    from ..ilp.proof_check import recheck
    from ..verifier import Violation

    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return "", Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    found = recheck(schedule.problem, Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks), seconds)
    if found.value < stated.bound:
        text = f"bound {stated.bound} µs is not proven again; {found.value} µs is ({found.proof})"
        return "", Violation("bound", (), text)
    return (f"; bound {stated.bound} µs proven again: {found.proof}",)
