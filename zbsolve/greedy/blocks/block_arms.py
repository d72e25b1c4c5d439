"""The state of a search over building blocks, and its arms: patterns and annealing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ...problem import Ints
from ...schedule import Schedule
from ...util.clock import Clock, TimeShare
from ..annealing import Annealing, Pattern, anneal_pattern, anneal_targets, justified
from ..arrays.microbatch import MicrobatchGraph, least_value, rank_work, shortened
from ..decoding import SECONDS_PER_DECODED_PASS, Decoded, DecodeRule, decode, repeated_targets
from .building_block import (
    BuildingBlock,
    earliest_offsets,
    microbatches_in_flight,
    period_lower_bound,
    serial_block,
    shift_lengths,
    shorter_blocks,
)
from .meshed import meshed_blocks, meshing_seconds
from .packing import COARSE, FINE, least_packed
from .period_search import anneal_block

RULES = (
    DecodeRule(1, 0, 2),
    DecodeRule(1, 8, 2),
    DecodeRule(2, 0, 2),
    DecodeRule(0, 0, 1),
    DecodeRule(1, 0, 1),
    DecodeRule(2, 8, 1),
    DecodeRule(1, 16, 2),
)
AS_ORDERED = DecodeRule(0, 0, 1)
PATTERN_RULE = DecodeRule(2, 8, 1)  # the first rule by which patterns are decoded
POOL_SIZE = 3  # decoded schedules that are kept and improved, of different values
ANNEALING_SECONDS = 0.3  # of one annealing over target starts
TARGET_HEATS = (0.05, 0.15, 0.4)  # its temperatures at first, in mean pass durations
PATTERN_HEATS = (1.0, 0.75)  # temperatures at first for a new pattern, and for the best one again
PATTERN_PERIOD = 1.05  # the period of a new pattern, as a multiple of the lower bound
# Microbatches of a sample for patterns: a multiple of those in flight at once; as a share of all, at most.
SAMPLE_FLIGHTS, MAX_SAMPLE_SHARE = 6, 0.6
PATTERN_GOAL = 1.005  # times the target: at this value patterns end
MESHED = 1.02  # times the work of the busiest rank: with a plain block so short, meshed ones are not made
MAX_ROWS = 2  # the most rows of offsets that microbatches of a pattern take in turn
DROP_RATE = 0.3  # how often the worst schedule of the pool is dropped
BLOCK_ROUNDS = 300  # of annealing a block
SECONDS_PER_PLACED_LANE = 1.5e-8  # effort that is counted
PACKING = 10  # packing a lane takes so many times as long as placing it


@dataclass
class BlockSearch:
    """The best decoded schedules so far (`pool`, best first), and the time left.

    Each arm is an iterator: a step may offer schedules to the pool, and it ends if it has nothing more to try.
    """

    g: MicrobatchGraph
    share: TimeShare  # of the clock
    target: int  # µs: no schedule is shorter
    random: np.random.Generator
    others: Callable[[], Sequence[Schedule]]  # what other finders have found by now
    adopted: int = 0  # how many of the others' schedules were decoded here
    pool: list[Decoded] = field(default_factory=list)
    block: BuildingBlock = field(init=False)  # the shortest legal one found
    cost: float = 1e-3  # seconds that one decoding takes
    round_cost: float = 1e-5  # seconds that one round of annealing a block takes

    def __post_init__(self) -> None:
        self.block = serial_block(self.g)

    @cached_property
    def shifts(self) -> Ints:
        """The shifts that annealing uses, µs."""
        return shift_lengths(self.g)

    @cached_property
    def mean(self) -> float:
        """The mean duration of a pass, µs."""
        return float(self.g.duration.mean())

    @property
    def left(self) -> float:
        """Seconds left of the share, never negative."""
        return self.share.left

    @property
    def clock(self) -> Clock:
        """The clock of the share."""
        return self.share.clock

    def seed(self) -> int:
        """A new seed for a compiled annealing."""
        return int(self.random.integers(1 << 31))

    def seconds_of(self, rounds: int, microbatches: int) -> float:
        """The effort of so many decodings of so many microbatches."""
        return rounds * self.g.rank.size * microbatches * SECONDS_PER_DECODED_PASS

    def offer(self, decoded: Decoded | None) -> bool:
        """Add a schedule to the pool, which keeps one of each value. Returns whether it is the best."""
        if decoded is None or any(decoded.value == other.value for other in self.pool):
            return False
        self.pool = sorted([*self.pool, decoded], key=lambda member: member.value)[:POOL_SIZE]
        return self.pool[0] is decoded

    # Decoding targets

    def decode_all(self, target: Ints, rules: tuple[DecodeRule, ...]) -> Iterator[None]:
        """Decode target starts with each of the rules."""
        for rule in rules:
            decoded = decode(self.g, target, rule)
            self.clock.spend(self.cost)
            if self.offer(decoded):
                self.justify(self.pool[0])
            yield
            if decoded is None:
                return

    def decode_block(self, block: BuildingBlock, rules: tuple[DecodeRule, ...]) -> Iterator[None]:
        """Decode the repeated block with each of the rules."""
        yield from self.decode_all(repeated_targets(self.g, block.offset, block.period), rules)

    def justify(self, best: Decoded) -> None:
        """Shift all passes as late, then as early as possible, and offer the result (see `justified`)."""
        for _ in range(2):
            if self.left < 4 * self.cost:
                return
            self.clock.spend(2 * self.cost)
            decoded = justified(self.g, best.start, best.rule)
            self.offer(decoded)
            if decoded is None or decoded.value >= best.value:
                return
            best = decoded

    def adopt(self) -> Iterator[None]:
        """Decode by their start times the schedules that other sources have found since the last call."""
        new = self.others()[self.adopted :]
        self.adopted += len(new)
        for schedule in new:
            yield from self.decode_all(schedule.timeline().start[self.g.passes], (AS_ORDERED, *RULES))

    # Blocks

    def settled(self, start: Ints, period: int) -> tuple[BuildingBlock, bool]:
        """`anneal_block` for at most a twentieth of the time left."""
        began = self.clock.used
        allowed = max(1, min(BLOCK_ROUNDS, int(0.05 * self.left / self.round_cost)))
        result = anneal_block(self.g, start, period, allowed, self.seed())
        self.clock.spend(allowed * self.g.rank.size * SECONDS_PER_PLACED_LANE)
        self.round_cost = max(1e-7, (self.clock.used - began) / allowed)
        return result

    def shorten(self) -> None:
        """Make `block` the shortest of legal blocks of falling period, while time is left."""
        for block in shorter_blocks(self.g, self.block, self.settled, lambda: self.left > 0):
            self.block = block

    def packed(self) -> Iterator[None]:
        """Decode a packed block, if its period is shorter than that of `block`."""
        self.clock.spend((COARSE + FINE) * self.g.rank.size * SECONDS_PER_PLACED_LANE * PACKING)
        block = least_packed(self.g)
        if block.period < self.block.period:
            self.block = block
            yield from self.decode_block(block, RULES)

    def meshed(self) -> Iterator[None]:
        """Decode the shortest meshed block, if the memory allows no plain one that is nearly as short."""
        if self.block.period < MESHED * rank_work(self.g).max():
            return
        self.clock.spend(meshing_seconds(self.g))
        for block in meshed_blocks(self.g)[:1]:
            if block.estimate < self.block.period:
                yield from self.decode_all(block.targets(self.g.microbatches), RULES)

    # Arms

    def pattern_arm(self, seconds: float) -> Iterator[None]:
        """Anneal patterns for so many seconds each.

        The first one starts with every pass as early as possible, which holds memory for the shortest time; then the best so
        far is annealed again. With many microbatches a sample is annealed first. Ends when only ramps can still gain.
        """
        tight = Pattern(earliest_offsets(self.g)[None], int(PATTERN_PERIOD * period_lower_bound(self.g)), PATTERN_RULE)
        m, sample = self.g.microbatches, SAMPLE_FLIGHTS * microbatches_in_flight(self.g)
        few = sample if sample <= MAX_SAMPLE_SHARE * m else m
        best: tuple[int, Pattern] | None = None
        while True:
            for count, again in ((few, False), *((count, True) for count in sorted({few, m}))):
                if self.left <= 0 or (self.pool and self.pool[0].value <= PATTERN_GOAL * self.target):
                    return
                begin = self.told_apart(best[1]) if again and best is not None else tight
                annealed = self.annealed_pattern(begin, count, seconds, PATTERN_HEATS[again])
                if annealed is not None:
                    pattern, value = annealed[0], annealed[1].value
                    if count == few and (best is None or value < best[0]):
                        best = value, pattern
                    targets = repeated_targets(self.g, pattern.offset, pattern.period)
                    yield from self.decode_all(targets, (pattern.rule,))
                yield

    def told_apart(self, pattern: Pattern) -> Pattern:
        """The pattern, at random with more rows of offsets, which microbatches take in turn."""
        rows = int(self.random.integers(len(pattern.offset), MAX_ROWS + 1))
        return pattern._replace(offset=np.repeat(pattern.offset, rows // len(pattern.offset), axis=0))

    def annealed_pattern(self, begin: Pattern, few: int, seconds: float, heat: float) -> tuple[Pattern, Decoded] | None:
        """Anneal a pattern with the first `few` microbatches alone. heat: in mean pass durations."""
        small, share = shortened(self.g, few), few / self.g.microbatches
        target = self.target if share == 1 else least_value(small)
        rounds = max(1, int(min(seconds, self.left) / (share * self.cost)))
        at = self.clock.used
        annealing = Annealing(self.shifts, target, rounds, heat * self.mean, self.seed())
        annealed = anneal_pattern(small, begin, RULES, annealing)
        self.count(rounds, at, few)
        return annealed

    def target_arm(self) -> Iterator[None]:
        """Anneal the target starts of the pool's schedules in turn; sometimes the worst schedule is dropped."""
        while self.pool:
            for begin in list(self.pool):
                if self.left <= 0:
                    return
                at, rounds = self.clock.used, max(1, int(min(ANNEALING_SECONDS, self.left) / self.cost))
                heat = self.mean * float(self.random.choice(TARGET_HEATS))
                decoded = anneal_targets(self.g, begin, Annealing(self.shifts, self.target, rounds, heat, self.seed()))
                self.count(rounds, at, self.g.microbatches)
                if decoded.value < begin.value:
                    self.pool = [other for other in self.pool if other is not begin]
                    self.offer(decoded)
                yield
            if len(self.pool) > 1 and self.random.random() < DROP_RATE:
                self.pool.pop()

    def count(self, rounds: int, began: float, few: int) -> None:
        """Count the effort of so many decodings of `few` microbatches since `began`, and update `cost`."""
        self.clock.spend(self.seconds_of(rounds, few))
        self.cost = max(1e-7, (self.clock.used - began) / rounds * self.g.microbatches / few)
