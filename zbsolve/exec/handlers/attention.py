"""Handlers of attention that ranks make for each other: FQ, FA, BQ and BA are parts of what F and B do, FH and BH help.

F and B (or BW) run their stage as they do without an exchange, behind their parts, and ask the helper at each call of
attention (see `slices.exchange`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...problem import Problem
from ...tables import Ints, pass_name
from ..program import Action
from .graph import Graph
from .handler import Handler, RankState


def _part(state: RankState, action: Action, given: Any) -> Any:
    """F or B, which comes behind, does it."""
    return None


def _help(state: RankState, action: Action, given: Any) -> Any:
    assert state.attention is not None
    at = action.stage, action.part, action.kind == "BH"
    if action.goes_on:
        state.attention.begin_serving(action.name, *at)
    else:
        state.attention.serve(*at)
    return None


def _ended(state: RankState, action: Action) -> int:
    """Its rank spent no time on what it served while other passes ran there."""
    assert state.attention is not None
    state.attention.ended(action.name)
    return 0


def _check_help(graph: Graph, rows: Ints) -> None:
    """It has the parts that it helps."""
    for row in rows.tolist():
        one = graph.one(row)
        for kind in ("Q", "A"):
            graph.need(one.kind[0] + kind, one)


def helped_passes(problem: Problem) -> Ints:
    """Rows of helpers and of the passes that they help, shape (helpers, 2)."""
    found, rows = [], problem.rows("FH", "BH") if {"FH", "BH"} & set(problem.passes.kinds) else np.zeros(0, np.int64)
    for row in rows.tolist():
        one = problem.passes[row]
        kinds = ("F",) if one.kind == "FH" else ("B", "BW")
        names = (pass_name(kind, one.stage, one.microbatch, one.slice) for kind in kinds)
        found.append((row, next(problem.index[name] for name in names if name in problem.index)))
    return np.array(found, np.int64).reshape(-1, 2)


PART = Handler(_part, only_time=True, sliced=True, before_its_pass=True)
HELP = Handler(_help, _check_help, sliced=True, helps=True, ended=_ended)
