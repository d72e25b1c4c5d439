"""A user's own work beside a training step: passes J, which a search puts where ranks would wait.

Examples: a frozen encoder's forward of the next batch (Optimus, ATC'25, section 3), a teacher's forward, evaluation, copies
of a checkpoint: work for which the step does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..kinds import WORK, kinds_that
from ..problem import Problem
from ..problem.tables import Edges, Ints
from ..schedule.timeline import Precedence, longest_path
from ..util.errors import BadInput, Deadlock, Infeasible
from ..util.text import exact_bytes
from .numbers import check_before

MOST_PIECES = 10_000
STREAMS = ("compute", "d2h", "h2d")


@dataclass(frozen=True, slots=True)
class Work:
    """Work of one rank, or of ranks to choose from.

    rank: the one that does it; several: each of its pieces goes to one of them; None: to any rank.
    time: µs of all its pieces together, or of each.
    pieces: passes that it is cut into; those on one rank run in order. 1: it is not cut. None: as many of `time` as fit (see
        `work_room`).
    before: a stage of the rank whose first F waits for it.
    after: a stage of the rank for whose last gradients it waits; without either it runs whenever the rank is free.
    microbatches: for each piece its microbatch: only the F of that microbatch waits for the piece, and the piece only for
        its gradients; (): for all.
    takes: number of an earlier work with as many pieces; each piece takes the result of the piece with its number there.
    comm: µs until that arrives from another rank.
    held: bytes from the start of its first piece to the end of its last one, or of the F that waits for it.
    stream: the stream of its rank that it occupies: "compute", or a copy engine, "d2h" or "h2d".
    homes: for each piece the rank that does it, one of several; (): the one with least to compute.
    """

    rank: int | tuple[int, ...] | None
    time: int | tuple[int, ...]
    pieces: int | None = 1
    before: int | None = None
    after: int | None = None
    microbatches: tuple[int, ...] = ()
    takes: int | None = None
    comm: int = 0
    held: int = 0
    stream: str = "compute"
    homes: tuple[int, ...] = ()

    @property
    def times(self) -> tuple[int, ...]:
        """µs of each piece."""
        if not isinstance(self.time, int):
            return self.time
        count = self.pieces or 1
        return tuple(self.time // count + (i < self.time % count) for i in range(count))

    @property
    def chosen(self) -> bool:
        """Must its rank still be chosen?"""
        return not isinstance(self.rank, int)

    def ranks(self, problem: Problem) -> tuple[int, ...]:
        """The ranks that may do it."""
        return (self.rank,) if isinstance(self.rank, int) else self.rank or tuple(range(problem.ranks))


def with_work(problem: Problem, *works: Work) -> Problem:
    """A step with passes `<first stage of the rank>J<number>` for these `works` on `<stream>:<rank>`, numbered in the given
    order, all pieces of a work one after the other. Works of one rank run in any order that `before` and `after` allow.

    Apply it last: other features do not know these passes. Raises BadInput for numbers that make no sense, and where a work
    must end before it can start; Infeasible where a rank has no room for what one holds.
    """
    check_before(problem, WORK)
    passes, edges, made = problem.passes, problem.edges, list[Ints]()
    first = {rank: stage for stage in reversed(range(problem.stages)) for rank in problem.stage_ranks[stage]}
    for number in range(len(works)):
        _check(problem, works, number)
    for work, homes in zip(works, homes_of(problem, works), strict=True):
        rows = len(passes) + np.arange(len(homes))
        columns = {"stage": np.array([first[rank] for rank in homes.tolist()]), "microbatch": rows - len(problem.passes)}
        passes = passes.more("J", work.stream, **columns, rank=homes, duration=np.array(work.times))
        made.append(rows)
        edges += _edges(problem, work, homes, rows)
        if work.takes is not None:
            giver = made[work.takes]
            lag = np.where(passes.rank[giver] == homes, 0, work.comm)
            edges += Edges.of(giver, rows, lag=lag, carries="activation")
    whole = replace(problem, passes=passes, edges=edges)
    if any(work.takes is not None for work in works):
        try:
            longest_path(whole, Precedence.of(whole))
        except Deadlock as error:
            circle = " → ".join((*error.cycle, error.cycle[0]))
            raise BadInput(f"work: its latest moment lies before its earliest: {circle}") from None
    return whole


def homes_of(problem: Problem, works: Sequence[Work]) -> list[Ints]:
    """For each work the rank of each piece. A piece whose rank is open goes to the rank with the least work so far, the
    longest piece first; of equal pieces the first ones go to the first ranks."""
    busy, chosen = problem.busy.copy(), dict[int, Ints]()
    for number, work in sorted(enumerate(works), key=lambda item: item[1].chosen and not item[1].homes):
        ranks, times = np.array(work.ranks(problem)), np.array(work.times)
        homes = np.array(work.homes or (ranks[0],) * len(times))
        if work.chosen and not work.homes:
            homes = _of_least(busy.copy(), ranks, times)
        np.add.at(busy, homes, times if work.stream == "compute" else 0)
        chosen[number] = homes
    return [chosen[number] for number in range(len(works))]


def _of_least(busy: Ints, ranks: Ints, times: Ints) -> Ints:
    homes = np.zeros(len(times), np.int64)
    for piece in np.argsort(-times, kind="stable"):
        homes[piece] = ranks[busy[ranks].argmin()]
        busy[homes[piece]] += times[piece]
    return np.sort(homes) if np.ptp(times) < 2 else homes


def _edges(problem: Problem, work: Work, homes: Ints, rows: Ints) -> Edges:
    """The edges of a work: its pieces in order on each rank, after and before other passes, with the bytes that it holds."""
    turn = rows[np.argsort(homes, kind="stable")]
    same = np.diff(np.sort(homes)) == 0
    edges, last = Edges.of(turn[:-1][same], turn[1:][same]), rows[-1:]
    number, rank = problem.passes.microbatch, int(homes[0])
    if work.after is not None:
        gradients = problem.rows(*kinds_that(adds_gradients=True), stage=work.after, rank=rank)
        edges += Edges.of(*_pairs(work, gradients, number[gradients], rows[:1], rows))
    if work.before is not None:
        forwards = problem.rows("F", stage=work.before, rank=rank)
        after, before = _pairs(work, forwards, number[forwards], rows[-1:], rows)
        edges, last = edges + Edges.of(before, after), after[-1:] if work.microbatches else forwards[:1]
    return edges + Edges.of(rows[:1], last, bytes=work.held) if work.held else edges


def _pairs(work: Work, others: Ints, numbers: Ints, end: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Passes of the step, with the piece to which each of them is tied: that of its microbatch, or the one at an end."""
    if not work.microbatches:
        return others, np.repeat(end, len(others))
    by_piece = [np.flatnonzero(numbers == microbatch) for microbatch in work.microbatches]
    return others[np.concatenate(by_piece)], np.repeat(rows, [len(own) for own in by_piece])


def _check(problem: Problem, works: Sequence[Work], number: int) -> None:
    work, where = works[number], f"work {number}"
    for wrong, why in _faults(problem, works, number):
        if wrong:
            raise BadInput(f"{where}: {why}")
    if not work.held or problem.capacity is None:
        return
    assert isinstance(work.rank, int)
    forwards = problem.rows("F", stage=work.before, rank=work.rank)
    beside = problem.taken[forwards[:1]].sum() if work.before is not None else 0
    needs, room = work.held + int(beside), problem.capacity[work.rank]
    if needs > room:
        what = "" if work.before is None else " with the F that waits for it"
        raise Infeasible(
            f"{where}: it holds {exact_bytes(needs)}{what}, and rank {work.rank} has {exact_bytes(room)}: no schedule exists"
        )


def _faults(problem: Problem, works: Sequence[Work], number: int) -> Iterator[tuple[bool, str]]:
    """Possible faults of a work: (is there one?, its text). Each may rely on those before it being absent."""
    work, moments = works[number], (works[number].before, works[number].after)
    ranks, pieces, timed = set(work.ranks(problem)), work.pieces or 0, not isinstance(work.time, int)
    yield work.pieces is None, "how many pieces fit is open: zbsolve solve and work_room say it"
    bound = moments != (None, None) or work.held != 0
    yield work.chosen and bound, "before, after and held need a rank; work on any rank may take what this makes"
    for rank in {*ranks, *work.homes}:
        yield not 0 <= rank < problem.ranks, f"there is no rank {rank} (they are 0 to {problem.ranks - 1})"
    wrong = not 1 <= pieces <= MOST_PIECES or (timed and pieces not in (1, len(work.times)))
    yield wrong, f"{pieces} pieces: 1 to {MOST_PIECES} are possible, and as many as there are times"
    each, others = work.times, set(work.homes) - ranks
    for what, column in (("homes", work.homes), ("microbatches", work.microbatches)):
        yield len(column) not in (0, len(each)), f"{what}: {len(column)}, not one for each of {len(each)} pieces"
    wrong = min(each) < int(timed) or sum(each) < 1 or min(work.held, work.comm) < 0
    yield wrong, "time and bytes are whole numbers, the time at least 1 µs"
    yield work.stream not in STREAMS, f"stream '{work.stream}': one of {', '.join(STREAMS)}"
    yield bool(others), f"homes: rank {min(others, default=0)} is none of its ranks"
    if work.takes is not None:
        yield not 0 <= work.takes < number, f"takes: there is no work {work.takes} before it"
        have = len(works[work.takes].times)
        yield have != len(each), f"takes: work {work.takes} has {have} pieces, and this one {len(each)}"
    why = f"its latest moment, before stage {work.before}, lies before its earliest, after {work.after}"
    yield None not in moments, why
    for stage in moments:
        on_rank = stage is None or (0 <= stage < problem.stages and work.rank in problem.stage_ranks[stage])
        yield not on_rank, f"stage {stage} does not lie on rank {work.rank}"
    trained = problem.passes.that(adds_gradients=True) & (problem.passes.stage == work.after)
    yield work.after is not None and not trained.any(), f"stage {work.after} makes no gradients that it could wait for"
    yield work.microbatches != () and moments == (None, None), "microbatches are of a moment: say 'before' or 'after'"
    for m in work.microbatches:
        yield not 0 <= m < problem.microbatches, f"there is no microbatch {m} (they are 0 to {problem.microbatches - 1})"
        rows = problem.in_microbatch & (problem.passes.rank == work.rank) & (problem.passes.microbatch == m)
        yield {*moments}.isdisjoint(problem.passes.stage[rows].tolist()), f"microbatch {m} runs that stage on another rank"
    why = "bytes are held from a first piece to a last one, and it has one: say 'before', or cut it"
    yield work.held > 0 and len(each) == 1 and work.before is None, why
