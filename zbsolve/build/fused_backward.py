"""Fused backwards in a split step: some microbatches of some stages run B and W as one pass BW.

Some engines mix both in one step (DualPipeV of torch.distributed.pipelining splits the backward only where that fills a
bubble). To everybody else such a step is passes and edges like any other.
"""

from __future__ import annotations

import numpy as np

from ..kinds import KINDS
from ..problem import Problem
from ..tables import Bools, Ints
from ..util.errors import BadInput
from .before import check_apart
from .joined import merged
from .numbers import Numbers, whole_numbers


def with_fused_backward(problem: Problem, fused: Bools, BW: Numbers | Ints) -> Problem:
    """`problem`, a step whose backward is split, with one pass BW in place of B and W where `fused` says so.

    fused: booleans, shape (stages, microbatches).
    BW: µs, one number, one a stage, or shape (stages, microbatches), to which comes what B sends.

    BW waits for what B and W waited for, and frees what both freed. Raises BadInput for a wrong shape, and for a stage
    without B and W.
    """
    check_apart(problem, "fused")
    passes = problem.passes
    chosen = np.asarray(fused, bool)
    if chosen.shape != (problem.stages, problem.microbatches):
        raise BadInput(
            f"fused: shape {chosen.shape}, not (stages, microbatches): ({problem.stages}, {problem.microbatches})"
        )
    each = np.asarray(BW)
    times = each if each.shape == chosen.shape else np.tile(whole_numbers(BW, "BW", problem.stages), (len(chosen.T), 1)).T
    home = np.full((2, *chosen.shape), -1, np.int64)
    for half, letter in enumerate("BW"):
        rows = problem.rows(letter)
        home[half, passes.stage[rows], passes.microbatch[rows]] = rows
    b, w = home[:, chosen]
    if min(b.min(initial=0), w.min(initial=0)) < 0:
        stage, microbatch = np.argwhere(chosen & (home < 0).any(axis=0))[0].tolist()
        raise BadInput(f"fused: stage {stage} of microbatch {microbatch} has no B and W that one pass could replace")
    kind, duration = passes.kind.copy(), passes.duration.copy()
    kind[b], duration[b] = KINDS.index("BW"), times[chosen] + problem.sending[b]
    stand_in = np.arange(len(passes))
    stand_in[w] = b
    return merged(problem, stand_in, kind, duration)
