"""Where a profile's output layer, loss and embedding are: as a whole on the last and first stage, or sharded over all ranks
(vocabulary parallelism, arXiv 2411.05288)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..build.mixing import one_microbatch_needs
from ..build.numbers import check_room
from ..build.vocabulary import barriers_of, with_vocabulary
from ..kinds import VOCABULARY as NAME
from ..partition.stage_memory import NONE, Common
from ..problem import Problem
from ..util.errors import BadInput
from ..util.text import times_note
from .feature import AUTO, Choices, Feature, Field, Named, OfRun, is_auto, needs_base

LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS = "last", "redistribute", "sharded", "two-barriers"
VOCABULARIES = (LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS)
LAST_PARTITION = "equal"  # of the vocabulary "last"
BARRIERS = {SHARDED: 1, TWO_BARRIERS: 2}  # algorithm 2 (Vocab-2) and algorithm 1 (Vocab-1) of the paper


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
