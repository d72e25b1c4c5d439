"""`zbsolve solve` for steps with too many passes to schedule each: it schedules a few microbatches and repeats a round."""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from ..problem import Problem
from ..profile.profile import Profile
from ..profile.step import Step
from ..show.sentences import placed
from ..util.errors import BadInput
from ..util.text import times_note
from ..verifier import Violation
from .tools import first_lines, progress_line, save_found, search_limits, tell

if TYPE_CHECKING:
    from ..long_steps.repeated import RepeatedSchedule

FEW = 4  # microbatches that are built to check that all are alike: alternating routes or other times show among them


def repeated_step(options: argparse.Namespace, profile: Profile, step: Step) -> Problem | None:
    """The step with one microbatch, if the step is so long that a repeated schedule is better (see
    `search.many.worth_repeating`) and the options allow that; otherwise None."""
    from ..search.many import MIN_PASSES, worth_repeating

    asked = options.method != "auto" or options.hint or step.auto or ":" in options.prefer
    if asked or step.microbatches * len(step.routes[0]) * 3 < MIN_PASSES:
        return None
    problem = _one_microbatch(profile, step)
    return problem if problem is not None and worth_repeating(problem, step.microbatches) else None


def _one_microbatch(profile: Profile, step: Step) -> Problem | None:
    """The step with one microbatch, if steps of several only repeat it; otherwise None."""
    from ..build.mixing import with_microbatches

    fixed = replace(step, partition=step.counts(profile))
    try:
        problem, several = (replace(fixed, microbatches=count).problem(profile) for count in (1, FEW))
        return problem if with_microbatches(problem, FEW) == several else None
    except BadInput:
        return None  # the error is reported when the whole step is built


def solve_repeated(options: argparse.Namespace, step: Problem, microbatches: int) -> int:
    """Find a schedule of `microbatches` times the step, write it, and print how good it is."""
    from ..long_steps.files import as_json
    from ..search.many import solve_many
    from ..show.solved_text import repeated_as_text

    began, limits = time.monotonic(), search_limits(options)

    def show(line: str) -> None:
        progress_line(f"{time.monotonic() - began:.0f} s: {line}")

    long = solve_many(step, microbatches, **limits, progress=show)
    progress_line("")
    note = f"{times_note(step.source)}\n".lstrip("\n")
    saves = [partial(save_found, long, path) for path in options.output]
    body = as_json(long) | {"source": step.source} | placed(step)
    tell(options, lambda: body, lambda: note + repeated_as_text(long), *saves)
    return 0


def check_repeated(options: argparse.Namespace) -> int:
    """Whether a repeated schedule holds for all its microbatches, and whether its bound follows."""
    from ..long_steps.check import violations
    from ..long_steps.files import as_json, load
    from ..show.solved_text import repeated_as_text

    if options.output:
        raise BadInput("-o: the bound of a repeated schedule is proven again, and nothing is written")
    long = load(options.schedule)
    faults = violations(long) or _bound_again(long, options.seconds)
    rows = [{"rule": violation.rule, "passes": list(violation.passes), "text": violation.text} for violation in faults]
    stated = dict.fromkeys(("value", "bound", "gap", "status")) if faults else as_json(long)
    body = {"violations": rows, **stated} if options.bound else rows
    wrong = first_lines([f"{options.schedule}: {violation}" for violation in faults])
    bound = "it states no bound" if long.certificate is None else "its bound is proven again"
    holds = f"{options.schedule}: holds ({long.passes:,} passes, by induction over rounds); {bound}\n"
    tell(options, lambda: body, lambda: wrong or holds + repeated_as_text(long))
    return 1 if faults else 0


def _bound_again(long: RepeatedSchedule, seconds: float) -> tuple[Violation, ...]:
    """Whether the stated bound follows, in this time."""
    from ..ilp.bounds.bound import Bound
    from ..ilp.proof_check import recheck_of_many

    if (stated := long.certificate) is None:
        return ()
    bound = Bound(stated.bound, stated.proof, stated.relaxation, stated.ranks)
    proven = recheck_of_many(long.one, long.microbatches, bound, seconds)
    if proven.value >= stated.bound:
        return ()
    return (Violation("bound", (), f"{stated.bound} µs is not proven again; {proven.value} µs is ({proven.proof})"),)
