"""Whether messages hold their sender up, told from how long ranks stood idle behind the passes that send.

Megatron sends by a call that returns when the message is there, so behind a pass that sends the next one begins a message
later, though it has its inputs. Behind a pass that sends nothing it begins at once.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ...trace import Trace
from ...util.statistics import quartiles

SHARE, MOST = 0.5, 2.0  # of a message: so much longer ranks stand idle behind passes that send, where it holds them up
MIN_GAPS = 4  # without which nothing is told


@dataclass(frozen=True, slots=True)
class Gaps:
    """How long ranks stood idle between two passes, µs, where the second had its inputs when the first ended; medians.
    sending: behind passes that send to another rank, of which there are `count`, and of them the lower quartile; silent:
    behind those that send nothing, where that was least of all ranks (0 where there is none); message: what such a pass
    sends takes."""

    count: int
    sending: float
    lower: float
    silent: float
    message: float

    @property
    def blocked(self) -> bool:
        """Whether the message is in the gap, of nearly all of them (delays by chance are in some), and little else is."""
        longer = self.lower - self.silent, self.sending - self.silent
        return self.count >= MIN_GAPS and longer[0] >= SHARE * self.message > 0 and longer[1] <= MOST * self.message

    def to_json(self) -> dict[str, Any]:
        """The fields."""
        return asdict(self)


def gaps_of(trace: Trace) -> Gaps:
    """The gaps of a run whose problem has messages beside compute."""
    problem = trace.problem
    edges, rank = problem.edges, problem.passes.rank
    apart = edges.only(np.flatnonzero(rank[edges.before] != rank[edges.after]))
    message = np.zeros(len(problem.passes))
    np.maximum.at(message, apart.before, apart.lag)
    sends = np.bincount(apart.before, minlength=len(message)) > 0
    behind: list[float] = []
    silent: dict[int, list[float]] = {}
    sizes: list[float] = []
    for step in trace.steps:
        there = np.full(len(message), -np.inf)
        np.maximum.at(there, apart.after, step.end[apart.before] + apart.lag)
        for names in trace.schedule.values():
            rows = np.array([problem.index[name] for name in names])
            one, other = rows[:-1], rows[1:]
            had = there[other] <= step.end[one]
            gap = np.maximum(0.0, step.start[other] - step.end[one])
            behind += gap[had & sends[one]].tolist()
            sizes += message[one[had & sends[one]]].tolist()
            silent.setdefault(int(rank[rows[0]]), []).extend(gap[had & ~sends[one]].tolist())
    least = min((median(row) for row in silent.values() if row), default=0.0)
    row = behind or [0.0]
    return Gaps(len(behind), median(row), quartiles(row)[0], least, median(sizes or [0.0]))
