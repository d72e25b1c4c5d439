"""Tasks and their answers as lines of JSON, for workers elsewhere."""

from __future__ import annotations

import json
import math
import platform
import traceback
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

import msgspec

from ..order import order_as_json, order_from
from ..problem import Problem
from ..problem_form import ProblemForm
from ..schedule import Certificate, Schedule
from ..util.errors import BadInput, Infeasible, NotFound, ZbsolveError
from ..util.files import checked
from ..util.machine import LIBRARIES, library_versions
from ..util.own_code import raised
from ..workers.workers import Rival, threads_each
from .solver import compiled, retimed
from .state import Contest
from .task import Answer, Task, solve_task

UNSOLVED = {"Infeasible": Infeasible, "NotFound": NotFound}


@cache
def _versions() -> dict[str, str]:
    """What must be the same wherever tasks run."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **library_versions((*LIBRARIES, "distributed"))}


def task_text(task: Task, count: int) -> str:
    """The task as a line of JSON."""
    options = dict(task.options)
    hint = options.pop("hint", None)
    if hint is not None:
        hint = retimed(task.problem, hint)
        hint = {"order": order_as_json(hint.order), "syncs": [list(pair) for pair in hint.syncs]}
    body = {"problem": task.problem.to_json(), "hint": hint, "options": options, "offset": task.offset, "many": task.many}
    return json.dumps({"versions": _versions(), "measured": task.measured, "threads": threads_each(count), **body})


class OrderForm(msgspec.Struct):
    """An order in a message."""

    order: dict[str, str]
    syncs: list[tuple[str, str]]


class TaskForm(msgspec.Struct):
    """A task in a message."""

    versions: dict[str, str]
    problem: ProblemForm
    hint: OrderForm | None
    options: dict[str, Any]
    offset: float | None
    many: int | None
    measured: bool
    threads: int


class AnswerForm(msgspec.Struct):
    """An answer in a message: an order and its certificate, or the kind and text of an error."""

    order: dict[str, str] = {}
    syncs: list[tuple[str, str]] = []
    certificate: Certificate | None = None
    error: tuple[str, str, str] | None = None
    seconds: float = 0.0
    pace: float = 0.0
    machine: dict[str, Any] = {}


def answer_task(text: str, rival: Rival) -> str:
    """On a worker: the answer to a task's text. Errors are answers too."""
    try:
        body = json.loads(text)
        if wrong := _other_versions(body.get("versions", {})):
            raise BadInput(wrong)
        return json.dumps(_answer_body(checked(body, TaskForm, "task"), rival))
    except Exception as error:
        said = str(error) if isinstance(error, ZbsolveError) else raised(error)
        return json.dumps({"error": [type(error).__name__, said, traceback.format_exc()]})


def _other_versions(theirs: Mapping[str, str]) -> str:
    """Which versions differ between the asker and this worker, in a line; "" where none."""
    here = _versions()
    pairs = [(name, theirs.get(name, ""), here.get(name, "")) for name in {**theirs, **here}]
    differ = [f"{name} {one or 'missing'} here, {other or 'missing'} there" for name, one, other in pairs if one != other]
    return f"versions differ from those of a worker on {platform.node()}: {'; '.join(differ)}" if differ else ""


def _answer_body(form: TaskForm, rival: Rival) -> dict[str, Any]:
    if form.measured:
        compiled()
    problem, options = Problem.from_form(form.problem, "task"), dict(form.options)
    if form.hint is not None:
        options["hint"] = Schedule(problem, order_from(problem, form.hint.order), tuple(form.hint.syncs))
    ends = partial(_only_the_end, rival) if form.offset is None else partial(_less, rival, form.offset)
    found = solve_task(Task(None, problem, options, measured=form.measured, many=form.many), Contest(form.threads, ends), {})
    if found.schedule is None:
        return {"error": [type(found.error).__name__, str(found.error), ""]}
    assert found.schedule.certificate is not None
    order, syncs = order_as_json(found.schedule.order), [list(pair) for pair in found.schedule.syncs]
    took = {"seconds": found.seconds, "pace": found.pace, "machine": dict(found.machine)}
    return {"order": order, "syncs": syncs, "certificate": found.schedule.certificate.to_json(), **took}


def _less(rival: Rival, offset: float) -> float:
    return rival() - offset


def _only_the_end(rival: Rival) -> float:
    """Others' values do not count, but that all are to end does."""
    return -math.inf if rival() == -math.inf else math.inf


def answer_from(task: Task, text: str) -> Answer:
    """A worker's answer. Raises what it raised; BadInput where it is of another problem."""
    form = checked(json.loads(text), AnswerForm, "a worker's answer")
    if form.error is not None:
        kind, said, details = form.error
        if kind in UNSOLVED:
            return Answer(task, None, UNSOLVED[kind](said), form.seconds, form.pace, form.machine)
        failed = BadInput(said) if kind == "BadInput" else ZbsolveError(f"a worker failed: {said}")
        failed.details = details
        raise failed
    order = order_from(task.problem, form.order)
    if form.certificate is None or form.certificate.digest != task.problem.digest:
        raise BadInput("a worker's answer is of another problem")
    schedule = Schedule(task.problem, order, tuple(form.syncs), form.certificate)
    return Answer(task, schedule, None, form.seconds, form.pace, form.machine)
