"""Megatron: which layers each stage has, and the best of its own orders (`pipeline_parallel_layer_layout.py`,
`pipeline_parallel/schedules.py`, core 0.16.1).

It does not take an order. With one stage a rank it runs 1F1B; with more, interleaved 1F1B in groups of g microbatches, and
only g can be chosen. For a plan the file also has the flags of its layout (`megatron/training/arguments.py`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence

from ..planner.candidate import Choice, grouped_orders
from ..planner.engines import target
from ..planner.layout import FULL, NONE, SELECTIVE
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.text import format_bytes, format_time, plural
from ..verifier import verify
from .alternatives import compared, cost_of_step
from .exports import Export, Options, layer_letters, stage_letters
from .order import Refused, order_for

TARGET = target("megatron")
RECOMPUTED: Mapping[int, dict[str, int | str | bool]] = {
    NONE: {},
    SELECTIVE: {"recompute_granularity": "selective"},
    FULL: {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
# ZeRO by its stage: Megatron's distributed optimizer is 1, its FSDP 3. Plans count exchanges beside computing.
OVERLAPPED = {"overlap_grad_reduce": True, "overlap_param_gather": True}
FSDP: dict[str, int | str | bool] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
SHARDED: Mapping[int, dict[str, int | str | bool]] = {
    0: {"overlap_grad_reduce": True},
    1: {"use_distributed_optimizer": True, **OVERLAPPED},
    3: {"use_distributed_optimizer": True, **OVERLAPPED, **FSDP, "ckpt_format": "fsdp_dtensor"},
}


def write(schedule: Schedule, options: Options) -> Export:
    """Megatron's arguments as JSON. Raises Refused, BadInput, Deadlock."""
    plan, problem = options.plan, schedule.problem
    if plan is not None and (reason := TARGET.lacks(plan.best.layout)):
        raise Refused(reason)
    order = order_for(schedule, TARGET)
    ranks, count = problem.ranks, problem.microbatches
    letters = layer_letters(problem, options.layers, "Megatron")
    layout = layout_of(letters, problem.layers, ranks)
    group, best = best_group(problem, plan is not None)
    arguments: dict[str, int | str | bool] = {"pipeline_model_parallel_size": ranks}
    arguments |= {"pipeline_model_parallel_layout": layout} if problem.stages > 1 or plan is None else {}
    arguments["num_layers"] = letters.count("t")
    if group is not None:
        arguments["microbatch_group_size_per_virtual_pipeline_stage"] = group
    arguments |= {} if plan is None else layout_arguments(plan)
    flags = " ".join(_flag(name, value) for name, value in arguments.items())
    first = (
        () if options.layers else (f"the first of {len(letters)} layers is the embedding, the last the loss; else --layers",)
    )
    batch = f"a global batch of {plural(microbatch=count)}" if plan is None else plural(device=plan.best.layout.devices)
    if plan is None or plan.best.layout.tp > 1 > plan.best.layout.sequence:
        batch += "; experts on several tensor ranks want --sequence-parallel, too"
    name = "1F1B" if group is None else f"interleaved 1F1B with its best g = {group}"
    step = best.timeline().makespan + (0 if plan is None else plan.best.behind)
    of_plan = "" if plan is None else f"which {cost_of_step(step, plan)}"
    notes = (
        f"{plural(rank=ranks, stage=problem.stages, microbatch=count)}; for Megatron core 0.16.1",
        f"flags: {flags} (with {batch}; none of the other flags that share layers out)",
        *first,
        f"Megatron takes no order: it runs {name}, {_cost(schedule, best) if plan is None else of_plan}",
    )
    facts = {**order.facts(), **arguments, "value": best.timeline().value, "schedule_value": schedule.timeline().value}
    if plan is not None:
        facts |= {"step": step, "plan_step": plan.best.value}
    return Export(json.dumps(arguments, indent=1) + "\n", notes, facts, [list(row) for row in layout.split("|")])


def layout_arguments(plan: Choice) -> dict[str, int | str | bool]:
    """Megatron's arguments for the parts of a plan's layout other than the pipeline."""
    layout = plan.best.layout
    arguments: dict[str, int | str | bool] = {
        "tensor_model_parallel_size": layout.tp,
        "micro_batch_size": layout.size,
        "global_batch_size": plan.batch,
    }
    if layout.sequence:
        arguments["sequence_parallel"] = True
    return arguments | RECOMPUTED[layout.recompute] | (SHARDED[layout.zero] if layout.dp > 1 else {})


def layout_of(letters: str, layers: Sequence[int], ranks: int) -> str:
    """Stages with | between them, for --pipeline-model-parallel-layout. Raises BadInput for what Megatron refuses."""
    stages = stage_letters(letters, layers)
    predicting = [stage for stage, text in enumerate(stages) if "m" in text]
    if len(predicting) > 1 or any(stage < len(stages) - ranks or stage % ranks == 0 < ranks - 1 for stage in predicting):
        raise BadInput(
            f"schedule: stage {predicting[0]} has layers m; Megatron wants all of them on one stage, the last one of a rank "
            "other than the first"
        )
    return "|".join(re.sub(r"(.)\1+", lambda run: f"{run[1]}*{len(run[0])}", text) for text in stages)


def best_group(problem: Problem, within_memory: bool = False) -> tuple[int | None, Schedule]:
    """(g, order): the best group size g (None with one stage a rank), and the order that Megatron runs with it. Raises
    Refused if there is none. within_memory: only orders that fit the memory."""
    ranked = [(schedule.timeline().value, group, schedule) for group, schedule in grouped_orders(problem)]
    if not ranked:
        raise Refused(f"problem: {problem.microbatches} microbatches; Megatron needs at least {problem.ranks}, one a rank")
    within = [order for order in ranked if not verify(problem, order[2])]
    if within_memory and not within:
        raise Refused(f"layout: no order that Megatron has holds within its memory ({verify(problem, ranked[0][2])[0]})")
    _, group, schedule = min(within or ranked, key=lambda order: order[0])
    return group, schedule


def orders(problem: Problem) -> Iterator[tuple[str, Schedule]]:
    """Every order that Megatron has for the problem, by name."""
    for group, schedule in grouped_orders(problem):
        yield "1F1B" if group is None else f"interleaved 1F1B in groups of {group}", schedule


def _cost(schedule: Schedule, best: Schedule) -> str:
    """Time and memory of Megatron's order, compared with the schedule's."""
    ours, theirs = schedule.timeline().value, best.timeline().value
    over = verify(schedule.problem, best)
    memory = f"; it does not fit the schedule's memory: {over[0]}" if over else ""
    held, own = (max(order.timeline().peak_bytes) for order in (best, schedule))
    if held != own:
        memory = f"; its fullest rank holds {format_bytes(held)}, the schedule's {format_bytes(own)}{memory}"
    if ours == theirs:
        return f"{format_time(theirs)}, as long as the exported order{memory}"
    return f"{format_time(theirs)}, {compared(theirs, ours)} than the schedule's {format_time(ours)}{memory}"


def _flag(name: str, value: int | str | bool) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} '{value}'" if isinstance(value, str) else f"{flag} {value}"
