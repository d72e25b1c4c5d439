"""A run in words: what ran, what each stage took and how far that spreads, which passes stalled."""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from ..build.vocabulary import barriers_of, model_routes
from ..kinds import KINDS
from ..placement import describe
from ..profile.lengths import Stall
from ..trace import Trace
from ..util.statistics import quartiles
from ..util.text import aligned, format_time, printable

MAX_STALLS = 5  # that are told
NOTABLE_ERROR = 0.02  # of a step, of which nothing is told
MAX_STAGES = 32  # that have a line each


def stalls_as_text(trace: Trace, stalls: tuple[Stall, ...]) -> str:
    """A line a stall, the longest few."""
    names = trace.facts.get("steps")
    lines = []
    for one in stalls[:MAX_STALLS]:
        step = names[one.step] if isinstance(names, list) else one.step
        saved = one.measured - one.without
        without = f"the step is {format_time(saved)} shorter without" if saved >= 0.5 else "the step is no shorter without"
        usual = f"{format_time(one.took)} in place of {format_time(one.usual)}"
        lines.append(f"stall: step {printable(str(step))}, {one.name} on rank {one.rank}: {usual}; {without}")
    if len(stalls) > MAX_STALLS:
        lines.append(f"and {len(stalls) - MAX_STALLS} more stalls")
    return "".join(f"{line}\n" for line in lines)


def links_as_text(trace: Trace) -> str:
    """A line where the run showed that messages hold their sender up: how long ranks stood idle behind such passes."""
    gaps = trace.facts.get("blocking")
    if not isinstance(gaps, dict):
        return ""
    sending, silent, message = (format_time(gaps[name]) for name in ("sending", "silent", "message"))
    return (
        f"messages hold their sender up: with its inputs there, a pass began {sending} behind one that sends, and {silent} "
        f"behind one that does not; a message takes {message}\n"
    )


def replay_as_text(trace: Trace) -> str:
    """A line where steps replay notably shorter or longer with their own times: then there is more in them than is told."""
    off = trace.replay_error()
    if abs(off) < NOTABLE_ERROR:
        return ""
    more = "ranks also did something else" if off < 0 else "some passes overlapped"
    return f"by its passes and messages alone a step takes {abs(off):.1%} {'less' if off < 0 else 'more'}: {more}\n"


def lengths_as_text(trace: Trace) -> str:
    """A line where microbatches differ in length: by how much, and how far one factor each explains it."""
    factors = trace.facts.get("microbatch_factors")
    if not isinstance(factors, list):
        return ""
    spread, left = trace.facts["spread"], trace.facts["spread_left"]
    return (
        f"microbatches differ in length: in the median step they take {min(factors):.2f} to {max(factors):.2f} times the "
        f"median; passes lie {spread:.1%} from their stage's median, {left:.1%} with a factor a microbatch\n"
    )


def stage_times(trace: Trace) -> list[dict[str, Any]]:
    """Of each stage: its ranks; of each of its kinds of compute pass the median and the quartiles over all microbatches and
    steps, µs; and the message to the next stage, as the problem has it (None behind the last, and within a rank)."""
    problem = trace.problem
    p, e = problem.passes, problem.edges
    times = trace.computed()
    found = []
    for stage in range(problem.stages):
        rows = np.flatnonzero((p.stage == stage) & problem.computing)
        kinds = {KINDS[k]: times[:, rows[p.kind[rows] == k]] for k in np.unique(p.kind[rows])}
        sent = (p.stage[e.before] == stage) & e.carrying("activation") & (p.rank[e.before] != p.rank[e.after])
        passes = {kind: {"median": median(one.ravel().tolist()), "quartiles": quartiles(one)} for kind, one in kinds.items()}
        message = float(np.median((e.lag + e.sent)[sent])) if sent.any() else None
        found.append({"stage": stage, "ranks": list(problem.stage_ranks[stage]), "passes": passes, "message": message})
    return found


def stages_as_text(trace: Trace) -> str:
    """A table of what stages took: medians, and half of what lies between the quartiles as a share of them."""
    told = stage_times(trace)
    kinds = [kind for kind in KINDS if any(kind in one["passes"] for one in told)]
    rows = [("stage", "rank", *(f"{kind}, ms" for kind in kinds), "message, ms")]
    for one in told[:MAX_STAGES]:
        cells = [_spread(one["passes"].get(kind)) for kind in kinds]
        message = "–" if one["message"] is None else f"{one['message'] / 1e3:.2f}"
        rows.append((str(one["stage"]), "/".join(map(str, one["ranks"])), *cells, message))
    more = [f"and {len(told) - MAX_STAGES} more stages"] if len(told) > MAX_STAGES else []
    return "".join(f"{line}\n" for line in (*aligned(rows), *more))


def _spread(passes: dict[str, Any] | None) -> str:
    if passes is None:
        return "–"
    low, high = passes["quartiles"]
    middle = passes["median"]
    return f"{middle / 1e3:,.2f} ±{(high - low) / 2 / middle if middle else 0.0:.1%}"


def run_as_text(trace: Trace) -> str:
    """What ran, in a line: format, ranks, placement, steps; and what was left out, a line each."""
    problem, facts = trace.problem, trace.facts
    routes = model_routes(problem)
    placement = describe(routes[0]) if len(routes) == 1 else "several routes"
    shards = ", the vocabulary sharded" if barriers_of(problem) else ""
    what = f"{problem.ranks} ranks, {len(routes[0])} stages ({placement}), {problem.microbatches} microbatches{shards}"
    clocks = f"; clocks {facts['clocks']}" if isinstance(facts.get("clocks"), str) else ""
    lines = [f"{printable(str(facts.get('format', 'zbsolve trace')))}: {what}, {len(trace.steps)} steps{clocks}"]
    left = facts.get("left_out")
    lines += [f"left out: {printable(str(one))}" for one in left] if isinstance(left, list) else []
    return "".join(f"{line}\n" for line in lines)


def run_in_words(trace: Trace, stalls: tuple[Stall, ...]) -> str:
    """All that is told of a run: what ran, what stages took, what messages and lengths do, what stalled."""
    told = run_as_text(trace) + stages_as_text(trace) + links_as_text(trace) + lengths_as_text(trace)
    return told + replay_as_text(trace) + stalls_as_text(trace, stalls)
