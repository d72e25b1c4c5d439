"""What a running page remembers: its profile, answers by state, and the one longer search at a time."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from queue import SimpleQueue

from ..profile.profile import Profile
from ..search.state import State as Search
from ..util.errors import BadInput
from .answers import Answer, Row, answer, compared, searched_on
from .setting import in_its_placement
from .state import State

MAX_KEPT = 200  # answers
MORE_SECONDS = 5.0  # of one longer search
AT_ONCE = 2  # answers that are worked out at the same time; further ones wait


class Playground:
    """Answers states, from several threads. profile: the user's, or None; path: as commands name it."""

    def __init__(self, profile: Profile | None = None, path: str = "") -> None:
        self.profile, self.path = profile, path
        self._kept: OrderedDict[State, tuple[Answer, float]] = OrderedDict()
        self._keeping, self._turns = threading.Lock(), threading.BoundedSemaphore(AT_ONCE)
        self._longer = threading.Lock()
        self._running: Search | None = None
        self._over = threading.Event()

    def answer(self, state: State) -> tuple[Answer, float]:
        """The answer, and the seconds that it took when it was worked out. Raises what `answers.answer` raises."""
        state = in_its_placement(state)
        with self._turns:
            with self._keeping:
                if state in self._kept:
                    self._kept.move_to_end(state)
                    return self._kept[state]
            began = time.monotonic()
            found = answer(state, self.profile)
            return self._keep(state, found, time.monotonic() - began)

    def compared(self, state: State) -> Iterator[tuple[Row, ...]]:
        """See `answers.compared`."""
        return compared(state, lambda one: self.answer(one)[0])

    def search(self, state: State) -> Iterator[Search | Answer]:
        """A longer search from a state's answer: its state at every progress, and the answer at the end, which is the
        state's from then on. Raises BadInput while another one runs."""
        found, _ = self.answer(state)
        if found.over:
            raise BadInput("system: this schedule does not fit the memory; a search starts from one that does")
        if not self._longer.acquire(blocking=False):
            raise BadInput("search: another one is running; it ends within seconds")
        said: SimpleQueue[Search | Answer | Exception] = SimpleQueue()
        threading.Thread(target=self._search, args=(found, said)).start()
        while isinstance(one := said.get(), Search):
            yield one
        if isinstance(one, Exception):
            raise one
        yield one

    def _search(self, found: Answer, said: SimpleQueue[Search | Answer | Exception]) -> None:
        def progress(now: Search) -> None:
            self._running = now
            if self._over.is_set():
                now.clock.stop()
            said.put(now)

        began = time.monotonic()
        try:
            better = searched_on(found, MORE_SECONDS, progress)
            self._keep(found.state, better, time.monotonic() - began)
            said.put(better)
        except Exception as error:
            said.put(error)
        finally:
            self._running = None
            self._longer.release()

    def warm(self, state: State) -> None:
        """Begin to answer and compare a state, so that kernels and tables are loaded before somebody waits for them. Returns
        at once."""
        threading.Thread(target=self._warm, args=(state,)).start()

    def _warm(self, state: State) -> None:
        for _ in self.compared(state):
            if self._over.is_set():
                break

    def stop(self) -> None:
        """End all threads: a longer search now, others after the answer that they work out. They are no daemons, so that
        Python waits for them at exit: it would tear a daemon out of CP-SAT, and that aborts the process."""
        self._over.set()
        running = self._running
        if running is not None:
            running.clock.stop()

    def _keep(self, state: State, found: Answer, seconds: float) -> tuple[Answer, float]:
        with self._keeping:
            self._kept[state] = found, seconds
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return found, seconds
