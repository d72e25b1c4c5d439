"""`python -m benchmarks.big_step`: what commands take on a large step: seconds, CPU seconds, memory, and the size of files.

    python -m benchmarks.big_step --against PATH

128 ranks of 4 stages each and 1024 microbatches are 1.6 million passes. Each command is a process of its own. With
`--against`, the folder of another checkout, both take turns at every command.
"""

from __future__ import annotations

import argparse
import gzip
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zbsolve import Layer, Link, Profile

from .harness import Benchmark

HERE = Path(__file__).parents[1]
CHUNKS = 4
LIMIT = 600  # seconds for one command


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of the command line."""
    parser.add_argument("--against", type=Path, help="folder of another checkout; without, this one alone is measured")
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--microbatches", type=int, default=1024)
    parser.add_argument("--seconds", type=float, nargs="*", default=[60.0], help="of each solve")


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """A row a command and checkout."""
    folders = {"here": HERE} | ({} if options.against is None else {"against": options.against})
    found: dict[str, dict[str, Any]] = {name: {} for name in folders}
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as place:
        _profile(options.ranks * CHUNKS).save(Path(place) / "profile.json")
        for name in folders:
            (Path(place) / name).mkdir()
        for label, command in _commands(options).items():
            for name, folder in folders.items():
                said = [part.format(own=f"{place}/{name}", place=place) for part in command]
                row = found[name][label] = _taken(folder, said)
                print(f"{label:24} {name:8} {row}", flush=True)
        for name in folders:
            written = sorted((Path(place) / name).iterdir())
            found[name]["bytes"] = {path.name: path.stat().st_size for path in written}
            found[name]["bytes, compressed"] = {path.name: len(gzip.compress(path.read_bytes(), 6)) for path in written}
            print(name, found[name]["bytes"])
    return found


def _profile(stages: int) -> Profile:
    """A layer a stage, all alike: F, B, W 300, 320, 210 µs, messages 8 µs."""
    layers = tuple(Layer(f"layer{i}", 300.0, 320.0, 210.0, 530.0, 600, 400, 1000, 0) for i in range(stages))
    return Profile("estimated: by hand", "uniform", layers, Link(8.0, 1000.0), 4.0, None, {}, {})


def _commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Label → arguments; {place} has the profile, {own} is the checkout's own folder."""
    step = ["--ranks", str(options.ranks), "--microbatches", str(options.microbatches), "--placement", f"loop{CHUNKS}"]
    solve = ["solve", "{place}/profile.json", *step]
    named = {"solve interleaved-zb": [*solve, "--method", "interleaved-zb", "--seconds", "60", "-o", "{own}/named.json"]}
    timed = {f"solve {s:g} s": [*solve, "--seconds", f"{s:g}", "-o", "{own}/solved.json"] for s in options.seconds}
    return {
        **named,
        "check": ["check", "{own}/named.json"],
        "export torch-csv": ["export", "{own}/named.json", "--to", "torch-csv", "-o", "{own}/order.csv"],
        **timed,
    }


def _taken(folder: Path, command: list[str]) -> dict[str, Any]:
    """Exit status, seconds, CPU seconds and MiB of a command of the checkout in `folder`, and the end of what it said."""
    environment = {**os.environ, "PYTHONPATH": str(folder.resolve())}
    began = time.monotonic()
    with tempfile.TemporaryFile("w+") as out:
        whole = [sys.executable, "-m", "zbsolve.cli", *command]
        process = subprocess.Popen(whole, stdout=out, stderr=subprocess.DEVNULL, env=environment, cwd=folder)
        while True:
            done, status, used = os.wait4(process.pid, os.WNOHANG)
            if done:
                break
            if time.monotonic() - began > LIMIT:
                process.kill()
            time.sleep(0.02)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        lines = [line for line in out.read().splitlines() if line.startswith("makespan")]
    return {
        "exit": process.returncode,
        "seconds": round(time.monotonic() - began, 2),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 2),
        "most_memory_mib": used.ru_maxrss // 1024,
        **({"said": lines[-1]} if lines else {}),
    }


BENCHMARK = Benchmark("big_step", __doc__, measure, arguments)

if __name__ == "__main__":
    BENCHMARK.main()
