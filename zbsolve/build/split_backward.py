"""A split backward where only a fused one was measured: an estimate."""

from __future__ import annotations

from ..problem import Problem
from ..util.errors import BadInput
from .restage import durations_of, rebuilt


def with_halved_backward(problem: Problem) -> Problem:
    """A plain step of F and BW with B and W in its place, each half of BW: an estimate, and its source says so. What BW
    freed, W frees. Raises BadInput where the problem is no such step."""
    if problem.passes.kinds != ("F", "BW"):
        raise BadInput(f"problem: no step of F and BW alone: it has {' '.join(problem.passes.kinds)}")
    whole = durations_of(problem, "BW")
    split = {"F": durations_of(problem, "F"), "B": whole // 2, "W": whole - whole // 2}
    source = f"estimated: B and W are half of BW each, {problem.source or 'given'}"
    return rebuilt(problem, problem.placement, split, source)
