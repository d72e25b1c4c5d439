"""`zbsolve check`: verify a schedule from its file alone."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ..util.errors import BadInput
from .tools import print_json

if TYPE_CHECKING:
    from ..schedule import Schedule
    from ..verifier import Violation


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json, or - for standard input")
    parser.add_argument("--bound", action="store_true", help="also prove the certificate's bound again, from the file alone")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds to prove the bound at most")
    parser.add_argument("--json", action="store_true", help="the violations as JSON on standard output")


def command(options: argparse.Namespace) -> int:
    """Verify, and with --bound prove the certificate's bound again."""
    from ..schedule import Schedule
    from ..verifier import verify

    schedule = Schedule.load(options.schedule)
    violations = verify(schedule.problem, schedule)
    proven = ""
    if options.bound and not violations:
        proven, *failed = _prove_again(schedule, options.seconds)
        violations = tuple(failed)
    if options.json:
        print_json([{"rule": v.rule, "passes": list(v.passes), "text": v.text} for v in violations])
    else:
        for violation in violations:
            print(f"{options.schedule}: {violation}")
        if not violations:
            print(f"{options.schedule}: holds ({len(schedule.problem.passes)} passes){proven}")
    return 1 if violations else 0


def _prove_again(schedule: Schedule, seconds: float) -> tuple[str] | tuple[str, Violation]:
    """The words for a bound that was proven again; with a violation where it was not."""
    from ..ilp.bounds.bound import Bound
    from ..ilp.proof_check import recheck
    from ..verifier import Violation

    if not seconds > 0:
        raise BadInput(f"seconds: {seconds} is not a positive time")
    stated = schedule.certificate
    if stated is None:
        return "", Violation("bound", (), "there is no certificate, so no bound is stated")
    if not all(0 <= rank < schedule.problem.ranks for rank in stated.ranks):
        return "", Violation("bound", (), f"the certificate names ranks {list(stated.ranks)} of {schedule.problem.ranks}")
    found = recheck(schedule.problem, Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks), seconds)
    if found.value < stated.bound:
        text = f"bound {stated.bound} µs is not proven again; {found.value} µs is ({found.proof})"
        return "", Violation("bound", (), text)
    return (f"; bound {stated.bound} µs proven again: {found.proof}",)
