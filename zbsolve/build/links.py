"""Links that messages share: each is a pass on the link's stream, so that one goes after the other (CrossPipe, ATC'25,
section 4.1, on the link between two sites).

Elsewhere a message is a lag, and any number of messages travel at the same time. Here `<stage>MF<microbatch>` is the message
of a forward and `<stage>MB<microbatch>` that of a backward, on the rank that sends it: it occupies its link for its bytes,
and its latency is the lag after it. For all other code they are two more kinds of passes, and the schedule decides in which
order a link sends. `handover` counts the bytes of messages that wait for a link or to be taken, as for any message.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..kinds import ALL_TO_ALL, LINKS
from ..problem import Problem
from ..problem.placement import PAIR, RANK, sites_in
from ..problem.tables import CARGO, Edges, Ints
from ..util.errors import BadInput

# Kinds of messages of the backward and of the forward: between stages, to a helper of attention, and back.
MESSAGES = np.array([["MB", "MF"], ["BS", "FS"], ["BR", "FR"]])


def with_links(problem: Problem, shared: str, latency: int = 0) -> Problem:
    """`problem` with its messages between ranks as passes on the links that they share.

    shared: "rank": each rank has a card, which sends one message at a time and receives one (`out:<rank>`, `in:<rank>`).
        "pair": a link each way between each two ranks (`link:<from>-<to>`). Sites such as "4+4", of the first 4 ranks and
        the next 4: a link each way between each two sites (`site:<from>-<to>`); messages inside a site stay lags.
    latency: µs of each message that occupy no link. A message that takes no longer stays a lag.

    Apply it when parts of microbatches are there. Raises BadInput where messages occupy their sender, or pass no tensor on.
    """
    p, e = problem.passes, problem.edges
    site = np.arange(problem.ranks) if shared in (PAIR, RANK) else sites_of(shared, problem.ranks)
    apart = (site[p.rank[e.before]] != site[p.rank[e.after]]) & ~p.that(feature=LINKS)[e.before]
    rows, helps = np.flatnonzero(apart & (e.lag > latency)), p.that(away=True)
    if e.sent.any():
        raise BadInput("links: messages of this step occupy their sender, so they wait for no link")
    back, lent = helps[e.before[rows]], (helps[e.before] | helps[e.after])[rows]
    if len(silent := rows[(e.carries[rows] == 0) & ~lent]):
        names = f"{problem.names[e.before[silent[0]]]} → {problem.names[e.after[silent[0]]]}"
        raise BadInput(f"links: edge {names} takes a message's time, but hands on no activation or gradient")
    if not len(rows):
        return problem
    maker, taker, cargo = e.before[rows], e.after[rows], np.array(CARGO)[e.carries[rows]]
    ends = zip(site[p.rank[maker]].tolist(), site[p.rank[taker]].tolist(), strict=True)
    name = "link" if shared == PAIR else "site"
    streams = [(f"out:{a}", f"in:{b}") if shared == RANK else (f"{name}:{a}-{b}",) for a, b in ends]
    sets = tuple(dict.fromkeys((*p.stream_sets, *streams)))
    number = {stream: i for i, stream in enumerate(sets)}
    home = np.where(back, taker, maker)  # a helper's messages belong to the pass that it helps
    kind = MESSAGES[lent.astype(int) + back, np.where(lent, p.that(half="forward")[home], cargo == CARGO[1]).astype(int)]
    passes = p.like(home, kind, "compute", e.lag[rows] - latency)
    on = np.concatenate([p.streams, [number[stream] for stream in streams]])
    own, edges = len(p) + np.arange(len(rows)), e.only(np.setdiff1d(np.arange(len(e)), rows))
    edges += Edges.of(maker, own, carries=cargo) + Edges.of(own, taker, lag=latency, carries=cargo)
    return replace(problem, passes=replace(passes, streams=on, stream_sets=sets), edges=edges)


def sites_of(shared: str, ranks: int) -> Ints:
    """The site of each rank, shape (ranks,); "4+4" says how many ranks each site has. Raises BadInput."""
    sizes = sites_in(shared)
    if sum(sizes) != ranks:
        raise BadInput(f"sites '{shared}': of {sum(sizes)} ranks, and there are {ranks}")
    return np.repeat(np.arange(len(sizes)), sizes)


def with_cards(problem: Problem) -> Problem:
    """`problem` whose sums of gradients, gathers and reductions, put in before, also occupy their rank's card, both ways."""
    p = problem.passes
    rows = np.flatnonzero(~p.that(feature=ALL_TO_ALL) & ~p.that(together=True))
    sets, streams = list(p.stream_sets), p.streams.copy()
    for number, those in enumerate(p.stream_sets):
        own = rows[p.streams[rows] == number]
        if len(own) and len(those) == 1 and those[0].startswith("comm:"):
            rank = those[0].removeprefix("comm:")
            sets.append((*those, f"out:{rank}", f"in:{rank}"))
            streams[own] = len(sets) - 1
    return replace(problem, passes=replace(p, streams=streams, stream_sets=tuple(sets)))


def without_links(problem: Problem) -> Problem:
    """The step with messages as lags, as before `with_links`, and with nothing on cards. Itself without such passes."""
    sends = problem.passes.that(feature=LINKS)
    if not sends.any():
        return problem
    p, e = problem.passes, problem.edges
    maker, out = np.arange(len(p)), np.flatnonzero(sends[e.before])
    maker[e.after[sends[e.after]]] = e.before[sends[e.after]]
    lag = e.lag.copy()
    lag[out] += p.duration[e.before[out]]
    edges = replace(e, before=maker[e.before], lag=lag).only(np.flatnonzero(~sends[e.after]))
    sets = tuple(stream_set[:1] if stream_set[0].startswith("comm:") else stream_set for stream_set in p.stream_sets)
    return replace(problem, passes=replace(p, stream_sets=sets), edges=edges).only(np.flatnonzero(~sends))
