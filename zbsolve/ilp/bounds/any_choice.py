"""Bounds over every choice of copies (none, all, or any fraction of each), over every order of microbatches, and over every
way to divide a batch into microbatches: of any sizes, in any order, in several numbers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from ...problem import Ints, Problem
from ...schedule.timeline import Floats, Precedence, longest_path
from ...util.errors import BadInput
from .bound import CHOICES, Bound, serial_length
from .closed_form_kernels import one_machine
from .closed_forms import closed_form
from .copies import Copies, Device, device_of, in_one_pool, least_work, with_more_room, without_copies
from .necessary_arcs import heads_and_tails
from .path_walks import NO_PATH

# --- Copies ---


ANY_CHOICE = "whatever is copied"
SLACK = 1e-6  # µs, and relative: tolerance, since work is a float


class StreamWork(NamedTuple):
    """One stream. own: µs of the window before its first copy can start and after its last one must have ended. devices: of
    the ranks whose copies it runs: the index, and whether it runs their copies out, and their copies back."""

    stream: str
    own: int
    devices: list[tuple[int, bool, bool]]


def bound_over_choices(problem: Problem) -> Bound:
    """A lower bound over every choice of copies, µs.

    problem: makes all copies that may be made, whole (`with_offload` with the fraction 1).

    A choice is the same step with the same copy times, capacities and pools, but each pair of copies is left out, or moves a
    fraction from 0 to 1 of its bytes in that fraction of its time, rounded as `with_offload` does. `problem` is one choice,
    so certificates of its schedules may name this bound, and `recheck` proves it again. Lanes run by number.

    Proof. A schedule of any choice, without its copies, is a schedule of the step alone. It needs no more room on a device
    than there is on the device and in the pools to which it may copy (`with_more_room`, `in_one_pool`). So bounds of the
    step with that room hold; they give heads and tails. Then a window must be long enough for the copies that memory
    requires within it (`least_work`), on each stream between the first end of a pass that takes bytes and the last start of
    a pass that needs them.
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
    """The least window of rank `whose` (−1: of all), from `low` µs on, with time for the copies that memory requires."""
    times = heads_and_tails(step, whose)
    ranks = range(problem.ranks) if whose < 0 else [whose]
    known = {rank: device_of(problem, step, copies, rank, times) for rank in ranks}
    devices = {rank: device for rank, device in known.items() if device is not None}
    streams = list(stream_work(problem, step, copies, list(devices), times))
    why_not = partial(_too_short, devices=list(devices.values()), streams=streams)
    windows = range(low, max(low, serial_length(problem)))  # no schedule need take longer, if one exists
    least = low + bisect_left(windows, True, key=lambda window: why_not(window) is None)
    why = why_not(least - 1) if least > low else None
    return Bound(low, "", CHOICES) if why is None else Bound(least, f"{ANY_CHOICE}: {why}", CHOICES)


def _too_short(window: int, devices: list[Device], streams: list[StreamWork]) -> str | None:
    """Why a window, µs, has no time for the copies that memory requires; None if it has."""
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
        for i, number in enumerate(ranks):
            on_rank = rank == number
            whole = all(ways[on_rank].all() or not ways[on_rank].any() for ways in (out, back))
            if whole and (out | back)[on_rank].all():
                its.append((i, bool(out[on_rank].any()), bool(back[on_rank].any())))
        use = known & np.isin(rank[copies.pair], [ranks[i] for i, _, _ in its])
        if its and use.any():
            yield StreamWork(stream, int(first[copies.pair[use]].min() + last[use].min()), its)


# --- Order of microbatches ---


def longest(problem: Problem, length: Ints, back: bool = False) -> Ints:
    """The longest path before each pass, or behind it if `back`, µs, shape (passes,). length: duration of each pass, µs."""
    e = problem.edges
    arcs = Precedence(e.after, e.before, e.lag) if back else Precedence(e.before, e.after, e.lag)
    return longest_path(replace(problem, passes=replace(problem.passes, duration=length)), arcs)[0]


def bound_over_orders(problem: Problem) -> int:
    """A lower bound over every order of microbatches, µs: it does not assume that lanes run by number.

    It is the longest path of the graph without the order of lanes; and each stream as one machine, whose passes have the
    longest paths before and behind them as heads and tails (Carlier, 1982). Memory is ignored. For the span it is the work
    of the busiest rank. Raises BadInput if another numbering would be another step: microbatches take several routes, or a
    pass is only for some of them (a collective for two of four, copies of the first one).
    """
    check_numbers(problem)
    if problem.objective != "makespan":
        return problem.work
    duration = problem.passes.duration
    head, tail = longest(problem, duration), longest(problem, duration, back=True)
    machines = (int(one_machine(head[rows], duration[rows], tail[rows])) for rows in problem.members.values())
    return max(int((head + duration + tail).max()), *machines)


def check_numbers(problem: Problem) -> None:
    """Raise BadInput unless microbatches can be renumbered: each has the same passes on the same ranks, and every other pass
    has edges to all of them or to none."""
    if len(problem.routes) > 1:
        raise BadInput("order: microbatches take several routes in turn, so another number is another route")
    count, number, inside, e = problem.microbatches, problem.passes.microbatch, problem.in_microbatch, problem.edges
    some = [int(rows[0]) for rows in problem.lanes if inside[rows[0]] and len(rows) < count]
    end, other = np.append(e.before, e.after), np.append(e.after, e.before)
    apart = inside[other] & ~(inside[end] & (number[end] == number[other]))
    rows, met = np.unique(np.unique(end[apart] * count + number[other[apart]]) // count, return_counts=True)
    some += rows[met < count].tolist()
    if some:
        name = problem.names[some[0]]
        raise BadInput(f"order: pass {name} is for some microbatches alone, so with other numbers it is for others")


# --- Sizes of microbatches ---


MOST_STATES = 30_000_000  # of the dynamic program over all windows; with more, only windows of whole streams count


class Window(NamedTuple):
    """Some passes of a microbatch on one stream. ends: the least path before one of them plus the least path behind one, by
    the microbatch's size, µs, shape (sizes,). fixed, each: their work is at least fixed + each · size µs."""

    ends: Floats
    fixed: float
    each: float

    def below(self, other: Window) -> bool:
        """Whether the other window is at least as strong in all cases."""
        return bool((self.ends <= other.ends).all()) and self.fixed <= other.fixed and self.each <= other.each


def bound_over_sizes(steps: Sequence[Problem], batch: int, numbers: Sequence[int]) -> int:
    """A lower bound of a step of `batch` sequences over all sizes and orders of its microbatches, µs.

    steps: the step of one microbatch of 1, 2, … sequences.
    batch: sequences of a step.
    numbers: allowed numbers of microbatches, ascending.

    Each microbatch has the same passes, and paths before and behind them, as when it is alone. So some passes on one stream,
    of all microbatches of σ sequences or more, take the least path before one of size σ, plus their work, plus the least
    path behind one. Take sizes from the largest down: k microbatches with n sequences together, the last of size σ, need the
    longest such window for k, n and σ, and what the first k − 1 needed. Dynamic programming finds the least for k of
    `numbers` and n = `batch`. Memory is ignored. For the span it is the work of the busiest rank.
    """
    sizes = min(len(steps), batch)
    whole, windows = _windows(steps[:sizes])
    if len(windows) * sizes * batch * numbers[-1] > MOST_STATES:
        whole, windows = _windows(steps[:sizes], all_of_it=True)
    size, many = np.arange(1, sizes + 1), np.arange(batch + 1)
    state = np.full((sizes, batch + 1), np.inf)
    least, state[:, 0] = np.inf, 0.0
    for count in range(1, numbers[-1] + 1):
        larger = np.minimum.accumulate(state[::-1])[::-1] if count > 1 else state
        state = np.full((sizes, batch + 1), np.inf)
        for row, sequences in enumerate(size.tolist()):
            state[row, sequences:] = np.maximum(larger[row, : batch + 1 - sequences], whole[row] if count == 1 else 0.0)
        for window in windows:
            np.maximum(state, window.ends[:, None] + (window.fixed * count + window.each * many), out=state)
        if count in numbers:
            least = min(least, state[:, batch].min())
    return int(np.ceil(least - 1e-6))


def _windows(steps: Sequence[Problem], all_of_it: bool = False) -> tuple[Floats, list[Window]]:
    """The longest path of one microbatch by its size, and the windows that no other dominates. all_of_it: only windows of
    whole streams."""
    problem, makespan = steps[0], steps[0].objective == "makespan"
    duration = np.array([step.passes.duration for step in steps], np.float64)
    head, tail = (np.array([longest(step, step.passes.duration, back) for step in steps], float) for back in (False, True))
    # Rounding may make a larger size shorter: with the least over larger sizes, bounds never fall as the size grows.
    duration, head, tail = (np.minimum.accumulate(rows[::-1])[::-1] for rows in (duration, head, tail))
    path = (duration + head + tail).max(axis=1) if makespan else duration.max(axis=1)
    windows = list[Window]()
    for rows in problem.members.values():
        rows = rows[problem.in_microbatch[rows]]
        for some in _subsets(rows, head[0], tail[0], all_of_it or not makespan):
            ends = head[:, some].min(axis=1) + tail[:, some].min(axis=1) if makespan else np.zeros(len(steps))
            window = Window(ends, *_line(duration[:, some].sum(axis=1)))
            if not any(window.below(other) for other in windows):
                windows = [other for other in windows if not other.below(window)] + [window]
    return path, windows


def _subsets(rows: Ints, head: Floats, tail: Floats, all_of_it: bool) -> Iterator[Ints]:
    """Sets of passes of a stream: those with at least some path before them, and at least some path behind."""
    for first in (head[rows].min(initial=np.inf),) if all_of_it else np.unique(head[rows]):
        for last in (tail[rows].min(initial=np.inf),) if all_of_it else np.unique(tail[rows]):
            some = rows[(head[rows] >= first) & (tail[rows] >= last)]
            if len(some):
                yield some


def _line(work: Floats) -> tuple[float, float]:
    """A line that is never above the work by size: its value at size 0, and its slope. work: µs, shape (sizes,)."""
    each = (work[-1] - work[0]) / max(1, len(work) - 1)
    return float((work - each * np.arange(1, len(work) + 1)).min()), float(each)
