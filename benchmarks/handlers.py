"""What a pass costs the executor, here and in another checkout, turn by turn in one run.

    python -m benchmarks.handlers --against PATH [--launches 8] [--turns 12]

PATH is the root of another checkout of zbsolve. All times are CPU time of a rank's thread a pass, µs. `interpreter`: of one
rank whose stages do nothing, so that what is left is the interpreter with its table of handlers. `layers`: of one rank with
a small layer a stage. `messages`: of two gloo ranks with such a stage each, by 1F1B.

Each process waits while the others take their turn. Processes are started anew some times, because one and the same code
takes up to 20 % longer in one pair of processes than in another. A ratio is this checkout's time over the other's, of one
turn's medians; all samples are kept. Only names that both checkouts have are used.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from .handler_cases import SIZES
from .harness import Benchmark

HERE = Path(__file__).parents[1]
Rows = dict[str, list[list[float]]]  # checkout → for each turn its samples, µs a pass


class Ranks:
    """The ranks of one checkout, as processes that take turns."""

    def __init__(self, what: str, root: Path, folder: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        command = [sys.executable, str(HERE / "benchmarks" / "handler_cases.py"), what, folder]
        self.processes = [subprocess.Popen([*command, str(rank), str(root)], **pipes) for rank in range(SIZES[what][0])]

    def turn(self) -> list[float]:
        """The samples of all ranks: the mean over ranks of each step."""
        for one in self.processes:
            assert one.stdin is not None
            one.stdin.write("turn\n")
            one.stdin.flush()
        found = []
        for one in self.processes:
            assert one.stdout is not None
            found.append(json.loads(one.stdout.readline()))
        return [round(sum(step) / len(step), 3) for step in zip(*found, strict=True)]

    def end(self) -> None:
        """End all processes."""
        for one in self.processes:
            one.kill()
            one.communicate()


def take_turns(what: str, roots: dict[str, Path], turns: int, found: Rows) -> None:
    """Both checkouts in turn, each the first of a pair as often as the other; samples go into `found`."""
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        ranks: dict[str, Ranks] = {}
        try:
            for name, root in roots.items():
                (Path(folder) / name).mkdir()
                ranks[name] = Ranks(what, root, str(Path(folder) / name))
            for turn in range(turns):
                for name in list(roots)[:: 1 if turn % 2 else -1]:
                    found[name].append(ranks[name].turn())
        finally:
            for one in ranks.values():
                one.end()


def summary(rows: Rows) -> dict[str, Any]:
    """Medians, and the ratio of every turn."""
    ratios = [round(median(new) / median(old), 4) for new, old in zip(rows["here"], rows["there"], strict=True)]
    medians = {f"{name}_us": round(median(us for turn in turns for us in turn), 2) for name, turns in rows.items()}
    return {**medians, "ratio": median(ratios), "ratios": ratios}


def arguments(parser: argparse.ArgumentParser) -> None:
    """The other checkout, and how long to measure."""
    parser.add_argument("--against", type=Path, metavar="PATH", required=True)
    parser.add_argument("--launches", type=int, default=8)
    parser.add_argument("--turns", type=int, default=12, help="in a launch")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One line a case; all samples."""
    roots, results = {"here": HERE, "there": options.against.resolve()}, {}
    for what, size in SIZES.items():
        rows: Rows = {name: [] for name in roots}
        for _ in range(options.launches):
            take_turns(what, roots, options.turns, rows)
        one = summary(rows)
        low, high = min(one["ratios"]), max(one["ratios"])
        times = f"{one['here_us']:8.2f} µs a pass, there {one['there_us']:8.2f}"
        print(f"{what:12} {times}; ratio {one['ratio']:.3f} (turns {low:.3f} to {high:.3f})", flush=True)
        sizes = dict(zip(("ranks", "stages", "microbatches"), size, strict=True))
        results[what] = {**sizes, **one, "samples_us": rows}
    return results


BENCHMARK = Benchmark("handlers", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
