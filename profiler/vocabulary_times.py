"""How long the passes of a sharded vocabulary take: shards of the real output layer and embedding, and what is left of the
layers, run as the executor runs them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from zbsolve.exec.transport.failure import one_line
from zbsolve.features.vocabulary import VocabularyCosts
from zbsolve.layer import Layer
from zbsolve.models.model import Model
from zbsolve.util.errors import BadInput

from .dataflow import Flow, batch_of, fake_mode, quiet
from .stage_rounds import TURNS, PassTimer, rounds
from .timing import Bench, Progress
from .vocabulary import Clock, Times, held_by_shard, vocabulary_costs
from .vocabulary_cut import Cut, Rest, cut_of, run_shard, run_table

LayerOf = Callable[[int, dict[str, list[float]], dict[str, int], int], Layer]  # of number, samples, sizes, parameter bytes
WARM_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 1, 5, 20  # of each shard
TIME_SHARE, MIN_SECONDS = 0.5, 5.0  # of the time for layers
USUAL_RANKS = 8  # come first, and then their neighbours


class MeasuredVocabulary(NamedTuple):
    """What a sharded vocabulary costs, every sample (see `Profile.samples`), and why nobody knows where there are no
    costs."""

    costs: VocabularyCosts | None
    samples: dict[str, list[float]]
    unknown: str = ""

    @property
    def sizes(self) -> tuple[int, int] | None:
        """Bytes that collectives send: hidden states, and what one shard tells the others."""
        return None if self.costs is None else (self.costs.hidden_bytes, self.costs.statistic_bytes)

    def together(self, ranks: int, collectives: dict[str, list[float]]) -> MeasuredVocabulary:
        """The same with collectives that were measured between so many ranks: kind → samples, µs."""
        if self.costs is None or not collectives:
            return self
        known: dict[str, Any] = {kind: median(row) for kind, row in collectives.items()}
        rows = (replace(row, **known) if row.ranks == ranks else row for row in self.costs.shards)
        samples = {f"vocabulary/{ranks}/{kind}": row for kind, row in collectives.items()}
        return MeasuredVocabulary(replace(self.costs, shards=tuple(rows)), self.samples | samples)


@dataclass(frozen=True)
class VocabularyTimes:
    """What was timed. shards: (ranks, barriers) → pass → samples, µs; tables: ranks → the same; rests: layer → kind → the
    same. held: (ranks, barriers) → bytes, on a CPU (see `held_by_shard`)."""

    shards: dict[tuple[int, int], dict[str, list[float]]] = field(default_factory=dict)
    tables: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    rests: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Numbers of ranks that were measured, with one barrier and with two."""
        return sorted(ranks for ranks, barriers in self.shards if barriers == 2)

    def samples(self, names: tuple[str, ...]) -> dict[str, list[float]]:
        """All of them by name, as in a profile. names: of the model's layers."""
        shards = {
            f"vocabulary/{ranks}/{name}{barriers}": row
            for (ranks, barriers), rows in self.shards.items()
            for name, row in rows.items()
        }
        tables = {f"vocabulary/{ranks}/{name}": row for ranks, rows in self.tables.items() for name, row in rows.items()}
        rests = {f"vocabulary/{names[i]}/{kind}": row for i, rows in self.rests.items() for kind, row in rows.items()}
        return shards | tables | rests


def measured_vocabulary(model: Model, through: Flow, bench: Bench, layer: LayerOf, progress: Progress) -> MeasuredVocabulary:
    """The vocabulary of `model`, timed on `bench`. layer: makes a layer."""
    try:
        times = time_vocabulary(model, through, bench, progress)
        return MeasuredVocabulary(measured_costs(model, through, times, layer), times.samples(model.layer_names))
    except Exception as error:  # the model runs: a vocabulary that cannot be looked at is no reason to refuse it
        return MeasuredVocabulary(None, {}, str(error) if isinstance(error, BadInput) else one_line(error))


def time_vocabulary(model: Model, through: Flow, bench: Bench, progress: Progress) -> VocabularyTimes:
    """Times of one microbatch. Numbers of ranks whose rounds would take too long are left out, but for one, and for
    torchrun's. Raises BadInput where the vocabulary is none that can be sharded."""
    cut, timer = cut_of(model, through, batch_of(model, device=bench.device), torch.randn), PassTimer(bench.device)
    found, until = VocabularyTimes(), time.monotonic() + max(MIN_SECONDS, TIME_SHARE * bench.seconds)
    for rest in cut.rests:
        progress("what a sharded vocabulary leaves of the layers")
        found.rests[rest.number] = _rest(rest, cut, timer)
    together = dist.get_world_size() if dist.is_initialized() else 0  # of torchrun, whose collectives are measured too
    wanted = {*cut.ranks, *([together] if 1 < together <= cut.size else [])}
    most, each = max(wanted), _seconds_a_turn(cut, max(wanted), timer)
    for done, ranks in enumerate(sorted(wanted, key=lambda one: (one != together, abs(one - USUAL_RANKS), one))):
        left = until - time.monotonic()
        last = done == len(wanted) - 1 and not found.shards
        takes = each * most / ranks * 2 * (WARM_ROUNDS + MIN_ROUNDS)
        if takes > left and ranks != together and not last:
            continue
        progress(f"the vocabulary's shards for {ranks} ranks")
        for barriers in (1, 2):
            if bench.device.type == "cpu":
                found.held[ranks, barriers] = held_by_shard(cut, ranks, barriers)
            found.shards[ranks, barriers] = _shard(cut, ranks, barriers, timer, left / len(wanted))
        found.tables[ranks] = _table(cut, ranks, timer)
    return found


def measured_costs(model: Model, through: Flow, times: VocabularyTimes, layer: LayerOf) -> VocabularyCosts:
    """The costs that these times make; bytes that are not known are counted under fake tensors. layer: makes a layer. Raises
    BadInput."""
    mode = fake_mode()
    with mode, quiet():
        cut = replace(cut_of(model, through, batch_of(model, mode)), ranks=tuple(times.ranks))
        clock = Clock(
            lambda ranks, barriers: _medians(times.shards[ranks, barriers]),
            lambda ranks, barriers: times.held.get((ranks, barriers)) or held_by_shard(cut, ranks, barriers),
            lambda ranks: _medians(times.tables[ranks]),
            lambda rest, sizes: layer(rest.number, times.rests[rest.number], sizes, rest.parameter_bytes),
        )
        return vocabulary_costs("measured", cut, clock)


def _medians(rows: dict[str, list[float]]) -> Times:
    return {name: median(row) for name, row in rows.items()}


def _shard(cut: Cut, ranks: int, barriers: int, timer: PassTimer, seconds: float) -> dict[str, list[float]]:
    shard = cut.output(ranks)

    def turn() -> None:
        run_shard(shard, cut.hidden, cut.labels, ranks, barriers, around)

    def around(name: str, call: Callable[[], Any]) -> Any:
        return timer.run(0, name, call)

    return _sampled(turn, timer, seconds)


def _seconds_a_turn(cut: Cut, ranks: int, timer: PassTimer) -> float:
    """About how long a shard of so many takes for one microbatch."""
    begin = time.monotonic()
    run_shard(cut.output(ranks), cut.hidden, cut.labels, ranks, 1, lambda name, call: timer.run(0, name, call))
    timer.drain()
    return time.monotonic() - begin


def _table(cut: Cut, ranks: int, timer: PassTimer) -> dict[str, list[float]]:
    shard = cut.embedding(ranks)
    if shard is None:
        return {}
    return _sampled(lambda: run_table(shard, cut.tokens, lambda name, call: timer.run(0, name, call)), timer, 0.0)


def _rest(rest: Rest, cut: Cut, timer: PassTimer) -> dict[str, list[float]]:
    turns = rounds([[rest.stage]], lambda microbatch, step: (rest.given, cut.labels), timer, recompute=True)
    for _ in TURNS:
        next(turns)
    found: dict[str, list[float]] = {}
    for _ in range(MIN_ROUNDS * len(TURNS)):
        for _, kind, device_us, _ in next(turns):
            found.setdefault(kind, []).append(device_us)
    return found


def _sampled(turn: Callable[[], None], timer: PassTimer, seconds: float) -> dict[str, list[float]]:
    """Pass → samples of turns after one that warms up, for so many seconds, but some in any case."""
    for _ in range(WARM_ROUNDS):
        turn()
    timer.drain()
    found: dict[str, list[float]] = {}
    begin = time.monotonic()
    for done in range(MAX_ROUNDS):
        if done >= MIN_ROUNDS and time.monotonic() - begin > seconds / 2:
            break
        turn()
        for _, name, device_us, _ in timer.drain():
            found.setdefault(name, []).append(device_us)
    return found
