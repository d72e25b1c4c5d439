"""`python -m benchmarks.kernels`: how fast the compiled kernels are, alone or against another checkout of zbsolve.

    python -m benchmarks.kernels --against PATH

Both checkouts do the same work on the same inputs, each in a process of its own. They take turns at every sample, and a
sample is the CPU time of the process, so what else the machine does touches both alike. Where code and data come to lie in
memory is worth some percent and stays for a process's life: so there are several pairs of processes. Every sample is kept.
A ratio is this checkout's median over the other's; spread: how far the ratios of the pairs of processes lie apart.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from .harness import Benchmark
from .kernel_cases import CASES

HERE = Path(__file__).parents[1]
SAMPLE_SECONDS = 0.06  # CPU time of a sample, about
SLOWER = 1.03  # a ratio that no kernel may be above, beyond the spread

Samples = list[list[float]]  # µs a call, a list for each process of a checkout


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--against", type=Path, help="folder of another checkout; without, this one alone is measured")
    parser.add_argument("--processes", type=int, default=5, help="processes of each checkout")
    parser.add_argument("--samples", type=int, default=10, help="samples a case and process")
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given several times")


def stem(options: argparse.Namespace) -> str:
    """Of the result's file: a few cases do not replace all of them."""
    return "kernels" if options.case is None and options.against is not None else "kernels-part"


class Checkout:
    """One process of a checkout. Raises SystemExit where it ends before it should."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, str(HERE / "benchmarks" / "kernel_cases.py")]
        environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
        self.folder = folder
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder
        )

    def call(self, case: str, repeats: int) -> tuple[float, str]:
        """CPU seconds a call, and the digest of what it returned."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps({"case": case, "repeats": repeats}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.folder}: its process ended in case '{case}'")
        answer = json.loads(line)
        return answer["seconds"] / repeats, answer["digest"]

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """One line a case."""
    folders = [HERE] if options.against is None else [HERE, options.against]
    cases = list(options.case or CASES)
    taken: dict[str, list[Samples]] = {case: [[] for _ in folders] for case in cases}
    digests: dict[str, set[str]] = {case: set() for case in cases}
    for _ in range(options.processes):
        checkouts = [Checkout(folder) for folder in folders]
        try:
            for case in cases:
                for mine, new in zip(taken[case], sampled(checkouts, case, options.samples, digests[case]), strict=True):
                    mine.append(new)
        finally:
            for one in checkouts:
                one.close()
    rows = {case: row(taken[case], digests[case]) for case in cases}
    for case, found in rows.items():
        shown = f"  {found['ratio']:6.3f} ± {found['spread']:.3f}  {found['verdict']}" if len(folders) > 1 else ""
        print(f"{case:32} {found['median']:10.1f} µs{shown}", flush=True)
    return {"revisions": [revision(folder) for folder in folders], "slower_than": SLOWER, "cases": rows}


def sampled(checkouts: list[Checkout], case: str, samples: int, digests: set[str]) -> Samples:
    """Samples of one case, µs a call, for each of the checkouts, which take turns."""
    repeats = 1
    for one in checkouts:  # compiles where nothing is cached, and says how many calls make a sample
        one.call(case, 1)
        repeats = max(repeats, round(SAMPLE_SECONDS / max(1e-7, one.call(case, 1)[0])))
    taken: Samples = [[] for _ in checkouts]
    for turn in range(samples):
        for k in range(len(checkouts)) if turn % 2 else reversed(range(len(checkouts))):
            seconds, digest = checkouts[k].call(case, repeats)
            taken[k].append(round(1e6 * seconds, 2))
            digests.add(digest)
    return taken


def row(taken: list[Samples], digests: set[str]) -> dict[str, Any]:
    """What one case comes to, with all samples."""
    now = [one for process in taken[0] for one in process]
    found: dict[str, Any] = {"median": median(now), "us": taken[0]}
    if len(taken) == 1:
        return found
    before = [one for process in taken[1] for one in process]
    ratio = median(now) / median(before)
    pairs = [median(a) / median(b) for a, b in zip(*taken, strict=True)]
    spread = max(pairs) - min(pairs)
    verdict = "slower" if ratio > SLOWER + spread else "fine"
    if len(digests) > 1:
        verdict = "returns something else"
    return {
        **found,
        "against_us": taken[1],
        "ratio": round(ratio, 4),
        "ratios": [round(one, 4) for one in pairs],
        "spread": round(spread, 4),
        "verdict": verdict,
    }


def revision(folder: Path) -> str:
    """The checkout's commit, with a + where files differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", "zbsolve") else "") or "unknown"


BENCHMARK = Benchmark("kernels", __doc__, measure, arguments, stem)

if __name__ == "__main__":
    results = BENCHMARK.main()
    if any(found.get("verdict", "fine") != "fine" for found in results["cases"].values()):
        raise SystemExit(1)
