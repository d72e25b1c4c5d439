"""The costs of a sharded vocabulary, and the times of its passes: shards of the real output layer and embedding, and the
rest of their layers, run as in the executor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.vocabulary.shard import blocks, pass_s
from zbsolve.features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.layer import Layer
from zbsolve.util.errors import BadInput, one_line

from .dataflow import batch_of, fake_mode, quiet
from .memory import costs_of, held_by
from .operation_costs import Op, PassOps, counting
from .stage_rounds import TURNS, PassTimer, Sample, Samples, rounds, sampled
from .timing import Measuring, Part, layer_of
from .vocabulary_cut import Cut, Rest, cut_of, run_shard, run_table

Times = Mapping[str, float]  # pass name → µs


@dataclass(frozen=True)
class Clock:
    """The source of numbers. shard(ranks, barriers): times of S, "merge" and T; held: bytes (see `held_by_shard`).
    table(ranks): times of VE and VS. rest: the rest of a layer, with the sizes of a Layer."""

    shard: Callable[[int, int], Times]
    held: Callable[[int, int], tuple[int, int]]
    table: Callable[[int], Times]
    rest: Callable[[Rest, dict[str, int]], Layer]


def vocabulary_costs(source: str, cut: Cut, clock: Clock) -> VocabularyCosts:
    """All costs. source: as in `VocabularyCosts`. cut: with fake tensors."""
    rests = [clock.rest(rest, costs_of([held_by(rest.stage, rest.given, cut.labels)])[0]) for rest in cut.rests]
    with_table = len(rests) > 1
    return VocabularyCosts(
        source,
        cut.size,
        cut.hidden.nbytes,
        # from the smallest shard: all have the same number of statistics
        int(pass_s(cut.output(cut.size), cut.hidden, cut.labels, 2).statistics.nbytes),
        cut.rests[0].number,
        rests[0],
        tuple(_one_shard(cut, ranks, clock) for ranks in cut.ranks),
        0 if with_table else None,
        rests[1] if with_table else None,
        cut.tied,
    )


def counted_shard(cut: Cut, ranks: int, barriers: int) -> PassOps:
    """The operations of S, "merge" and T. cut: with fake tensors."""
    ops: PassOps = {}
    shard = cut.output(ranks, lambda logits: _few_blocks(logits, ops["S"]))
    run_shard(shard, cut.hidden, cut.labels, ranks, barriers, counting(ops))
    return ops


def counted_table(cut: Cut, ranks: int) -> PassOps:
    """The operations of VE and VS; none if the embedding is not sharded."""
    ops: PassOps = {}
    shard = cut.embedding(ranks)
    if shard is not None:
        run_table(shard, cut.tokens, counting(ops))
    return ops


def _few_blocks(logits: Tensor, ops: list[Op]) -> Iterator[slice]:
    """The first two and the last block of a shard's logits, which may have hundreds of blocks: all but the last are equal.
    `ops` are those of the pass; the second block's are added for each block left out."""
    *alike, last = blocks(logits)
    before = 0
    for block in alike[:2]:
        before = len(ops)
        yield block
    ops += ops[before:] * (len(alike) - 2)
    yield last


def _one_shard(cut: Cut, ranks: int, clock: Clock) -> ShardCosts:
    def passes(barriers: int) -> ShardPasses:
        times = clock.shard(ranks, barriers)
        return ShardPasses(times["S"], times["T"], *clock.held(ranks, barriers), times["merge"])

    size, frozen = cut.parameter_bytes(ranks), cut.parameter_bytes(ranks, frozen=True)
    lookup = max(clock.table(ranks).values(), default=0.0)
    return ShardCosts(ranks, passes(1), passes(2), size, lookup, frozen_bytes=frozen)


def held_by_shard(cut: Cut, ranks: int, barriers: int) -> tuple[int, int]:
    """Bytes that S keeps for T, without hidden states and their gradient; the peak inside a pass beyond what lives before or
    after it."""
    shard = cut.output(ranks, lambda logits: _few_blocks(logits, []))
    own = [t for tensor in (shard.weight, shard.bias) if tensor is not None for t in (tensor, tensor.grad) if t is not None]
    after: dict[str, int] = {}
    over = [0]
    with LiveBytes([cut.hidden, cut.labels, *own]) as meter:

        def around(name: str, call: Callable[[], Any]) -> Any:
            before = meter.most = meter.now
            result = call()
            after[name] = meter.now
            over.append(meter.most - max(before, after[name]))
            return result

        run_shard(shard, cut.hidden, cut.labels, ranks, barriers, around)
    partial = cut.hidden.nbytes if barriers == 1 else 0
    return after["S"] - partial, max(over)


ROUNDS = WARM_ROUNDS, MIN_ROUNDS, MAX_ROUNDS = 1, 5, 20  # of each shard
TIME_SHARE, MIN_SECONDS = 0.5, 5.0  # of the time for layers
USUAL_RANKS = 8  # measured first, then their neighbours


class VocabularyPart(Part):
    """The costs of a sharded vocabulary in a measurement; if there are none, a fact says why."""

    def after(self, what: Measuring) -> None:
        """Time the vocabulary of the model."""
        if what.bench.spread is not None:
            self.facts = {"no_vocabulary": "layers are spread over a mesh"}
            return
        try:
            times = _timed(what)
            costs = _costs(what, times)
        except Exception as error:  # the model runs even if its vocabulary cannot be examined
            self.facts = {"no_vocabulary": str(error) if isinstance(error, BadInput) else one_line(error)}
            return
        self.fields, self.samples = {"vocabulary": costs}, times.samples(what.model.layer_names)
        self.sent = costs.hidden_bytes, costs.statistic_bytes  # of hidden states, and of one shard's softmax statistics

    def together(self, ranks: int, collectives: Samples) -> None:
        """Put the medians into the row for this number of ranks."""
        if self.sent is not None and collectives:
            costs, known = self.fields["vocabulary"], {kind: median(row) for kind, row in collectives.items()}
            rows = (replace(row, **known) if row.ranks == ranks else row for row in costs.shards)
            self.fields = {"vocabulary": replace(costs, shards=tuple(rows))}
            self.samples |= {f"vocabulary/{ranks}/{kind}": row for kind, row in collectives.items()}


@dataclass(frozen=True)
class VocabularyTimes:
    """Measured times. shards: (ranks, barriers) → pass → samples, µs; tables: ranks → the same; rests: layer → kind → the
    same. held: (ranks, barriers) → bytes, on a CPU (see `held_by_shard`)."""

    shards: dict[tuple[int, int], Samples] = field(default_factory=dict)
    tables: dict[int, Samples] = field(default_factory=dict)
    rests: dict[int, Samples] = field(default_factory=dict)
    held: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    @property
    def ranks(self) -> list[int]:
        """Numbers of ranks that were measured, with one barrier and with two."""
        return sorted(ranks for ranks, barriers in self.shards if barriers == 2)

    def samples(self, names: tuple[str, ...]) -> Samples:
        """All samples by name, as in a profile. names: of the model's layers."""
        parts: dict[tuple[Any, Any], Samples] = dict(self.shards)  # location, and the suffix of a pass
        parts |= {(ranks, ""): rows for ranks, rows in self.tables.items()}
        parts |= {(names[i], ""): rows for i, rows in self.rests.items()}
        return {f"vocabulary/{at}/{name}{end}": row for (at, end), rows in parts.items() for name, row in rows.items()}


def _timed(what: Measuring) -> VocabularyTimes:
    """Times of one microbatch. Numbers of ranks whose rounds would take too long are left out, except one and torchrun's.
    Raises BadInput if the vocabulary cannot be sharded."""
    device, times = what.bench.device, VocabularyTimes()
    cut, timer = cut_of(what.model, what.through, batch_of(what.model, device=device), torch.randn), PassTimer(device)
    until = time.monotonic() + max(MIN_SECONDS, TIME_SHARE * what.bench.seconds)
    for rest in cut.rests:
        what.progress("what a sharded vocabulary leaves of the layers")
        times.rests[rest.number] = _rest(rest, cut, timer)
    together = dist.get_world_size() if dist.is_initialized() else 0  # torchrun's, whose collectives are measured
    wanted = {*cut.ranks, *([together] if 1 < together <= cut.size else [])}
    most, each = max(wanted), _seconds_a_turn(cut, max(wanted), timer)
    for done, ranks in enumerate(sorted(wanted, key=lambda count: (count != together, abs(count - USUAL_RANKS), count))):
        left = until - time.monotonic()
        last = done == len(wanted) - 1 and not times.shards
        takes = each * most / ranks * 2 * (WARM_ROUNDS + MIN_ROUNDS)
        if takes > left and ranks != together and not last:
            continue
        what.progress(f"the vocabulary's shards for {ranks} ranks")
        for barriers in (1, 2):
            if device.type == "cpu":
                times.held[ranks, barriers] = held_by_shard(cut, ranks, barriers)
            own = cut.output(ranks)
            run = partial(run_shard, own, cut.hidden, cut.labels, ranks, barriers, partial(timer.run, 0))
            times.shards[ranks, barriers] = _sampled(run, timer, left / len(wanted))
        table = cut.embedding(ranks)
        if table is not None:
            times.tables[ranks] = _sampled(partial(run_table, table, cut.tokens, partial(timer.run, 0)), timer, 0.0)
    return times


def _costs(what: Measuring, times: VocabularyTimes) -> VocabularyCosts:
    """The costs from these times; unknown bytes are counted with fake tensors. Raises BadInput."""
    model, mode = what.model, fake_mode()
    with mode, quiet():
        cut = replace(cut_of(model, what.through, batch_of(model, mode)), ranks=tuple(times.ranks))
        clock = Clock(
            lambda ranks, barriers: _medians(times.shards[ranks, barriers]),
            lambda ranks, barriers: times.held.get((ranks, barriers)) or held_by_shard(cut, ranks, barriers),
            lambda ranks: _medians(times.tables.get(ranks, {})),
            lambda rest, sizes: layer_of(model, rest.number, times.rests[rest.number], sizes, rest.parameter_bytes),
        )
        return vocabulary_costs("measured", cut, clock)


def _medians(rows: Samples) -> Times:
    return {name: median(row) for name, row in rows.items()}


def _seconds_a_turn(cut: Cut, ranks: int, timer: PassTimer) -> float:
    """About how long one of `ranks` shards takes for one microbatch."""
    begin = time.monotonic()
    run_shard(cut.output(ranks), cut.hidden, cut.labels, ranks, 1, partial(timer.run, 0))
    timer.drain()
    return time.monotonic() - begin


def _rest(rest: Rest, cut: Cut, timer: PassTimer) -> Samples:
    count, batch = len(TURNS), (rest.given, cut.labels)
    turns = rounds([[rest.stage]], lambda microbatch, step: batch, timer, recompute=True)
    (samples,) = sampled(turns, 0.0, (count, MIN_ROUNDS * count, MIN_ROUNDS * count)).values()
    return samples


def _sampled(turn: Callable[[], None], timer: PassTimer, seconds: float) -> Samples:
    """Pass → samples of turns after a warm-up, for this many seconds, but at least a few."""

    def turns() -> Iterator[list[Sample]]:
        while True:
            turn()
            yield timer.drain()

    return sampled(turns(), seconds / 2, ROUNDS)[0]
