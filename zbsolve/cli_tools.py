"""What commands share: JSON on standard output, one line of progress, and Ctrl-C that keeps what was found."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .search import State


def print_json(body: Any) -> None:
    """Machine-readable results on standard output."""
    print(json.dumps(body, indent=1))


def progress_line() -> Callable[[str], None]:
    """One line on standard error, written over again; nothing where that is no terminal. An empty text clears it."""

    def show(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    return show


@dataclass
class Search:
    """A search as a terminal shows it: `show(where, state)` writes the line, ten times a second at most."""

    began: float
    shown: float = 0.0

    def show(self, where: str, state: State) -> None:
        """Incumbent, bound, gap, elapsed, who found it."""
        now = time.monotonic()
        if now - self.shown >= 0.1:
            self.shown = now if state.schedule is not None else 0.0
            progress_line()(f"{where}{': ' if where else ''}{status(state, now - self.began)}")

    def clear(self) -> None:
        """An empty line."""
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
def searching(name: str) -> Iterator[tuple[Search, Callable[[], bool]]]:
    """A search that Ctrl-C ends early: gives the progress and whether Ctrl-C was pressed, clears the line at the end, and
    then says on standard error what an interruption left. A second Ctrl-C is one more KeyboardInterrupt."""
    pressed: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        pressed.append(number)
        raise KeyboardInterrupt

    before = None
    with suppress(ValueError):  # not the main thread: whoever runs it handles signals
        before = signal.signal(signal.SIGINT, note)
    search = Search(time.monotonic())
    try:
        yield search, lambda: bool(pressed)
        if pressed:
            search.clear()
            print(f"zbsolve {name}: interrupted: this is the best found until then", file=sys.stderr)
    finally:
        search.clear()
        if before is not None:
            signal.signal(signal.SIGINT, before)
