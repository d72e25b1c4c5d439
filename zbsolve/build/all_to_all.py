"""All-to-all of expert parallelism: what F and B of a stage send between devices, on a stream of its own.

Where experts live on other devices, a pass dispatches tokens to them and combines what they give back (arXiv 2412.19437,
section 3.2.1). Both are one pass here, behind the computation that they belong to: `AF` after F, `AB` after B or BW, on
`comm:<rank>`. What the stage gives on is there when it has ended, so a microbatch waits for each of its all-to-alls, and
others may compute meanwhile: that is what DualPipe's overlapped F and B do.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kinds import ALL_TO_ALL
from ..problem import Problem
from ..tables import Edges
from ..util.errors import BadInput
from .numbers import Numbers, check_apart, whole_numbers


def with_all_to_all(problem: Problem, AF: Numbers, AB: Numbers | None = None) -> Problem:
    """`problem` with the all-to-alls of expert parallelism as passes beside computing.

    AF: µs a stage of `<stage>AF<microbatch>` after each F; no pass where it is 0.
    AB: µs a stage of `<stage>AB<microbatch>` after each B or BW; None: as AF.

    What waited for the F or B of another stage waits for its all-to-all, as does the last stage's own backward; W does not.
    Raises BadInput, also for a stage that recomputes: its X would have to repeat AF.
    """
    check_apart(problem, ALL_TO_ALL)
    passes, edges, stages = problem.passes, problem.edges, problem.stages
    forward = whole_numbers(AF, "AF", stages)
    backward = whole_numbers(AF if AB is None else AB, "AB", stages)
    for stage in np.unique(passes.stage[problem.rows("X")]).tolist():
        if forward[stage]:
            raise BadInput(f"recompute: stage {stage} has an all-to-all AF, which its X would have to repeat: not modelled")
    is_f, backs = passes.are("F"), passes.are("B", "BW")
    times = np.where(is_f, forward[passes.stage], np.where(backs, backward[passes.stage], 0))
    own = np.flatnonzero(times)
    if not len(own):
        return problem
    table = passes.more(
        np.where(is_f[own], "AF", "AB"),
        "comm",
        stage=passes.stage[own],
        microbatch=passes.microbatch[own],
        rank=passes.rank[own],
        duration=times[own],
    )
    place = np.full(len(passes), -1, np.int64)  # F or B → its all-to-all
    place[own] = len(passes) + np.arange(len(own))
    before, after = edges.before, edges.after
    output = (place[before] >= 0) & (passes.kind[before] == passes.kind[after])  # to the F or B of another stage
    turn = np.flatnonzero(is_f[before] & backs[after] & (passes.stage[before] == stages - 1))
    turn = turn[place[before[turn]] >= 0]
    # Behind the last stage is the loss, before the first the batch: nobody takes what goes there.
    down, up = is_f[own] & (passes.stage[own] < stages - 1), backs[own] & (passes.stage[own] > 0)
    handed = Edges.of(own, place[own], carries=np.where(down, "activation", np.where(up, "gradient", "")))
    moved = replace(edges, before=np.where(output, place[before], before))
    return replace(problem, passes=table, edges=moved + handed + Edges.of(place[before[turn]], after[turn]))
