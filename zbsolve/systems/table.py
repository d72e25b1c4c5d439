"""The systems of the literature: what each is called, where it is defined, its formulas, and a problem to see it on.

p ranks, v chunks a rank, m microbatches; F, B, W pass times of a rank, B the input gradient alone; M what 1F1B's first rank
holds: p microbatches of one rank's activations. Bubble: time beyond a rank's work; of the makespan where nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial

from .. import placement as placements
from ..build.recompute import without_recompute
from ..build.untrained import with_backward
from ..greedy.side_stream import with_side_streams, without_side_streams
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput, NotFound
from .entry import ASYNCHRONOUS, OFFLOAD, TWO_DIRECTIONS, VOCABULARY, System
from .one_direction import (
    gis,
    gis_h,
    gpipe,
    interleaved,
    interleaved_in_groups,
    interleaved_zb,
    one_f_one_b,
    one_f_one_b_split,
    pipedream,
    zb_1p,
    zb_2p,
    zb_h1,
    zb_h2,
)
from .one_gap import zb_gap
from .pipeoffload import full_copies, half_copies, po_full, po_half
from .plain_step import WrongPlacement, without_shards
from .slices import SLICED
from .two_directions import chimera, dualpipe, dualpipe_v, gems
from .vee import one_f_one_b_v, one_f_one_b_vocabulary, v_half, v_half_vocabulary, v_min, v_zb, zb_h1_vocabulary, zb_v
from .vee_times import zb_v_by_times

SYSTEMS: tuple[System, ...] = (
    System("gpipe", "GPipe", gpipe, "arXiv 1811.06965", "single", "(p−1)(F+B+W)", "m microbatches", fused=True),
    System(
        "1f1b",
        "1F1B (DAPPLE, PipeDream-Flush)",
        one_f_one_b,
        "arXiv 2007.01045",
        "single",
        "(p−1)(F+B+W)",
        "M: min(p−r, m)",
        fused=True,
        split="1f1b-split",
    ),
    System(
        "1f1b-split",
        "1F1B with a split backward",
        one_f_one_b_split,
        "arXiv 2401.10241",
        "single",
        "(p−1)(F+B)",
        "M",
    ),
    System(
        "interleaved",
        "Interleaved 1F1B",
        interleaved,
        "arXiv 2104.04473",
        "loop",
        "(p−1)(F+B+W)/v",
        "M(1+(p−1)/(pv))",
        fused=True,
        in_groups=lambda size: partial(interleaved_in_groups, size=size),
    ),
    System("gis", "Grouped interleaving (GIS)", gis, "arXiv 2503.01328", "loop", "(p−1)(F+B) of a chunk", "M"),
    System("gis-h", "GIS, half memory", gis_h, "arXiv 2503.01328", "loop", "GIS + (v−1)(p/2)(F+B−W)", "(v+1)/(2v)·M"),
    System(
        "interleaved-zb",
        "Interleaved zero bubble (torch.distributed.pipelining)",
        interleaved_zb,
        "arXiv 2401.10241",
        "loop",
        "(p−1)(F+B−W) of a chunk",
        "M",
    ),
    System("zb-h1", "ZB-H1", zb_h1, "arXiv 2401.10241", "single", "(p−1)(F+B−W)", "M"),
    System(
        "zb-gap",
        "ZB-H1 with a gap",
        zb_gap,
        "docs/notes/tight-memory.md",
        "single",
        "ZB-H1's, or less by times",
        "M, or what there is",
    ),
    System("zb-h2", "ZB-H2", zb_h2, "arXiv 2401.10241", "single", "(p−1)(F+B−2W) of the span", "(2p−1)/p·M"),
    System("zb-1p", "Automatic zero bubble, 1p", zb_1p, "arXiv 2401.10241", "single", "ZB-H1's or less", "M", searched=True),
    System(
        "zb-2p", "Automatic zero bubble, 2p", zb_2p, "arXiv 2401.10241", "single", "near 0 of the span", "2M", searched=True
    ),
    System(
        "1f1b-v",
        "1F1B-V",
        one_f_one_b_v,
        "arXiv 2405.15362",
        "vee",
        "0 in the steady state at B+W=2F",
        "about 2/3 M",
        fused=True,
    ),
    System("zb-v", "ZB-V", zb_v, "arXiv 2401.10241", "vee", "0 of the span at F=B=W", "M"),
    System(
        "zb-v-times",
        "ZB-V by times",
        zb_v_by_times,
        "arXiv 2401.10241",
        "vee",
        "ZB-V's, or less where times differ",
        "what there is",
    ),
    System("v-zb", "V-ZB", v_zb, "arXiv 2405.15362", "vee", "0 of the span at F=B=W", "M"),
    System("v-half", "V-Half", v_half, "arXiv 2405.15362", "vee", "about half of 1F1B's at F=B=W", "⌊(p+2)/2⌋ microbatches"),
    System("v-min", "V-Min", v_min, "arXiv 2405.15362", "vee", "about 2/3 of 1F1B's at F=B=W", "⌊(p+4)/3⌋ microbatches"),
    System(
        "dualpipe-v",
        "DualPipeV",
        dualpipe_v,
        "deepseek-ai/DualPipe",
        "vee",
        "(p−1)(F+B−W) of a chunk",
        "2p+1 chunks",
        needs="m ≥ 2p",
    ),
    System(
        "po-f",
        "PipeOffload, full (PO-F)",
        po_full,
        "arXiv 2503.01328",
        "loop",
        "under v(p−1)(F+B+W) of a chunk",
        "about 4 chunks",
        needs="copies out and back in F+B+W",
        group=OFFLOAD,
        copies=full_copies,
    ),
    System(
        "po-h",
        "PipeOffload, half (PO-H)",
        po_half,
        "arXiv 2503.01328",
        "loop",
        "under v(p−1)(F+B+W) of a chunk",
        "(v+2)/(8v)·M",
        needs="copies out and back in twice F+B+W",
        group=OFFLOAD,
        copies=half_copies,
    ),
    *SLICED,
    System(
        "1f1b-vocab",
        "1F1B with a sharded vocabulary",
        one_f_one_b_vocabulary,
        "arXiv 2411.05288",
        "single",
        "1F1B's: (p−1)(F+B+W)",
        "p−r+1, with two barriers p−r+2",
        fused=True,
        group=VOCABULARY,
        vocabulary=True,
    ),
    System(
        "zb-h1-vocab",
        "ZB-H1 with a sharded vocabulary",
        zb_h1_vocabulary,
        "arXiv 2411.05288",
        "single",
        "ZB-H1's and a slot a barrier",
        "p+1, with two barriers p+2",
        group=VOCABULARY,
        vocabulary=True,
    ),
    System(
        "v-half-vocab",
        "V-Half with a sharded vocabulary",
        v_half_vocabulary,
        "arXiv 2411.05288",
        "vee",
        "about V-Half's",
        "⌊(p+2)/2⌋+1, with two barriers +2",
        group=VOCABULARY,
        vocabulary=True,
    ),
    System(
        "gems",
        "GEMS",
        gems,
        "SC 2020",
        "mirror",
        "(p−1)/(p+1/2) of the time at B+W=2F",
        "1 microbatch",
        fused=True,
        needs="p even",
        group=TWO_DIRECTIONS,
        weights="2×",
    ),
    System(
        "chimera",
        "Chimera",
        chimera,
        "arXiv 2107.06925",
        "mirror",
        "(p−2f)/(2fm+p−2f) of the time at B+W=F",
        "p−p/2f+1 to p microbatches",
        fused=True,
        needs="p a multiple of 2f, m of 2f, for f pairs of pipelines",
        group=TWO_DIRECTIONS,
        weights="2f×",
    ),
    System(
        "dualpipe",
        "DualPipe",
        dualpipe,
        "arXiv 2412.19437",
        "mirror",
        "(p/2−1)(F+B−W); F&B as one block: (p/2−1)(F&B+B+W−3W)",
        "p+1 microbatches",
        needs="p even, m even and ≥ 2p",
        group=TWO_DIRECTIONS,
        weights="2×",
    ),
    System(
        "pipedream",
        "PipeDream",
        pipedream,
        "arXiv 1806.03377",
        "single",
        "0 in the steady state",
        "M",
        fused=True,
        needs="updates after every microbatch, p−s groups late",
        group=ASYNCHRONOUS,
        weights="p−r versions",
        rounds=lambda ranks, m: (1, [ranks - stage for stage in range(ranks)]),
    ),
    System(
        "pipedream-2bw",
        "PipeDream-2BW",
        pipedream,
        "arXiv 2006.09503",
        "single",
        "0 in the steady state",
        "M",
        fused=True,
        needs="at least p microbatches an update, two groups late",
        group=ASYNCHRONOUS,
        weights="2 versions",
        rounds=lambda ranks, m: (_group(m, ranks), 2),
    ),
)

PRESETS = {one.name: one.order for one in SYSTEMS}


def system(name: str) -> System:
    """The system called `name`, or "name:number" where it has groups of so many microbatches. Raises BadInput."""
    known, _, size = name.partition(":")
    for one in SYSTEMS:
        if one.name == name:
            return one
        if one.name == known and one.in_groups is not None and re.fullmatch(r"[1-9]\d{0,8}", size, re.ASCII):
            return replace(one, name=name, order=one.in_groups(int(size)))
    raise BadInput(f"unknown system '{name}' (known: {', '.join(one.name for one in SYSTEMS)})")


def is_named(name: str) -> bool:
    """Whether there is a system called `name`: see `system`."""
    with suppress(BadInput):
        return bool(system(name))
    return False


def name_on(name: str, problem: Problem) -> str:
    """What the schedule called `name` is called on a problem: on a split backward 1F1B is 1f1b-split. Raises BadInput for an
    unknown name."""
    if not is_named(name):
        raise BadInput(f"unknown schedule '{name}' (known: {', '.join(PRESETS)})")
    other = system(name).split
    return other if other and "W" in problem.passes.kinds else name


def preset(name: str, problem: Problem, plain: Problem | None = None) -> Schedule:
    """A named schedule of the literature on a problem.

    name: as `zbsolve systems` lists it; on the problem it is `name_on`.
    problem: a step on which the system is defined.
    plain: the problem `without_side_streams`, where it was made before.

    A pass X comes directly before its backward. Raises BadInput for an unknown name, or a problem that it is not defined
    for.
    """
    one = system(name_on(name, problem))
    if "S" in problem.passes.kinds and not one.vocabulary:
        raise BadInput(f"{one.name}: is defined where the vocabulary is not sharded; {_known_on(problem)}")
    try:
        if one.copies is not None:
            return one.order(problem)
        plain = without_side_streams(problem) if plain is None else plain
        kept, waits = without_recompute(plain)
        order = _in_front(one.order(with_backward(kept)), kept)
        return with_side_streams(problem, _with_recompute(order, plain, waits) if waits else order)
    except WrongPlacement as error:
        raise WrongPlacement(f"{error}; {_known_on(problem)}") from None


def _in_front(schedule: Schedule, problem: Problem) -> Schedule:
    """The same order for a problem, which may have no backwards of stages in front that train nothing."""
    if schedule.problem is problem:
        return schedule
    rows = {stream: tuple(name for name in names if name in problem.index) for stream, names in schedule.order.items()}
    return Schedule(problem, rows)


def _with_recompute(schedule: Schedule, problem: Problem, waits: Mapping[str, str]) -> Schedule:
    """The same order for a problem with passes X, each directly before the first pass that waits for it. waits: pass → X."""
    rows = {}
    for stream, names in schedule.order.items():
        both = (one for name in names for one in (waits.get(name, name), name))
        rows[stream] = tuple(dict.fromkeys(both))
    return Schedule(problem, rows, schedule.syncs)


def _known_on(problem: Problem) -> str:
    """Which systems there are for the placement of a problem, in words."""
    step = without_shards(problem)
    placed = "/".join(map(placements.describe, step.routes))
    shape = "mirror" if len(step.routes) > 1 else placed.rstrip("0123456789")
    offloads, sharded = "O" in problem.passes.kinds, "S" in problem.passes.kinds
    known = [one for one in SYSTEMS if one.rounds is None and (offloads or one.copies is None)]
    special = (sharded, bool(problem.passes.slice.any()))
    names = [one.name for one in known if one.placement == shape and (one.vocabulary, one.slices) == special]
    return f"for {'mirror' if names and shape == 'mirror' else placed} there are {', '.join(names) or 'no named ones'}"


def presets_of(problem: Problem, searched: bool = True) -> Iterator[tuple[str, Schedule]]:
    """Every system that is defined for a problem, with its schedule, in the table's order.

    problem: the step. Each order comes under one name; none comes whose passes on side streams find no room.
    searched: whether those come too whose orders searches try anyway.
    """
    plain = without_side_streams(problem)
    for one in SYSTEMS:
        if (searched or not one.searched) and name_on(one.name, problem) == one.name:
            with suppress(BadInput, NotFound):
                yield one.name, preset(one.name, problem, plain)


def _group(microbatches: int, ranks: int) -> int:
    """Microbatches an update: as few as 2BW allows that make whole groups."""
    for every in range(ranks, microbatches + 1):
        if microbatches % every == 0:
            return every
    raise BadInput(f"pipedream-2bw: {microbatches} microbatches do not make groups of at least {ranks}, one a rank")
