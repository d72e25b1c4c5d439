"""`Recording`: a trace of any engine in zbsolve's terms: rank, start and end of each pass, step by step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple, NoReturn

from ...build.plain import MAX_PASSES
from ...problem.placement import check
from ...problem.tables import pass_name
from ...util.errors import BadInput, prefixed
from ...util.text import first_difference

BACKWARD = ("B", "BW")  # kinds that receive and send gradients
OWN, HOST, ONE = "a clock a rank", "a clock a host", "one clock"  # which clocks the times are from
MOST = 0.9  # of all steps: if at least this share ran one order, the others are left out
OVERLAP = 0.5  # of the shorter of two passes: passes that overlap by more were one call


class RanPass(NamedTuple):
    """One pass in one step: kind (zbsolve's), stage, microbatch, rank; start and end in µs, without waiting for inputs."""

    kind: str
    stage: int
    microbatch: int
    rank: int
    start: float
    end: float

    @property
    def name(self) -> str:
        """The pass's name."""
        return pass_name(self.kind, self.stage, self.microbatch)


class Hop(NamedTuple):
    """A message between two ranks, from the end of `sender` to the start of `receiver`, which may start later."""

    sender: RanPass
    receiver: RanPass

    @property
    def pair(self) -> tuple[int, int]:
        """From which rank to which."""
        return self.sender.rank, self.receiver.rank

    @property
    def delay(self) -> float:
        """µs from the sender's end to the receiver's start, each by its own rank's clock."""
        return self.receiver.start - self.sender.end


@dataclass(frozen=True)
class RecordedStep:
    """One step of one pipeline. name: the step's name in the file, for messages."""

    name: str
    passes: tuple[RanPass, ...]

    @cached_property
    def by_name(self) -> dict[str, RanPass]:
        """Pass name → pass."""
        return {each_pass.name: each_pass for each_pass in self.passes}

    @cached_property
    def rows(self) -> tuple[tuple[RanPass, ...], ...]:
        """The passes of each rank in the order in which they ran."""
        rows: list[list[RanPass]] = [[] for _ in range(1 + max(each_pass.rank for each_pass in self.passes))]
        for each_pass in sorted(self.passes, key=lambda ran: (ran.start, ran.end)):
            rows[each_pass.rank].append(each_pass)
        return tuple(map(tuple, rows))

    @cached_property
    def order(self) -> tuple[tuple[str, ...], ...]:
        """The names of the passes of each rank in the order in which they ran."""
        return tuple(tuple(ran_pass.name for ran_pass in row) for row in self.rows)

    @property
    def length(self) -> float:
        """First start to last end, µs; only correct if the clocks of ranks agree."""
        return max(each_pass.end for each_pass in self.passes) - min(each_pass.start for each_pass in self.passes)

    def hops(self) -> Iterator[Hop]:
        """All messages between ranks: activations down the stages, gradients up."""
        forward = {(each_pass.stage, each_pass.microbatch): each_pass for each_pass in self.passes if each_pass.kind == "F"}
        backward = {(ran.stage, ran.microbatch): ran for ran in self.passes if ran.kind in BACKWARD}
        for by_place, step in ((forward, 1), (backward, -1)):
            for (stage, microbatch), ran_pass in by_place.items():
                other = by_place.get((stage + step, microbatch))
                if other is not None and other.rank != ran_pass.rank:
                    yield Hop(ran_pass, other)

    def moved(self, offsets: Sequence[float]) -> RecordedStep:
        """The step with `offsets[r]` µs added to the times of rank r."""
        passes = (ran._replace(start=ran.start + offsets[ran.rank], end=ran.end + offsets[ran.rank]) for ran in self.passes)
        return RecordedStep(self.name, tuple(passes))


@dataclass(frozen=True)
class Recording:
    """A trace of another engine. where: its path. format: its format, in words. clocks: OWN (each rank has its own clock),
    HOST (ranks of one host share a clock) or ONE (all ranks do). links: pair of ranks → µs of each message, without waiting;
    missing pairs are estimated. facts: JSON values for the trace. left_out: unused parts of the file, a line each."""

    where: str
    format: str
    clocks: str
    steps: tuple[RecordedStep, ...]
    links: Mapping[tuple[int, int], Sequence[float]]
    facts: dict[str, Any]
    left_out: tuple[str, ...] = ()

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """Stage → rank. Raises BadInput where a stage has no pass or several ranks."""
        homes: dict[int, int] = {}
        for ran in self.steps[0].passes:
            if homes.setdefault(ran.stage, ran.rank) != ran.rank:
                raise BadInput(f"{self.where}: stage {ran.stage} is on rank {homes[ran.stage]} and on rank {ran.rank}")
        hole = next((stage for stage in range(len(homes)) if stage not in homes), None)
        if hole is not None:
            raise BadInput(f"{self.where}: no rank has a pass of stage {hole}: is a rank's file missing?")
        with prefixed(self.where):
            return check([homes[stage] for stage in range(len(homes))])

    def checked(self) -> Recording:
        """The recording with only those steps that ran the most common order. Raises BadInput, naming step, rank and pass,
        if too few ran one order, a pass is missing or duplicated, or two passes of a rank overlap."""
        if not self.steps or not self.steps[0].passes:
            why = f" ({self.left_out[0]})" if self.left_out else ""
            raise BadInput(f"{self.where}: there is no whole step in it{why}")
        for step in self.steps:
            self._check_times(step)
        same = self._of_one_order()
        first = same.steps[0]
        count = (1 + max(each_pass.stage for each_pass in first.passes)) * (1 + max(ran.microbatch for ran in first.passes))
        if count > MAX_PASSES:
            raise BadInput(f"{self.where}: {count} microbatches of stages are more than zbsolve handles ({MAX_PASSES})")
        same._check_whole(first, len(same.placement), 1 + max(each_pass.microbatch for each_pass in first.passes))
        return same

    def _of_one_order(self) -> Recording:
        orders = [step.order for step in self.steps]
        usual, count = Counter(orders).most_common(1)[0]
        if count == len(orders):
            return self
        kept = tuple(step for step, order in zip(self.steps, orders, strict=True) if order == usual)
        odd = next(step for step, order in zip(self.steps, orders, strict=True) if order != usual)
        if count < MOST * len(orders):
            self._refuse_other_order(kept[0], odd)
        note = f"{len(orders) - count} of {len(orders)} steps, which ran another order than most (step {odd.name})"
        return replace(self, steps=kept, left_out=(*self.left_out, note))

    def _at(self, step: RecordedStep, rank: int) -> str:
        return f"{self.where}: step {step.name}: rank {rank}"

    def _check_times(self, step: RecordedStep) -> None:
        if len(step.by_name) < len(step.passes):
            double = next(each_pass for each_pass in step.passes if step.by_name[each_pass.name] is not each_pass)
            raise BadInput(f"{self._at(step, double.rank)}: pass {double.name} ran twice")
        for each_pass in step.passes:
            if not (math.isfinite(each_pass.start) and math.isfinite(each_pass.end) and each_pass.start <= each_pass.end):
                times = f"from {each_pass.start:g} to {each_pass.end:g} µs"
                raise BadInput(f"{self._at(step, each_pass.rank)}: pass {each_pass.name} cannot run {times}")
        for rank, row in enumerate(step.rows):
            for each_pass, other in zip(row, row[1:], strict=False):
                shorter = min(each_pass.end - each_pass.start, other.end - other.start)
                if each_pass.end - other.start > OVERLAP * shorter > 0:
                    raise BadInput(
                        f"{self._at(step, rank)}: passes {each_pass.name} and {other.name} ran at one time: combined passes "
                        "cannot be told apart; record the run without combining (overlapping) F and B"
                    )

    def _check_whole(self, step: RecordedStep, stages: int, microbatches: int) -> None:
        """Every stage of every microbatch has F, and BW or B and W."""
        kinds_of: dict[tuple[int, int], set[str]] = {}
        for each_pass in step.passes:
            kinds_of.setdefault((each_pass.stage, each_pass.microbatch), set()).add(each_pass.kind)
        for stage in range(stages):
            for microbatch in range(microbatches):
                kinds = kinds_of.get((stage, microbatch), set())
                if kinds not in ({"F", "BW"}, {"F", "B", "W"}):
                    raise BadInput(
                        f"{self._at(step, self.placement[stage])}: stage {stage} of microbatch {microbatch} has "
                        f"{' and '.join(sorted(kinds)) or 'no pass'}; F and BW, or F, B and W are needed"
                    )

    def _refuse_other_order(self, first: RecordedStep, step: RecordedStep) -> NoReturn:
        """Raises BadInput for the first pass at which the orders of two steps differ."""
        pairs = enumerate(zip_longest(step.order, first.order, fillvalue=()))
        rank, differs = next((rank, spot) for rank, pair in pairs if (spot := first_difference(*pair)))
        place, ran, other = differs
        raise BadInput(
            f"{self._at(step, rank)}: ran {ran} at place {place}, where step {first.name} ran {other}: steps are mixed; a "
            "trace has one order"
        )
