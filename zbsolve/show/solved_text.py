"""The report of `solve`, the progress line of a running search, and the table of choices that were tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..features.table import FEATURES
from ..long_steps.check import peaks
from ..long_steps.repeated import RepeatedSchedule
from ..partition.by_name import moves_between
from ..schedule import Schedule, relative_gap
from ..schedule.handover import most_waiting
from ..search.idle_room import Placed, Room
from ..util.text import (
    aligned,
    counted,
    exact_time,
    format_bytes,
    format_time,
    format_times,
    in_one_unit,
    plural,
    printable,
    time_unit,
    times_note,
)
from .sentences import copies_in_words, placed, placement_line, pool_lines, proof_line, verdict

if TYPE_CHECKING:
    from ..search.auto import Tried
    from ..search.least_peak import LeastPeak
    from ..search.noisy import LeastUnderNoise
    from ..search.state import State


# Options over all of whose choices a bound may hold, as the report names them.
PARTITION, CHOICE, SLICES, ORDER, SIZES = "partition", "choice", "slicing", "order of microbatches", "size of microbatches"
LONGER = "longer_from"  # the number of slices from which on every step is longer than the best
MAX_RANKS = 16  # with more ranks, only the fullest and the emptiest are shown
NOTABLE = 0.005  # of B and W: the report mentions a fused backward that is shorter by more
SMALL = 0.01  # of the capacity: smaller peaks are shown in a smaller unit
NO_CHANGE = 0.0005  # a smaller share would be shown as 0.0 %
HELD_BEFORE_COPIES = (
    "offload: the fullest rank holds more than 1F1B without it, which has room, too: forwards run ahead, and what waits for "
    "its copy stays on the device; with less memory (--memory) they wait for copies"
)


class AttentionGain(NamedTuple):
    """The effect of the attention exchange. handed: passes that hand attention to another rank. possible: attention passes
    of slices other than the first. time: µs of attention on other ranks. value, without: µs of SlimPipe's order with the
    exchange and without it; None: not known. slices: their number. even: they have equal lengths. note: a sentence if
    attention was taken as less than profiled, or ""."""

    handed: int
    possible: int
    time: int
    slices: int
    even: bool
    value: int | None = None
    without: int | None = None
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        """The numbers."""
        return {name: getattr(self, name) for name in ("handed", "possible", "time", "value", "without")}


@dataclass(frozen=True)
class WorkBeside:
    """Passes of the feature `work`. alone: the step without them, certified. found: their ranks or number, if left open."""

    alone: Schedule
    found: Placed | Room | None = None

    def facts(self, schedule: Schedule) -> dict[str, Any]:
        """share, bubble: of all ranks' time, what the work takes, and what the step without it leaves idle. value_alone,
        bound_alone: µs of the step without it. Then what is proven over all choices that were left open."""
        problem, alone = schedule.problem, self.alone.certificate
        assert alone is not None
        busy = self.alone.problem.busy.sum()
        facts: dict[str, Any] = {
            "share": float(problem.busy.sum() - busy) / (problem.ranks * round(schedule.timeline().value)),
            "bubble": float(1 - busy / (problem.ranks * alone.value)),
            "value_alone": alone.value,
            "bound_alone": alone.bound,
        }
        match self.found:
            case Placed(_, bound):
                facts["bound_of_every_choice"] = bound
            case Room(pieces=pieces, most=most):
                facts |= {"pieces": pieces, "most": most}
        return facts


@dataclass(frozen=True)
class Solved:
    """A solved schedule and what the report says beside it. usual: 1F1B of the same layers on the same ranks, if it exists.
    peak: the result of the search for less memory. noise: of the search for times that vary. timed: report the seconds (not
    with `effort`). copies: k of a step that offloads (see `copy_ratio`). fused_saves: the share by which BW is shorter than
    the schedule's B and W; 0: not known. attention: the effect of the attention exchange. tried: the choices that were
    tried. bounds: bounds over all choices: option (PARTITION, CHOICE, SLICES, ORDER, SIZES) → placement → µs, and LONGER →
    placement → number of slices. notes: on the reliability of the profile's numbers. work: passes of the feature `work`."""

    schedule: Schedule
    usual: Schedule | None = None
    peak: LeastPeak | None = None
    timed: bool = True
    copies: float | None = None
    fused_saves: float = 0.0
    attention: AttentionGain | None = None
    tried: tuple[Tried, ...] = ()
    bounds: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    work: WorkBeside | None = None
    noise: LeastUnderNoise | None = None

    @property
    def moved(self) -> tuple[Tried, list[tuple[int, int, int]]] | None:
        """The balanced split that was tried on the best choice's placement, and the layers moved from it to the best split
        (see `moves_between`); None if the best is that split, or it was not tried."""
        rows = [attempt for attempt in self.tried if attempt.value is not None]
        for best in (row for row in rows if not row.why):
            for row in rows:
                default = "balanced" in row.partition.split("=") and "," not in row.partition  # no layers were moved
                if default and row.placement.split()[0] == best.placement.split()[0] and row.layers != best.layers:
                    return row, moves_between(row.layers, best.layers)
        return None

    def to_json(self) -> dict[str, Any]:
        """The certificate; choices tried, and bounds over them; the placement; lengths of uneven slices; what a fused
        backward saves; peaks and capacities, bytes of each rank; results for less memory, work and noise; and the changes
        against 1F1B, relative to its value and to its largest peak."""
        problem, peaks = self.schedule.problem, self.schedule.timeline().peak_bytes
        certificate = self.schedule.certificate
        assert certificate is not None
        pools, peak = zip(problem.pools, self.schedule.timeline().pool_peaks, strict=True), self.peak
        sections = {
            "pools": [{"name": pool.name, "peak": most, "capacity": pool.capacity} for pool, most in pools] or None,
            "messages": _waiting_as_json(self.schedule),
            "copies": None if self.copies is None else {"k": self.copies},
            "attention_exchange": None if self.attention is None else self.attention.to_json(),
            "least_peak": peak and {"proven": peak.proven, "floor": float(peak.floor), "before": _size(peak.before)},
            "work": None if self.work is None else self.work.facts(self.schedule),
            "under_noise": None if self.noise is None else self.noise.to_json(),
            "against_1f1b": None if self.usual is None else _against(self.schedule, self.usual),
        }
        return {
            **certificate.to_json(),
            "source": problem.source,
            **({"tried": [attempt.to_json() for attempt in self.tried]} if self.tried else {}),
            **({"moved": self.moved[1]} if self.moved else {}),
            **{what if what == LONGER else f"bound_of_every_{what}": every for what, every in self.bounds.items()},
            **placed(problem),
            **{name: fact for feature in FEATURES for name, fact in feature.facts(problem).items()},
            "fused_saves": self.fused_saves,
            "peaks": list(peaks),
            "capacity": None if problem.capacity is None else list(problem.capacity),
            **{name: section for name, section in sections.items() if section is not None},
        }


def _waiting_as_json(schedule: Schedule) -> dict[str, Any] | None:
    """Bytes of each rank: of messages that wait at once, and reserved for them; None if memory has no limit."""
    problem = schedule.problem
    if problem.messages is None or problem.capacity is None:
        return None
    return {"waiting": most_waiting(schedule).tolist(), "reserved": list(problem.messages.reserved)}


def _size(schedule: Schedule) -> dict[str, Any]:
    timeline = schedule.timeline()
    return {"value": int(timeline.value), "peaks": list(timeline.peak_bytes)}


def _against(schedule: Schedule, usual: Schedule) -> dict[str, Any]:
    time, memory = changes(schedule, usual)
    return {**_size(usual), "time_change": time, "memory_change": memory}


def changes(schedule: Schedule, other: Schedule) -> tuple[float, float | None]:
    """The relative differences of `schedule` to `other` in value and in largest peak (None if the other's peak is 0)."""
    own, its = schedule.timeline(), other.timeline()
    most = max(its.peak_bytes)
    return own.value / its.value - 1, max(own.peak_bytes) / most - 1 if most else None


def solved_as_text(solved: Solved) -> str:
    """The lines that `solve` prints."""
    schedule = solved.schedule
    certificate, timeline = schedule.certificate, schedule.timeline()
    assert certificate is not None
    before = [tried_as_text(solved.tried, certificate.objective).rstrip("\n")] if solved.tried else []
    before += filter(None, [times_note(schedule.problem.source)])
    took = f" in {certificate.seconds:.1f} s" if solved.timed else ""
    lines = [
        *before,
        verdict(certificate),
        proof_line(certificate),
        f"bubble {timeline.bubble_rate:.2%}, found by {printable(certificate.solver)}{took}",
        placement_line(schedule.problem),
    ]
    lines += [line for feature in FEATURES for line in feature.lines(schedule.problem)]
    lines += [] if solved.work is None else [_work_in_words(schedule, solved.work)]
    if solved.moved is not None:
        lines.append(_moved_in_words(schedule, *solved.moved))
    if any(timeline.peak_bytes):
        lines += _memory_lines(solved)
    if solved.noise is not None:
        lines += _noise_lines(solved.noise)
    if solved.copies is not None:
        lines.append(copies_in_words(solved.copies, "of the busiest of these stages' ranks"))
        usual = solved.usual
        if usual is not None and max(timeline.peak_bytes) > max(usual.timeline().peak_bytes):
            lines.append(HELD_BEFORE_COPIES)
    if solved.attention is not None:
        lines.append(_attention_in_words(solved.attention))
    if solved.usual is not None:
        against = f"{_changes_in_words(schedule, solved.usual)}{_no_room(schedule, solved.usual)}"
        lines.append(f"against 1F1B on these ranks: {against}")
    if solved.fused_saves > NOTABLE:
        shorter = solved.usual is not None and solved.usual.timeline().value < timeline.value
        also = ", and 1F1B, which runs it, is shorter than this" if shorter else ""
        lines.append(
            f"all of this is about B and W apart. One pass BW takes {solved.fused_saves:.1%} less than both{also}: that is "
            "another problem, which --fused solves"
        )
    return "\n".join([*lines, *_bound_lines(solved)]) + "\n"


def _work_in_words(schedule: Schedule, work: WorkBeside) -> str:
    """The cost of passes of the feature `work`, and what is proven about it."""
    facts, value = work.facts(schedule), round(schedule.timeline().value)
    alone, least, most = facts["value_alone"], facts["bound_alone"], facts.get("most")
    pieces = "" if most is None else f" ({plural(piece=facts['pieces'])})"
    text = f"{facts['share']:.1%} of all ranks' time{pieces} does this work"
    by = " by microbatch" * schedule.problem.ordered
    if value > least and work.found is None:
        return f"work: {text}; proven: without it the step takes at least {exact_time(least)}{by and ' in orders'}{by}"
    text = f"work: without it {facts['bubble']:.1%} of all ranks' time is idle; {text}"
    if most is not None:
        more = "more" if most == facts["pieces"] else f"more than {most}"
        return f"{text}; proven: no order{by} does {more} without being longer"
    if value <= least:
        return f"{text}; proven: no order{by} is shorter without it"
    longer = f"{exact_time(value - alone)} longer" if value > alone else "not longer"
    return (
        f"{text}; the step is {longer} than without it; proven: whatever ranks do it, it takes at least "
        f"{exact_time(facts['bound_of_every_choice'])}{by and ' in orders'}{by}"
    )


def _noise_lines(least_under_noise: LeastUnderNoise) -> list[str]:
    """Step times where times of passes vary, and how much shorter they are than by the order best for the given times."""
    aim, drawn = least_under_noise.aim, least_under_noise.drawn
    unit, show = time_unit(max(spread.at(0.5)[0] for spread in drawn.spreads.values()))
    rows: list[tuple[str, ...]] = [(f"where times vary, {unit}", "as given", "mean", "p50", "p95", "p99")]
    for name, spread in drawn.spreads.items():
        ranked = (f"{show(at)} ({show(low)} to {show(high)})" for at, low, high in map(spread.at, (0.5, 0.95, 0.99)))
        rows.append((name, show(spread.given), "{} ± {}".format(*map(show, spread.mean)), *ranked))
    (least, low, high), bound = least_under_noise.less, least_under_noise.bound
    return [
        f"times vary: {drawn.noise}; {drawn.draws:,} steps that nothing was chosen by (95 % intervals)",
        *aligned(rows),
        f"{aim.what}: {least:.2%} less than the shortest by the given times ({low:.2%} to {high:.2%}); no order of these "
        "passes has less than {} {} ({} to {})".format(show(bound[0]), unit, *map(show, bound[1:])),
    ]


def _moved_in_words(schedule: Schedule, default: Tried, moves: Sequence[tuple[int, int, int]]) -> str:
    """The layers that moved from the balanced split to the best one, and the time that this saves."""
    moved = ", ".join(f"{count} from stage {giver} to stage {taker}" for giver, taker, count in moves)
    value = default.value or 1
    change = _change(schedule.timeline().value / value - 1, "time")
    split = f"the balanced split ({counted(default.layers)})"
    return f"layers moved from {split}: {moved}; those between move along; {change} ({format_times(value)[0]} there)"


def _bound_lines(solved: Solved) -> Iterator[str]:
    """A line for each bound over all choices."""
    for what, every in solved.bounds.items():
        if what == LONGER:
            counts = ", ".join(f"{count} on {placement}" for placement, count in every.items())
            yield f"more slices take longer than the best, however long they are: proven from {counts}"
            continue
        least = ", ".join(f"{exact_time(bound)} on {placement}" for placement, bound in every.items())
        kept = solved.schedule.every_split if what == PARTITION else None
        proven = [row.placement for row in solved.tried if not row.why and kept and kept.bound >= every[row.placement]]
        proof = f"the schedule's file proves that of {proven[0]} (check --bound)" if proven else "no certificate says that"
        by = " in orders by microbatch" * (solved.schedule.problem.ordered and what not in (ORDER, SIZES))
        by += " with the splits tried" * (what != PARTITION)
        yield f"each bound is for its own {what}; for every {what}: at least {least}{by}; {proof}"


def _attention_in_words(gain: AttentionGain) -> str:
    """How many passes hand attention to other ranks, and the time that SlimPipe's order saves by it."""
    if gain.slices == 1 or not gain.even:
        which = "has whole sequences" if gain.slices == 1 else "has slices of equal work"
        return f"attention exchange: none, since the shortest step found {which}"
    if not gain.handed:
        return (
            "attention exchange: no pass hands attention over, so nothing changes: ranks that wait cannot help, or messages "
            "take as long as they would save"
        )
    text = f"attention exchange: {gain.handed} of {gain.possible} passes hand attention over, {exact_time(gain.time)} in all"
    if gain.value is None or gain.without is None:
        return text
    change, both = _change(gain.value / gain.without - 1, "time"), format_times(gain.without, gain.value)
    return f"{text}; SlimPipe's order has {change} with it ({' → '.join(both)})"


def _memory_lines(solved: Solved) -> list[str]:
    """Peak activations of each rank (or of the fullest and the emptiest), and what the search for less memory found."""
    problem, peaks = solved.schedule.problem, solved.schedule.timeline().peak_bytes
    rows, peak = [*_peak_rows(peaks, problem.capacity), *pool_lines(solved.schedule)], solved.peak
    rows += _waiting_rows(solved.schedule)
    if peak is None:
        return rows
    if peak.enough > peak.before.timeline().value and peak.schedule is not peak.before:
        rows.append(f"memory was preferred: {_changes_in_words(peak.schedule, peak.before)} than the shortest found")
    elif peak.proven:
        by = " by microbatch" * problem.ordered  # the proof is about these orders only
        rows.append(f"least memory: proven, for this time no order{by} needs less on its fullest rank")
    return rows


def _waiting_rows(schedule: Schedule) -> list[str]:
    """A line if more bytes of messages wait at once than are reserved for them; none if memory has no limit."""
    problem = schedule.problem
    if problem.messages is None or problem.capacity is None:
        return []
    waiting = most_waiting(schedule)
    over = waiting - np.array(problem.messages.reserved)
    if (over <= 0).all():
        return []
    rank = int(over.argmax())
    most, usual = (format_bytes(int(array[rank])) for array in (waiting, problem.messages.reserved))
    more = int((over > 0).sum()) - 1
    others = f" (and on {more} more {'rank' if more == 1 else 'ranks'})" if more else ""
    return [f"messages: {most} wait at once on rank {rank}{others}, more than the usual {usual}; that has room, too"]


def _peak_rows(peaks: Sequence[int], capacity: Sequence[int] | None) -> list[str]:
    if len(peaks) > MAX_RANKS:
        shares = [peak / max(1, room) for peak, room in zip(peaks, capacity or (1,) * len(peaks), strict=True)]
        rank = max(range(len(peaks)), key=lambda rank: shares[rank])
        of = f" of {format_bytes(capacity[rank])}" if capacity else ""
        fullest, least = format_bytes(peaks[rank]), format_bytes(min(peaks))
        return [f"activations: {fullest}{of} on rank {rank}, the fullest; {least} on the emptiest"]
    unit, shown = in_one_unit((*peaks, *(capacity or ())))
    rooms, room = "", shown[len(peaks) :]
    if capacity and max(peaks) < SMALL * max(capacity):
        (unit, shown), (larger, room) = in_one_unit(peaks), in_one_unit(capacity)
        rooms = f", {larger}"
    rows = [("rank", *map(str, range(len(peaks)))), (f"activations, {unit}", *shown[: len(peaks)])]
    return aligned([*rows, (f"room for them{rooms}", *room)] if capacity else rows)


def _changes_in_words(schedule: Schedule, other: Schedule) -> str:
    """`13.3% less time (1,079.41 ms → 935.37 ms), 102.4% more memory on the fullest rank (12.5 GiB → 25.3 GiB)`."""
    time, memory = changes(schedule, other)
    own, its = schedule.timeline(), other.timeline()
    text = f"{_change(time, 'time')} ({' → '.join(format_times(its.value, own.value))})"
    if memory is None:
        return text
    most = f"{format_bytes(max(its.peak_bytes))} → {format_bytes(max(own.peak_bytes))}"
    return f"{text}, {_change(memory, 'memory')} on the fullest rank ({most})"


def _no_room(schedule: Schedule, usual: Schedule) -> str:
    """`; rank 0 has no room for 1F1B's 4.80 GiB`: where 1F1B of the same layers on each rank would not fit; otherwise ""."""
    own, its = schedule.problem, usual.problem
    if own.capacity is None or (own.layers, own.routes) != (its.layers, its.routes):
        return ""
    rows = zip(usual.timeline().peak_bytes, own.capacity, strict=True)
    over = next(((rank, peak) for rank, (peak, room) in enumerate(rows) if peak > room), None)
    return f"; rank {over[0]} has no room for 1F1B's {format_bytes(over[1])}" if over else ""


def _change(share: float, what: str) -> str:
    if abs(share) < NO_CHANGE:
        return f"the same {what}"
    return f"{abs(share):.1%} {'more' if share > 0 else 'less'} {what}"


def repeated_as_text(long: RepeatedSchedule) -> str:
    """The lines that `solve` and `check` print of a repeated schedule, each with its end."""
    lines, certificate, round = [], long.certificate, long.round
    if certificate is not None:
        bubble = 1 - long.microbatches * long.one.work / certificate.value
        lines += [verdict(certificate), proof_line(certificate), f"bubble {bubble:.2%}, found by {certificate.solver}"]
    lines.append(placement_line(long.one))
    rounds = "a microbatch" if round.every == 1 else f"{round.every} microbatches"
    lines.append(
        f"{long.passes:,} passes of {long.microbatches:,} microbatches: an order of {long.few}, and in it rounds of "
        f"{rounds}, {exact_time(round.period)} each, {round.copies + long.further:,} in a row"
    )
    held = peaks(long.one, long.order)
    rank = int(held.argmax())
    room = "" if long.one.capacity is None else f" of {format_bytes(long.one.capacity[rank])}"
    lines.append(f"activations: at most {format_bytes(int(held[rank]))}{room}, on rank {rank}")
    return "".join(f"{line}\n" for line in lines)


def state_as_text(state: State, elapsed: float) -> str:
    """`makespan 12.40 ms, bound 12.10 ms, gap 2.42%, 3 s, by annealing`; elapsed: seconds since the search began."""
    bound = f"bound {format_time(state.bound.value)}"
    if state.schedule is None:
        return f"no schedule yet, {bound}, {elapsed:.0f} s"
    objective, gap = state.schedule.problem.objective, relative_gap(state.value, state.bound.value)
    return f"{objective} {format_time(state.value)}, {bound}, gap {gap:.2%}, {elapsed:.0f} s, by {state.solver}"


def tried_as_text(tried: Sequence[Tried], objective: str) -> str:
    """A table of tried choices: value, bound, gap, in one unit; the fullest rank's memory, if known; why the choice lost."""
    split, full = len({attempt.partition for attempt in tried}) > 1, any(attempt.memory for attempt in tried)
    head = "placement, partition" if split else "placement"
    unit, show = time_unit(max(attempt.value for attempt in tried if attempt.value is not None), digits=3)
    rows = [(head, f"{objective}, {unit}", f"bound, {unit}", "gap", *["fullest rank"] * full, "seconds", "")]
    for choice in tried:
        name = f"{choice.placement} {choice.partition}" if split else choice.placement
        gap = "–" if choice.value is None or choice.bound is None else f"{relative_gap(choice.value, choice.bound):.2%}"
        numbers = (*("–" if us is None else show(us) for us in (choice.value, choice.bound)), gap)
        if full:
            numbers = (*numbers, format_bytes(choice.memory) if choice.memory else "–")
        layers = f"  {counted(choice.layers)}" if split and choice.layers else ""
        rows.append((name, *numbers, f"{choice.seconds:.1f}" if choice.seconds else "–", f"{choice.why or 'best'}{layers}"))
    return "\n".join(aligned(rows, left=(0, -1))) + "\n"
