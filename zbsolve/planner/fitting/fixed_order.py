"""µs of a pipeline that runs 1F1B, or interleaved 1F1B, as measured steps did: the longest path through that order."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ...build.plain import pipeline
from ...kinds import KINDS
from ...problem import Problem
from ...systems.table import preset
from ...timeline import Precedence, longest_path

NS = 1000  # a µs: durations are whole numbers, and constants are fitted by small differences
KEPT_ORDERS = 64


def order_time(forward: NDArray[np.float64], backward: NDArray[np.float64], ranks: int, microbatches: int) -> float:
    """µs from the first start to the last end. forward, backward: µs of each stage's passes, shape (stages,), stage i on
    rank i mod `ranks`, with the messages that they send."""
    if ranks == 1:
        return float(microbatches * (forward.sum() + backward.sum()))
    problem, precedence = _order(ranks, len(forward) // ranks, microbatches)
    table = problem.passes
    each = np.where(table.kind == KINDS.index("F"), forward[table.stage], backward[table.stage])
    duration = np.rint(NS * each).astype(np.int64)
    start, _ = longest_path(replace(problem, passes=replace(table, duration=duration)), precedence)
    return float((start + duration).max()) / NS


@lru_cache(maxsize=KEPT_ORDERS)
def _order(ranks: int, chunks: int, microbatches: int) -> tuple[Problem, Precedence]:
    """The step with passes of one length, and who waits for whom."""
    placement = tuple(range(ranks)) * chunks
    problem = pipeline([1] * len(placement), BW=[1] * len(placement), placement=placement, microbatches=microbatches)
    return problem, preset("1f1b" if chunks == 1 else "interleaved", problem).precedence()
