"""Bounds over every choice: of what is copied (none, all, or any fraction of each copy that a problem has), and of how
attention is exchanged between ranks (whatever is sent, to which ranks, in how many parts), and of the order of microbatches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from ...build.attention_costs import AttentionExchange, attending, parts_of
from ...build.attention_exchange import check_exchangeable
from ...problem import Ints, Problem
from ...timeline import Floats, Precedence, longest_path
from ...util.errors import BadInput
from .bound import CHOICES, Bound, serial_length
from .closed_form_kernels import one_machine
from .closed_forms import closed_form
from .copies import Copies, Device, device_of, in_one_pool, least_work, with_more_room, without_copies
from .necessary_arcs import heads_and_tails
from .path_walks import NO_PATH

# --- Copies ---


ANY_CHOICE = "whatever is copied"
SLACK = 1e-6  # µs, and relative: work is a float


class StreamWork(NamedTuple):
    """One stream: `own`, µs in the window before its first copy can start and after its last must have ended; for each of
    its devices the index among all, and whether its copies out and its copies back are there."""

    stream: str
    own: int
    devices: list[tuple[int, bool, bool]]


def bound_over_choices(problem: Problem) -> Bound:
    """A value in µs that no schedule undercuts, of any problem that copies less than `problem` does.

    problem: makes all copies that may be made, whole (`with_offload` with the fraction 1).

    The others are those of the same step, copy times, capacities and pools. Each pair of copies is left out there, or moves
    a fraction from 0 to 1 of its bytes in that part of its time, rounded as `with_offload` does. `problem` is one of them,
    so a certificate of one of its schedules may name this bound, and `recheck` proves it again. Lanes run in table order.

    Proof. A schedule of any of them, without its copies, is one of the step alone. That needs no more room on a device than
    there is on it and in the pools that it may copy to (`with_more_room`, `in_one_pool`). So bounds of the step with that
    room hold. They give heads and tails. Then a window must be long enough for the copies that memory asks for within it
    (`least_work`): on each stream between the first moment when a pass that takes has ended and the last one when a pass
    that needs the bytes must start.
    """
    base, copies = without_copies(problem)
    step = with_more_room(problem, base, copies)
    one_pool = (in_one_pool(problem, step, copies, pool) for pool in np.unique(copies.pool).tolist())
    best = max((closed_form(simpler) for simpler in (step, *one_pool) if simpler is not None), key=lambda bound: bound.value)
    best = Bound(best.value, f"{ANY_CHOICE}: {best.proof}", CHOICES)
    for whose in [-1] if problem.objective == "makespan" else range(problem.ranks):
        best = max(best, _copying(problem, step, copies, whose, best.value), key=lambda bound: bound.value)
    return best


def _copying(problem: Problem, step: Problem, copies: Copies, whose: int, low: int) -> Bound:
    """The least window of rank `whose` (−1: of all), `low` µs or more, with time for the copies that memory asks for."""
    times = heads_and_tails(step, whose)
    ranks = range(problem.ranks) if whose < 0 else [whose]
    found = [(rank, device_of(problem, step, copies, rank, times)) for rank in ranks]
    devices = [(rank, device) for rank, device in found if device is not None]
    streams = list(stream_work(problem, step, copies, [rank for rank, _ in devices], times))
    least, high = low, max(low, serial_length(problem))  # no schedule need take longer, if one exists
    while least < high:
        middle = (least + high) // 2
        if _too_short(middle, [device for _, device in devices], streams) is None:
            high = middle
        else:
            least = middle + 1
    why = _too_short(least - 1, [device for _, device in devices], streams) if least > low else None
    return Bound(low, "", CHOICES) if why is None else Bound(least, f"{ANY_CHOICE}: {why}", CHOICES)


def _too_short(window: int, devices: list[Device], streams: list[StreamWork]) -> str | None:
    """Why a window, µs, has no time for the copies that memory asks for; None where it has."""
    missing = [device.missing(window) for device in devices]
    for stream, own, its in streams:
        work = sum(least_work(devices[i].savings, missing[i], out, back) for i, out, back in its)
        if work == np.inf:
            return f"{stream}: no copies there free enough memory in less time"
        if work > 0 and own + work * (1 - SLACK) - SLACK > window:
            return f"{stream}: the copies that memory asks for take longer than less time"
    return None


def stream_work(
    problem: Problem, step: Problem, copies: Copies, ranks: list[int], times: tuple[Ints, Ints]
) -> Iterator[StreamWork]:
    """The streams of copies of these ranks' devices."""
    (head, tail), duration, e = times, step.passes.duration, step.edges
    first = head[copies.taker] + duration[copies.taker]
    last = (duration + tail)[e.after[copies.edge]]
    sure = (head[copies.taker] > NO_PATH) & (tail[copies.taker] > NO_PATH)
    known = sure[copies.pair] & (tail[e.after[copies.edge]] > NO_PATH) & (head[e.after[copies.edge]] > NO_PATH)
    rank = problem.passes.rank[copies.out]
    for stream, rows in problem.members.items():
        out, back = np.isin(copies.out, rows), np.isin(copies.back, rows)
        its = []
        for i, one in enumerate(ranks):
            on_rank = rank == one
            whole = all(ways[on_rank].all() or not ways[on_rank].any() for ways in (out, back))
            if whole and (out | back)[on_rank].all():
                its.append((i, bool(out[on_rank].any()), bool(back[on_rank].any())))
        use = known & np.isin(rank[copies.pair], [ranks[i] for i, _, _ in its])
        if its and use.any():
            yield StreamWork(stream, int(first[copies.pair[use]].min() + last[use].min()), its)


# --- Exchange of attention ---


MAX_WINDOWS = 300  # ends of windows that are looked at on either side


def bound_over_exchanges(problem: Problem, costs: AttentionExchange, helpers: int = 1) -> int:
    """A value that no schedule undercuts of any problem that `with_attention_exchange` makes of `problem`, a step in even
    slices without an exchange, whatever the handings are; in µs. helpers: of a pass, one as that builder has them; with
    more, at most all other ranks, the bound holds for steps where several ranks share a pass's attention.

    Proof. A pass keeps all but its attention to earlier slices, and k = helpers + 1 ranks share the attention at best: so
    between its beginning and its end lie at least the parts before and behind and, between them, the longer of what it keeps
    of the attention and one k-th of all of it. With these lengths longest paths give earliest beginnings and latest
    ends (tails). That bounds a step by (1) the longest path, (2) for each rank its least head, what its passes keep, and its
    least tail, and (3) all work: in the first s µs no pass does more than its part before at once and its attention k-fold
    since its earliest beginning, U(s) in all; in the last t µs no more than V(t) likewise. Where U(s) + V(t) is less than
    all work W, a step lasts longer than s + t, and p ranks do the rest between: s + t + (W − U(s) − V(t))/p. For spans, (2)
    without head and tail, and W/p: no rank's window is shorter than its work.
    Raises BadInput where that builder does.
    """
    check_exchangeable(problem)
    ranks, p = problem.ranks, problem.passes
    share = min(helpers + 1, ranks)
    passes = _Passes.of(problem, costs.checked(problem.stages), share)
    rows_of = [problem.computing & (p.rank == rank) for rank in range(ranks)]
    whole = int(passes.work.sum())
    if problem.objective == "span":
        return max(-(-whole // ranks), *(int(passes.kept[rows].sum()) for rows in rows_of))
    head, tail = longest(problem, passes.length), longest(problem, passes.length, back=True)
    own = (int(head[rows].min() + passes.kept[rows].sum() + tail[rows].min()) for rows in rows_of if rows.any())
    # Windows that end where passes can begin, the shortest ones, for there few are under way.
    first, last = (np.unique(np.append(at[problem.computing], 0))[:MAX_WINDOWS] for at in (head, tail))
    early = passes.done_by(first, head, passes.before, share)
    late = passes.done_by(last, tail, passes.behind, share)
    rest = whole - early[:, None] - late[None]
    window = np.where(rest > 0, first[:, None] + last[None] + rest / ranks, 0)
    return max(int((head + passes.length + tail).max()), *own, int(np.ceil(window.max() - 1e-6)))


class _Passes(NamedTuple):
    """One value a pass, µs. length: between its beginning and its end at least; kept: what stays on its rank; work: all that
    ranks compute for it; before, behind: what comes before and behind its attention; attention."""

    length: Ints
    kept: Ints
    work: Ints
    before: Ints
    behind: Ints

    @classmethod
    def of(cls, problem: Problem, costs: AttentionExchange, share: int) -> _Passes:
        p, rows = problem.passes, attending(problem)
        parts = parts_of(problem, costs, rows)
        stays = parts.attention - np.minimum(parts.attention, np.ceil(parts.blocks * parts.key_time).astype(np.int64))
        length, kept, before, behind = (p.duration.copy() for _ in range(4))
        length[rows] = parts.before + parts.behind + np.maximum(stays, parts.attention // share)
        kept[rows] = parts.before + parts.behind + stays
        before[rows], behind[rows] = parts.before, parts.behind
        return cls(length, kept, np.where(problem.computing, p.duration, 0), before, behind)

    def done_by(self, windows: Ints, begin: Ints, first: Ints, share: int) -> Floats:
        """The most work done within windows from the step's end that `begin` counts from, shape (windows,). first: what a
        pass does alone before its attention, seen from that end."""
        since = np.maximum(0, windows[:, None] - begin[None])
        done = np.minimum(since, first) + share * np.maximum(0, since - first)
        return np.asarray(np.minimum(done, self.work).sum(axis=1), np.float64)


def longest(problem: Problem, length: Ints, back: bool = False) -> Ints:
    """Longest path before each pass, µs, where passes take so long; back: behind it."""
    e = problem.edges
    arcs = Precedence(e.after, e.before, e.lag) if back else Precedence(e.before, e.after, e.lag)
    return longest_path(replace(problem, passes=replace(problem.passes, duration=length)), arcs)[0]


def bound_over_orders(problem: Problem) -> int:
    """µs that no schedule of the problem takes less than, also where lanes run in another order than that of microbatches'
    numbers: so of the problem with its microbatches numbered in any way.

    The longest path of the graph, without the order of lanes; and each stream as one machine, whose passes have the longest
    paths before and behind them as heads and tails (Carlier, 1982). It counts no memory. Of a span: the busiest rank's work.
    Raises BadInput where another numbering is another step: microbatches take several routes, or a pass is for some of them
    alone (a gather for two of four, copies of the first).
    """
    check_numbers(problem)
    if problem.objective != "makespan":
        return problem.work
    duration = problem.passes.duration
    head, tail = longest(problem, duration), longest(problem, duration, back=True)
    machines = (int(one_machine(head[rows], duration[rows], tail[rows])) for rows in problem.members.values())
    return max(int((head + duration + tail).max()), *machines)


def check_numbers(problem: Problem) -> None:
    """Raise BadInput unless microbatches can change their numbers: each has the same passes, on the same ranks, and what is
    of no microbatch, or of another one, waits for all of them or for none."""
    if len(problem.routes) > 1:
        raise BadInput("order: microbatches take several routes in turn, so another number is another route")
    count, number, inside, e = problem.microbatches, problem.passes.microbatch, problem.in_microbatch, problem.edges
    some = [int(rows[0]) for rows in problem.lanes if inside[rows[0]] and len(rows) < count]
    here, there = np.append(e.before, e.after), np.append(e.after, e.before)
    apart = inside[there] & ~(inside[here] & (number[here] == number[there]))
    rows, met = np.unique(np.unique(here[apart] * count + number[there[apart]]) // count, return_counts=True)
    some += rows[met < count].tolist()
    if some:
        name = problem.names[some[0]]
        raise BadInput(f"order: pass {name} is for some microbatches alone, so with other numbers it is for others")
