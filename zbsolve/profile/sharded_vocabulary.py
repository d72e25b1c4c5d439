"""Where a profile's output layer, loss and embedding are: whole, on the last and the first stage, or sharded over all ranks
(vocabulary parallelism, arXiv 2411.05288)."""

from __future__ import annotations

from ..build.one_microbatch import one_microbatch_needs
from ..build.vocabulary import barriers_of, with_vocabulary
from ..layer import Link
from ..partition.stage_memory import Shard
from ..problem import Problem
from ..util.errors import BadInput, Infeasible
from ..util.text import exact_bytes, times_note
from .vocabulary import VocabularyCosts

LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS = "last", "redistribute", "sharded", "two-barriers"
VOCABULARIES = (LAST, REDISTRIBUTE, SHARDED, TWO_BARRIERS)
BARRIERS = {SHARDED: 1, TWO_BARRIERS: 2}  # algorithm 2 (Vocab-2) and algorithm 1 (Vocab-1) of the paper


def check_vocabulary(said: str | None, ranks: int, shards: int = 1, further: tuple[str, ...] = ()) -> None:
    """Raise BadInput for what makes no sense whatever the profile. shards: of the parameters (FSDP). further: names that may
    stand for a sharded vocabulary too."""
    if said not in (None, *VOCABULARIES, *further):
        raise BadInput(f"vocabulary '{said}': one of {', '.join((*VOCABULARIES, *further))}")
    if said in (*BARRIERS, *further) and shards > 1:
        raise BadInput(f"vocabulary '{said}': a sharded vocabulary goes without sharded parameters (shards: {shards})")
    if said in BARRIERS and ranks == 1:
        raise BadInput(f"vocabulary '{said}': a vocabulary is sharded over 2 ranks or more, and there is one")


def vocabulary_of(problem: Problem) -> str | None:
    """How the vocabulary of a problem is sharded; None where it is not."""
    return next((name for name, barriers in BARRIERS.items() if barriers == barriers_of(problem)), None)


def shard_of(costs: VocabularyCosts, vocabulary: str, ranks: int) -> Shard:
    """What each of so many ranks has of a vocabulary that is sharded in this way. Raises BadInput for more ranks than
    words."""
    row = costs.shard(ranks)
    passes = row.one if BARRIERS[vocabulary] == 1 else row.two
    sizes = costs.parameter_bytes(ranks), passes.transient, costs.frozen_bytes(ranks)
    return Shard(passes.S, passes.T, BARRIERS[vocabulary], *sizes)


def source_with_shards(source: str, costs: VocabularyCosts, ranks: int) -> str:
    """Where times come from: `source` those of the layers, which says "measured" only where the shards' are too."""
    scaled = costs.shard(ranks).scaled
    if times_note(source) or not (times_note(costs.source) or scaled):
        return source
    return f"estimated: layers measured, the sharded vocabulary {scaled or costs.source}"


def vocabulary_step(problem: Problem, costs: VocabularyCosts | None, link: Link, vocabulary: str | None) -> Problem:
    """`problem`, the step of a model without its vocabulary, with the shards of that, if it is sharded; link: the
    pipeline's. Raises BadInput, and Infeasible where a rank has less memory than one microbatch needs."""
    if costs is None or vocabulary not in BARRIERS:
        return problem
    found = with_vocabulary(problem, costs.passes(problem.ranks, link, BARRIERS[vocabulary]))
    need = one_microbatch_needs(found)
    for rank, room in enumerate(problem.capacity or ()):
        if need[rank] > room:
            need_and_room = f"needs {exact_bytes(need[rank])} for one microbatch, but has {exact_bytes(room)}"
            raise Infeasible(f"capacity: rank {rank} {need_and_room}, with its shard of the vocabulary: no schedule exists")
    return found
