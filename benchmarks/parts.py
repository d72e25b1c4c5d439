"""Parts of a benchmark as processes of their own, so that one that fails or hangs leaves the others alone."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, TextIO

from zbsolve.exec.run.launch import child_environment

ENDING_SECONDS = 10.0


@dataclass(frozen=True)
class Part:
    """One part. work: "module:function", which returns a dict of JSON values; what it lists under `wrong` failed. seconds:
    how long it may take, its start included. arguments: the function's, JSON values. beside: it times nothing, so it may run
    beside the part before it that does not either."""

    name: str
    work: str
    seconds: float
    arguments: dict[str, Any] = field(default_factory=dict)
    beside: bool = False


def results_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Run every part, whatever becomes of those before it. By name: seconds taken and allowed, and `found`, or the `error`
    that ended it."""
    found: dict[str, Any] = {}
    for group in groups(parts):
        print(f"{', '.join(part.name for part in group)} …", flush=True)
        with ThreadPoolExecutor(len(group)) as threads:
            for part, row in zip(group, threads.map(_run, group), strict=True):
                found[part.name] = row
                lines = failures({part.name: row})
                print("\n".join(lines) if lines else f"{part.name}: done in {row['seconds']} s", flush=True)
    return found


def groups(parts: Sequence[Part]) -> list[list[Part]]:
    """Parts that run at one time, in order."""
    found: list[list[Part]] = []
    for part in parts:
        if part.beside and found and found[-1][-1].beside:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def longest(parts: Sequence[Part]) -> float:
    """Seconds that all may take."""
    return sum(max(part.seconds for part in group) for group in groups(parts))


def failures(results: dict[str, Any]) -> list[str]:
    """A line for each thing that failed in what `results_of` returned."""
    return [
        f"{name}: {line}"
        for name, row in results.items()
        for line in ([row["error"]] if "error" in row else row["found"].get("wrong", []))
    ]


def _run(part: Part) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="zbsolve-") as folder:
        result, said = Path(folder) / "result.json", Path(folder) / "said.txt"
        with said.open("w", encoding="utf-8") as sink:
            code = _code(part, result, sink)
        row: dict[str, Any] = {"seconds": round(time.monotonic() - began, 2), "limit": part.seconds}
        if code == 0:
            return row | {"found": json.loads(result.read_text(encoding="utf-8"))}
        lines = [line for line in said.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        print("\n".join(lines[-30:]), file=sys.stderr)
        last = lines[-1] if lines else "it said nothing"
        return row | {"error": f"not done after {part.seconds:g} s" if code is None else f"exit code {code}: {last}"}


def _code(part: Part, result: Path, sink: TextIO) -> int | None:
    """The exit code of the part's process; None where its time was over. It ends with all that it started: what lives on by
    itself, such as MPS, it is asked to end before."""
    command = [sys.executable, "-m", "benchmarks.parts", part.work, str(result), json.dumps(part.arguments)]
    with subprocess.Popen(
        command,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=sink,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as child:
        try:
            return child.wait(part.seconds)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGINT)
            until = time.monotonic() + ENDING_SECONDS
            while os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
                time.sleep(0.05)
            return None
        finally:
            if child.returncode is None:  # not yet waited for, so the group is still its own
                os.killpg(child.pid, signal.SIGKILL)


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", help="module:function")
    parser.add_argument("result", type=Path, help="the file that gets what it returns")
    parser.add_argument("arguments", type=json.loads)
    options = parser.parse_args()
    module, _, name = options.work.partition(":")
    found = getattr(import_module(module), name)(**options.arguments)
    options.result.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
