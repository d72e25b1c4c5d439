"""Measured runs in words: what ran, times of stages, stalls, how short the step could be, changes since a profile."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import numpy as np

from ..kinds import KINDS
from ..problem.placement import describe
from ..profile.changes import KINDS as MEASURED
from ..profile.changes import MIN_SAMPLES, Change, Drift
from ..profile.lengths import Stall
from ..schedule.trace import Trace
from ..search.today import UNITS, Better, Today
from ..util.columns import quartiles
from ..util.text import aligned, exact_time, format_bytes, format_gap, format_time, plural, printable
from .sentences import by_microbatch

MAX_STALLS = 5  # stalls that are shown
NOTABLE_ERROR = 0.02  # of a step: smaller errors of the replay are not mentioned
MAX_STAGES = 32  # stages with a row in the table


def _stalls(trace: Trace, stalls: tuple[Stall, ...]) -> Iterator[str]:
    """A line a stall, the longest few."""
    names = trace.facts.get("steps")
    for stall in stalls[:MAX_STALLS]:
        step = names[stall.step] if isinstance(names, list) else stall.step
        saved = stall.measured - stall.without
        without = f"the step is {format_time(saved)} shorter without" if saved >= 0.5 else "the step is no shorter without"
        usual = f"{format_time(stall.took)} in place of {format_time(stall.usual)}"
        yield f"stall: step {printable(str(step))}, {stall.name} on rank {stall.rank}: {usual}; {without}"
    if len(stalls) > MAX_STALLS:
        yield f"and {plural(more_stall=len(stalls) - MAX_STALLS)}"


def _messages_and_lengths(trace: Trace) -> Iterator[str]:
    """Up to three lines. Where sends blocked their rank: the idle time after passes that send, and after others. Where
    microbatches differ in length: how well one factor for each explains the times. Where the replay of steps (see
    `Trace.replayed`) is notably shorter or longer than measured: by how much."""
    gaps, factors, off = trace.facts.get("blocking"), trace.facts.get("microbatch_factors"), trace.replay_error()
    if isinstance(gaps, dict):
        sending, silent, message = (format_time(gaps[name]) for name in ("sending", "silent", "message"))
        yield (
            f"messages block their sender: with its inputs there, a pass began {sending} after one that sends, and "
            f"{silent} after one that does not; a message takes {message}"
        )
    if isinstance(factors, list):
        spread, left = trace.facts["spread"], trace.facts["spread_left"]
        yield (
            f"microbatches differ in length: in the median step they take {min(factors):.2f} to {max(factors):.2f} times "
            f"the median; passes lie {spread:.1%} from their stage's median, {left:.1%} with a factor a microbatch"
        )
    if abs(off) >= NOTABLE_ERROR:
        more = "ranks also did something else" if off < 0 else "some passes overlapped"
        yield f"by its passes and messages alone a step takes {abs(off):.1%} {'less' if off < 0 else 'more'}: {more}"


def stage_times(trace: Trace) -> list[dict[str, Any]]:
    """For each stage: its ranks; for each kind of compute pass the median and the quartiles over all microbatches and steps,
    µs; and the problem's time of the message to the next stage (None for the last stage, and within a rank)."""
    problem = trace.problem
    p, e = problem.passes, problem.edges
    times = trace.computed()
    rows_of = []
    for stage in range(problem.stages):
        rows = np.flatnonzero((p.stage == stage) & problem.computing)
        kinds = {KINDS[k]: times[:, rows[p.kind[rows] == k]] for k in np.unique(p.kind[rows])}
        sent = (p.stage[e.before] == stage) & e.carrying("activation") & (p.rank[e.before] != p.rank[e.after])
        passes = {kind: {"median": median(us.ravel().tolist()), "quartiles": quartiles(us)} for kind, us in kinds.items()}
        message = float(np.median((e.lag + e.sent)[sent])) if sent.any() else None
        rows_of.append({"stage": stage, "ranks": list(problem.stage_ranks[stage]), "passes": passes, "message": message})
    return rows_of


def _stages(trace: Trace) -> list[str]:
    """A table of stages' times: medians, and half of the interquartile range relative to the median."""
    times = stage_times(trace)
    kinds = [kind for kind in KINDS if any(kind in row["passes"] for row in times)]
    rows = [("stage", "rank", *(f"{kind}, ms" for kind in kinds), "message, ms")]
    for stage in times[:MAX_STAGES]:
        cells = [_spread(stage["passes"].get(kind)) for kind in kinds]
        message = "–" if stage["message"] is None else f"{stage['message'] / 1e3:.2f}"
        rows.append((str(stage["stage"]), "/".join(map(str, stage["ranks"])), *cells, message))
    more = [f"and {plural(more_stage=len(times) - MAX_STAGES)}"] if len(times) > MAX_STAGES else []
    return [*aligned(rows), *more]


def _spread(passes: dict[str, Any] | None) -> str:
    if passes is None:
        return "–"
    low, high = passes["quartiles"]
    middle = passes["median"]
    return f"{middle / 1e3:,.2f} ±{(high - low) / 2 / middle if middle else 0.0:.1%}"


def run_in_words(trace: Trace, stalls: tuple[Stall, ...]) -> str:
    """The report of a run: what ran, what was left out, times of stages, effects of messages and lengths, and stalls."""
    problem, facts = trace.problem, trace.facts
    routes = problem.model_routes
    placement = describe(routes[0]) if len(routes) == 1 else "several routes"
    beside = plural(microbatch=problem.microbatches) + (f" with {', '.join(problem.features)}" if problem.features else "")
    what = f"{plural(rank=problem.ranks, stage=len(routes[0]))} ({placement}), {beside}"
    clocks = f"; clocks {facts['clocks']}" if isinstance(facts.get("clocks"), str) else ""
    lines = [f"{printable(str(facts.get('format', 'zbsolve trace')))}: {what}, {plural(step=len(trace.steps))}{clocks}"]
    left = facts.get("left_out")
    lines += [f"left out: {printable(str(part))}" for part in left] if isinstance(left, list) else []
    lines += [*_stages(trace), *_messages_and_lengths(trace), *_stalls(trace, stalls)]
    return "".join(f"{line}\n" for line in lines)


def today_line(today: Today) -> str:
    """One line: the measured step, the best schedule in the same memory, and what balanced stages would save."""
    text = f"today's step takes {format_time(today.measured)}, of which bubble {today.bubble:.1%}"
    lengths = "" if today.alike else ", microbatches as long as in this one"
    text += f" (its order by the medians of all steps{lengths}: {format_time(today.replayed)})"
    best, saved = today.best, today.replayed - today.even
    if best is not None:
        text += (
            f"; the best schedule in the same memory ({_memory(today)}) takes {format_time(best.value)} ({_proven(best)})"
        )
        if best is not today.found[0]:
            text += f", on placement {best.placement}"
            text += ", each stage cut in two" if best.cut else ""
    even = f"would save {format_time(saved)}" if saved > 0 else "would save nothing"
    return f"{text}; balancing stages {even} of today's"


def _memory(today: Today) -> str:
    most = max(today.room)
    if today.counted:
        return format_bytes(most)
    return f"{most / UNITS:g} microbatches in flight" if most != UNITS else "1 microbatch in flight"


def _proven(better: Better) -> str:
    certificate = better.schedule.certificate
    assert certificate is not None
    order = ", for orders that run each stage's microbatches by number" if by_microbatch(certificate.proof) else ""
    return ("proven optimal" if certificate.gap == 0 else f"proven within {format_gap(certificate.gap)}") + order


def today_as_text(today: Today) -> str:
    """The answer, and below it each placement with value, bound and gap."""
    lines = [today_line(today)]
    if today.found:
        rows = [("placement", "step", "bound", "gap", "of today's order")]
        for better in today.found:
            certificate = better.schedule.certificate
            assert certificate is not None
            name = f"{better.placement}{', stages cut in two' if better.cut else ''}"
            change = f"{better.value / today.replayed - 1:+.1%}" if today.replayed else ""
            gap = format_gap(certificate.gap)
            rows.append((name, exact_time(better.value), exact_time(certificate.bound), gap, change))
        lines += [f"  {line}" for line in aligned(rows)]
    return "\n".join(lines) + "\n"


def drift_as_text(changes: Drift) -> str:
    """A row a layer, a column a kind; `*`: beyond the spread, `?`: too few samples to say."""
    kinds = [kind for kind in MEASURED if any(layer.what == kind for layer in changes.layers)]
    names = list(dict.fromkeys(layer.layer for layer in changes.layers))
    cells = {(change.layer, change.what): _cell(change) for change in (*changes.layers, *changes.total)}
    rows = [("", *(f"{kind} " for kind in kinds))]
    rows += [(name or "all layers", *(cells.get((name, kind), "– ") for kind in kinds)) for name in (*names, "")]
    lines = aligned(rows)
    link = next(change for change in changes.total if change.what == "link")
    lines.append(f"largest message: {link.old:,.1f} → {link.new:,.1f} µs ({_cell(link).strip()})")
    marked = [layer.beyond for layer in changes.layers]
    lines.append(f"{sum(map(bool, marked))} of {len(marked)} times changed beyond their spread (*)")
    if None in marked:
        lines[-1] += f"; {marked.count(None)} have fewer than {MIN_SAMPLES} samples on one side (?)"
    lines += [f"{change.layer}: {change.what} {change.old:,.0f} → {change.new:,.0f} bytes" for change in changes.bytes]
    lines += [f"only in the older: {', '.join(changes.only_old)}"] * bool(changes.only_old)
    lines += [f"only in the newer: {', '.join(changes.only_new)}"] * bool(changes.only_new)
    return "\n".join(lines) + "\n"


def _cell(change: Change) -> str:
    """`+3.1%*`; without a mark a blank, so that numbers are aligned."""
    share = "new" if change.change is None else f"{change.change:+.1%}"
    mark = " " if not change.layer and change.what != "link" else {True: "*", False: " ", None: "?"}[change.beyond]
    return f"{share}{mark}"
