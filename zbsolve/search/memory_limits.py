"""One step under several memory limits. A schedule that fits less memory also fits more, and a bound that is proven for
more memory also holds for less; so each limit uses the results of the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..build.mixing import one_microbatch_needs
from ..greedy.syncs import with_syncs
from ..problem import Ints, Problem
from ..schedule import Certificate, Schedule, relative_gap
from ..schedule.handover import needed
from ..systems.table import presets_of
from ..util.clock import LEAST_TIME, Clock, limit_of
from ..util.errors import Infeasible
from ..util.workers import WorkersLost
from ..verifier import verify
from .certify import check_bound
from .task import Answer, Task
from .task_runner import TaskRunner

ROUND = 4  # limits that are drawn at once if effort is the limit; few, since neighbours help each other


@dataclass(frozen=True, slots=True)
class Point:
    """The result at one memory limit. memory: bytes of every rank, with parameters and optimizer state. peak: bytes that the
    schedule needs on its fullest rank. value, bound: µs. proof: where the bound comes from. solver: what found the schedule.
    seconds: spent at this limit. choice: of what is kept, if that was "auto"."""

    memory: int
    peak: int
    value: int
    bound: int
    proof: str
    solver: str
    seconds: float
    schedule: Schedule
    choice: str = ""

    @property
    def gap(self) -> float:
        """(value − bound) / value."""
        return relative_gap(self.value, self.bound)

    def to_json(self) -> dict[str, Any]:
        """All fields but the schedule, and gap and status."""
        body = {name: getattr(self, name) for name in ("memory", "peak", "value", "bound", "proof", "solver", "seconds")}
        body |= {"choice": self.choice} if self.choice else {}
        return {**body, "gap": self.gap, "status": "optimal" if self.bound >= self.value else "feasible"}


@dataclass(frozen=True, slots=True)
class Named:
    """A named schedule on this step. memory: bytes that its fullest rank needs. value: µs. work: µs of its busiest rank."""

    name: str
    memory: int
    value: int
    work: int


class MemoryLimits:
    """All schedules and bounds found so far with their limits (None: unlimited), and the time left. free: the step without
    a limit. fixed: bytes of each rank beside activations, shape (ranks,)."""

    def __init__(
        self,
        free: Problem,
        fixed: Ints,
        named: Sequence[Named],
        clock: Clock,
        options: dict[str, Any],
        runner: TaskRunner,
        stop: Callable[[], bool],
    ) -> None:
        self.free, self.fixed, self.named, self.clock, self.options = free, fixed, named, clock, options
        self.runner, self.halted, self.interrupted = runner, stop, False
        runner.stop = lambda: self.stop() and bool(self.found)
        self.found: list[tuple[int, int, str, Schedule]] = []  # value, memory it needs, solver, schedule
        self.proven: list[tuple[int | None, Certificate]] = []  # limit, and the bound that was proven there
        self.spent: dict[int | None, float] = {}
        self.limits: list[int] = []
        self.sound: set[int] = set()  # ids of schedules that were verified in exactly the memory that they need
        for name, schedule in known_orders(free):
            self.found.append((int(schedule.timeline().value), needs(schedule, fixed), name, schedule))

    def problem(self, limit: int | None) -> Problem:
        """The step within `limit` bytes a rank."""
        if limit is None:
            return self.free
        return replace(self.free, capacity=tuple((limit - self.fixed).tolist()))

    def best(self, limit: int | None) -> tuple[int, int, str, Schedule] | None:
        """The shortest known schedule that fits; of equal ones the one that needs least memory."""
        fitting = [row for row in self.found if limit is None or row[1] <= limit]
        return min(fitting, key=lambda row: row[:2], default=None)

    def bound(self, limit: int | None) -> tuple[int | None, Certificate] | None:
        """The highest known bound, proven at this limit or with more memory."""
        holds = [row for row in self.proven if row[0] is None or (limit is not None and row[0] >= limit)]
        return max(holds, key=lambda row: row[1].bound, default=None)

    def open(self, limit: int | None) -> bool:
        """Whether anything is left to gain at this limit."""
        best, bound = self.best(limit), self.bound(limit)
        return best is None or bound is None or best[0] > bound[1].bound

    def stop(self) -> bool:
        """Whether nothing further is to begin."""
        return self.interrupted or self.halted()

    def solve(self, *shares: tuple[int | None, float, str]) -> None:
        """Spend a share of the time left on each limit, under its label."""
        self.solve_each(iter(shares), 1)

    def solve_each(self, shares: Iterator[tuple[int | None, float, str]], count: int) -> None:
        """`solve` for `count` limits, each from the best schedule that fits. With several workers each has more time."""
        at_once = min(count, self.runner.count)
        try:
            for answer in self.runner.answers((self._task(*share, at_once) for share in shares), ROUND):
                self._keep(answer)
        except (KeyboardInterrupt, WorkersLost):
            if not self.found:
                raise
            self.interrupted = True

    def _task(self, limit: int | None, share: float, label: str, at_once: int) -> Task:
        problem, left = self.problem(limit), self.clock.left
        share = share if self.clock.counted else min(1.0, share * at_once)
        granted = max(LEAST_TIME, share * left)
        options = {**self.options, **limit_of(granted, self.clock.counted)}
        best = self.best(limit)
        if best is not None and self.spent:
            options["hint"] = Schedule(problem, best[3].order, best[3].syncs)
        if self.clock.counted:
            self.clock.spend(granted)
        return Task((limit, granted), problem, options, None, label)

    def _keep(self, answer: Answer) -> None:
        """Keep the answer's schedule, if there is one. A limit that is closed early gives its share of the effort back."""
        limit, granted = answer.task.of
        if answer.schedule is not None:
            self.keep(limit, answer.schedule)
        took = answer.seconds
        if self.clock.counted:
            took = granted if self.open(limit) else 0.0
            self.clock.spend(took - granted)
        self.spent[limit] = self.spent.get(limit, 0.0) + took

    def keep(self, limit: int | None, schedule: Schedule) -> None:
        """Keep a schedule with the memory that it really needs, and its bound."""
        certificate = schedule.certificate
        assert certificate is not None
        row = certificate.value, needs(schedule, self.fixed), certificate.solver, schedule
        self.verified(row)
        self.found.append(row)
        self.proven.append((limit, certificate))

    def verified(self, row: tuple[int, int, str, Schedule]) -> None:
        """Verify a schedule once, in the memory that it needs: then it is valid with more memory too."""
        _, memory, _, schedule = row
        if id(schedule) not in self.sound:
            problem = self.problem(memory)
            assert not verify(problem, Schedule(problem, schedule.order, schedule.syncs))
            self.sound.add(id(schedule))

    def plan(self, points: int) -> None:
        """Choose the limits: from the least possible to the peak of the best unlimited schedule, in equal ratios of
        activation memory; and the peaks of named schedules between."""
        need = one_microbatch_needs(self.free)[: self.free.ranks]
        least, best = int((self.fixed + need).max()), self.best(None)
        if best is None:
            raise Infeasible("no schedule was found without a memory limit in this time")
        top = max(least, best[1])
        base = int(self.fixed.max())
        low, high = max(least - base, 1), max(top - base, 1)
        ladder = {base + round(low * (high / low) ** (i / (points - 1))) for i in range(points)}
        named = {limit.memory for limit in self.named if least < limit.memory < top}
        self.limits = sorted({min(max(at, least), top) for at in ladder} | {least, top} | named)

    def down(self) -> None:
        """Solve every limit once, from the largest down, since its bound holds for all below. When the time is up, solve the
        tightest ones without a schedule until one has a schedule."""

        def shares() -> Iterator[tuple[int | None, float, str]]:
            for i, limit in enumerate(reversed(self.limits)):
                if self.clock.left <= 0:
                    return
                if self.open(limit):  # two thirds of the time for the way down
                    yield limit, 0.67 / (len(self.limits) - i), f"point {len(self.limits) - i} of {len(self.limits)}"

        self.solve_each(shares(), len(self.limits))
        for limit in self.limits:
            if self.stop() or self.best(limit) is not None:
                return
            self.solve((limit, 1.0, "the least memory"))

    def up(self) -> None:
        """Solve open limits again, from the tightest up: each schedule starts the next search."""

        def shares() -> Iterator[tuple[int | None, float, str]]:
            for i, limit in enumerate(self.limits):
                if self.clock.left <= 0:
                    return
                if self.open(limit):
                    still = sum(self.open(other) for other in self.limits[i:])
                    yield limit, 1 / still, f"point {i + 1} of {len(self.limits)}, again"

        self.solve_each(shares(), sum(self.open(limit) for limit in self.limits))

    def points(self) -> tuple[Point, ...]:
        """The frontier as found: each limit with the best schedule that fits it and the best bound that holds."""
        return tuple(point for limit in self.limits if (point := self._point(limit)) is not None)

    def _point(self, limit: int) -> Point | None:
        best, bound = self.best(limit), self.bound(limit)
        if best is None or bound is None:
            return None
        self.verified(best)
        (value, peak, solver, shortest), (at, proven) = best, bound
        where = "without a memory limit" if at is None else f"with {at} bytes a rank"
        proof = proven.proof if at == limit else f"{proven.proof} ({where}, so with less too)"
        problem, seconds = self.problem(limit), round(self.spent.get(limit, 0.0), 3)
        check_bound(shortest, proven.bound, proof)
        certificate = replace(proven, value=value, proof=proof, solver=solver, seconds=seconds, digest=problem.digest)
        schedule = with_syncs(Schedule(problem, shortest.order, shortest.syncs)).certified(certificate)
        return Point(limit, peak, value, proven.bound, proof, solver, seconds, schedule)


def needs(schedule: Schedule, fixed: Ints) -> int:
    """Bytes that `schedule` needs on its fullest rank, with the `fixed` ones and those for messages that wait."""
    return int((fixed + needed(schedule)).max())


def known_orders(problem: Problem) -> list[tuple[str, Schedule]]:
    """The named schedules of a problem that are valid, without two names for one order."""
    orders: list[tuple[str, Schedule]] = []
    for name, schedule in presets_of(problem):
        if all(schedule.order != other.order for _, other in orders) and not verify(problem, schedule):
            orders.append((name, schedule))
    return orders
