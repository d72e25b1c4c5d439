"""The vocabulary: output layer, loss and input embedding as a whole on the last and first stage, or sharded over all ranks
(vocabulary parallelism, arXiv 2411.05288). Costs of shards and collectives, and the feature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, log2
from operator import attrgetter
from typing import Any

from ..build.mixing import one_microbatch_needs
from ..build.numbers import check_room
from ..build.vocabulary import Vocabulary, barriers_of, with_vocabulary
from ..kinds import VOCABULARY as NAME
from ..partition.layer import Layer, Link
from ..partition.stage_memory import NONE, Common
from ..problem import Problem
from ..util.errors import BadInput
from ..util.text import times_note
from .feature import AUTO, Choices, Feature, Field, Named, OfRun, is_auto, needs_base

LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS = "last", "redistribute", "sharded", "two-barriers"
VOCABULARIES = (LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS)
LAST_PARTITION = "equal"  # of the vocabulary "last"
BARRIERS = {SHARDED: 1, TWO_BARRIERS: 2}  # algorithm 2 (Vocab-2) and algorithm 1 (Vocab-1) of the paper


@dataclass(frozen=True, slots=True)
class ShardPasses:
    """Passes S and T of one shard for one microbatch, µs each. held: bytes that S keeps until T ends, without the hidden
    states and their gradient. transient: the most further bytes inside a pass. merge: µs of the shard's own work at the
    barrier; with a single barrier that includes its part of the input gradient."""

    S: float
    T: float
    held: int
    transient: int = 0
    merge: float = 0.0

    def part(self, share: float) -> ShardPasses:
        """The passes for this share of each sequence."""
        S, T, held = self.S * share, self.T * share, ceil(self.held * share)
        return ShardPasses(S, T, held, ceil(self.transient * share), self.merge * share)


@dataclass(frozen=True, slots=True)
class ShardCosts:
    """The costs of a vocabulary in `ranks` shards; those of the largest one.

    one: with one barrier (algorithm 2: S computes the shard's part of the input gradient, T only the weight gradient). two:
    with two (algorithm 1: T computes both). parameter_bytes: of a shard of the output's weight and, if it is sharded and not
    tied, of the embedding's; frozen_bytes: those that are not trained. lookup: µs of the shard's embedding for one
    microbatch, forward or backward (the longer), without the collective. broadcast, reduce, statistics: µs of the
    collectives, if measured on this number of ranks. scaled: if not measured, from which rows this one is computed.
    """

    ranks: int
    one: ShardPasses
    two: ShardPasses
    parameter_bytes: int
    lookup: float = 0.0
    broadcast: float | None = None
    reduce: float | None = None
    statistics: float | None = None
    scaled: str = ""
    frozen_bytes: int = 0

    def part(self, share: float, link: Link) -> ShardCosts:
        """The costs for this share of each sequence; those of parameters stay."""
        known = ((name, getattr(self, name)) for name in ("broadcast", "reduce", "statistics"))
        times: dict[str, Any] = {name: link.part_of(time, share) for name, time in known if time is not None}
        return replace(self, **times, lookup=self.lookup * share, one=self.one.part(share), two=self.two.part(share))


@dataclass(frozen=True, slots=True)
class VocabularyCosts:
    """The costs of the sharded output layer, loss and input embedding of a model.

    source: where the shards' times come from, as in `Profile.source`. size: rows of the output's weight. hidden_bytes: of
    the last hidden states of one microbatch. statistic_bytes: what a shard sends to the others at the barrier, two numbers
    for each token of a microbatch. output: the number of the layer with logits and loss, the last one; output_rest: what is
    left of it on its stage. embedding, embedding_rest: the same for the input embedding, the first layer; None if it is not
    sharded. tied: output and embedding share a weight. shards: a row for each number of ranks, ascending. Raises BadInput
    for values that make no sense.
    """

    source: str
    size: int
    hidden_bytes: int
    statistic_bytes: int
    output: int
    output_rest: Layer
    shards: tuple[ShardCosts, ...]
    embedding: int | None = None
    embedding_rest: Layer | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        ranks = [row.ranks for row in self.shards]
        if not ranks or ranks != sorted(set(ranks)) or not 1 <= ranks[0] <= ranks[-1] <= self.size:
            raise BadInput(f"shards are for {ranks} ranks: ascending numbers from 1 to {self.size} are needed")
        if (self.embedding is None) != (self.embedding_rest is None):
            raise BadInput("'embedding' and 'embedding_rest' go together")
        if self.tied and self.embedding is None:
            raise BadInput("tied: an embedding that shares the output's weight is sharded with it")

    def part(self, share: float, link: Link, part_of: Callable[[Layer], Layer]) -> VocabularyCosts:
        """The costs for this share of each sequence. part_of: a layer → what it costs for that share."""
        return replace(
            self,
            hidden_bytes=ceil(self.hidden_bytes * share),
            statistic_bytes=ceil(self.statistic_bytes * share),
            output_rest=part_of(self.output_rest),
            embedding_rest=None if self.embedding_rest is None else part_of(self.embedding_rest),
            shards=tuple(row.part(share, link) for row in self.shards),
        )

    def shard(self, ranks: int) -> ShardCosts:
        """The row for this number of ranks. If there is none, it is interpolated in 1/ranks between its neighbours, or
        scaled from the nearest rows, and `scaled` says so. Raises BadInput for more ranks than words."""
        self._check(ranks)
        rows = {row.ranks: row for row in self.shards}
        return rows[ranks] if ranks in rows else self._made(ranks)

    def parameter_bytes(self, ranks: int) -> int:
        """Bytes of the largest shard's parameters."""
        return self._part(ranks, self.shards[0].parameter_bytes)

    def frozen_bytes(self, ranks: int) -> int:
        """Bytes of the largest shard's parameters that are not trained."""
        return self._part(ranks, self.shards[0].frozen_bytes)

    def _part(self, ranks: int, size: int) -> int:
        """Bytes of the largest of `ranks` shards, if the largest one in the first row has `size`."""
        self._check(ranks)
        return ceil(self.size / ranks) * size // ceil(self.size / self.shards[0].ranks)

    def broadcast(self, ranks: int, link: Link) -> float:
        """µs until all ranks have the hidden states of one microbatch: as measured, else the shorter of a binomial tree and
        of scatter and all-gather over the pipeline's link (Thakur et al. 2005, doi 10.1177/1094342005051521)."""
        return self._collective(ranks, "broadcast", _rooted(ranks, self.hidden_bytes, link, ranks - 1))

    def reduce(self, ranks: int, link: Link) -> float:
        """µs until one rank has the sum of all shards' input gradients, or of their parts of the embedding's output: as
        measured, else the shorter of a binomial tree and of reduce-scatter and gather (same source)."""
        return self._collective(ranks, "reduce", _rooted(ranks, self.hidden_bytes, link, log2(ranks)))

    def statistics(self, ranks: int, link: Link) -> float:
        """µs until all ranks have every shard's sums of exponentials and logits of labels: as measured, else an all-gather
        by recursive doubling (same source)."""
        gathered = log2(ranks) * link.latency + (ranks - 1) * self.statistic_bytes / link.bytes_per_us
        return self._collective(ranks, "statistics", gathered)

    def passes(self, ranks: int, link: Link, barriers: int = 1) -> Vocabulary:
        """The argument of `with_vocabulary`, the same for all ranks: whole µs and bytes. Raises BadInput."""
        if barriers not in BARRIERS.values():
            raise BadInput(f"vocabulary: barriers: {barriers}: 1 (the paper's algorithm 2) or 2 (algorithm 1)")
        row = self.shard(ranks)
        here = row.one if barriers == 1 else row.two
        broadcast, reduce = self.broadcast(ranks, link), self.reduce(ranks, link)
        return Vocabulary(
            S=round(here.S),
            T=round(here.T),
            broadcast=round(broadcast),
            reduce=round(reduce),
            statistics=round(self.statistics(ranks, link) + here.merge),
            lookup=None if self.embedding is None else round(row.lookup + max(broadcast, reduce)),
            held_shard=here.held,
            held_hidden=self.hidden_bytes,
            barriers=barriers,
        )

    def rest(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The model's layers, with the rests of the output layer and of the embedding in their places."""
        rests = [*layers]
        rests[self.output] = self.output_rest
        if self.embedding is not None and self.embedding_rest is not None:
            rests[self.embedding] = self.embedding_rest
        return tuple(rests)

    def check(self, layers: int) -> None:
        """Raise BadInput where this output layer is not the last of this many layers, or the embedding not the first."""
        if self.output != layers - 1 or self.embedding not in (None, 0) or layers == 1:
            place = f"output is layer {self.output} and embedding {self.embedding} of {layers} layers"
            raise BadInput(f"vocabulary: {place}: the last one, and the first one or none, are needed")

    def _check(self, ranks: int) -> None:
        if not 1 <= ranks <= self.size:
            raise BadInput(f"vocabulary: {self.size} words cannot be sharded over {ranks} ranks")

    def _collective(self, ranks: int, name: str, modelled: float) -> float:
        known: list[float] = [getattr(row, name) for row in self.shards if row.ranks == ranks]
        return modelled if known in ([], [None]) else known[0]

    def _made(self, ranks: int) -> ShardCosts:
        """A missing row, from the two nearest ones or the only one."""
        below = [row for row in self.shards if row.ranks < ranks]
        above = [row for row in self.shards if row.ranks > ranks]
        nearest = [below[-1], above[0]] if below and above else below[-2:][::-1] or above[:2]
        between = f"interpolated between {nearest[0].ranks} and {nearest[-1].ranks} ranks"
        scaled = between if below and above else f"scaled from {nearest[0].ranks} ranks"

        def at(name: str) -> float:
            return _line(ranks, [(row.ranks, attrgetter(name)(row)) for row in nearest])

        def passes(of: str) -> ShardPasses:
            S, T, held, transient, merge = (at(f"{of}.{name}") for name in ("S", "T", "held", "transient", "merge"))
            if not (below and above):  # work at the barrier depends on tokens, not on the shard's size
                merge = getattr(nearest[0], of).merge
            return ShardPasses(S, T, ceil(held), ceil(transient), merge)

        own, frozen = self.parameter_bytes(ranks), self.frozen_bytes(ranks)
        return ShardCosts(ranks, passes("one"), passes("two"), own, at("lookup"), scaled=scaled, frozen_bytes=frozen)


def _line(ranks: int, rows: Sequence[tuple[int, float]]) -> float:
    """The value at `ranks` on the line in 1/ranks through two rows (ranks, value). Outside of them it is limited to the
    range between the first row's value and that value scaled in proportion: a shard's cost has a part that does not shrink,
    but it grows no faster than the shard."""
    near, value = rows[0]
    proportional = value * near / ranks
    if len(rows) == 1:
        return proportional
    other, second = rows[1]
    drawn = value + (second - value) * (1 / ranks - 1 / near) / (1 / other - 1 / near)
    if min(near, other) < ranks < max(near, other):
        return drawn
    return min(max(drawn, min(value, proportional)), max(value, proportional))


def _rooted(ranks: int, size: int, link: Link, starts: float) -> float:
    """µs to send one rank's bytes to all, or all ranks' bytes to one: the shorter of a binomial tree, ⌈log₂ p⌉ messages, and
    of two phases that each send (p − 1)/p of the bytes. starts: messages of the second phase; the first has log₂ p."""
    tree = ceil(log2(ranks)) * link.time(size)
    return min(tree, (log2(ranks) + starts) * link.latency + 2 * (ranks - 1) / ranks * size / link.bytes_per_us)


def on_all_ranks(step: Any) -> bool:
    """Is the vocabulary of a step on all ranks, or does the search decide it?"""
    return is_auto(step.vocabulary) or step.vocabulary in BARRIERS


def _check(step: Any) -> None:
    where, partition = step.vocabulary, step.partition
    if where not in (None, *VOCABULARIES, AUTO):
        raise BadInput(f"vocabulary '{where}': one of {', '.join((*VOCABULARIES, AUTO))}")
    if where == LAST and partition not in (None, LAST_PARTITION) and isinstance(partition, str):
        raise BadInput(f"partition '{partition}': vocabulary 'last' has the partition '{LAST_PARTITION}'")


def vocabulary_of(problem: Problem) -> str | None:
    """How the vocabulary of a problem is sharded; None if it is not."""
    return next((name for name, barriers in BARRIERS.items() if barriers == barriers_of(problem)), None)


def without_vocabulary(profile: Any) -> Any:
    """The profile without the sharded parts of output layer, loss and embedding; layers keep their numbers. All ranks have
    the shards' parameters and their optimizer states in addition (see `VocabularyCosts.parameter_bytes`). Raises BadInput
    where the profile has no costs for a sharded vocabulary."""
    costs = profile.vocabulary
    if costs is None:
        why = profile.facts.get("no_vocabulary", "the profile has no field 'vocabulary'")
        raise BadInput(f"vocabulary: {why}: what a sharded one costs is not known")
    gone = {costs.output, costs.embedding}
    groups = ((size, tuple(i for i in group if i not in gone)) for size, group in profile.tied)
    tied = tuple((size, group) for size, group in groups if len(group) > 1)
    return replace(profile, layers=costs.rest(profile.layers), tied=tied, vocabulary=None)


def on_stages(profile: Any, vocabulary: str | None, ranks: int) -> tuple[Any, Common]:
    """The profile of what is on stages, and what each of `ranks` ranks has in addition. Raises BadInput."""
    if vocabulary not in BARRIERS:
        return profile, NONE
    plain, costs, source = without_vocabulary(profile), profile.vocabulary, profile.source
    row = costs.shard(ranks)
    if not times_note(source) and (
        times_note(costs.source) or row.scaled
    ):  # "measured" only where the shards' times are too
        source = f"estimated: layers measured, the sharded vocabulary {row.scaled or costs.source}"
    passes = row.one if BARRIERS[vocabulary] == 1 else row.two
    sizes = costs.parameter_bytes(ranks), passes.transient, costs.frozen_bytes(ranks)
    return replace(plain, source=source), Common(passes.S, passes.T, BARRIERS[vocabulary], *sizes)


def _build(problem: Problem, staged: Any) -> Problem:
    """Add the shards of the vocabulary on all ranks, to a step of a model without it."""
    costs, vocabulary = staged.part.vocabulary, staged.step.vocabulary
    if costs is None or vocabulary not in BARRIERS:
        return problem
    sharded = with_vocabulary(problem, costs.passes(problem.ranks, staged.profile.link, BARRIERS[vocabulary]))
    check_room(one_microbatch_needs(sharded), problem.capacity, also=", with its shard of the vocabulary")
    return sharded


def vocabularies(step: Any) -> list[Named]:
    """The choices for output layer, loss and embedding, if the search decides. With a given partition "last" and
    "redistribute" are the same; a single rank has no shards."""
    if not is_auto(step.vocabulary):
        return [("", step)]
    names = [name for name in VOCABULARIES if name != (REDISTRIBUTE if step.partition == LAST_PARTITION else LAST)]
    names = [name for name in names if step.ranks > 1 or name not in BARRIERS]
    steps = [(f" vocabulary={name}", replace(step, vocabulary=name)) for name in names]
    if isinstance(step.partition, str | None) and step.partition != LAST_PARTITION:
        steps.insert(0, (f" vocabulary={LAST}", replace(step, vocabulary=LAST, partition=LAST_PARTITION)))
    return steps


def _with_times(profile: Any, base: Any, us: Callable[[str], float], problem: Problem) -> Any:
    """`profile`, a run's result for the rests of the layers, with the rest of `base`: the run's S and T go into the row for
    its number of ranks. All that did not run (whole end layers, collectives, other numbers of ranks) is not changed."""
    if not (barriers := barriers_of(problem)):
        return profile
    costs, ranks, part = base.vocabulary, problem.ranks, "one" if barriers == 1 else "two"
    row = costs.shard(ranks)
    row = replace(row, **{part: replace(getattr(row, part), S=us("S"), T=us("T"))})
    rows = {shard.ranks: shard for shard in costs.shards} | {ranks: row}
    rests = {costs.output: "output_rest"} | ({} if costs.embedding is None else {costs.embedding: "embedding_rest"})
    changed: dict[str, Any] = {name: profile.layers[i] for i, name in rests.items()}
    changed |= {"source": costs.source if profile.source == base.source else profile.source}
    return replace(
        profile,
        layers=tuple(base.layers[i] if i in rests else layer for i, layer in enumerate(profile.layers)),
        tied=base.tied,
        vocabulary=replace(costs, shards=tuple(rows[count] for count in sorted(rows)), **changed),
    )


VOCABULARY = Feature(
    NAME,
    (
        Field(
            "vocabulary",
            None,
            "output layer, loss and embedding: last: on the last and first stage, as many layers on each; redistribute: "
            "there, with layers moved; sharded: on all ranks; two-barriers: the same with two barriers a microbatch; auto: "
            "the best of these (default: as --partition says)",
            choices=(*VOCABULARIES, AUTO),
            closed=None,
            told=vocabulary_of,
            fixed="is sharded",
            offered=VOCABULARIES,
        ),
    ),
    _check,
    _build,
    usual=False,
    partition=lambda step: LAST_PARTITION if step.vocabulary == LAST else "",
    choices=Choices(("vocabulary",), vocabularies, compared=True),
    of_run=OfRun(
        needs_base(lambda problem: bool(barriers_of(problem)), "its vocabulary is sharded", "what is left of the layers"),
        lambda base, problem: without_vocabulary(base) if barriers_of(problem) else base,
        _with_times,
    ),
    holds={
        "sharded vocabulary": lambda seen: on_all_ranks(seen.step),
        "a single rank": lambda seen: seen.step.ranks == 1 and not is_auto(seen.step.vocabulary),
    },
)
