"""Why the bound of a plan's schedule holds: its layout's bound, which is for every partition, may be as high; else closed
forms, or a search over its own problem, say so."""

from __future__ import annotations

from ..search.prove_again import proven_again
from .bounds.space_bounds import RULES, SpaceBounds
from .candidate import Candidate
from .layout import rows_of


def proof_of_schedule(
    candidate: Candidate, stated: SpaceBounds, seconds: float, search: bool
) -> tuple[str | None, list[str]]:
    """Why the bound of the schedule's certificate holds, and what is wrong with it. The space's bounds are proven, and the
    schedule is verified."""
    own = candidate.schedule.certificate
    if own is None:
        return None, []
    row = int(rows_of(stated.layout, candidate.layout)[0])
    if own.bound <= stated.pipeline[row]:
        return f"{RULES[stated.rule[row]]}, whatever the partition", []
    found = proven_again(candidate.schedule, own, seconds, search=search)
    if isinstance(found, str):
        return found, []
    return None, [f"schedule: {found}"] if search else []
