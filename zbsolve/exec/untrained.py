"""Stages that a schedule has no backward of: their layers train nothing, and so say their parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from ..build.untrained import untrained_stages
from ..problem import Problem
from ..util.errors import BadInput


def forwards_alone(problem: Problem) -> bool:
    """Whether the step has no backward at all: then it trains nothing, whatever the model, and is lowered as such."""
    return untrained_stages(problem) == problem.stages


def check_untrained(problem: Problem, counts: Sequence[int], stages: Sequence[int], layers: Mapping[int, nn.Module]) -> None:
    """Raise BadInput naming a parameter that is trained on one of these stages, though the schedule has no backward there.
    counts: layers of every stage; layers: those of these stages, by number."""
    front = 0 if forwards_alone(problem) else untrained_stages(problem)
    for i in (i for s in stages if s < front for i in range(sum(counts[:s]), sum(counts[: s + 1]))):
        for name, parameter in layers[i].named_parameters():
            if parameter.requires_grad:
                raise BadInput(
                    f"layer {i}.{name}: is trained, but the schedule has no backward of its stage: it was made for layers "
                    f"that train nothing there (requires_grad_(False), or solve again)"
                )
