"""`zbsolve period`."""

from __future__ import annotations

import argparse

from ..util.errors import BadInput
from .tools import print_json


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json, of training with updates (PipeDream, 2BW) or of one step, to go on")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="for a better one in the same memory; 0: look at this one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the search")
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument("-o", "--output", help="schedule.json with the best steady state found")


def command(options: argparse.Namespace) -> int:
    """How long a round takes in the steady state, the bound, and the best found."""
    from ..ilp.steady.periodic import least_period, lower_bound
    from ..ilp.steady.rounds import period as period_of
    from ..ilp.steady.rounds import rounds_of
    from ..schedule import Schedule
    from ..verifier import verify

    if options.seconds < 0:
        raise BadInput(f"--seconds {options.seconds:g}: it cannot be negative")
    schedule = Schedule.load(options.schedule)
    for violation in verify(schedule.problem, schedule):
        raise BadInput(f"{options.schedule}: {violation}")
    own, rounds = period_of(schedule), rounds_of(schedule.problem)
    bound, proof = lower_bound(rounds)
    body = {"microbatches": rounds.microbatches, "work": rounds.work, "period": float(own.time), "cycle": list(own.cycle)}
    body |= {"bound": float(bound), "proof": proof}
    lines = [
        _line("this order", float(own.time), rounds.microbatches, rounds.work) + f"; set by {' → '.join(own.cycle)}",
        _line("bound", float(bound), rounds.microbatches, rounds.work) + f"; {proof}",
    ]
    if options.seconds:
        best = least_period(schedule.problem, options.seconds, options.seed, known=[schedule])
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
