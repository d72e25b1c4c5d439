"""Starts the ranks of a run on this machine, one process each, and ends them in any case. A rank is `python -m
zbsolve.exec.run.launch FOLDER RANK`."""

from __future__ import annotations

import json
import math
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...long_steps.check import CheckedRounds
from ...long_steps.files import load_unrolled, save
from ...schedule import Schedule
from ...schedule.trace import Trace
from ...util.errors import BadInput, LostRank, RunFailed, ZbsolveError, one_line
from ...util.files import remove_leftovers, temporary_folder, write_text
from ...util.machine import child_environment
from ..mesh import PIPELINE, named_rank, process_of
from ..reports import RunNumbers
from ..transport.wires import came_true
from .host import device_environment, end_with_parent, local_network, together
from .job import Options, run_on_one_device
from .torchrun import LATE_SECONDS, Prediction, Rounds, fit, read_schedule, run_group, run_torchrun, step_of

NOTE_BYTES = 64  # for each rank, in the file of what ranks do now
KILL_SECONDS = 10.0  # to wait for a killed rank
MAX_PROCESSES = 1000
HEAR_SECONDS = 0.2  # between two reads of what ranks print: each is a system call for every rank
STOP_SECONDS = 10.0  # for the last step after an interrupt
NOT_TRAINING = ("", "start", "joining", "building", "checking")  # what a rank announces before its first step
REPORT_SECONDS = 1.5  # from one rank's end, for the reports of the others
MAX_DETAILS = 100_000  # characters of a traceback; the innermost lines are kept
MOST_KNOWN = 10_000  # printed lines that are remembered; after that many, repeated lines are printed again


def run_local(given: Schedule | CheckedRounds, spec: str, **chosen: Any) -> Trace | RunNumbers:
    """Run a schedule with the model called `spec` in one single-threaded process for each rank. Returns what was measured.

    given: a schedule, or rounds of a very long step, for which the result is numbers, or with `whole_trace` a trace.
    chosen: fields of `job.Options`. Raises BadInput, and RunFailed in one line naming rank, pass and cause. No process and
    no file stays behind, even after an interrupt. If this process is killed, the next run removes its files.
    """
    options = Options(**chosen)
    sizes = options.sizes(step_of(given).ranks)
    if (ranks := math.prod(sizes.values())) > MAX_PROCESSES:
        what = f"--mesh {options.mesh}" if options.mesh else f"{ranks} ranks"
        text = f"{what} are {ranks} processes here, more than {MAX_PROCESSES}"
        raise BadInput(f"--local: {text}: use torchrun on several machines")
    options = options.on(ranks)
    fit(given, spec, options)
    sharing = options.share_gpus and options.device == "cuda"
    sharers = -(-ranks // torch.cuda.device_count()) if sharing else 1
    with temporary_folder("run") as folder, together(folder) if sharing else nullcontext():
        if isinstance(given, Schedule):
            given.save(folder / "schedule.json")
        else:
            save(given.long, folder / "schedule.json")
        write_text(folder / "job.json", json.dumps({"spec": spec, "ranks": ranks, "options": asdict(options)}))
        (folder / "now").write_bytes(bytes(NOTE_BYTES * ranks))
        tell = partial(print, file=sys.stderr, flush=True)
        processes = Processes(folder, sizes, options, tell)
        try:
            for rank in range(ranks):
                more = device_environment(rank, sharers) if options.device == "cuda" else {}
                processes.children.append(_start(folder, rank, more))
            try:
                processes.wait()
            except KeyboardInterrupt as pressed:
                if not processes.stop():
                    raise
                tell("zbsolve run: the step that runs is the last one")
                try:
                    processes.wait(time.monotonic() + STOP_SECONDS)
                except TimeoutError:
                    raise pressed from None
        finally:
            processes.end()
            remove_leftovers()  # of a search by rank 0 in a watched run
        processes.said.hear(last=True)
        numbers = folder / "numbers.json"
        return RunNumbers.load(numbers) if numbers.exists() else Trace.load(folder / "trace.json")


def run(
    path: str, spec: str, options: Options, *, local: bool = False, one_device: bool = False
) -> tuple[Prediction, Trace | RunNumbers] | None:
    """Run the schedule in a file, and return what was predicted and what was measured.

    one_device: in this process (`job.run_on_one_device`). Neither: as one of torchrun's ranks, of which all but the first
    return None. Raises BadInput, RunFailed.
    """
    if one_device:
        schedule = load_unrolled(path)
        return Prediction.of(schedule), run_on_one_device(schedule, spec, options)
    if not local:
        return run_torchrun(path, spec, options)
    given = read_schedule(path)
    checked = given.checked if isinstance(given, Rounds) else given
    assert checked is not None
    return Prediction.of(checked), run_local(checked, spec, **vars(options))


def _start(folder: Path, rank: int, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank. more: environment variables. Its standard input is a pipe that closes when this process ends, so a
    rank never outlives its parent."""
    with open(path_of(folder, rank), "wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "zbsolve.exec.run.launch", str(folder), str(rank)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**child_environment(), **more},
            start_new_session=True,
        )


class Processes:
    """The processes of a run's ranks. folder: of their files. sizes: of the mesh. said: what they print."""

    def __init__(self, folder: Path, sizes: Mapping[str, int], options: Options, tell: Callable[[str], None]) -> None:
        self.folder, self.sizes, self.options = folder, sizes, options
        self.children: list[subprocess.Popen[bytes]] = []
        self.said = Said(folder, math.prod(sizes.values()), sizes, tell)

    def doing(self) -> list[str]:
        """What each rank has announced last."""
        notes, each = (self.folder / "now").read_bytes(), range(0, NOTE_BYTES * len(self.children), NOTE_BYTES)
        return [notes[at : at + NOTE_BYTES].rstrip(b"\0").decode(errors="replace") for at in each]

    def stop(self) -> bool:
        """Ask ranks to end after their current step. Returns False if they do not train yet, or there are several pipelines,
        which would have to agree."""
        if self.sizes[PIPELINE] < len(self.children) or any(name in NOT_TRAINING for name in self.doing()):
            return False
        for child in self.children:
            assert child.stdin is not None
            with suppress(OSError):  # it has ended
                child.stdin.write(b".")
                child.stdin.flush()
        return True

    def wait(self, until: float = math.inf) -> None:
        """Wait until every rank has ended without an error, and print what they say. The time limit counts from the last
        progress of any rank. Raises the error of the first rank that failed, and TimeoutError if some ranks still run at the
        time `until`."""
        before, since, heard = self.doing(), time.monotonic(), 0.0
        while True:
            codes = [child.poll() for child in self.children]
            if time.monotonic() > heard + HEAR_SECONDS:
                heard = time.monotonic()
                self.said.hear()
            if all(code == 0 for code in codes):
                return
            if any(code not in (None, 0) for code in codes):
                raise self.cause()
            if time.monotonic() > until:
                raise TimeoutError
            doing = self.doing()
            if doing != before:
                before, since = doing, time.monotonic()
            running = [rank for rank, code in enumerate(codes) if code is None]
            limit = max(self.options.allowed(doing[rank]) for rank in running)
            if time.monotonic() - since > limit + LATE_SECONDS:
                where = ", ".join(f"rank {rank} at {doing[rank] or 'start'}" for rank in running)
                raise RunFailed(f"nothing went on for {limit:g} s: {where}")
            time.sleep(0.01)

    def cause(self) -> ZbsolveError:
        """The error of the rank that failed first. A rank that died without a report comes before ranks that reported, and a
        lost connection is only a consequence."""
        came_true(lambda: all(child.poll() is not None for child in self.children), REPORT_SECONDS)
        failures: list[tuple[bool, float, str, ZbsolveError]] = []
        for rank, child in enumerate(self.children):
            path = self.folder / f"failure.{rank}"
            if path.exists():
                body = json.loads(path.read_text(encoding="utf-8"))
                text = self._of_rank(rank, body)
                failed = (BadInput if body["kind"] == "BadInput" else RunFailed)(text)
                failed.details = body["details"]
                failures.append((body["kind"] == "LostRank", body["time"], text, failed))
            elif code := child.poll():
                lines = path_of(self.folder, rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                last = f": {lines[-1][:300]}" if lines else ""
                how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}{last}"
                where = f"{named_rank(self.sizes, rank)}, pass {self.doing()[rank] or 'start'}"
                return RunFailed(f"{where}: the process {how}")
        return min(failures, key=lambda failure: failure[:3])[3] if failures else RunFailed("a rank ended without a word")

    def _of_rank(self, rank: int, body: dict[str, Any]) -> str:
        """The text of a rank's report. It says so where the rank that it lost hangs."""
        other = None if body["peer"] is None else process_of(self.sizes, rank, body["peer"])
        if body["kind"] != "LostRank" or other is None or self.children[other].poll() is not None:
            return str(body["text"])
        who, name = named_rank(self.sizes, other), self.doing()[other]
        text = body["text"].removeprefix(f"{who} is lost: ")
        return f"{who}, pass {name}: hangs, not done after {self.options.allowed(name):g} s ({text})"

    def end(self) -> None:
        """Kill the processes that still run, and wait for all."""
        for child in self.children:
            if child.poll() is None:
                child.kill()
        for child in self.children:
            with suppress(subprocess.TimeoutExpired):  # killed, but still in the kernel
                child.wait(KILL_SECONDS)
            if child.stdin is not None:
                child.stdin.close()


class Said:
    """What the ranks have printed, into `folder`/said.RANK. All ranks often print the same warning, so equal lines are shown
    once. sizes: of the mesh."""

    def __init__(self, folder: Path, ranks: int, sizes: Mapping[str, int], tell: Callable[[str], None]) -> None:
        self._paths = [path_of(folder, rank) for rank in range(ranks)]
        self._names = [named_rank(sizes, rank) for rank in range(ranks)]
        self._tell, self._at, self._known = tell, [0] * ranks, set[bytes]()

    def hear(self, last: bool = False) -> None:
        """Show what is new. last: nothing more comes, so an incomplete line is shown, too."""
        for rank, path in enumerate(self._paths):
            if path.stat().st_size == self._at[rank]:
                continue
            with open(path, "rb") as stream:
                stream.seek(self._at[rank])
                text = stream.read()
            whole = text if last else text[: text.rfind(b"\n") + 1]
            self._at[rank] += len(whole)
            for line in whole.splitlines():
                if not line.strip() or line in self._known:
                    continue
                if len(self._known) < MOST_KNOWN:
                    self._known.add(line)
                self._tell(f"{self._names[rank]}: {line.decode(errors='replace').rstrip()}")


def path_of(folder: Path, rank: int) -> Path:
    """The file that a rank writes to."""
    return folder / f"said.{rank}"


def run_rank_process(folder: Path, rank: int) -> int:
    """Run the rank in this process. Returns its exit code. Rank 0 writes `trace.json` or `numbers.json`, and a rank that
    fails `failure.RANK`; each whole or not at all."""
    end_with_parent()
    local_network()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a model's output is shown immediately
    try:
        _run_rank(folder, rank)
    except Exception as error:
        text = str(error) if isinstance(error, ZbsolveError) else f"rank {rank}: {one_line(error)}"
        kind = type(error).__name__ if isinstance(error, ZbsolveError) else RunFailed.__name__
        peer = error.peer if isinstance(error, LostRank) else None
        known = error.details if isinstance(error, ZbsolveError) else ""
        details = (known or "".join(traceback.format_exception(error)))[-MAX_DETAILS:]
        body = {"kind": kind, "text": " ".join(text.split()), "peer": peer, "time": time.monotonic_ns(), "details": details}
        write_text(folder / f"failure.{rank}", json.dumps(body))
        return 1
    return 0


def _run_rank(folder: Path, rank: int) -> None:
    job = json.loads((folder / "job.json").read_text(encoding="utf-8"))
    announce = _announcer(folder, rank)
    announce("start")
    trace = run_group(
        (rank, job["ranks"], rank),
        f"file://{folder / 'store'}",
        partial(read_schedule, str(folder / "schedule.json"), rank),
        job["spec"],
        Options(**job["options"]),
        announce,
    )
    if isinstance(trace, RunNumbers):
        trace.save(folder / "numbers.json")
    elif trace is not None:
        trace.save(folder / "trace.json")


def _announcer(folder: Path, rank: int) -> Callable[[str], None]:
    """A function that writes what this rank does to a file that its parent can read after its death, in under 1 µs."""
    with open(folder / "now", "r+b") as stream:
        notes = mmap.mmap(stream.fileno(), 0)
    a, b = rank * NOTE_BYTES, (rank + 1) * NOTE_BYTES

    def announce(name: str) -> None:
        notes[a:b] = name.encode()[:NOTE_BYTES].ljust(NOTE_BYTES, b"\0")

    return announce


if __name__ == "__main__":
    code = run_rank_process(Path(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # skips torch's and gloo's destructors, which may wait for lost ranks
