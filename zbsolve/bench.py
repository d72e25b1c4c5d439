"""Benchmarks of the search: a suite solved, every sample kept, with the machine and versions that it was measured on."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any

from .bench_suites import suite
from .errors import BadInput
from .files import field, read_document, write_document
from .machine import cores, processor
from .problem import Problem
from .search import compiled, solve
from .state import State
from .verifier import verify

LIBRARIES = ("zbsolve", "numpy", "numba", "ortools", "pulp")


@dataclass(frozen=True, slots=True)
class Result:
    """One problem, solved once a repeat: `values` and `bounds` in µs, `seconds` of wall time, and `yardstick`, the
    seconds that a fixed piece of work took just before (how fast the machine was then). `digest` is the problem's."""

    name: str
    digest: str
    proof: str
    solver: str
    values: tuple[int, ...]
    bounds: tuple[int, ...]
    seconds: tuple[float, ...]
    yardstick: tuple[float, ...]

    @property
    def value(self) -> int:
        """The middle value of the repeats, µs (the better of two middle ones)."""
        return sorted(self.values)[(len(self.values) - 1) // 2]

    @property
    def bound(self) -> int:
        """The middle bound of the repeats, µs (the higher of two middle ones)."""
        return sorted(self.bounds)[len(self.bounds) // 2]

    @property
    def gap(self) -> float:
        """(value − bound) / value."""
        return (self.value - self.bound) / self.value if self.value else 0.0

    def to_json(self) -> dict[str, Any]:
        """Every sample, and the derived value, bound, gap and median of seconds for readers."""
        return {**asdict(self), "value": self.value, "bound": self.bound, "gap": self.gap, "median": median(self.seconds)}

    @classmethod
    def from_json(cls, body: Any, where: str) -> Result:
        """What `to_json` wrote. Raises BadInput naming the field."""
        if not isinstance(body, dict):
            raise BadInput(f"{where}: not an object")
        rows = {f.name: field(body, f.name, str if f.type == "str" else list, where) for f in fields(cls)}
        for name in ("values", "bounds", "seconds", "yardstick"):
            row = rows[name]
            whole = name in ("values", "bounds")
            if not row or any(type(x) not in ((int,) if whole else (int, float)) or not 0 <= x < math.inf for x in row):
                raise BadInput(f"{where}: field '{name}' must hold a {'whole ' if whole else ''}number from 0 up a repeat")
            rows[name] = tuple(row)
        return cls(**rows)


@dataclass(frozen=True)
class Report:
    """A suite's results. `effort` (the same work on any machine) or `seconds` a problem; `machine`: what time depends
    on; `versions`: of zbsolve and what it solves with."""

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
        return {**body, "results": [one.to_json() for one in self.results]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a bench file, whole or not at all; `-` is standard output."""
        write_document(path, "bench", self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Report:
        """Read a bench file; `-` is standard input. Raises BadInput naming the field."""
        body, where = read_document(path, "bench"), str(path)
        for name in ("seconds", "effort"):
            if body.get(name) is not None:
                field(body, name, (int, float), where)
        return cls(
            field(body, "suite", str, where),
            body.get("seconds"),
            body.get("effort"),
            field(body, "seed", int, where),
            field(body, "machine", dict, where),
            field(body, "versions", dict, where),
            tuple(Result.from_json(r, f"{where}: result {i}") for i, r in enumerate(field(body, "results", list, where))),
        )


def run(
    name: str,
    *,
    seconds: float = 10.0,
    effort: float | None = None,
    seed: int = 0,
    repeats: int = 3,
    method: str = "auto",
    progress: Callable[[str, State], None] | None = None,
    done: Callable[[Result], None] | None = None,
) -> Report:
    """Solve suite `name`, each problem `repeats` times for `seconds` (or `effort`), round after round, so that a slow
    minute of the machine does not fall on one problem. Raises BadInput."""
    if repeats < 1:
        raise BadInput(f"repeats: at least 1 is needed, got {repeats}")
    limit = {"seconds": seconds} if effort is None else {"effort": effort}
    options = {**limit, "seed": seed, "method": method}
    problems = suite(name)
    compiled()
    rounds: list[dict[str, Result]] = []
    for i in range(repeats):
        rounds.append({})
        for label, problem in problems.items():
            where = f"{label} ({i + 1} of {repeats})"
            show = None if progress is None else _named(progress, where)
            rounds[-1][label] = one = _sample(label, problem, {**options, "progress": show})
            if done is not None:
                done(one)
    results = tuple(_together([row[label] for row in rounds]) for label in problems)
    return Report(name, None if effort is not None else seconds, effort, seed, machine(), versions(), results)


def _named(progress: Callable[[str, State], None], where: str) -> Callable[[State], None]:
    return lambda state: progress(where, state)


def _sample(name: str, problem: Problem, options: dict[str, Any]) -> Result:
    """One solve, verified, timed from outside."""
    measure = yardstick()
    began = time.perf_counter()
    schedule = solve(problem, **options)
    took = time.perf_counter() - began
    certificate = schedule.certificate
    assert certificate is not None
    assert not verify(problem, schedule)
    return Result(
        name,
        problem.digest,
        certificate.proof,
        certificate.solver,
        (certificate.value,),
        (certificate.bound,),
        (round(took, 4),),
        (round(measure, 6),),
    )


def _together(samples: list[Result]) -> Result:
    """The repeats of one problem; proof and solver are the first one's."""
    first = samples[0]
    columns = [tuple(x for one in samples for x in getattr(one, n)) for n in ("values", "bounds", "seconds", "yardstick")]
    return Result(first.name, first.digest, first.proof, first.solver, *columns)


def yardstick() -> float:
    """Seconds that a fixed piece of work takes now: the least of three runs of an interpreted loop."""
    best = math.inf
    for _ in range(3):
        began = time.perf_counter()
        total = 0
        for i in range(60_000):
            total += i & 7
        best = min(best, time.perf_counter() - began)
    return best


def machine() -> dict[str, Any]:
    """What times depend on: processor, cores that may be used, system. No name of the host."""
    return {
        "cpu": processor(),
        "cores": cores(),
        "architecture": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Versions of zbsolve and of what it solves with ("" where one is missing)."""

    def of(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return {name: of(name) for name in LIBRARIES}
