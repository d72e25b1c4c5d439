"""Forwards alone: what a step's graph leaves where nothing is trained."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kinds import ATTENTION
from ..problem import Problem


def forwards_only(problem: Problem, microbatches: int) -> Problem:
    """The forwards of `problem`'s first `microbatches` microbatches, with what runs behind them (AF) or makes the embedding
    and the loss of a sharded vocabulary (VE, VB, S, VR), and the activations that they hand on. Nothing holds memory for a
    backward, so no capacity limits them."""
    first = problem.head(microbatches)
    p = first.passes  # F is all of its attention where nobody waits for a backward
    kept = p.that(half="forward") & ~p.that(feature=ATTENTION)
    return replace(first.only(np.flatnonzero(kept)), capacity=None)
