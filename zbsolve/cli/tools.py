"""Shared by commands: common options, output as text or JSON, a progress line, and searches that Ctrl-C ends early."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput, ZbsolveError

if TYPE_CHECKING:
    from ..long_steps.repeated import RepeatedSchedule
    from ..profile.noise import Noise
    from ..profile.profile import Profile
    from ..schedule import Schedule
    from ..schedule.trace import Trace
    from ..search.state import State
    from ..util.workers import Workers

PICTURES = (".html", ".svg", ".pdf", ".png")  # endings
MOST_WRONG = 20  # violations of a file that are printed


def print_json(body: Any) -> None:
    """Machine-readable results on standard output."""
    print(json.dumps(body, indent=1))


def add_search_limits(parser: argparse.ArgumentParser, seconds: float, meaning: str, same: str) -> None:
    """Add --seconds, --effort and --seed. same: names, for the help, what --effort makes the same on any machine."""
    limit = parser.add_mutually_exclusive_group()
    limit.add_argument("--seconds", type=float, default=seconds, help=meaning)
    limit.add_argument(
        "--effort",
        type=float,
        help=f"work, about seconds of one core, in place of --seconds: the same {same} for the same seed on any machine",
    )
    parser.add_argument("--seed", type=int, default=0, help="of random choices")


def search_limits(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds or effort, and the seed, as searches take them. Seconds that loading the command took (`loading`) are part of
    --seconds, up to half of them. Raises BadInput."""
    if options.effort is None:
        loading = min(getattr(options, "loading", 0.0), max(0.0, options.seconds) / 2)
        return {"seconds": options.seconds - loading, "seed": options.seed}
    if not 0 < options.effort < float("inf"):
        raise BadInput(f"effort: {options.effort:g} is not a positive number")
    return {"effort": options.effort, "seed": options.seed}


def add_workers(parser: argparse.ArgumentParser) -> None:
    """Add --on: where tasks run."""
    parser.add_argument(
        "--on",
        metavar="WHERE",
        help="a number of processes on this machine, or tcp://host:port of a Dask scheduler (default: as many as keep the "
        "cores busy, or this one alone for short searches)",
    )


def add_outputs(parser: argparse.ArgumentParser, json: str, files: str) -> None:
    """Add --json and --output. json, files: for the help, what is printed as JSON, and which files are written."""
    parser.add_argument("--json", action="store_true", help=f"{json} as JSON on standard output")
    parser.add_argument("-o", "--output", action="append", default=[], help=f"{files}; may be given more than once")


def workers_of(options: argparse.Namespace, name: str, threads: int = 1) -> AbstractContextManager[Workers | None]:
    """The workers for --on; if one dies, a line on standard error says so. threads: of one search whose limit is --seconds.
    By default short searches get no further processes, since starting them takes a second or two. Raises BadInput."""
    from ..search.task_runner import solvers_on
    from ..util.machine import cores

    timed = options.effort is None
    usual = cores() // threads if timed else cores()
    short = (options.seconds if timed else options.effort) < LEAST_FOR_PROCESSES
    on = options.on or (1 if short else max(1, usual))
    return solvers_on(on, lambda line: print(f"zbsolve {name}: {line}", file=sys.stderr))


@contextmanager
def saving(*saves: Callable[[], None]) -> Iterator[None]:
    """Call all of `saves`, which write results, then run the body, which prints them. If a file cannot be written, the other
    files are still written and the body still runs; the first error is raised at the end."""
    failed: list[ZbsolveError] = []
    for save in saves:
        try:
            save()
        except ZbsolveError as error:
            failed.append(error)
    try:
        yield
    finally:
        if failed:
            failed[0].others = tuple(failed[1:])
            raise failed[0]


def outputs_of(options: argparse.Namespace) -> list[str]:
    """The files that are to be written."""
    output = getattr(options, "output", None)
    return [output] if isinstance(output, str) else list(output or ())


def tell(
    options: argparse.Namespace, body: Callable[[], Any], text: Callable[[], str | list[str]], *saves: Callable[[], None]
) -> None:
    """Write results (see `saving`), and print them: with --json as JSON (`body`), otherwise as `text`, a text or lines. With
    `-o -` standard output is the file, and nothing else is printed."""
    with saving(*saves):
        if options.json:
            print_json(body())
        elif "-" not in outputs_of(options):
            shown = text()
            print(shown if isinstance(shown, str) else "".join(f"{line}\n" for line in shown), end="")


def first_lines(lines: Sequence[str]) -> list[str]:
    """Lines that say what does not hold; of very many only the first ones."""
    more = len(lines) - MOST_WRONG
    return [*lines[:MOST_WRONG], f"and {more:,} more (--json has all)"] if more > 0 else [*lines]


def save_found(schedule: Schedule | RepeatedSchedule, path: str) -> None:
    """A schedule's file, or its picture, by the ending."""
    from ..long_steps.files import save, schedule_to_show
    from ..schedule import Schedule
    from ..show.pictures.files import save_schedule_picture

    if path.endswith(PICTURES):
        save_schedule_picture(schedule if isinstance(schedule, Schedule) else schedule_to_show(schedule, path), path)
    else:
        schedule.save(path) if isinstance(schedule, Schedule) else save(schedule, path)


def method_of(text: str) -> tuple[str, str]:
    """A method, and the solver of milp, from `milp:highs`."""
    method, _, solver = text.partition(":")
    return (method, solver or "cbc") if method == "milp" else (text, "cbc")


def run_of(schedule: Schedule, path: str) -> Trace:
    """The run of a schedule, from a trace of zbsolve, or of another engine, which lacks predicted times. Raises BadInput."""
    from ..interchange.traces.reading import others_trace
    from ..schedule.trace import Trace

    foreign = others_trace(path)
    return Trace.load(path) if foreign is None else foreign.of_problem(schedule.problem, path)


def profile_from(path: str, command: str, body: Any = None) -> Profile:
    """The profile in a file; prints doubts about it to standard error. body: its content, if known. Raises BadInput."""
    from ..profile.doubtful import doubts
    from ..profile.profile import Profile

    profile = Profile.load(path) if body is None else Profile.from_json(body, path)
    for doubt in doubts(profile):
        print(f"zbsolve {command}: WARNING: {path}: {doubt}", file=sys.stderr)
    return profile


def tell_other_model(schedule: Schedule, profile: Profile, command: str) -> None:
    """Print a line to standard error if the profile is of another model than the schedule."""
    from ..profile.doubtful import other_model

    if line := other_model(schedule.problem.source, profile.model):
        print(f"zbsolve {command}: {line}", file=sys.stderr)


def noise_of(text: str) -> Noise:
    """The noise that `text` describes, or the noise measured in the run of a trace's file."""
    from ..interchange.traces.reading import others_trace
    from ..profile.noise import Noise
    from ..schedule.trace import Trace

    if not (text and Path(text).exists()):
        return Noise.read(text)
    return Noise.of(others_trace(text) or Trace.load(text), text)


def need_torch() -> None:
    """Raise BadInput if torch is not installed."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise BadInput("torch is missing, and profile and run need it: pip install torch (2.11 or newer)")


def progress_line(text: str) -> None:
    """Overwrite one line on standard error, if that is a terminal. An empty text clears the line."""
    if sys.stderr.isatty():
        width = shutil.get_terminal_size((100, 24)).columns - 1  # a wrapped line could not be overwritten
        print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)


LEAST_SECONDS = 0.01  # of a search, if building the problem took the whole limit
LEAST_FOR_PROCESSES = 10.0  # seconds, or effort: shorter searches start no processes


@dataclass
class Search:
    """The progress of a search in the terminal. `show(where, state)` writes the line, at most ten times a second. `ticking`
    also writes it every second, so that the elapsed time continues. came: received signals, which end the search early."""

    began: float
    came: list[int] = field(default_factory=list)
    shown: float = 0.0
    last: tuple[str, State] | None = None

    def rest(self, limits: dict[str, Any]) -> dict[str, Any]:
        """The limits, less twice the seconds since the search began: verifying and writing take as long as building."""
        if not limits.get("seconds", 0) > 0:
            return limits
        return {**limits, "seconds": max(LEAST_SECONDS, limits["seconds"] - 2 * (time.monotonic() - self.began))}

    def show(self, where: str, state: State) -> None:
        """Write the line: incumbent, bound, gap, elapsed time and the source of the incumbent."""
        self.last = (where, state)
        now = time.monotonic()
        if now - self.shown >= 0.1:
            self.shown = now if state.schedule is not None else 0.0
            self._draw()

    def _draw(self) -> None:
        if self.last is not None:
            from ..show.solved_text import state_as_text

            where, state = self.last
            progress_line(f"{where}{': ' if where else ''}{state_as_text(state, time.monotonic() - self.began)}")

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Keep the line going, on a terminal; an empty line at the end."""
        ended = threading.Event()

        def tick() -> None:
            while not ended.wait(1.0):
                self._draw()

        thread = threading.Thread(target=tick, daemon=True)
        if sys.stderr.isatty():
            thread.start()
        try:
            yield
        finally:
            ended.set()
            if thread.ident is not None:
                thread.join()
            progress_line("")


@contextmanager
def compiling(name: str) -> Iterator[None]:
    """A line on standard error where kernels are compiled inside. A signal that the compiler ignores ends the block."""
    from ..util.kernels import before_compiling

    came: list[int] = []
    said = f"zbsolve {name}: compiling its kernels, once on this machine"
    try:
        with before_compiling(lambda: print(said, file=sys.stderr)), interrupts((signal.SIGINT, signal.SIGTERM), came):
            yield
    finally:
        if came:
            raise KeyboardInterrupt(came[0])


@contextmanager
def searching(
    name: str, method: str = "auto", further: Callable[[], None] = lambda: None
) -> Iterator[tuple[Search, Callable[[], bool]]]:
    """A context for a search that Ctrl-C or SIGTERM ends early. It gives the progress and a function that tells whether a
    signal came. At the end it clears the line, and says that the result is of an interrupted search. A second Ctrl-C raises
    KeyboardInterrupt. The kernels of method "auto" are compiled first. further: compiles other kernels."""
    from ..search.solver import ready

    if method == "auto":
        with compiling(name):
            ready()
            further()
    search = Search(time.monotonic())
    with interrupts((signal.SIGINT, signal.SIGTERM), search.came), search.ticking():
        yield search, lambda: bool(search.came)
    if search.came:
        print(f"zbsolve {name}: interrupted: this is the best found until then", file=sys.stderr)


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """A context in which SIGTERM raises KeyboardInterrupt as Ctrl-C does, so that files and processes are cleaned up. Not in
    torchrun's ranks: a rank that waits inside gloo would react too late, and torchrun stops all of them."""
    with interrupts(() if under_torchrun() else (signal.SIGTERM,), []):
        yield


def under_torchrun() -> bool:
    """Whether torchrun started this process, as far as its environment says."""
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys()


@contextmanager
def interrupts(signals: Sequence[signal.Signals], came: list[int]) -> Iterator[None]:
    """A context in which these signals raise KeyboardInterrupt with their number, and are appended to `came`."""

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt(number)

    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not the main thread: the program that started it handles signals
        before = {which: signal.signal(which, note) for which in signals}
    try:
        yield
    finally:
        for caught, handler in before.items():
            signal.signal(caught, handler)


def word_and_number(text: str, word: str, option: str) -> tuple[bool, int]:
    """Whether an option's text has `word`, and its number (0: none); a comma is between them. Raises BadInput."""
    words = text.split(",") if text else []
    numbers = [name for name in words if name != word]
    if len(words) > len(set(words)) or len(numbers) > 1 or not all(map(str.isdecimal, numbers)):
        raise BadInput(f"{option} '{text[:40]}': {word}, a whole number, or both: {word},3")
    return word in words, int(numbers[0]) if numbers else 0
