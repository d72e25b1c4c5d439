"""`zbsolve check schedule.json --period`: the steady state of training without an end, its bound, and a better one."""

from __future__ import annotations

import argparse

from ..util.errors import BadInput
from .tools import print_json


def check_period(options: argparse.Namespace) -> int:
    """How long a round takes in the steady state, the bound, and the best that is found in the time."""
    from ..ilp.steady.periodic import least_period, lower_bound
    from ..ilp.steady.rounds import period, rounds_of
    from ..schedule import Schedule
    from ..verifier import verify

    schedule = Schedule.load(options.schedule)
    for violation in verify(schedule.problem, schedule):
        raise BadInput(f"{options.schedule}: {violation}")
    own, rounds = period(schedule), rounds_of(schedule.problem)
    bound, proof = lower_bound(rounds)
    body = {"microbatches": rounds.microbatches, "work": rounds.work, "period": float(own.time), "cycle": list(own.cycle)}
    body |= {"bound": float(bound), "proof": proof}
    lines = [
        _line("this order", float(own.time), rounds.microbatches, rounds.work) + f"; set by {' → '.join(own.cycle)}",
        _line("bound", float(bound), rounds.microbatches, rounds.work) + f"; {proof}",
    ]
    if options.seconds:
        best = least_period(schedule.problem, options.seconds, known=[schedule])
        body |= {"found": float(best.time), "strictly_periodic_bound": best.strict}
        strict = f"; none that is strictly periodic takes less than {best.strict:,} µs a round"
        lines.append(_line("best found", float(best.time), rounds.microbatches, rounds.work) + strict)
        schedule = best.schedule
    if options.output:
        schedule.save(options.output)
    if options.json:
        print_json(body)
    elif options.output != "-":
        print("\n".join(lines))
    return 0


def _line(what: str, time: float, microbatches: int, work: int) -> str:
    a_round = f" ({time:,.6g} µs a round of {microbatches})" if microbatches > 1 else ""
    return f"{what}: {time / microbatches:,.6g} µs a microbatch{a_round}, bubble {1 - work / time:.2%}"
