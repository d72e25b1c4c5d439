"""What a run says about a sharded vocabulary: S and T of its number of ranks, and what is left of the layers at the ends."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..build.vocabulary import barriers_of
from ..trace import Trace
from ..util.errors import BadInput
from ..util.statistics import weighted_median
from .lengths import lengths_of
from .profile import Profile


def without_shards(base: Profile | None) -> Profile:
    """What a run of a sharded vocabulary is compared with: `base` without what lies on all ranks. Raises BadInput."""
    if base is None:
        raise BadInput("trace: its vocabulary is sharded: a base profile is needed, which says what is left of the layers")
    return base.without_vocabulary()


def with_shards(found: Profile, trace: Trace, base: Profile) -> Profile:
    """`found`, which a run says of what is left of the layers, put into `base`: the run's S and T go into the row of its
    ranks. The ends' whole layers, collectives, and other numbers of ranks did not run and stay as they were."""
    costs, barriers, ranks = base.vocabulary, barriers_of(trace.problem), trace.problem.ranks
    assert costs is not None
    row, (S, T) = costs.shard(ranks), (_shard_us(found, trace, kind) for kind in ("S", "T"))
    row = replace(row, one=replace(row.one, S=S, T=T)) if barriers == 1 else replace(row, two=replace(row.two, S=S, T=T))
    rows = {one.ranks: one for one in costs.shards} | {ranks: row}
    rests = {costs.output: "output_rest"} | ({} if costs.embedding is None else {costs.embedding: "embedding_rest"})
    return replace(
        found,
        layers=tuple(base.layers[i] if i in rests else layer for i, layer in enumerate(found.layers)),
        tied=base.tied,
        vocabulary=replace(
            costs,
            source=costs.source if found.source == base.source else found.source,
            shards=tuple(rows[one] for one in sorted(rows)),
            **{name: found.layers[i] for i, name in rests.items()},  # type: ignore[arg-type]
        ),
    )


def _shard_us(found: Profile, trace: Trace, kind: str) -> float:
    """The median of a shard's pass, µs, on a rank and of a microbatch whose factor is 1."""
    p, rows = trace.problem.passes, trace.problem.rows(kind)
    each = lengths_of(trace).each if found.microbatch_factors else np.ones((len(trace.steps), trace.problem.microbatches))
    weights = each[:, p.microbatch[rows]]
    slow = np.asarray(found.rank_factors or (1.0,) * trace.problem.ranks)[p.rank[rows]]
    return float(weighted_median((trace.computed()[:, rows] / weights / slow).ravel(), weights.ravel()))
