"""What every benchmark shares: its command line, timed repeats, and one file with the samples, the machine and versions."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zbsolve.util.machine import LIBRARIES, library_versions, machine_facts

RESULTS = Path(__file__).parent / "results"
MAX_LINE = 1000  # characters of a row in a file


def no_arguments(parser: argparse.ArgumentParser) -> None:
    """For a benchmark without arguments of its own."""


@dataclass(frozen=True)
class Benchmark:
    """`python -m benchmarks.NAME`. text: what --help says. measure: prints as it goes, and returns what is kept. arguments:
    adds its own to the command line. stem: of the result's file, where arguments decide it; else it is the name."""

    name: str
    text: str | None
    measure: Callable[[argparse.Namespace], dict[str, Any]]
    arguments: Callable[[argparse.ArgumentParser], None] = no_arguments
    stem: Callable[[argparse.Namespace], str] | None = None

    def main(self, argv: Sequence[str] | None = None) -> dict[str, Any]:
        """Read the command line, measure, write the file; returns the results."""
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{self.name}",
            description=self.text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.arguments(parser)
        parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="file, or folder of it (benchmarks/results)")
        options = parser.parse_args(argv)
        if options.output.suffix != ".json":
            stem = self.name if self.stem is None else self.stem(options)
            options.output = options.output / f"{stem}.json"
        options.output.parent.mkdir(parents=True, exist_ok=True)
        load = os.getloadavg()[0]
        results = self.measure(options)
        write(self.name, results, options.output, arguments=_plain(options), load=load)
        return results


def _plain(options: argparse.Namespace) -> dict[str, Any]:
    """The arguments as they are kept: of a file only its name, where it lay is nobody's business."""
    kept = {name: value for name, value in vars(options).items() if name != "output"}
    return {name: value.name if isinstance(value, Path) else value for name, value in kept.items()}


def _versions() -> dict[str, str]:
    """Of what a benchmark loaded."""
    return library_versions((*LIBRARIES, *(("torch",) if "torch" in sys.modules else ())))


def write(name: str, results: dict[str, Any], path: Path | None = None, **facts: Any) -> None:
    """One file: what it is of, further facts, machine, versions, results; without `path` it is `results/NAME.json`."""
    path = RESULTS / f"{name}.json" if path is None else path
    body = {"benchmark": name, **facts, "machine": machine_facts(), "versions": _versions(), "results": results}
    path.write_text(as_lines(body) + "\n", encoding="utf-8")
    print(f"written: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")


def as_lines(value: Any, indent: str = "") -> str:
    """JSON in lines: a row, or a list of samples, stands in one."""
    line = json.dumps(value, ensure_ascii=False)
    plain = isinstance(value, list) and not any(isinstance(one, list | dict) for one in value)
    if plain or not isinstance(value, list | dict) or len(line) <= MAX_LINE:
        return line
    inside = indent + " "
    if isinstance(value, list):
        return "[\n" + ",\n".join(f"{inside}{as_lines(one, inside)}" for one in value) + f"\n{indent}]"
    rows = (f"{inside}{json.dumps(name)}: {as_lines(one, inside)}" for name, one in value.items())
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}"


def kept(path: Path) -> dict[str, Any]:
    """The results in a file that a benchmark wrote."""
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["results"]
    return results


def timed(work: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Seconds of every repeat, and the last result."""
    samples, result = [], None
    for _ in range(repeats):
        began = time.perf_counter()
        result = work()
        samples.append(round(time.perf_counter() - began, 4))
    return samples, result
