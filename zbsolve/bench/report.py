"""What a suite's solves took and found: every sample, with the machine and versions that they were measured on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from statistics import median
from typing import Annotated, Any

import msgspec

from ..schedule import relative_gap
from ..util.files import AMOUNT, COUNT, read_document, write_document
from ..util.text import aligned, format_gap


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
        return relative_gap(self.value, self.bound)

    def to_json(self) -> dict[str, Any]:
        """Every sample, and the derived value, bound, gap and median of seconds for readers."""
        return {**asdict(self), "value": self.value, "bound": self.bound, "gap": self.gap, "median": median(self.seconds)}


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
        form = read_document(path, "bench", ReportForm)
        results = tuple(
            Result(
                one.name,
                one.digest,
                one.proof,
                one.solver,
                tuple(one.values),
                tuple(one.bounds),
                tuple(one.seconds),
                tuple(one.yardstick),
            )
            for one in form.results
        )
        return cls(form.suite, form.seconds, form.effort, form.seed, form.machine, form.versions, results)


Sampled = Annotated[list[AMOUNT], msgspec.Meta(min_length=1)]
Counted = Annotated[list[COUNT], msgspec.Meta(min_length=1)]


class ResultForm(msgspec.Struct):
    """A result in a file: one number a repeat."""

    name: str
    digest: str
    proof: str
    solver: str
    values: Counted
    bounds: Counted
    seconds: Sampled
    yardstick: Sampled


class ReportForm(msgspec.Struct):
    """A report in a file."""

    suite: str
    seed: int
    machine: dict[str, Any]
    versions: dict[str, str]
    results: list[ResultForm]
    seconds: float | None = None
    effort: float | None = None


def report_as_text(report: Report) -> str:
    """Value, bound, gap and seconds of every problem, and in all."""
    rows = [("problem", "value µs", "bound µs", "gap", "seconds", "by")]
    for one in report.results:
        numbers = (str(one.value), str(one.bound), format_gap(one.gap), f"{median(one.seconds):.2f}")
        rows.append((one.name, *numbers, one.solver))
    closed = sum(one.bound >= one.value for one in report.results)
    mean = sum(one.gap for one in report.results) / len(report.results)
    total = sum(median(one.seconds) for one in report.results)
    said = f"{len(report.results)} problems: {closed} optimal, mean gap {mean:.2%}, {total:.1f} s a round"
    return "\n".join([*aligned(rows, left=(0, -1)), said]) + "\n"
