"""The named schedules of the literature, as orders: what people use today, and the baselines of every comparison.

Each preset takes a `pipeline` problem and returns its schedule there; memory is not looked at (`verify` does). Raises
BadInput where the problem's placement or kinds are not the ones that the schedule is defined for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from ..errors import BadInput
from ..placement import describe
from ..problem import KINDS, Problem
from ..schedule import Schedule

Lane = Callable[[int], str]


def preset(name: str, problem: Problem) -> Schedule:
    """The schedule called `name` (see PRESETS). Raises BadInput for an unknown name or a problem that it does not fit."""
    if name not in PRESETS:
        raise BadInput(f"unknown schedule '{name}' (known: {', '.join(PRESETS)})")
    return PRESETS[name](problem)


def gpipe(problem: Problem) -> Schedule:
    """All forwards, then all backwards (arXiv 1811.06965)."""
    return _single(problem, "gpipe", lambda rank, ranks, m: m, lambda rank: 0)


def one_f_one_b(problem: Problem) -> Schedule:
    """1F1B (DAPPLE, arXiv 2007.01045; PipeDream-Flush, arXiv 2006.09503): rank r starts with p − r forwards."""
    return _single(problem, "1f1b", lambda rank, ranks, m: ranks - rank, lambda rank: 0)


def zb_h1(problem: Problem) -> Schedule:
    """ZB-H1 (arXiv 2401.10241, section 2.3): the warm-up of 1F1B; rank r leaves r weight gradients for later."""
    return _single(problem, "zb-h1", lambda rank, ranks, m: ranks - rank, lambda rank: rank)


def zb_h2(problem: Problem) -> Schedule:
    """ZB-H2 (arXiv 2401.10241, section 2.3): 2(p − r) − 1 forwards in warm-up; rank r leaves 2r weight gradients."""
    return _single(problem, "zb-h2", lambda rank, ranks, m: 2 * (ranks - rank) - 1, lambda rank: 2 * rank)


def interleaved(problem: Problem) -> Schedule:
    """Interleaved 1F1B (arXiv 2104.04473, section 2.2): chunks in turn, groups of p microbatches.

    Rank r starts with 2(p − r − 1) + (v − 1)p + 1 chunk forwards. The paper needs m divisible by p. Here the first group
    takes the remainder too, g microbatches with g in place of p in the warm-up: a short last group would deadlock.
    """
    ranks, m = problem.ranks, _microbatches(problem)
    stages, split = _kinds(problem, "interleaved")
    chunks = len(stages) // ranks
    if describe(stages) != ("loop" if chunks == 2 else f"loop{chunks}") and chunks > 1:
        raise BadInput("interleaved: is defined for placement loop only")
    group = m if m < ranks else ranks + m % ranks
    groups = [range(group), *(range(g, g + ranks) for g in range(group, m, ranks))]
    order = {}
    for rank in range(ranks):
        forward = [(k * ranks + rank, j) for g in groups for k in range(chunks) for j in g]
        backward = [(k * ranks + rank, j) for g in groups for k in reversed(range(chunks)) for j in g]
        warm = min(2 * (ranks - rank - 1) + (chunks - 1) * group + 1, len(forward))
        if chunks == 1:
            warm = min(ranks - rank, m)
        order[f"compute:{rank}"] = _alternate(forward, backward, warm, 0, split)
    return Schedule(problem, order)


PRESETS: dict[str, Callable[[Problem], Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "zb-h1": zb_h1,
    "zb-h2": zb_h2,
}


def _single(problem: Problem, name: str, warm: Callable[[int, int, int], int], pending: Callable[[int], int]) -> Schedule:
    stages, split = _kinds(problem, name)
    ranks, m = problem.ranks, _microbatches(problem)
    if describe(stages) != "single":
        raise BadInput(f"{name}: is defined for placement single only")
    order = {}
    for rank in range(ranks):
        each = [(rank, j) for j in range(m)]
        order[f"compute:{rank}"] = _alternate(each, each, min(warm(rank, ranks, m), m), pending(rank), split)
    return Schedule(problem, order)


def _alternate(
    forward: list[tuple[int, int]], backward: list[tuple[int, int]], warm: int, pending: int, split: bool
) -> tuple[str, ...]:
    """`warm` forwards, then one backward one forward; W follows its B, `pending` of them later."""
    row = [f"{s}F{j}" for s, j in forward[:warm]]
    for n, (s, j) in enumerate(backward):
        row.append(f"{s}{'B' if split else 'BW'}{j}")
        if split and n >= pending:
            row.append(f"{backward[n - pending][0]}W{backward[n - pending][1]}")
        if warm + n < len(forward):
            row.append(f"{forward[warm + n][0]}F{forward[warm + n][1]}")
    if split:
        row += [f"{s}W{j}" for s, j in backward[len(backward) - min(pending, len(backward)) :]]
    return tuple(row)


def _microbatches(problem: Problem) -> int:
    return int(problem.passes.microbatch.max()) + 1


def _kinds(problem: Problem, name: str) -> tuple[tuple[int, ...], bool]:
    """Stage → rank, and whether the backward is split. Raises BadInput where the problem is no plain pipeline."""
    passes = problem.passes
    kinds = Counter(KINDS[k] for k in passes.kind.tolist())
    homes = dict(zip(passes.stage.tolist(), passes.rank.tolist(), strict=True))
    stages = tuple(homes[s] for s in sorted(homes))
    m = _microbatches(problem)
    for shape in (("F", "B", "W"), ("F", "BW")):
        if kinds == {kind: len(stages) * m for kind in shape} and (passes.rank == [stages[s] for s in passes.stage]).all():
            return stages, len(shape) == 3
    raise BadInput(f"{name}: needs a plain pipeline of F, B, W (or F, BW) passes, not {dict(kinds)}")
