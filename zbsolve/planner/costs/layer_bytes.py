"""Bytes that layers keep and states take on one device: Korthikanti et al., 2205.05198, section 4, and ZeRO, 1910.02054.

With b sequences of s tokens, hidden width h, a heads and t tensor ranks a GPT's block keeps
b s h (10 + 24 / t) + 5 a s² b / t (equation 2), all of it over t with sequence parallelism (equation 4); without the scores'
term where they are made again (equation 6), and 2 b s h where all is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..layout import FULL, NONE, Layout, Many
from ..model.shape import Shape
from .layer_times import HALF

SCORE_BYTES = 5  # kept for each attention score: softmax, its dropout, and the mask
LOGIT_BYTES = 6  # for each logit: 16 bits, and 32 of the loss
WEIGHT_BYTES = 2  # for each parameter


class Held(NamedTuple):
    """Bytes of one microbatch that F takes and B frees, that F takes and W frees, that B takes and W frees; and what a pass
    takes while it runs."""

    until_b: Many
    until_w: Many
    from_b: Many
    transient: Many

    @property
    def after_f(self) -> Many:
        """What F leaves."""
        return self.until_b + self.until_w


def block_bytes(shape: Shape, layout: Layout) -> Held:
    """Of one block. Inputs of projections stay until W, and so do the gradients of their outputs, which B makes
    (Qi et al., 2401.10241, section 2.1: 32 b s h of a GPT)."""
    tokens, split, parts = layout.size * shape.sequence, layout.tp, np.where(layout.sequence, layout.tp, 1)
    scores = SCORE_BYTES * tokens * shape.scores / split
    all_kept = tokens * (shape.kept_whole / parts + shape.kept_split / split)
    inputs = tokens * (4 * shape.hidden / parts + 2 * (shape.query_width + shape.inner) / split)
    into = 2 * (shape.query_width + 2 * shape.key_width) + 2 * (2 if shape.gated else 1) * shape.inner
    gradients = tokens * (4 * shape.hidden / parts + into / split)
    full = layout.recompute == FULL
    keys = np.where(np.asarray(layout.slices) > 1, key_bytes(shape, layout), 0.0)  # of earlier slices are not made again
    least = HALF * tokens * shape.hidden / parts + keys
    kept = np.where(full, least, all_kept + np.where(layout.recompute == NONE, scores, 0))
    until_w = np.where(full, 0.0, inputs)
    from_b = np.where(full, gradients + inputs, gradients)
    again = np.where(full, all_kept + scores, np.where(layout.recompute == NONE, 0.0, scores))
    return Held(kept - until_w, until_w, from_b, again + gathered_bytes(shape.matrices / layout.tp, layout))


def key_bytes(shape: Shape, layout: Layout) -> Many:
    """Of a block's keys and values."""
    return 2 * HALF * layout.size * shape.sequence * shape.key_width / layout.tp


def head_bytes(shape: Shape, layout: Layout) -> Held:
    """Of the last norm, the output layer and the loss: logits until B."""
    tokens, parts = layout.size * shape.sequence, np.where(layout.sequence, layout.tp, 1)
    inputs, logits = HALF * tokens * shape.hidden / parts, LOGIT_BYTES * tokens * shape.vocabulary / layout.tp
    return Held(inputs + logits, inputs, HALF * tokens * shape.vocabulary / layout.tp, 0.0 * logits)


def gathered_bytes(parameters: Many, layout: Layout) -> Many:
    """What a pass has of a block's sharded parameters (ZeRO 3) and of its gradients before they are reduced (ZeRO 2, 3), if
    passes gather and reduce. parameters: of a rank's part of the block."""
    weights = np.where(layout.zero == 3, WEIGHT_BYTES * parameters, 0.0)
    return weights + np.where((layout.zero >= 2) & ~layout.gathers_by_stage, HALF * parameters, 0.0)


def state_bytes(layout: Layout, parts: tuple[float, float, float] = (2, 4, 12)) -> Many:
    """Bytes for each parameter of a rank: weights, gradients and optimizer states, `parts`, which ZeRO shards over replicas
    in turn: 18 a parameter, or 6 + 12 / dp with ZeRO 1. All of it where stages gather: what they gathered comes on top."""
    by_stage = layout.gathers_by_stage
    over = [np.where((layout.zero >= stage) | by_stage, layout.dp, 1) for stage in (3, 2, 1)]
    return sum(size / part for size, part in zip(parts, over, strict=True))
