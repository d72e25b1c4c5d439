"""Megatron: which layers each stage has, and the best of its own orders (`pipeline_parallel_layer_layout.py`,
`pipeline_parallel/schedules.py`, core 0.16.1).

It takes no order. On one stage a rank it runs 1F1B; on more, interleaved 1F1B in groups of g microbatches, and g is the only
thing to choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from ..problem import Problem
from ..schedule import Schedule
from ..systems.one_direction import interleaved_in_groups, one_f_one_b
from ..util.errors import BadInput
from ..util.text import format_time
from ..verifier import verify
from .alternatives import compared
from .exports import Export, Options
from .layer_kinds import layer_letters, stage_letters
from .order import Refused, order_for
from .targets import target

TARGET = target("megatron")
MAX_TRIED = 1_000_000  # passes of all orders that are tried: some seconds


def write(schedule: Schedule, options: Options) -> Export:
    """Megatron's arguments as JSON. Raises Refused, BadInput, Deadlock."""
    order = order_for(schedule, TARGET)
    problem = schedule.problem
    ranks, count = problem.ranks, problem.microbatches
    letters = layer_letters(problem, options.layers, "Megatron")
    layout = layout_of(letters, problem.layers, ranks)
    group, best = best_group(problem)
    arguments: dict[str, int | str] = {
        "pipeline_model_parallel_size": ranks,
        "pipeline_model_parallel_layout": layout,
        "num_layers": letters.count("t"),
    }
    if group is not None:
        arguments["microbatch_group_size_per_virtual_pipeline_stage"] = group
    flags = " ".join(f"--{name.replace('_', '-')} {_quoted(value)}" for name, value in arguments.items())
    said = (
        () if options.layers else (f"the first of {len(letters)} layers is the embedding, the last the loss; else --layers",)
    )
    notes = (
        f"{ranks} ranks, {problem.stages} stages, {count} microbatches; for Megatron core 0.16.1",
        f"flags: {flags} (with a global batch of {count} microbatches; none of the other flags that share layers out)",
        *said,
        _cost(schedule, best, group),
    )
    facts = {**order.facts(), **arguments, "value": best.timeline().value, "schedule_value": schedule.timeline().value}
    return Export(json.dumps(arguments, indent=1) + "\n", notes, facts, [list(row) for row in layout.split("|")])


def layout_of(letters: str, layers: Sequence[int], ranks: int) -> str:
    """The string for --pipeline-model-parallel-layout: stages with | between them. Raises BadInput for a layout that
    Megatron refuses."""
    stages = stage_letters(letters, layers)
    predicting = [stage for stage, text in enumerate(stages) if "m" in text]
    if len(predicting) > 1 or any(stage < len(stages) - ranks or stage % ranks == 0 < ranks - 1 for stage in predicting):
        raise BadInput(
            f"schedule: stage {predicting[0]} has layers m; Megatron wants all of them on one stage, the last one of a rank "
            "other than the first"
        )
    return "|".join(re.sub(r"(.)\1+", lambda run: f"{run[1]}*{len(run[0])}", text) for text in stages)


def best_group(problem: Problem) -> tuple[int | None, Schedule]:
    """The best g of those tried, and the order that Megatron then runs; None with one stage a rank. Raises Refused where
    none fits."""
    found = [(schedule.timeline().value, group, schedule) for group, schedule in _groups(problem)]
    if not found:
        raise Refused(f"problem: {problem.microbatches} microbatches; Megatron needs at least {problem.ranks}, one a rank")
    within = [one for one in found if not verify(problem, one[2])] or found
    _, group, schedule = min(within, key=lambda one: one[0])
    return group, schedule


def orders(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """Every order that Megatron has for the problem, by name."""
    for group, schedule in _groups(problem):
        yield "1F1B" if group is None else f"interleaved 1F1B in groups of {group}", schedule


def _groups(problem: Problem) -> Iterator[tuple[int | None, Schedule]]:
    """(g, order) of each g that Megatron allows, or as many as MAX_TRIED lets us try: then evenly spread ones, powers of two
    times p, and m."""
    p, m = problem.ranks, problem.microbatches
    if problem.stages == p:
        yield None, one_f_one_b(problem)
        return
    allowed = [g for g in range(p, m + 1) if m % g == 0 or m % g >= p]
    if len(allowed) * len(problem.passes) > MAX_TRIED:
        powers = {p << shift for shift in range(m.bit_length())} | {m}
        spread = -(-len(allowed) * len(problem.passes) // MAX_TRIED)
        allowed = [g for i, g in enumerate(allowed) if g in powers or i % spread == 0]
    for g in allowed:
        yield g, interleaved_in_groups(problem, g)


def _cost(schedule: Schedule, best: Schedule, group: int | None) -> str:
    """What the schedule's own order would gain."""
    ours, theirs = schedule.timeline().value, best.timeline().value
    name = "1F1B" if group is None else f"interleaved 1F1B with its best g = {group}"
    over = verify(schedule.problem, best)
    memory = f"; it does not fit the schedule's memory: {over[0]}" if over else ""
    if ours == theirs:
        return f"Megatron takes no order: it runs {name}, {format_time(theirs)}, as long as the schedule{memory}"
    return (
        f"Megatron takes no order: it runs {name}, {format_time(theirs)}, {compared(theirs, ours)} than the schedule's "
        f"{format_time(ours)}{memory}"
    )


def _quoted(value: int | str) -> str:
    return f"'{value}'" if isinstance(value, str) else str(value)
