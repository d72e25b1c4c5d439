"""Named bidirectional schedules: GEMS, Chimera, DualPipe; and DualPipeV, which is DualPipe cut in half.

In placement `mirror` microbatches alternately go from the first rank to the last and back, so every stage is on two ranks.
F and B that DualPipe overlaps are consecutive here: only their all-to-alls overlap, which are not on the compute stream. Or
they are one pass with a measured time (`overlapped`).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

from ..build.joined import JOINED, with_joined
from ..kinds import KINDS
from ..problem import Problem
from ..problem.placement import mirror
from ..schedule import Schedule
from ..util.errors import BadInput
from .plain_step import FUSED, SPLIT, WrongPlacement, check_plain, order_of

Row = Iterator[tuple[int, str, int]]  # chunk (or stage), kind, microbatch


@order_of("gems")
def gems(problem: Problem) -> Schedule:
    """GEMS (SC 2020): at most two microbatches are in flight. The forward of each follows the backward of the one before,
    which goes in the other direction. Each replica holds one microbatch's activations."""
    routes, split = _mirrored(problem, "gems", pairs=1)
    order = {}
    for rank in range(problem.ranks):
        stages = [routes[i % 2].index(rank) for i in range(problem.microbatches)]
        order[f"compute:{rank}"] = tuple(
            f"{stage}{kind}{i}" for i, stage in enumerate(stages) for kind in (("F", "B", "W") if split else ("F", "BW"))
        )
    return Schedule(problem, order)


@order_of("chimera")
def chimera(problem: Problem) -> Schedule:
    """Chimera (arXiv 2107.06925, sections 3.1 to 3.5) with one or more pairs of pipelines (`mirror`, `mirror2`). Units of p
    microbatches follow each other, and the forwards of the next unit fill the bubbles at a unit's end. The order is that for
    equal forward and backward times."""
    routes, split = _mirrored(problem, "chimera")
    ranks, m = problem.ranks, problem.microbatches
    if m % len(routes):
        raise BadInput(f"chimera: {m} microbatches are not as many for each of its {len(routes)} pipelines")
    rows: list[list[str]] = [[] for _ in range(ranks)]
    for rank, kind, stage, i in _unit_steps(routes, m):
        rows[rank] += [f"{stage}{name}{i}" for name in (("F",) if kind == "F" else ("B", "W") if split else ("BW",))]
    return Schedule(problem, {f"compute:{rank}": tuple(row) for rank, row in enumerate(rows)})


def _unit_steps(routes: tuple[tuple[int, ...], ...], m: int) -> Iterator[tuple[int, str, int, int]]:
    """(rank, kind, stage, microbatch) in the order of time, if every pass takes one slot. Earlier units are first, backwards
    before forwards. A unit's forwards start on a rank after all those of the unit before, while it holds fewer than p."""
    ranks = len(routes[0])
    ready: list[list[tuple[int, int, int, str, int]]] = [[] for _ in range(ranks)]
    forwards, held = [Counter[int]() for _ in range(ranks)], [0] * ranks

    def add(kind: str, stage: int, i: int) -> None:
        key = (i // ranks, 0 if kind == "B" else 1, i, kind, stage)
        heapq.heappush(ready[routes[i % len(routes)][stage]], key)

    def allowed(rank: int, unit: int) -> bool:
        return held[rank] < ranks and (unit == 0 or forwards[rank][unit - 1] == ranks)

    for i in range(m):
        add("F", 0, i)
    for _ in range(4 * m * ranks):
        done = []
        for rank, waiting in enumerate(ready):
            usable = (key for key in sorted(waiting) if key[3] == "B" or allowed(rank, key[0]))
            key = next(usable, None)
            if key is None:
                continue
            waiting.remove(key)
            heapq.heapify(waiting)
            unit, _, i, kind, stage = key
            held[rank] += 1 if kind == "F" else -1
            forwards[rank][unit] += kind == "F"
            done.append((kind, stage, i))
            yield rank, kind, stage, i
        if not done:
            return
        for kind, stage, i in done:
            if kind == "F":
                add(*(("F", stage + 1, i) if stage + 1 < ranks else ("B", stage, i)))
            elif stage:
                add("B", stage - 1, i)


@order_of("dualpipe")
def dualpipe(problem: Problem) -> Schedule:
    """DualPipe (arXiv 2412.19437, section 3.2.1): microbatches from both ends, p even, m even and at least 2p."""
    routes, split = _mirrored(problem, "dualpipe", pairs=1)
    ranks, m = problem.ranks, problem.microbatches
    if not split:
        raise BadInput("dualpipe: needs B and W apart")
    if ranks % 2 or m % 2 or m < 2 * ranks:
        raise BadInput(f"dualpipe: needs an even number of ranks and microbatches, at least 2 a rank; got {ranks} and {m}")
    order = {}
    for rank in range(ranks):
        near = 0 if rank < ranks // 2 else 1  # the direction that reaches this rank in its first half
        row = _dual(min(rank, ranks - 1 - rank), ranks // 2, m // 2)
        ways = ((abs(chunk - near), kind, k) for chunk, kind, k in row)
        order[f"compute:{rank}"] = tuple(f"{routes[way].index(rank)}{kind}{2 * k + way}" for way, kind, k in ways)
    return Schedule(problem, order)


@order_of("dualpipe-v")
def dualpipe_v(problem: Problem) -> Schedule:
    """DualPipeV: DualPipe cut in half (deepseek-ai/DualPipe), placement vee, one replica; m at least 2p."""
    check_plain(problem, "dualpipe-v", "vee")
    ranks, m = problem.ranks, problem.microbatches
    if m < 2 * ranks:
        raise BadInput(f"dualpipe-v: needs at least 2 microbatches a rank; got {m} for {ranks} ranks")
    order = {}
    for rank in range(ranks):
        held = (rank, 2 * ranks - 1 - rank)
        order[f"compute:{rank}"] = tuple(f"{held[chunk]}{kind}{k}" for chunk, kind, k in _dual(rank, ranks, m))
    return Schedule(problem, order)


def overlapped(schedule: Schedule, times: int | Mapping[tuple[int, int], int]) -> Schedule:
    """DualPipe or DualPipeV with each pair of overlapped passes as one pass (`with_joined`). Passes that depend on one of
    the two then wait for both, as in DeepSeek's engine.

    schedule: of DualPipe or DualPipeV. A pair is a forward and, directly after it, the full backward of the other chunk.
    times: µs of a pair: one number, or (stage of the forward, stage of the backward) → µs.

    Raises BadInput for a schedule without such pairs, and for a pair without a time.
    """
    problem, groups = schedule.problem, list[tuple[str, ...]]()
    for names in schedule.order.values():
        groups += _pairs(problem, names)
    if not groups:
        raise BadInput("overlapped: no forward stands before a full backward of its rank's other chunk")
    stage = {name: int(problem.passes.stage[problem.index[name]]) for group in groups for name in group}
    try:
        took = [times if isinstance(times, int) else times[stage[group[0]], stage[group[1]]] for group in groups]
    except KeyError as error:
        raise BadInput(f"overlapped: no time of stages {error} together") from None
    joined = with_joined(problem, groups, took)
    gone = {name for group in groups for name in group[1:]}
    new = {group[0]: group[0].replace("F", JOINED.label) for group in groups}
    order = {
        stream: tuple(new.get(name, name) for name in names if name not in gone) for stream, names in schedule.order.items()
    }
    return Schedule(joined, order)


def _pairs(problem: Problem, names: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """The pairs in one stream: (F, B, W), each F directly followed by the B and W of a microbatch of another stage."""
    passes, rows = problem.passes, [problem.index[name] for name in names]
    kinds = [KINDS[kind] for kind in passes.kind[rows]]
    for i in range(len(names) - 2):
        f, b, w = rows[i : i + 3]
        full = passes.stage[b] == passes.stage[w] and passes.microbatch[b] == passes.microbatch[w]
        if full and kinds[i : i + 3] == ["F", "B", "W"] and passes.stage[f] != passes.stage[b]:
            yield names[i], names[i + 1], names[i + 2]


def _dual(place: int, half: int, m: int) -> Row:
    """The eight steps of DualPipe for the rank `place` from its end of `half`, m microbatches a chunk: (chunk, kind,
    microbatch). A full backward is B, directly followed by its W; deferred W run first in, first out."""
    next_of: dict[tuple[int, str], int] = defaultdict(int)
    late: deque[tuple[int, int]] = deque()

    def run(chunk: int, kind: str) -> Row:
        k = next_of[chunk, kind]
        next_of[chunk, kind] += 1
        yield chunk, kind, k

    def backward(chunk: int, *, put_off: bool = False) -> Row:
        k = next_of[chunk, "B"]
        yield from run(chunk, "B")
        if put_off:
            late.append((chunk, k))
        else:
            yield chunk, "W", k

    def weights() -> Row:
        chunk, k = late.popleft()
        yield chunk, "W", k

    outer = half - place - 1
    for _ in range(2 * outer):
        yield from run(0, "F")
    for _ in range(place + 1):
        yield from run(0, "F")
        yield from run(1, "F")
    for _ in range(outer):
        yield from backward(1, put_off=True)
        yield from weights()
        yield from run(1, "F")
    for _ in range(m - 2 * half + place + 1):
        yield from run(0, "F")
        yield from backward(1)
        yield from run(1, "F")
        yield from backward(0)
    for _ in range(outer):
        yield from backward(1)
        yield from run(1, "F")
        yield from backward(0)
    # The second half of the 2·(place + 1) backwards leaves its weight gradients for the end.
    for i in range(2 * (place + 1)):
        yield from backward(1 - i % 2, put_off=i > place)
    for _ in range(outer):
        yield from weights()
        yield from backward(0, put_off=True)
    while late:
        yield from weights()


def _mirrored(problem: Problem, name: str, pairs: int | None = None) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """The routes of a problem on placement mirror, and whether its backward is split. Raises BadInput for other problems."""
    kinds = {kind: len(problem.rows(kind)) for kind in problem.passes.kinds}
    ranks, m = problem.ranks, problem.microbatches
    split = set(kinds) == SPLIT
    if set(kinds.values()) != {ranks * m} or not (split or set(kinds) == FUSED):
        raise BadInput(f"{name}: needs F, B, W (or F, BW) passes of one stage a rank and direction, not {kinds}")
    routes = tuple(problem.routes[i % len(problem.routes)] for i in range(m))
    ways = {f: mirror(ranks, f) for f in range(1, ranks // 2 + 1) if ranks % (2 * f) == 0}
    count = next((f for f, way in ways.items() if routes == tuple(way[i % len(way)] for i in range(m))), None)
    if count is None or pairs not in (None, count):
        raise WrongPlacement(
            f"{name}: is defined for placement mirror only" + (", an even number of ranks" if ranks % 2 else "")
        )
    return routes[: 2 * count], split
