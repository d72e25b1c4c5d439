"""A bound over all ways in which ranks make attention for each other, which no search asks for: how far orders may be from
the best exchange."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from zbsolve import Problem
from zbsolve.build.attention_costs import AttentionExchange, attending, parts_of
from zbsolve.build.attention_exchange import check_exchangeable
from zbsolve.ilp.bounds.any_choice import longest
from zbsolve.problem.tables import Ints
from zbsolve.schedule.timeline import Floats

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
