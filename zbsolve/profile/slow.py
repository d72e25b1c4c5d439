"""What is slow in a run (a rank, a link, microbatches), and what it costs: by how much the step would be shorter, by the
longest path, if it took the median of the others. A rank is compared with the times that its schedule was made for; if these
are the run's own, with other ranks. ("Understanding Stragglers in Large Model Training Using What-if Analysis")"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..schedule.timeline import Floats
from ..schedule.trace import REPLAYED, Trace
from ..util.files import Fields
from ..util.text import format_time
from .lengths import Lengths, lengths_of, with_times
from .measured_run import FROM_STEPS, LINKS, heard_messages

SLOWER, LEAST_SHARE = 1.05, 0.005  # to be reported: times the median of the others, and share of the step that it costs
ALONE = 1.25  # the same for a rank of one of several pipelines, compared with that rank of all
REPLICA = ", replica "  # precedes the number of a pipeline in the name of a step


@dataclass(frozen=True, slots=True)
class Slow(Fields):
    """Something slow. what: such as "rank 3", "link 0 → 1", "microbatch 5" or "microbatches"; replica: the number of its
    pipeline ("": all of them). times: its time relative to the median of the others. step: µs of a step, the mean; cost: by
    how much it would be shorter."""

    what: str
    replica: str
    times: float
    cost: float
    step: float

    def __str__(self) -> str:
        where = f" of replica {self.replica}" if self.replica else ""
        longest = "the longest takes" if self.what == "microbatches" else "takes"
        cost = f"the step is {format_time(self.cost)} ({self.cost / self.step:.1%}) shorter without"
        return f"slow: {self.what}{where}: {longest} {self.times:.2f} times the median of the others; {cost}"


def slow_parts(trace: Trace) -> tuple[Slow, ...]:
    """What is slow in the run of a `trace` (rank, link, microbatch), the costliest first, with its cost.

    Reported is what takes 5 % more than the median of the others, and costs at least 0.5 % of the step. A microbatch counts
    if it is long in most steps; all microbatches count together if their lengths differ. A rank that is slow in only one of
    several pipelines is reported for that one, from 25 % more than the same rank of all.
    """
    lengths, now = lengths_of(trace), replace(trace, problem=_with_links(trace))
    parts = [*_slow_links(trace, now), *_slow_microbatches(now, lengths)]
    ranks, expected = now.problem.ranks, np.maximum(_expected(trace, lengths), 1e-9)
    took, pipelines = now.computed(), _pipelines(trace)
    usual = _relative(now, took, expected)
    for name in dict.fromkeys(pipelines) if len(set(pipelines)) > 1 else ():
        rows = [i for i, other in enumerate(pipelines) if other == name]
        own = _relative(now, took[rows], expected)
        slow = np.flatnonzero(own >= ALONE * usual).tolist()
        parts += [_slow_rank(now, (took[rows], expected), rank, rows, name) for rank in slow]
    parts += [_slow_rank(now, (took, expected), rank, range(len(trace.steps)), "") for rank in range(ranks)]
    kept = [slow for slow in parts if slow.times >= SLOWER and slow.cost >= LEAST_SHARE * slow.step]
    return tuple(sorted(kept, key=lambda part: -part.cost))


def problem_now(trace: Trace) -> Problem:
    """The problem that ran, with present times: of passes (medians), of microbatches long in most steps, and of messages."""
    lengths, problem = lengths_of(trace), _with_links(trace)
    factor = _lasting(lengths)
    factor = np.where(factor >= SLOWER, factor, 1.0)[problem.passes.microbatch * problem.in_microbatch]
    return with_times(problem, lengths.usual * np.where(problem.in_microbatch, factor, 1.0))


def _of_itself(trace: Trace) -> bool:
    """Are the problem's times the run's own? Then there are no planned times to compare with."""
    return trace.facts.get(LINKS) == FROM_STEPS


def _pipelines(trace: Trace) -> list[str]:
    names = trace.facts.get("steps")
    names = names if isinstance(names, list) else [""] * len(trace.steps)
    return [str(name).partition(REPLICA)[2] for name in names]


def _lasting(lengths: Lengths) -> Floats:
    """The factor of each microbatch in most steps, relative to the median of them, shape (microbatches,)."""
    usual = np.median(lengths.each, axis=0)
    return np.asarray(usual / np.median(usual))


def _expected(trace: Trace, lengths: Lengths) -> Floats:
    """The expected µs of each pass, shape (passes,): by the schedule's times, else the median of all ranks with its kind."""
    problem, own = trace.problem, lengths.usual
    p = problem.passes
    if not _of_itself(trace):
        return (p.duration - problem.sending).astype(np.float64)
    expected = own.copy()
    layers = np.maximum(np.array(problem.layers or (1,) * problem.stages), 1)[p.stage % max(1, problem.stages)]
    for kind in np.unique(p.kind).tolist():
        rows = p.kind == kind
        ranks = [np.median((own / layers)[rows & (p.rank == rank)]) for rank in np.unique(p.rank[rows]).tolist()]
        if len(ranks) > 1:
            expected[rows] = np.median(ranks) * layers[rows]
    return expected


def _relative(trace: Trace, took: Floats, expected: Floats) -> Floats:
    """For each rank, its passes' time together relative to the expected one, the median over the steps of `took`, relative
    to the median of the other ranks, shape (ranks,). took: µs, shape (steps, passes); expected: shape (passes,)."""
    problem = trace.problem
    rows = problem.computing & problem.in_microbatch
    own = [np.flatnonzero(rows & (problem.passes.rank == rank)) for rank in range(problem.ranks)]
    means = [float(np.median(took[:, of].sum(axis=1)) / expected[of].sum()) if len(of) else 1.0 for of in own]
    return np.array([mean / _others(means, i) for i, mean in enumerate(means)])


def _others(values: Sequence[float], i: int) -> float:
    """The median of all other values, limited to positive numbers."""
    others = [value for j, value in enumerate(values) if j != i]
    return max(float(np.median(others)) if others else float(values[i]), 1e-9)


def _slow_rank(trace: Trace, times: tuple[Floats, Floats], rank: int, steps: Sequence[int], replica: str) -> Slow:
    """A slow rank. Its cost is for expected times, times the others' ratio; variation between passes is kept. times: of the
    steps, and expected (see `_relative`)."""
    (took, expected), own = times, (trace.problem.passes.rank == rank) & trace.problem.computing
    slower, of = float(_relative(trace, took, expected)[rank]), own & trace.problem.in_microbatch
    usual = np.median(took[:, of].sum(axis=1)) / expected[of].sum() / slower if of.any() else 1.0
    scale = np.where(own, usual * expected / np.maximum(np.median(took, axis=0), 1e-9), 1.0)
    return _slow(trace, steps, (f"rank {rank}", replica), slower, scale)


def _slow_microbatches(trace: Trace, lengths: Lengths) -> list[Slow]:
    problem = trace.problem
    if not (problem.alike or _of_itself(trace)):
        return []
    of = np.where(problem.in_microbatch & problem.computing, problem.passes.microbatch, -1)
    lasting, every = _lasting(lengths), range(len(trace.steps))
    parts = []
    for i in np.flatnonzero(lasting >= SLOWER).tolist():
        shorter = np.where(of == i, 1 / lasting[i], 1.0)
        parts.append(_slow(trace, every, (f"microbatch {i}", ""), float(lasting[i]), shorter))
    if not lengths.explain:
        return parts
    longest = float(np.median(lengths.each.max(axis=1)))
    scale = np.pad(1 / lengths.each, ((0, 0), (0, 1)), constant_values=1.0)  # the last entry: passes without a microbatch
    return [*parts, _slow(trace, every, ("microbatches", ""), longest, scale[:, of])]


def _links(problem: Problem) -> dict[tuple[int, int], Ints]:
    """(sender, receiver) → rows of the edges that are messages between them."""
    e, rank = problem.edges, problem.passes.rank
    rows = np.flatnonzero((rank[e.before] != rank[e.after]) & (e.lag + e.sent > 0))
    pairs: dict[tuple[int, int], list[int]] = {}
    for row in rows.tolist():
        pairs.setdefault((int(rank[e.before[row]]), int(rank[e.after[row]])), []).append(row)
    return {pair: np.array(numbers) for pair, numbers in pairs.items()}


def _with_links(trace: Trace) -> Problem:
    """The problem with the messages' measured times on each link, where idle ranks waited for them."""
    problem, delays = trace.problem, heard_messages(trace)
    lag = problem.edges.lag.astype(np.float64)
    for rows in _links(problem).values():
        took = np.concatenate([delays[row] for row in rows.tolist() if row in delays] or [np.zeros(0)])
        if len(took):
            lag[rows] *= np.median(took) / np.mean(problem.edges.lag[rows])
    return replace(problem, edges=replace(problem.edges, lag=np.rint(lag).astype(np.int64)))


def _slow_links(trace: Trace, now: Trace) -> list[Slow]:
    """Slow links, compared with their planned times; if these are the run's own, with other links."""
    links, edges = _links(trace.problem), (trace.problem.edges, now.problem.edges)
    planned, taken = ([float((e.lag + e.sent)[rows].mean()) for rows in links.values()] for e in edges)
    ratios = taken if _of_itself(trace) else [b / a for a, b in zip(planned, taken, strict=True)]
    parts = []
    for i, ((a, b), rows) in enumerate(links.items()):
        times = ratios[i] / _others(ratios, i)
        if times >= SLOWER:
            e = now.problem.edges
            lag, sent = e.lag.copy(), e.sent.copy()
            lag[rows], sent[rows] = np.rint(lag[rows] / times), np.rint(sent[rows] / times)
            healed, what = replace(now.problem, edges=replace(e, lag=lag, sent=sent)), (f"link {a} → {b}", "")
            parts.append(_slow(now, range(len(now.steps)), what, times, np.ones(1), healed))
    return parts


def _slow(
    trace: Trace, steps: Sequence[int], what: tuple[str, str], times: float, scale: Floats, healed: Problem | None = None
) -> Slow:
    """A `Slow` with its cost: some of the `steps` are replayed with their own times, and with times multiplied by `scale`,
    shape (steps or 1, passes or 1). healed: the problem with other messages, if they change."""
    problem, own, without = trace.problem, list[float](), list[float]()
    scale = np.broadcast_to(scale, (len(trace.steps), len(problem.passes)))
    sent = 0 if healed is None else problem.sending - healed.sending
    for step in steps[:: 1 + len(steps) // REPLAYED] if times >= SLOWER else ():
        own.append(trace.replayed(step).value)
        took = trace.alone(step) * scale[step] - sent
        without.append(replace(trace, problem=healed or problem).replayed(step, took).value)
    mean = float(np.mean(own or [0.0]))
    return Slow(*what, times, mean - float(np.mean(without or [0.0])), mean)
