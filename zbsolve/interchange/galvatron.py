"""Galvatron 2.4.1: a plan's layout as its strategy file (`core/runtime/hybrid_parallel_config.py`, `utils/config_utils.py`).

The file lists the settings of each transformer layer. The embedding is on the first layer's rank, the head on the last
layer's, and the pipeline runs 1F1B.
"""

from __future__ import annotations

import json

from ..planner.candidate import Choice
from ..planner.engines import target
from ..planner.layout import FULL
from ..problem import Problem
from ..schedule import Schedule
from ..systems.table import preset
from ..util.text import plural
from ..verifier import verify
from .alternatives import cost_of_step
from .exports import Export, Options, layer_letters, stage_letters
from .order import Refused, order_for

TARGET = target("galvatron")
REDUCED = ("ddp", "zero2", "zero2", "zero2")  # ZeRO's stage → default_dp_type; stage 3 is set for each layer


def write(schedule: Schedule, options: Options) -> Export:
    """The strategy file of a plan. Raises Refused, BadInput, Deadlock."""
    plan = options.plan
    assert plan is not None  # exports.py asks for it
    layout, problem = plan.best.layout, schedule.problem
    if reason := TARGET.lacks(layout):
        raise Refused(reason)
    order = order_for(schedule, TARGET)
    best = preset("1f1b", problem)
    if over := verify(problem, best):
        raise Refused(f"layout: Galvatron runs 1F1B, which does not hold within its memory ({over[0]})")
    body = strategy(plan, division_of(problem))
    step = best.timeline().makespan + plan.best.behind
    notes = [
        f"{plural(device=layout.devices, rank=layout.pp, microbatch=layout.count)} of {plural(sequence=layout.size)}; "
        "for Galvatron 2.4.1, as its galvatron_config_path",
        f"Galvatron takes no order: it runs 1F1B, which {cost_of_step(step, plan)}",
    ]
    if layout.zero == 1:
        notes.append("Galvatron's zero2 with async_grad_reduce, its default, reduces once a step: that is ZeRO 1")
    if layout.zero == 2 and not layout.gathers_by_stage:
        kept = "Galvatron keeps gradients whole until the step's end, as ZeRO 1 does"
        notes.append(f"set async_grad_reduce to False, or {kept}")
    facts = {**order.facts(), **body, "step": step, "plan_step": plan.best.value}
    return Export(json.dumps(body, indent=4) + "\n", tuple(notes), facts)


def strategy(plan: Choice, division: list[int]) -> dict[str, int | str]:
    """The fields of the file. division: transformer layers of each rank."""
    layout, layers = plan.best.layout, sum(division)

    def each(value: int) -> str:
        return ",".join([str(value)] * layers)

    return {
        "pp_deg": layout.pp,
        "tp_sizes_enc": each(layout.tp),
        "tp_consecutive_flags": each(1),
        "dp_types_enc": each(int(layout.zero == 3)),
        "use_sp": each(0),
        "checkpoint": each(int(layout.recompute == FULL)),
        "global_bsz": plan.batch,
        "chunks": layout.count,
        "pp_division": ",".join(map(str, division)),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": REDUCED[layout.zero],
        "vtp": layout.tp,
        "vsp": 0,
        "vocab_sdp": int(layout.zero == 3),
    }


def division_of(problem: Problem) -> list[int]:
    """Transformer layers of each rank. Raises Refused where the embedding or the head is on a rank without one."""
    stages = stage_letters(layer_letters(problem, None, "Galvatron"), problem.layers)
    layers = [text.count("t") for text in stages]
    if not all(layers):
        stage = layers.index(0)
        raise Refused(f"stage {stage}: it has no transformer layer, which Galvatron needs on each rank")
    return layers
