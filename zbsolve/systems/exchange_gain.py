"""What an exchange of attention comes to in a step: how much is handed over, and what SlimPipe's order takes without it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from ..build.attention_costs import attending
from ..build.vocabulary import model_routes
from ..features.attention_exchange import clipping_note
from ..features.offload import NO_OFFLOAD
from ..features.sharded_vocabulary import vocabulary_of
from ..partition.file import Partition
from ..problem import Problem
from ..profile.profile import Profile
from ..step import Step
from ..util.errors import BadInput, Infeasible
from .table import preset

ORDER = "slimpipe"


class AttentionGain(NamedTuple):
    """handed: how many passes hand attention over, of the `possible` ones behind a first slice; time: µs of attention that
    other ranks make. value, without: µs of SlimPipe's order with the exchange and without it; None where that order is not
    defined, or the step without it is not known. slices: how many the step has; even: whether they are as long. note: what
    was taken as less than profiled; or ""."""

    handed: int
    possible: int
    time: int
    slices: int
    even: bool
    value: int | None = None
    without: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The numbers."""
        return {name: getattr(self, name) for name in ("handed", "possible", "time", "value", "without")}


def attention_gain(problem: Problem) -> AttentionGain:
    """What the problem itself says."""
    p, helping = problem.passes, problem.rows("FH", "BH")
    possible = int((p.slice[attending(problem)] > 0).sum())
    even = len(set(problem.slice_lengths)) < 2
    return AttentionGain(len(helping), possible, int(p.duration[helping].sum()), problem.slices, even)


def attention_gain_of(profile: Profile, step: Step, problem: Problem) -> AttentionGain:
    """The same of a step's problem, one of `step`, beside the step without an exchange."""
    found = attention_gain(problem)
    if found.slices == 1 or not found.even:
        return found
    try:
        plain = _without(profile, step, problem)
        note = clipping_note(profile, plain)
        if step.keeping_open:
            return found._replace(note=note)
        value, without = (int(preset(ORDER, one).timeline().value) for one in (problem, plain))
    except (BadInput, Infeasible):
        return found
    return found._replace(value=value, without=without, note=note)


def _without(profile: Profile, step: Step, problem: Problem) -> Problem:
    """The step on the same stages without an exchange, and without a limit of memory. Raises BadInput, Infeasible."""
    layers = step.partition if isinstance(step.partition, Partition) else problem.layers or None
    named: dict[str, Any] = {"placement": model_routes(problem), "partition": layers, "vocabulary": vocabulary_of(problem)}
    open_now = replace(step.closed, slices=problem.slices, attention_exchange=False, memory=None, offload=NO_OFFLOAD)
    return replace(open_now, **named).problem(replace(profile, capacity=None))
