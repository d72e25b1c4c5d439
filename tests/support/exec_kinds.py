"""Kinds of passes that only tests know: problems that have them, their handlers, and what they run on gloo ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from zbsolve import Problem
from zbsolve.build import with_links
from zbsolve.exec.handlers import HANDLERS, Handler
from zbsolve.kinds import Kind, register
from zbsolve.problem.tables import CARGO, Edges

from .exec_tools import a_problem, toy
from .trials import Batches, Trial

RAN: list[str] = []


def note(state: Any, action: Any, given: Tensor | None) -> Tensor | None:
    """What both toy kinds do: note that they ran, and hand on what they are given."""
    RAN.append(action.name)
    assert action.name[1:] in {f"T{action.part}", f"S{action.part}"}
    assert {"F", "B", "W", action.kind} == action.companions
    return given


TOYS = {"T": Handler(note), "S": Handler(note, takes="", makes="what S made", repeatable=True)}


def with_pause(problem: Problem) -> Problem:
    """Each stage pauses between F and B of a microbatch: a pass T that carries nothing."""
    table, place, forwards = with_rows(problem, "T", problem.rows("F"))
    waits = problem.edges.only(np.flatnonzero(problem.passes.are("B")[problem.edges.after]))
    own = problem.passes.are("F")[waits.before]
    behind = Edges.of(place[waits.before[own]], waits.after[own])
    return replace(problem, passes=table, edges=problem.edges + Edges.of(forwards, place[forwards]) + behind)


def with_stop(problem: Problem) -> Problem:
    """Activations stop at a pass S on their way to the next stage: it takes them from F, and they go on from it."""
    forwards = problem.rows("F")[problem.passes.stage[problem.rows("F")] < problem.stages - 1]
    table, place, forwards = with_rows(problem, "S", forwards)
    edges, carried = problem.edges, problem.edges.carrying("activation")
    moved = replace(edges, before=np.where(carried, place[edges.before], edges.before))
    return replace(problem, passes=table, edges=moved + Edges.of(forwards, place[forwards], carries=CARGO[1]))


def forth(state: Any, action: Any, given: Tensor | None) -> Tensor:
    """A number that goes along the stages beside activations, and is that of the stage."""
    RAN.append(action.name)
    number = torch.zeros(()) if given is None else given + 1
    assert number.item() == action.stage
    return number


def back(state: Any, action: Any, given: Tensor | None) -> Tensor:
    """Two numbers that come back beside gradients: how many of four stages are behind this one, and the microbatch."""
    RAN.append(action.name)
    assert given is None or given.tolist() == [2 - action.stage, action.part]
    return torch.tensor([3.0 - action.stage, action.part])


CHAINS = {"QF": Handler(forth), "QB": Handler(back)}


def with_chains(problem: Problem) -> Problem:
    """Registered kinds whose passes of each microbatch send to the next stage, and to the one before."""
    for kind, plain, cargo in (("QF", "F", "activation"), ("QB", "B", "gradient")):
        register(Kind(kind, "numbers between stages", "#dbbee6"))
        table, place, rows = with_rows(problem, kind, problem.rows(plain))
        edges, passes = problem.edges, problem.passes
        models = edges.carrying(cargo) & passes.are(plain)[edges.before] & passes.are(plain)[edges.after]
        sent = edges.only(np.flatnonzero(models))
        own = replace(sent, before=place[sent.before], after=place[sent.after], bytes=0 * sent.bytes)
        problem = replace(problem, passes=table, edges=edges + own + Edges.of(rows, place[rows]))
    return problem


def with_rows(problem: Problem, kind: str, beside: Any) -> tuple[Any, Any, Any]:
    """The table with a pass of this kind for each row of `beside`; row → the row of its pass; `beside`."""
    columns = {name: getattr(problem.passes, name)[beside] for name in ("stage", "microbatch", "rank")}
    table = problem.passes.more(kind, "compute", duration=np.ones(len(beside), np.int64), **columns)
    place = np.zeros(len(problem.passes), np.int64)
    place[beside] = len(problem.passes) + np.arange(len(beside))
    return table, place, beside


BUILDERS = {"T": with_pause, "S": with_stop, "MB": lambda problem: with_links(problem, "rank", 1), "QF": with_chains}


def batch(place: int, step: int) -> Batches:
    x = torch.linspace(-1, 1, 32).reshape(8, 4)
    return x.chunk(4), x.flip(0).chunk(4)


def on_two_ranks(rank: int, seed: int) -> dict[str, Any]:
    """A step with each kind on two ranks: how far it is from the unsplit model, and how often a toy kind ran."""
    found: dict[str, Any] = {}
    for kind, build in BUILDERS.items():
        RAN.clear()
        trial = Trial(problem=build(a_problem((0, 1, 1, 0), 4, layers=4)), layers=toy, batch=batch, order=seed)
        with mock.patch.dict(HANDLERS, (TOYS if kind in TOYS else CHAINS)):
            found[kind] = trial.ran(trial.pipeline()) | {"ran": len(RAN)}
    return found
