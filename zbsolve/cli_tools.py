"""What commands share: JSON on standard output, one line of progress, and Ctrl-C that keeps what was found."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import BadInput

if TYPE_CHECKING:
    from .state import State


def print_json(body: Any) -> None:
    """Machine-readable results on standard output."""
    print(json.dumps(body, indent=1))


def counted(values: Sequence[object]) -> str:
    """`5 4×6 5`: values in a row, repeated ones counted."""
    runs = [(value, len(list(group))) for value, group in groupby(values)]
    return " ".join(f"{value}×{times}" if times > 1 else str(value) for value, times in runs)


def need_torch() -> None:
    """Raise BadInput where torch is not there."""
    from importlib.util import find_spec

    if find_spec("torch") is None:
        raise BadInput("torch is missing, and profile and run need it: pip install torch (2.5 or newer)")


def progress_line() -> Callable[[str], None]:
    """One line on standard error, written over again; nothing where that is no terminal. An empty text clears it."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            width = shutil.get_terminal_size((100, 24)).columns - 1  # a wrapped line could not be written over
            print(f"\r\x1b[K{text[:width]}", end="", file=sys.stderr, flush=True)

    return show


@dataclass
class Search:
    """A search as a terminal shows it: `show(where, state)` writes the line, ten times a second at most; while `ticking`
    it is written again every second, so that the time elapsed goes on where nothing better is found. `came`: the signals
    that ended it early."""

    began: float
    came: list[int] = field(default_factory=list)
    shown: float = 0.0
    last: tuple[str, State] | None = None

    def show(self, where: str, state: State) -> None:
        """Incumbent, bound, gap, elapsed, who found it."""
        self.last = (where, state)
        now = time.monotonic()
        if now - self.shown >= 0.1:
            self.shown = now if state.schedule is not None else 0.0
            self._draw()

    def _draw(self) -> None:
        if self.last is not None:
            where, state = self.last
            progress_line()(f"{where}{': ' if where else ''}{status(state, time.monotonic() - self.began)}")

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
            progress_line()("")


def status(state: State, elapsed: float) -> str:
    """`makespan 12.40 ms, bound 12.10 ms, gap 2.42%, 3 s, by annealing`."""
    from .show_style import format_time

    bound = f"bound {format_time(state.bound.value)}"
    if state.schedule is None:
        return f"no schedule yet, {bound}, {elapsed:.0f} s"
    gap = (state.value - state.bound.value) / state.value if state.value else 0.0
    objective = state.schedule.problem.objective
    return f"{objective} {format_time(state.value)}, {bound}, gap {gap:.2%}, {elapsed:.0f} s, by {state.solver}"


@contextmanager
def searching(name: str, method: str = "auto") -> Iterator[tuple[Search, Callable[[], bool]]]:
    """A search that Ctrl-C or SIGTERM ends early: gives the progress and whether one came, clears the line at the end, and
    then says on standard error what an interruption left. A second Ctrl-C is one more KeyboardInterrupt. What method
    "auto" needs is compiled before."""
    from .search import ready

    if method == "auto":
        ready(lambda: print(f"zbsolve {name}: compiling its kernels, once on this machine", file=sys.stderr))
    search = Search(time.monotonic())
    with interrupts((signal.SIGINT, signal.SIGTERM), search.came), search.ticking():
        yield search, lambda: bool(search.came)
    if search.came:
        print(f"zbsolve {name}: interrupted: this is the best found until then", file=sys.stderr)


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does: in order. Not so torchrun's ranks: one that waits inside gloo would hear
    of it late, and torchrun ends them all."""
    with interrupts(() if "RANK" in os.environ and "WORLD_SIZE" in os.environ else (signal.SIGTERM,), []):
        yield


@contextmanager
def interrupts(signals: Sequence[signal.Signals], came: list[int]) -> Iterator[None]:
    """Each of these signals is noted in `came` and raises KeyboardInterrupt with its number."""

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)
        raise KeyboardInterrupt(number)

    before: dict[signal.Signals, Any] = {}
    with suppress(ValueError):  # not the main thread: whoever runs it handles signals
        before = {one: signal.signal(one, note) for one in signals}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
