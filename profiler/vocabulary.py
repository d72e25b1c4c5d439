"""What a sharded vocabulary of a model costs: its shards' times, counted or measured, and the bytes that they keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from zbsolve.exec.vocabulary.shard import blocks, pass_s
from zbsolve.features.vocabulary import ShardCosts, ShardPasses, VocabularyCosts
from zbsolve.layer import Layer

from .memory import Living, costs_of, held_by
from .operation_costs import Op, PassOps, Work, passes_of
from .vocabulary_cut import Cut, Rest, run_shard, run_table

Times = Mapping[str, float]  # of each pass by name, µs


@dataclass(frozen=True)
class Clock:
    """Where numbers come from. shard(ranks, barriers): times of S, "merge" and T; held: bytes (see `held_by_shard`).
    table(ranks): times of VE and VS. rest: what is left of a layer, with the sizes that a Layer has."""

    shard: Callable[[int, int], Times]
    held: Callable[[int, int], tuple[int, int]]
    table: Callable[[int], Times]
    rest: Callable[[Rest, dict[str, int]], Layer]


def vocabulary_costs(source: str, cut: Cut, clock: Clock) -> VocabularyCosts:
    """All of it. source: as in `VocabularyCosts`. cut: of fake tensors."""
    rests = [clock.rest(rest, costs_of([held_by(rest.stage, rest.given, cut.labels)])[0]) for rest in cut.rests]
    with_table = len(rests) > 1
    return VocabularyCosts(
        source,
        cut.size,
        cut.hidden.nbytes,
        _statistic_bytes(cut),
        cut.rests[0].number,
        rests[0],
        tuple(_shard(cut, ranks, clock) for ranks in cut.ranks),
        0 if with_table else None,
        rests[1] if with_table else None,
        cut.tied,
    )


def counted_shard(cut: Cut, ranks: int, barriers: int) -> PassOps:
    """The operations of S, "merge" and T. cut: of fake tensors."""
    found: PassOps = {}
    shard = cut.output(ranks)._replace(blocks=lambda logits: _few_blocks(logits, found["S"]))
    run_shard(shard, cut.hidden, cut.labels, ranks, barriers, _counting(found))
    return found


def counted_table(cut: Cut, ranks: int) -> PassOps:
    """The operations of VE and VS; none where the embedding is not sharded."""
    found: PassOps = {}
    shard = cut.embedding(ranks)
    if shard is not None:
        run_table(shard, cut.tokens, _counting(found))
    return found


def counted_rest(rest: Rest, labels: Any) -> PassOps:
    """The operations of F, B, W and BW of what is left of a layer."""
    return passes_of(rest.stage, rest.given, labels)


def _counting(found: dict[str, list[Op]]) -> Callable[[str, Callable[[], Any]], Any]:
    def around(name: str, call: Callable[[], Any]) -> Any:
        with Work(found.setdefault(name, [])):
            return call()

    return around


def _few_blocks(logits: Tensor, ops: list[Op]) -> Iterator[slice]:
    """Of the blocks of a shard's logits, which may be hundreds, the first two and the last: all but that are alike. `ops`
    are those of the pass; the second block's are added for each that is left out."""
    *alike, last = blocks(logits)
    before = 0
    for block in alike[:2]:
        before = len(ops)
        yield block
    ops += ops[before:] * (len(alike) - 2)
    yield last


def _shard(cut: Cut, ranks: int, clock: Clock) -> ShardCosts:
    one, two = (_passes(clock.shard(ranks, barriers), *clock.held(ranks, barriers)) for barriers in (1, 2))
    lookup = max(clock.table(ranks).values(), default=0.0)
    return ShardCosts(ranks, one, two, cut.parameter_bytes(ranks), lookup, frozen_bytes=cut.frozen_bytes(ranks))


def _passes(times: Times, held: int, transient: int) -> ShardPasses:
    return ShardPasses(times["S"], times["T"], held, transient, times["merge"])


def _statistic_bytes(cut: Cut) -> int:
    """Of one shard, the smallest, since all have as many."""
    return int(pass_s(cut.output(cut.size), cut.hidden, cut.labels, 2).statistics.nbytes)


def held_by_shard(cut: Cut, ranks: int, barriers: int) -> tuple[int, int]:
    """Bytes that S keeps for T, without hidden states and their gradient; the most that a pass takes on top of what is there
    before or after it."""
    shard = cut.output(ranks)._replace(blocks=lambda logits: _few_blocks(logits, []))
    own = [t for one in (shard.weight, shard.bias) if one is not None for t in (one, one.grad) if t is not None]
    after: dict[str, int] = {}
    over = [0]
    with Living([cut.hidden, cut.labels, *own]) as meter:

        def around(name: str, call: Callable[[], Any]) -> Any:
            before = meter.most = meter.now
            result = call()
            after[name] = meter.now
            over.append(meter.most - max(before, after[name]))
            return result

        run_shard(shard, cut.hidden, cut.labels, ranks, barriers, around)
    partial = cut.hidden.nbytes if barriers == 1 else 0
    return after["S"] - partial, max(over)
