"""Events and what each of them waits for. A circle of them never happens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class WaitGraph:
    """texts: what each event is, in words; before: of each one the events that it waits for, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.before: list[list[int]] = []

    def event(self, text: str, before: Iterable[int | None] = ()) -> int:
        """A new event that waits for those of `before` that are there. Its number."""
        self.texts.append(text)
        self.before.append([one for one in before if one is not None])
        return len(self.texts) - 1

    def circle(self) -> tuple[str, ...]:
        """Events of which each waits for the one before it, and the first for the last, in words, from the one that was made
        first; () where none do. One of them is in no shorter circle."""
        after: list[list[int]] = [[] for _ in self.texts]
        waiting = [len(before) for before in self.before]
        for number, before in enumerate(self.before):
            for one in before:
                after[one].append(number)
        free = [number for number, count in enumerate(waiting) if not count]
        while free:
            for one in after[free.pop()]:
                waiting[one] -= 1
                if not waiting[one]:
                    free.append(one)
        stuck = next((number for number, count in enumerate(waiting) if count), None)
        if stuck is None:
            return ()
        seen = set[int]()
        while stuck not in seen:
            seen.add(stuck)
            stuck = next(one for one in self.before[stuck] if waiting[one])
        found = _way_round(stuck, after)
        first = found.index(min(found))
        return tuple(self.texts[one] for one in found[first:] + found[:first])


def _way_round(start: int, after: Sequence[Sequence[int]]) -> list[int]:
    """The shortest way from `start` back to it, which must exist: `start` first."""
    came, todo = dict[int, int](), deque([start])
    while start not in came:
        here = todo.popleft()
        for there in after[here]:
            if there not in came:
                came[there] = here
                todo.append(there)
    found = [came[start]]
    while found[-1] != start:
        found.append(came[found[-1]])
    return found[::-1]
