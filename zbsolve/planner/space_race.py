"""`SpaceRace`: what a plan is made of while it grows, which looks and longer searches share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..search.task import Task
from ..search.task_runner import TaskRunner
from ..util.clock import Clock
from .candidate import Candidate
from .cluster import Cluster
from .layer_costs import Model
from .space_bounds import SpaceBounds

ROUND = 16  # searches that are drawn at once where effort is the limit

Progress = Callable[[str], None]


@dataclass
class SpaceRace:
    """What a plan is made of while it grows. best comes first."""

    model: Model
    cluster: Cluster
    memory: int
    clock: Clock
    runner: TaskRunner
    seed: int
    bounds: SpaceBounds
    candidates: list[Candidate]
    looked_at: set[int]
    progress: Progress
    stop: Callable[[], bool]

    @property
    def value(self) -> float:
        """µs of the best step so far."""
        return min((one.value for one in self.candidates), default=np.inf)

    @property
    def rival(self) -> float:
        """What searches have to beat, µs; −∞ where the time is over and there is a plan."""
        return -np.inf if self.candidates and self.clock.left <= 0 else self.value

    @property
    def over(self) -> bool:
        """Somebody ended it, and there is a plan."""
        return bool(self.candidates) and self.stop()

    def keep(self, found: Candidate) -> None:
        """Note a candidate: in the place of one of its layout where it is better."""
        for at, one in enumerate(self.candidates):
            if one.layout == found.layout:
                self.candidates[at] = min(one, found, key=lambda candidate: candidate.value)
                break
        else:
            self.candidates.append(found)
        self.told()

    def told(self) -> None:
        """Tell value and gap."""
        gap = 1 - self.bounds.least / self.value
        self.progress(f"{len(self.candidates)} layouts solved: step {self.value / 1e3:,.1f} ms, gap {max(gap, 0.0):.2%}")

    def solve(self, tasks: Iterator[Task]) -> None:
        """Keep what looks find."""
        for answer in self.runner.answers(tasks, ROUND):
            if answer.schedule is not None:
                self.keep(answer.task.of.solved(answer.schedule))
