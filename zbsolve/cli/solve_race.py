"""`zbsolve solve --method 1f1b,zb-v,auto`: schedules of one step side by side, and the best of them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..util.errors import ZbsolveError
from .step_options import step_or_problem
from .tools import method_of, print_json, saving, search_limits, searching, workers_of

if TYPE_CHECKING:
    from ..problem import Problem
    from ..profile.profile import Profile
    from ..schedule import Schedule
    from ..show.schedule_comparison import ScheduleComparison
    from ..step import Step

    Given = tuple[Profile, Step] | Problem


def race(options: argparse.Namespace, methods: Sequence[str]) -> int:
    """Solve by each method, compare what they found beside a schedule that the file holds, and write the best."""
    from ..profile.doubtful import doubts
    from ..search.solver import check_options
    from ..show.schedule_comparison import compare_schedules
    from ..show.schedule_comparison_text import schedules_as_text

    for method in methods:
        check_options(*method_of(method), None)
    given = step_or_problem(options, partition="balanced")
    named, absent = _held(options.profile), list[tuple[str, str]]()
    with workers_of(options, "solve", threads=2) as workers, searching("solve") as (search, pressed):
        limits = {**search_limits(options), "progress": search.show, "stop": pressed, "workers": workers}
        for method in methods:
            try:
                named.append((method, _solved(given, method, limits, options.profile)))
            except ZbsolveError as error:
                absent.append((method, str(error).removeprefix(f"{method}: ")))
    result = compare_schedules(named, absent)
    doubted = doubts(given[0]) if isinstance(given, tuple) else []
    with saving(*[partial(_save, result, path, doubted) for path in options.output]):
        if options.json:
            print_json(result.to_json())
        elif "-" not in options.output:
            print(schedules_as_text(result), end="")
    return 0


def _held(path: str) -> list[tuple[str, Schedule]]:
    """The schedule of a file, with its name, where it is one."""
    from ..schedule import Schedule
    from ..search.certify import proven
    from ..util.files import document_kind

    return [(path, proven(Schedule.load(path)))] if document_kind(path) == "schedule" else []


def _solved(given: Given, method: str, limits: dict[str, Any], path: str) -> Schedule:
    """The schedule of a method: a named one on its own placement, with its own backward and layers balanced. Raises
    BadInput, Infeasible, NotFound."""
    from ..search.auto import solve_auto
    from ..search.solver import solve
    from ..systems.steps import check_backward, step_for
    from ..systems.table import is_named, system

    name, solver = method_of(method)
    how: dict[str, Any] = {"method": name, "solver": solver}
    if isinstance(given, tuple):
        profile, step = given
        if is_named(method):
            partition = "balanced" if step.partition == "auto" else step.partition
            step = step_for(method, profile, replace(step.closed, placement=system(method).placement, partition=partition))
        elif step.auto:
            return solve_auto(profile, step, **how, **limits)[0]
        given = step.problem(profile)
    elif is_named(method):
        check_backward(method, given, path)
    rest = {name: limit for name, limit in limits.items() if name not in ("progress", "stop", "workers")}
    return solve(given, **how, **rest, progress=lambda state: limits["progress"](method, state))


def _save(result: ScheduleComparison, path: str, doubted: Sequence[str]) -> None:
    """A page or a picture of all, or the best schedule, by the ending."""
    from ..show.schedule_comparison_page import PICTURES, save_comparison

    if path.endswith(PICTURES):
        save_comparison(result, path, doubted)
    else:
        result.best.schedule.save(path)
