"""Sentences about schedules: size, placement, step time, what is proven; and how much of offload's copies can be hidden."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from ..features.offload import copy_ratio
from ..ilp.bounds.bound import IN_ORDER
from ..problem import Problem
from ..problem.placement import describe
from ..profile.profile import Profile
from ..profile.step import Step
from ..schedule import Certificate, Schedule
from ..util.errors import BadInput
from ..util.text import exact_time, format_bytes, format_times, plural, printable


def headline(schedule: Schedule, of_all: bool = False) -> str:
    """One line: ranks, stages, microbatches, passes, source of times. of_all: only what all orders of this work share."""
    problem = schedule.problem
    step = {"rank": problem.ranks, "stage": problem.stages, "microbatch": problem.microbatches, "pass_": len(problem.passes)}
    counts = {noun: count for noun, count in step.items() if not of_all or noun in ("rank", "microbatch")}
    source = f" ({printable(problem.source)})" if problem.source else ""
    return plural(**counts) + source


def placed(problem: Problem) -> dict[str, Any]:
    """`placement` as options name it (None: no routes), the number of `stages`, and of each rank's (`stages_a_rank`)."""
    try:
        placement = "/".join(map(describe, problem.model_routes))
    except BadInput:
        placement = None
    homes = problem.stage_ranks[: problem.model_stages]
    a_rank = [sum(rank in ranks for ranks in homes) for rank in range(problem.ranks)]
    return {"placement": placement, "stages": len(homes), "stages_a_rank": a_rank}


def placement_line(problem: Problem) -> str:
    """`placement loop: 16 stages on 8 ranks, 2 a rank`."""
    spots = placed(problem)
    least, most = min(spots["stages_a_rank"]), max(spots["stages_a_rank"])
    each = f"{most}" if least == most else f"{least} to {most}"
    name = spots["placement"] or "without routes"
    return f"placement {name}: {plural(stage=spots['stages'])} on {plural(rank=problem.ranks)}, {each} a rank"


def without_notes(line: str) -> str:
    """A headline without nested brackets: they say how times were estimated, which takes several lines."""
    inner = re.compile(r" \([^()]*\)(?=[^()]*\))")
    while (shorter := inner.sub("", line)) != line:
        line = shorter
    return line


def value_line(schedule: Schedule) -> str:
    """One line: the objective's value, both step times and the bubble."""
    timeline, objective = schedule.timeline(), schedule.problem.objective
    other = "span" if objective == "makespan" else "makespan"
    second = timeline.span if other == "span" else timeline.makespan
    value, then, work = format_times(timeline.value, second, schedule.problem.work)
    return f"{objective} {value}, bubble {timeline.bubble_rate:.2%} of it ({other} {then}, work {work})"


def pool_lines(schedule: Schedule) -> list[str]:
    """A line for each memory pool that is no device's, such as a node's host memory: its peak and its capacity."""
    pools = schedule.problem.pools
    peaks = schedule.timeline().pool_peaks if pools else ()
    limits = ["" if pool.capacity is None else f" of {format_bytes(pool.capacity)}" for pool in pools]
    rows = zip(pools, peaks, limits, strict=True)
    return [f"{printable(pool.name)}: {format_bytes(peak)}{limit}" for pool, peak, limit in rows]


def by_microbatch(proof: str) -> str:
    """The words for a proof that is only about orders by microbatch; "" for one about every order."""
    return " by microbatch" if IN_ORDER in proof else ""  # the proof of a frontier's point goes on behind it


def verdict(certificate: Certificate) -> str:
    """The value and what is proven about it, in one sentence: `makespan 935.373 ms, proven optimal: …`."""
    value = f"{certificate.objective} {exact_time(certificate.value)}"
    order = f"no order of these passes{by_microbatch(certificate.proof)}"
    if not certificate.checked:
        says = f"a file says: {value}, and {order} takes less than {exact_time(certificate.bound)}; not proven here"
        return f"{says} (check --bound proves it again, if it holds)"
    if certificate.status == "optimal":
        return f"{value}, proven optimal: {order} takes less"
    bound, gap = exact_time(certificate.bound), certificate.gap
    share = "less than 0.01%" if 0 < gap < 0.0001 else f"{gap:.2%}"  # "0.00%" would claim that the gap is closed
    return f"{value}, not proven optimal: {order} takes less than {bound}, so another saves {share} at most"


def proof_line(certificate: Certificate) -> str:
    """Why the bound holds."""
    return f"proof: {printable(certificate.proof)}"


def certificate_lines(schedule: Schedule) -> list[str]:
    """What is proven about the schedule, and how; without a certificate, a line that nothing is."""
    c = schedule.certificate
    if c is None:
        return ["no certificate comes with this (a trace keeps none): nothing is proven here"]
    origin = f"{printable(c.solver)}; its own bound: for its passes on its ranks"
    took = f" in {c.seconds:.1f} s" if c.seconds else ""  # a search that --effort ends keeps no seconds
    origin = f"found by {printable(c.solver)}{took}, seed {c.seed}" if c.solved_here else origin
    return [verdict(c), proof_line(c), f"{origin}; problem {printable(c.digest)}"]


def host_lines(profile: Profile, ranks: int | None) -> list[str]:
    """A line with the speed of copies to host memory, and one with how much offload they can hide on `ranks` ranks (None:
    over all layers together). No lines where the profile has no host link."""
    host = profile.host
    if host is None:
        return []
    rates = (host.d2h, host.h2d), (host.d2h_both, host.h2d_both)
    alone, both = (f"{down / 1e3:.1f} GB/s and back at {up / 1e3:.1f}" for down, up in rates)
    room = "" if host.memory is None else f", into {format_bytes(host.memory)} a node"
    line = f"a copy to host memory takes {host.latency:.0f} µs and its bytes at {alone}, at {both} both ways at once{room}"
    if ranks is None:
        profile = replace(profile, rank_factors=())  # they are for a certain number of ranks
    step = Step(ranks or min(max(1, host.shared_bus), len(profile.layers)), 1, partition="balanced")
    ratio = copy_ratio(step, profile)
    where = "of all layers together" if ranks is None else f"of {ranks} balanced stages"
    return [line, *([] if ratio is None else [copies_in_words(ratio, where)])]


def copies_in_words(ratio: float, where: str) -> str:
    """How much offload k = T_offload / T_compute can hide behind computing (PipeOffload, arXiv 2503.01328): all activations
    if k ≤ 1, more than half if k < 2. where: the layers or stages that k is for. Where stages differ, the busiest rank and
    the busiest copy stream count, so that k differs from that of all layers together."""
    k = f"offload: {where}, copies of all activations take k = {ratio:.2f} times as long as computing"
    if ratio <= 1:
        return f"{k}: all fits beside it"
    return f"{k}: {1 / ratio:.0%} of them fits beside it{', more than half' if ratio < 2 else ''}"
