"""A plan as text: the best layouts, their memory, and why other layouts are worse. And its space as one HTML page: a chart
of the bounds of all layouts over any of their fields, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..planner.answers import LINK_CHANGES, Answer, PlanFront
from ..planner.bounds.layout_rules import NO_ROOM
from ..planner.bounds.space_bounds import DOMINATED, RULES
from ..planner.candidate import Candidate
from ..planner.case import carried_until, case_of
from ..planner.cluster import CONTENTION, Cluster
from ..planner.costs.rank_costs import least_bytes
from ..planner.layout import FIELDS, NAMES, Layout
from ..planner.plan_file import NEAR, Plan
from ..planner.profiled_model import Model
from ..planner.solved_space import MFU_COUNTS, SolvedSpace, families
from ..util.text import aligned, format_bytes, format_gap, format_time, format_times, in_one_unit, plural, printable
from .pages import packed, render

MOST_ROWS = 12
WIDE_GAP = 0.2  # a larger gap is mentioned in the first line too
LEAST_SHARE = 1e-3  # of a step: a link that saves less when twice as fast is not called limiting
PROVEN = "against: step over this plan's; proven: between these lies the best step there is over the best without the change"


def plan_as_text(plan: Plan) -> str:
    """The whole report."""
    best = f"best: {plan.best.layout.title}", f"after its last compute pass: {_behind(plan.best, plan.cluster)}"
    parts = [*space_lines(plan.space), "", *_near(plan), "", *best, bound_line(plan.space), "", *_lost(plan)]
    return "\n".join([*parts, honest_line(plan.shape, plan.cluster)]) + "\n"


def space_lines(space: SolvedSpace) -> Iterator[str]:
    """The model, devices and batch, the number of layouts, and how many each rule excluded, were solved or are open."""
    bounds, only = space.bounds, f"; only layouts {space.only.title}" if space.only.title else ""
    devices = f"{plural(device=space.devices)} ({space.cluster.name})"
    yield f"{space.shape.name}: {devices}, {plural(sequence=space.batch)} a step{only}"
    counts = zip(np.bincount(bounds.rule, minlength=len(RULES)), RULES, strict=True)
    pruned = [f"{count:,} {name}" for count, name in counts if count]
    yield f"{len(bounds.rule):,} layouts, by what decides their bound: {', '.join(pruned)}"
    if space.shape.left_out:
        yield f"left out: {space.shape.left_out}"
    yield f"{len(space.solved)} solved; {space.open} are open: no bound excludes them"


def _near(plan: Plan) -> Iterator[str]:
    """The plans that the model cannot order."""
    shown = plan.near[:MOST_ROWS]
    wide = f"; a step shorter by up to {format_gap(plan.gap)} is not excluded" if plan.gap > WIDE_GAP else ""
    yield f"plans within {NEAR:.0%} of the best ({len(plan.near)}); the model cannot order these{wide}"
    head = ("layout", "step", "MFU", f"{unit_of(plan.shape)}/s a device", "memory", "bubble", "bound", "by")
    times = steps_and_bounds([(candidate.value, float(plan.bounds.step[plan.number(candidate)])) for candidate in shown])
    rows = [head, *(_row(plan, candidate, *both) for candidate, both in zip(shown, times, strict=True))]
    yield from aligned(rows, left=(0, -1))
    yield "layout: 8 × 2 are eight microbatches of two sequences, loop2 two stages a rank"
    yield f"memory: of the fullest rank, of {format_bytes(plan.memory)}: {', '.join(plan.best.memory())}"
    if plan.mfu(plan.best) is not None:
        yield f"MFU counts {MFU_COUNTS}"
    yield "bound: no partition of that layout's layers and no schedule takes less; by: what says so"


def _row(plan: Plan, candidate: Candidate, step: str, bound: str) -> tuple[str, ...]:
    sizes = candidate.memory().values()
    unit, (total, *parts) = in_one_unit([sum(sizes), *sizes])
    sizes_shown, bubble = f"{total} = {' + '.join(parts)} {unit}", candidate.schedule.timeline().bubble_rate
    rates = (share_or_dash(plan.mfu(candidate)), f"{plan.tokens(candidate):,.0f}", sizes_shown, f"{bubble:.1%}")
    return (candidate.layout.title, step, *rates, bound, RULES[plan.bounds.rule[plan.number(candidate)]])


def steps_and_bounds(rows: Sequence[tuple[float, float]]) -> list[tuple[str, str]]:
    """Two columns of a table, step times and bounds, all in the same unit. rows: (step, bound), µs."""
    shown = format_times(*(time for row in rows for time in row))
    return list(zip(shown[::2], shown[1::2], strict=True))


def _behind(best: Candidate, cluster: Cluster) -> str:
    """The exchange's exposed and total time, with its contention; then the other time after the last compute pass."""
    problem = best.schedule.problem
    rows = problem.rows("C", "RS")
    if not len(rows):
        return f"update and constant {format_time(best.behind)}"
    busiest = int(np.bincount(problem.passes.rank[rows], problem.passes.duration[rows]).max())
    source = "assumed" if cluster.contention == CONTENTION else "as the cluster says"
    longer = f", {cluster.contention:g} times as long as without messages beside it ({source})" if best.layout.pp > 1 else ""
    exposed, all_of_it, behind = format_times(best.exposed, busiest, best.behind)
    return f"exchange of gradients {exposed} (of {all_of_it} of a rank{longer}), update and constant {behind}"


def bound_line(space: SolvedSpace) -> str:
    """The step, the bound of the space, and whose it is."""
    step, bound = format_times(space.value, space.bound)
    return f"step {step}, proven bound over the space {bound} (gap {format_gap(space.gap)}): {space.bound_by}"


def _lost(plan: Plan) -> Iterator[str]:
    yield "what families of layouts lose at least (0: still in the race):"
    lost = families(plan.space)
    for field, meaning in FIELDS.items():
        parts = [f"{family.value} {lost_share(family.lost)}" for family in lost if family.field == field]
        yield f"  {meaning}: {', '.join(parts)}"


def lost_share(lost: float) -> str:
    """The share by which a family of layouts is slower at least, in words."""
    return "no room" if np.isinf(lost) else f"{max(lost, 0.0):.1%}" if lost >= 0 else "0"


def unit_of(model: Model) -> str:
    """The unit of rates: tokens, or sequences if the model's sequence length is not known."""
    return "tokens" if model.sequence else "sequences"


def share_or_dash(value: float | None) -> str:
    """`43.1%`; a dash for None."""
    return "–" if value is None else f"{value:.1%}"


def honest_line(model: Model, cluster: Cluster) -> str:
    """What the proof holds for: the cost model's numbers, and the measured error of these, if known."""
    off = "their error was not measured"
    if cluster.error is not None:
        off = f"their measured error is {cluster.error:.1%} in the mean, over the steps that it was compared with"
    return f"proven for the model's numbers: {model.source}; the cluster is {cluster.source}; {off}"


def what_if_as_text(before: Plan, answers: Sequence[Answer]) -> str:
    """A row for each change, and the link that limits most, if faster links were among the changes."""
    head = ("what if", "step", "bound", "gap", "against", "proven", "layout")
    planned = [answer for answer in answers if answer.plan]
    times = steps_and_bounds([(answer.plan.best.value, answer.bound) for answer in planned if answer.plan])
    rows = [head]
    for answer, both in zip(planned, times, strict=True):
        if answer.plan is not None:
            best, (low, high) = answer.plan.best, _proven(before, answer)
            shares = f"{best.value / before.best.value - 1:+.1%}", f"{low:+.1%} to {high:+.1%}"
            rows.append((answer.change, *both, format_gap(answer.gap), *shares, best.layout.title))
    lines = aligned(rows, left=(0, -1)) if planned else []
    lines += [PROVEN] if lines else []
    lines += [f"{answer.change}: {printable(answer.reason)}" for answer in answers if not answer.plan]
    return "\n".join([*lines, *_limiting(before, answers)]) + "\n"


def front_as_text(front: PlanFront) -> str:
    """A row for each point; points that are not on the Pareto front are marked."""
    head = (front.over, "needed", "step", "bound", "gap", "layout")
    rows, times = [head], steps_and_bounds([(point.value, point.bound) for point in front.points])
    for at, point, efficient, both in zip(front.at, front.points, front.efficient, times, strict=True):
        where = format_bytes(at) if front.over == "memory" else f"{at:,}"
        numbers = (format_bytes(point.peak), *both, format_gap(point.gap))
        rows.append((where, *numbers, point.choice if efficient else f"no shorter than with less: {point.choice}"))
    lines = [f"the front of step over {front.over}", *(aligned(rows, left=(-1,)) if front.points else [])]
    for at, why in front.missing:
        lines.append(f"{format_bytes(at) if front.over == 'memory' else at}: {printable(why)}")
    return "\n".join(lines) + "\n"


def _proven(before: Plan, answer: Answer) -> tuple[float, float]:
    """The least and the largest relative difference between the best step with the change and without it. A change that
    makes nothing harder cannot lengthen the best step, and one that makes nothing easier cannot shorten it, unless that is
    one in slices (see `carried_until`)."""
    assert answer.plan is not None
    low, high, base = answer.bound / before.best.value - 1, answer.plan.best.value / before.bound - 1, case_of(before)
    longer = carried_until(base, answer.case, answer.plan.bounds) / before.best.value
    shorter = carried_until(answer.case, base, before.bounds) / answer.plan.best.value
    return max(low, min(0.0, longer - 1)), min(high, max(0.0, 1 / shorter - 1)) if shorter else high


def answer_as_json(before: Plan, answer: Answer) -> dict[str, Any]:
    """The same as fields."""
    if answer.plan is None:
        return {"change": answer.change, "reason": answer.reason}
    best = answer.plan.best
    fields = {"change": answer.change, "step": best.value, "bound": answer.bound, "gap": answer.gap, "proof": answer.proof}
    fields |= {"against": best.value / before.best.value - 1, "proven": list(_proven(before, answer))}
    return fields | {"layout": best.layout.numbers}


def _limiting(before: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    """The link that limits most, among those for which a doubled speed was planned."""
    links = {answer.change: (answer.plan, answer) for answer in answers if answer.plan and answer.change in LINK_CHANGES}
    saved = {change: 1 - plan.best.value / before.best.value for change, (plan, _) in links.items()}
    if len(saved) < 2:
        return
    most = max(saved, key=lambda link: saved[link])
    if saved[most] < LEAST_SHARE:
        yield f"no link limits: none that is twice as fast saves {LEAST_SHARE:.1%} here"
    else:
        least = -_proven(before, links[most][1])[0]
        yield (
            f"the link that limits most is {most.partition('=')[0]}: twice as fast it saves {saved[most]:.1%} here, and "
            f"{least:.1%} at most in any plan"
        )


# --- The page ---


WORDS = {**FIELDS, "dp": "replicas", "chunks": "stages a rank", "count": "microbatches a replica"}
MOST_SOLVED = 60  # rows in the table of solved layouts


def plan_as_page(space: SolvedSpace) -> str:
    """The page as text; it loads no other file."""
    title = f"{space.shape.name} on {plural(device=space.devices, sequence=space.batch)} a step"
    lines = *space_lines(space), bound_line(space), honest_line(space.shape, space.cluster)
    lost = [(FIELDS[row.field], row.value, f"{row.layouts:,}", lost_share(row.lost)) for row in families(space)]
    return render(
        "plan.html",
        title=printable(title),
        figures=_figures(space),
        sentences=list(map(printable, lines)),
        solved=_solved_rows(space),
        further=max(0, len(space.solved) - MOST_SOLVED),
        rules=_rule_rows(space),
        families=[("field", "value", "layouts", "loses at least"), *lost],
        data=_data(space),
    )


def _figures(space: SolvedSpace) -> list[tuple[str, str, str]]:
    """The key figures at the top: (label, value, note)."""
    rate = f"{space.tokens(space.value):,.0f} {unit_of(space.shape)}/s a device; MFU counts {MFU_COUNTS}"
    return [
        ("step", format_time(space.value), space.bounds.layout.row(space.best).title),
        ("proven bound", format_time(space.bound), f"gap {format_gap(space.gap)} over the space"),
        ("MFU", share_or_dash(space.mfu(space.value)), rate),
        ("layouts", f"{len(space.bounds.rule):,}", f"{len(space.solved):,} solved, {space.open:,} open"),
    ]


def _solved_rows(space: SolvedSpace) -> list[tuple[str, ...]]:
    """A header and the layouts that were solved, the best first."""
    head = ("layout", "step", "above the best", "bound", "MFU", f"{unit_of(space.shape)}/s a device")
    shown_rows: list[tuple[str, ...]] = [head]
    rows = sorted(space.solved.items(), key=lambda item: item[1])[:MOST_SOLVED]
    times = steps_and_bounds([(step, min(float(space.bounds.step[row]), step)) for row, step in rows])
    for (row, step), (shown, bound) in zip(rows, times, strict=True):
        rates = (bound, share_or_dash(space.mfu(step)), f"{space.tokens(step):,.0f}")
        shown_rows.append((space.bounds.layout.row(row).title, shown, f"{step / space.value - 1:.2%}", *rates))
    return shown_rows


def _rule_rows(space: SolvedSpace) -> list[tuple[str, ...]]:
    """A header and a row a rule: how many layouts' bounds it decides, and how far these are above the best step."""
    above = space.bounds.step / space.value - 1
    rows: list[tuple[str, ...]] = [("what decides the bound", "layouts", "bound above the best step: least", "median")]
    for number, rule in enumerate(RULES):
        ratios = above[space.bounds.rule == number]
        if len(ratios):
            shown = (f"{ratios.min():+.1%}", f"{np.median(ratios):+.1%}") if np.isfinite(ratios).all() else ("", "")
            rows.append((rule, f"{len(ratios):,}", *shown))
    return rows


def _data(space: SolvedSpace) -> dict[str, Any]:
    """All data for the page's script: names, and packed columns over all layouts: the bound (whole µs, rounded down; −1:
    none), the rule, the layout that dominates it, whether it is open, the least bytes that its fullest rank needs."""
    bounds = space.bounds
    columns = {name: np.asarray(column, np.int64) for name, column in bounds.layout._asdict().items()}
    varying = [name for name, column in columns.items() if len(column) and (column != column[0]).any()]
    whole = np.floor(np.where(np.isfinite(bounds.step), bounds.step, -1)).astype(np.int64)
    judged = {"bound": whole, "rule": bounds.rule, "by": bounds.by, "open": space.is_open.astype(int)}
    judged |= {"need": least_bytes(bounds.costs, bounds.layout)}
    return {
        "fields": [{"name": name, "words": WORDS.get(name, name), "names": NAMES.get(name)} for name in Layout._fields],
        "varying": varying,
        "groups": [name for name in FIELDS if name in varying],
        "rules": list(RULES),
        "dominated": RULES.index(DOMINATED),
        "no_room": RULES.index(NO_ROOM),
        "step": space.value,
        "memory": space.memory,
        "solved": [[row, round(step, 3)] for row, step in space.solved.items()],
        "packed": packed(columns | judged),
    }
