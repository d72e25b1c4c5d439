"""`with_microbatches`: a step of one microbatch, as often as it is wanted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..problem import Problem
from ..tables import Edges, Passes
from ..util.errors import BadInput


def with_microbatches(one: Problem, count: int) -> Problem:
    """The step of `count` microbatches that are all like the only one of the problem `one`.

    Row r of `one` becomes rows r · count to r · count + count − 1, and so do its edges. Raises BadInput where `one` has
    further microbatches, or passes that belong to none.
    """
    if one.microbatches != 1 or not one.in_microbatch.all():
        raise BadInput("microbatches: a step of one microbatch alone can be repeated")
    if count < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {count}")
    p, e, each = one.passes, one.edges, np.arange(count)
    columns = {
        name: np.repeat(getattr(p, name), count) for name in ("kind", "stage", "slice", "rank", "duration", "streams")
    }
    passes = Passes(microbatch=np.tile(each, len(p)), **columns, stream_sets=p.stream_sets)
    ends = {name: (getattr(e, name)[:, None] * count + each).ravel() for name in ("before", "after")}
    further = {name: np.repeat(getattr(e, name), count) for name in ("lag", "bytes", "carries", "sent", "pool")}
    return replace(one, passes=passes, edges=Edges(**ends, **further))
