"""Solves a suite, every problem several times; each schedule is verified and timed. And the report with the results."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Annotated, Any

import msgspec

from ..problem import Problem
from ..schedule import relative_gap
from ..search.solver import compiled
from ..search.state import State
from ..search.task import Answer, Task
from ..search.task_runner import TaskRunner
from ..util.errors import BadInput
from ..util.files import AMOUNT, COUNT, read_document, write_document
from ..util.machine import library_versions, machine_facts
from ..util.text import aligned, format_gap
from ..util.workers import Workers
from ..verifier import verify
from .suites import suite

Progress = Callable[[str, State], None]


@dataclass(frozen=True, slots=True)
class Settings:
    """How a suite is solved: each problem `repeats` times, method and seed as in `solve`, for `seconds` or with `effort`."""

    seconds: float = 10.0
    effort: float | None = None
    seed: int = 0
    repeats: int = 3
    method: str = "auto"


def run_suite(
    name: str,
    settings: Settings,
    progress: Progress | None = None,
    done: Callable[[Result], None] | None = None,
    problems: Mapping[str, Problem] | None = None,
    workers: Workers | None = None,
) -> Report:
    """Solve suite `name`. Each round solves every problem once, so that a slow minute does not affect only one problem.

    progress: called with the current problem's label and the search's state. done: called with each solve's result.
    problems: of your own suite, by name. workers: from `zbsolve.solvers_on`; parallel solves slow each other; None: this
    process. Raises BadInput.
    """
    if settings.repeats < 1:
        raise BadInput(f"repeats: at least 1 is needed, got {settings.repeats}")
    problems = suite(name) if problems is None else problems
    compiled()
    counted = settings.effort is not None
    limit = {"effort": settings.effort} if counted else {"seconds": settings.seconds}
    options = {"seed": settings.seed, "method": settings.method, **limit}
    turns = [(repeat, label) for repeat in range(settings.repeats) for label in problems]
    tasks = (
        Task((repeat, label), problems[label], options, None, f"{label} ({repeat + 1} of {settings.repeats})", measured=True)
        for repeat, label in turns
    )
    solves: dict[tuple[int, str], Result] = {}
    facts: list[Mapping[str, Any]] = []
    for answer in TaskRunner(workers, counted, progress=progress).answers(tasks, len(turns) if workers else 1):
        solves[answer.task.of] = result = _result(answer)
        facts.append(answer.machine)
        if done is not None:
            done(result)
    results = tuple(_together([solves[i, label] for i in range(settings.repeats)]) for label in problems)
    seconds = None if counted else settings.seconds
    return Report(name, seconds, settings.effort, settings.seed, _common(facts), library_versions(), results)


def _result(answer: Answer) -> Result:
    """One solve, verified. Raises what it raised."""
    if answer.schedule is None:
        assert answer.error is not None
        raise answer.error
    certificate = answer.schedule.certificate
    assert certificate is not None
    assert not verify(answer.task.problem, answer.schedule)
    return Result(
        answer.task.of[1],
        answer.task.problem.digest,
        certificate.proof,
        certificate.solver,
        (certificate.value,),
        (certificate.bound,),
        (round(answer.seconds, 4),),
        (round(answer.pace, 6),),
    )


def _common(facts: list[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The facts of the machines that solved; "several" for facts that differ."""
    first = facts[0] if facts else machine_facts()
    return {what: value if all(fact.get(what) == value for fact in facts) else "several" for what, value in first.items()}


def _together(samples: list[Result]) -> Result:
    """The repeats of one problem; proof and solver are the first one's."""
    first = samples[0]
    columns = [tuple(x for row in samples for x in getattr(row, n)) for n in ("values", "bounds", "seconds", "yardstick")]
    return Result(first.name, first.digest, first.proof, first.solver, *columns)


Sampled = Annotated[tuple[AMOUNT, ...], msgspec.Meta(min_length=1)]
Counted = Annotated[tuple[COUNT, ...], msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class Result:
    """One problem's solves, an entry for each repeat. values, bounds: µs. seconds: wall time. yardstick: seconds of a fixed
    piece of work just before, which tell the machine's speed at that time. digest: of the problem."""

    name: str
    digest: str
    proof: str
    solver: str
    values: Counted
    bounds: Counted
    seconds: Sampled
    yardstick: Sampled

    @property
    def value(self) -> int:
        """The median value of the repeats, µs (the better of two middle ones)."""
        return sorted(self.values)[(len(self.values) - 1) // 2]

    @property
    def bound(self) -> int:
        """The median bound of the repeats, µs (the higher of two middle ones)."""
        return sorted(self.bounds)[len(self.bounds) // 2]

    @property
    def gap(self) -> float:
        """(value − bound) / value."""
        return relative_gap(self.value, self.bound)

    def to_json(self) -> dict[str, Any]:
        """Every sample, and the derived value, bound, gap and median of seconds for readers."""
        return {**asdict(self), "value": self.value, "bound": self.bound, "gap": self.gap, "median": median(self.seconds)}


@dataclass(frozen=True)
class Report:
    """A suite's results. effort, seconds: the limit of each solve, one of the two. machine: facts that times depend on.
    versions: of zbsolve and its solvers."""

    suite: str
    seconds: float | None
    effort: float | None
    seed: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    results: tuple[Result, ...]

    def to_json(self) -> dict[str, Any]:
        """Fields, with every sample."""
        body = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**body, "results": [result.to_json() for result in self.results]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a bench file; after an error no partial file is left. `-` is standard output."""
        write_document(path, "bench", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a bench file; `-` is standard input. Raises BadInput naming the field."""
        return read_document(path, "bench", cls)


def report_as_text(report: Report) -> str:
    """Value, bound, gap and seconds of every problem, and in all."""
    rows = [("problem", "value µs", "bound µs", "gap", "seconds", "by")]
    for result in report.results:
        numbers = (str(result.value), str(result.bound), format_gap(result.gap), f"{median(result.seconds):.2f}")
        rows.append((result.name, *numbers, result.solver))
    closed = sum(result.bound >= result.value for result in report.results)
    mean = sum(result.gap for result in report.results) / len(report.results)
    total = sum(median(result.seconds) for result in report.results)
    sums = f"{len(report.results)} problems: {closed} optimal, mean gap {mean:.2%}, {total:.1f} s a round"
    return "\n".join([*aligned(rows, left=(0, -1)), sums]) + "\n"
