"""Ranks of a pipeline by what lies on them beside blocks: four roles, whatever the partition.

The embedding is on the first stage's rank and the head on the last stage's, which in a V, or alone, are one rank.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...tables import Ints
from ..layout import VEE, Layout

FIRST, LAST, TURN, MIDDLE = range(4)  # of a V, TURN is the rank with both middle stages


class Roles(NamedTuple):
    """By role and layout, shape (4, layouts) each: how many ranks have it; whether they have embedding and head; passes of a
    microbatch whose output goes to another rank; ends of stages where messages wait."""

    number: Ints
    embedding: Ints
    head: Ints
    sends: Ints
    ends: Ints


def roles(layout: Layout) -> Roles:
    """Of a table of layouts."""
    pp, chunks = np.asarray(layout.pp), np.asarray(layout.chunks)
    alone, vee = pp == 1, (np.asarray(layout.placement) == VEE) & (pp > 1)
    one, none = np.ones_like(pp), np.zeros_like(pp)
    last = np.where(alone | vee, 0, 1)
    turn = np.where(vee, 1, 0)
    number = np.stack([one, last, turn, pp - 1 - last - turn])
    together = alone | vee
    embedding = np.stack([one, none, none, none])
    head = np.stack([np.where(together, 1, 0), one, none, none])
    edge = 2 * chunks - 1  # the first stage sends no gradient, the last no activation
    sends = np.stack([np.where(alone, 0, np.where(vee, 2, edge)), edge, 2 * one, 2 * chunks])
    ends = 2 * chunks - np.stack([np.where(together, 2, 1), one, none, none])
    return Roles(number, embedding, head, sends, ends)


def fullest(blocks: int, unit: Ints, fixed: Ints, number: Ints, first: Ints | int = 0) -> Ints:
    """The least that the fullest rank can have, where `blocks` blocks lie on ranks whole, each of `unit`, beside what is
    fixed by role and what the first block of a rank brings: no partition has less. unit, first: shape (layouts,), from 0 up;
    fixed, number: shape (roles, layouts)."""
    floor: Ints = np.where(number > 0, fixed, 0).max(axis=0)
    low, high = floor - 1, floor + first + blocks * unit
    while (high - low > 1).any():
        middle = (low + high) // 2
        room = middle - fixed - first
        here = np.where(unit > 0, room // np.maximum(unit, 1), np.where(room >= 0, blocks, 0))
        taken = (number * np.maximum(here, 0)).sum(axis=0)
        enough = (taken >= blocks) & (middle >= floor)
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high
