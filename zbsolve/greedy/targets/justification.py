"""Justification: everything pushed late, then early again (Valls, Ballestín and Quintanilla, 2005). It shortens ramps."""

from __future__ import annotations

import numpy as np

from ...problem import Ints
from ..arrays.microbatch import MicrobatchGraph, reversed_graph
from .decoding import Decoded, DecodeRule, decode

FILL_ALL = DecodeRule(0, 0, 2)


def justified(g: MicrobatchGraph, start: Ints, rule: DecodeRule) -> Decoded | None:
    """The schedule of starts, µs, shape (lanes, microbatches), pushed late and, as the rule says, early again; None where
    one of the two does not fit the memory."""
    back = reversed_graph(g)
    late = decode(back, _mirrored(g, start), FILL_ALL)
    return None if late is None else decode(g, _mirrored(back, late.start), rule)


def _mirrored(g: MicrobatchGraph, start: Ints) -> Ints:
    """Times of the reversed problem, shape (lanes, microbatches): what ended last starts first."""
    end = start + g.duration[:, None]
    times: Ints = (end.max() - end)[::-1, ::-1]
    return np.ascontiguousarray(times)
