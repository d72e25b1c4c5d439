"""A task (a problem to solve, one of many) and its answer; both also as lines of JSON for workers in other processes."""

from __future__ import annotations

import json
import math
import platform
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import msgspec

from ..greedy.side_stream import with_side_streams
from ..ilp.bounds.many import repeated_microbatch
from ..problem import Problem
from ..problem.form import ProblemForm
from ..schedule import Certificate, Schedule
from ..schedule.order import order_as_json, order_from
from ..util.errors import BadInput, Infeasible, NotFound, ZbsolveError, raised
from ..util.files import checked
from ..util.machine import LIBRARIES, library_versions, machine_facts, yardstick
from ..util.workers import Rival, threads_each
from .many import solve_many, worth_repeating
from .solver import compiled, retimed, solve
from .state import Contest


@dataclass(frozen=True, eq=False)
class Task:
    """A problem to solve. of: what the caller knows it by. options: of `solve`. offset: µs that are added to its value to
    compare it with rivals; None: it is not compared. label: its name in progress. measured: whether the machine's speed is
    measured before. many: from so many passes on `solve_many` is tried first; None: never."""

    of: Any
    problem: Problem
    options: Mapping[str, Any]
    offset: float | None = None
    label: str = ""
    measured: bool = False
    many: int | None = None


class Answer(NamedTuple):
    """The answer of a task: a schedule, or why there is none. seconds: of the search. pace: the machine's speed
    (`yardstick`). machine: facts that times depend on."""

    task: Task
    schedule: Schedule | None
    error: ZbsolveError | None
    seconds: float
    pace: float
    machine: Mapping[str, Any]


def solve_task(task: Task, contest: Contest, callbacks: Mapping[str, Any]) -> Answer:
    """The task, solved in this process."""
    pace, began = yardstick() if task.measured else 0.0, time.perf_counter()
    schedule, error = None, None
    try:
        schedule = _repeated(task) or solve(task.problem, contest=contest, **{"prefer": None, **task.options}, **callbacks)
    except (Infeasible, NotFound) as failed:
        error = failed
    return Answer(task, schedule, error, time.perf_counter() - began, pace, machine_facts() if task.measured else {})


def _repeated(task: Task) -> Schedule | None:
    """A schedule by `solve_many`, with all its passes; None if the task is too small for it, or nothing was found."""
    problem, options, many = task.problem, task.options, task.many
    if many is None or len(problem.passes) < many or options.get("method", "auto") not in ("auto", "greedy"):
        return None
    microbatch = repeated_microbatch(problem)
    if microbatch is None or not worth_repeating(microbatch, problem.microbatches, many):
        return None
    limits = {name: options[name] for name in ("seconds", "effort", "seed") if name in options}
    try:
        schedule = solve_many(microbatch, problem.microbatches, **limits).unrolled()
    except NotFound:
        return None
    if len(problem.passes) == len(schedule.problem.passes):
        return schedule
    # Passes of the step that come behind all microbatches run as early as possible.
    whole, certificate = with_side_streams(problem, schedule), schedule.certificate
    assert certificate is not None
    return whole.certified(replace(certificate, value=int(whole.timeline().value), digest=problem.digest))


# --- As lines of JSON ---


UNSOLVED = {"Infeasible": Infeasible, "NotFound": NotFound}


@cache
def _versions() -> dict[str, str]:
    """Versions of libraries that must be the same on all workers."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **library_versions((*LIBRARIES, "distributed"))}


def task_text(task: Task, count: int) -> str:
    """The task as a line of JSON. count: of workers, which share the machine's threads."""
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
        message = str(error) if isinstance(error, ZbsolveError) else raised(error)
        return json.dumps({"error": [type(error).__name__, message, traceback.format_exc()]})


def _other_versions(theirs: Mapping[str, str]) -> str:
    """A line about versions that differ between the caller and this worker; "" if none does."""
    here = _versions()
    pairs = [(name, theirs.get(name, ""), here.get(name, "")) for name in {**theirs, **here}]
    differ = [f"{name} {own or 'missing'} here, {other or 'missing'} there" for name, own, other in pairs if own != other]
    return f"versions differ from those of a worker on {platform.node()}: {'; '.join(differ)}" if differ else ""


def _answer_body(form: TaskForm, rival: Rival) -> dict[str, Any]:
    if form.measured:
        compiled()
    problem, options = Problem.from_form(form.problem, "task"), dict(form.options)
    if form.hint is not None:
        options["hint"] = Schedule(problem, order_from(problem, form.hint.order), tuple(form.hint.syncs))
    offset = form.offset

    def ends() -> float:
        """The rival's value for this task; without an offset only −∞ counts, which ends all searches."""
        reached = rival()
        return reached - offset if offset is not None else reached if reached == -math.inf else math.inf

    task = Task(None, problem, options, measured=form.measured, many=form.many)
    answer = solve_task(task, Contest(form.threads, ends), {})
    if answer.schedule is None:
        return {"error": [type(answer.error).__name__, str(answer.error), ""]}
    assert answer.schedule.certificate is not None
    order, syncs = order_as_json(answer.schedule.order), [list(pair) for pair in answer.schedule.syncs]
    took = {"seconds": answer.seconds, "pace": answer.pace, "machine": dict(answer.machine)}
    return {"order": order, "syncs": syncs, "certificate": answer.schedule.certificate.to_json(), **took}


def answer_from(task: Task, text: str) -> Answer:
    """The answer in a worker's text. Raises what the worker raised; BadInput if it is about another problem."""
    form = checked(json.loads(text), AnswerForm, "a worker's answer")
    if form.error is not None:
        kind, message, details = form.error
        if kind in UNSOLVED:
            return Answer(task, None, UNSOLVED[kind](message), form.seconds, form.pace, form.machine)
        failed = BadInput(message) if kind == "BadInput" else ZbsolveError(f"a worker failed: {message}")
        failed.details = details
        raise failed
    order = order_from(task.problem, form.order)
    if form.certificate is None or form.certificate.digest != task.problem.digest:
        raise BadInput("a worker's answer is of another problem")
    schedule = Schedule(task.problem, order, tuple(form.syncs), form.certificate)
    return Answer(task, schedule, None, form.seconds, form.pace, form.machine)
