"""A repeated schedule in words: how long it takes, what is proven about that, what repeats, what memory it needs."""

from __future__ import annotations

from ..long_steps.repeated import RepeatedSchedule
from ..long_steps.simulation import peaks
from ..util.text import format_bytes, format_time
from .sentences import placement_line, proof_line, verdict


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
        f"{rounds}, {format_time(round.period)} each, {round.copies + long.further:,} in a row"
    )
    held = peaks(long.one, long.order)
    rank = int(held.argmax())
    room = "" if long.one.capacity is None else f" of {format_bytes(long.one.capacity[rank])}"
    lines.append(f"activations: at most {format_bytes(int(held[rank]))}{room}, on rank {rank}")
    return "".join(f"{line}\n" for line in lines)
