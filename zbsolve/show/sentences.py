"""The sentences under every picture of a schedule: what it is of, what it takes, what is proven about it."""

from __future__ import annotations

from ..schedule import Schedule
from ..util.text import format_time, printable


def headline(schedule: Schedule) -> str:
    """One line: ranks, stages, microbatches, passes, and where the times come from."""
    p = schedule.problem.passes
    counts = (
        (schedule.problem.ranks, "rank"),
        (schedule.problem.stages, "stage"),
        (schedule.problem.microbatches, "microbatch"),
        (len(p), "pass"),
    )
    words = [f"{n:,} {word}{'' if n == 1 else 'es' if word.endswith(('s', 'h')) else 's'}" for n, word in counts]
    source = f" ({printable(schedule.problem.source)})" if schedule.problem.source else ""
    return ", ".join(words) + source


def value_line(schedule: Schedule) -> str:
    """One line: the objective's value, both step times and the bubble."""
    timeline, objective = schedule.timeline(), schedule.problem.objective
    other = "span" if objective == "makespan" else "makespan"
    rest = timeline.span if other == "span" else timeline.makespan
    return (
        f"{objective} {format_time(timeline.value)}, bubble {timeline.bubble_rate:.2%} of it "
        f"({other} {format_time(rest)}, work {format_time(schedule.problem.work)})"
    )


def certificate_lines(schedule: Schedule) -> list[str]:
    """What is proven about the schedule, and how; one line saying so where nothing is."""
    c = schedule.certificate
    if c is None:
        return ["no certificate comes with this (a trace keeps none): nothing is proven here"]
    verdict = "optimal" if c.status == "optimal" else f"at most {c.gap:.2%} could still be saved"
    return [
        f"certificate: {c.objective} {format_time(c.value)}, proven bound {format_time(c.bound)}: {verdict}",
        f"bound by {printable(c.proof)}; found by {printable(c.solver)} in {c.seconds:.1f} s, seed {c.seed}, "
        f"problem {printable(c.digest)}",
    ]
