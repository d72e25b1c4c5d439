"""Sharded parameters (FSDP): the duration and memory of gathers and reductions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..build.sharded import with_sharding
from ..kinds import SHARDING as NAME
from ..problem import Problem
from ..util.errors import BadInput
from .feature import AUTO, Choices, Feature, Field, Named, is_auto
from .links import group_note

GATHERS = (1, 2, 4, 8)  # numbers that a search tries


def _read_gathers(text: str) -> str | int | tuple[int, ...]:
    """ "auto", a number of gathers, or one for each stage. Raises BadInput."""
    if text == AUTO:
        return text
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise BadInput(f"--gathers {text[:40]}: auto, a number, or one a stage such as 1,2,2,1") from None
    return counts[0] if len(counts) == 1 else counts


def _check(step: Any) -> None:
    if is_auto(step.gathers):
        return
    if isinstance(step.gathers, str):
        raise BadInput(f"gathers '{step.gathers}': auto, a number, or one a stage")
    several = [step.gathers] if isinstance(step.gathers, int) else list(step.gathers)
    if min(several, default=1) < 1:
        raise BadInput(f"gathers: {min(several)}: parameters are gathered once at least")
    if step.shards == 1 and any(count != 1 for count in several):
        raise BadInput(f"gathers: {', '.join(map(str, several))}: nothing is gathered without shards")


def _build(problem: Problem, staged: Any) -> Problem:
    """Shard each stage's parameters over the ranks of the group.

    A gather or a reduction takes latency + bytes · (N − 1) / N / bandwidth of the data-parallel group's link; bytes are of
    the stage's parameters, in a reduction only the trained ones. Gradients are as large as the profile's `gradients` says.
    """
    costs, counts, link = staged.costs, staged.counts, staged.group
    shards, sizes, gradients = costs.group, costs.memory.parameters(counts), costs.memory.unreduced(counts)
    if shards == 1:
        return problem
    gather, reduce = (
        [round(link.time(size * (shards - 1) / shards)) if size else 0 for size in each]
        for each in (sizes, costs.memory.trained(counts))
    )
    held = {"parameter_bytes": sizes, "gradient_bytes": gradients}
    return with_sharding(problem, gather, reduce, **held, gathers=staged.step.gathers)


def _choices(step: Any) -> list[Named]:
    most = step.microbatches // len(step.routes)
    counts = [count for count in GATHERS if count == 1 or (count <= most and step.shards > 1)]
    return [(f" gathers={count}", replace(step, gathers=count)) for count in counts]


SHARDING = Feature(
    NAME,
    (
        Field(
            "shards",
            1,
            "parameters are sharded over N ranks of a data-parallel group (FSDP) and gathered in the step (default: 1)",
            "N",
            kind=int,
            untold="over how many ranks parameters are sharded",
            fixed="is gathered",
            offered=("2", "4", "8"),
        ),
        Field(
            "gathers",
            1,
            "with --shards: how often a step's forwards gather a stage's parameters, a number or one a stage such as "
            "1,2,2,1, or auto: the best of 1, 2, 4, 8 (default: 1, and they stay until the stage's last backward)",
            "TIMES",
            read=_read_gathers,
            closed=1,
            fixed="is gathered",
            offered=("2", "4", "8"),
        ),
    ),
    _check,
    _build,
    note=lambda step, profile: group_note("gathers and reductions", profile) if step.shards > 1 else "",
    choices=Choices(("gathers",), _choices, apart=False),
    holds={"sharded parameters": lambda seen: seen.step.shards > 1},
)
