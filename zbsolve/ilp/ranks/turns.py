"""Whose turn it is: the kinds of groups that are searched share the partial orders by what they have gained."""

from __future__ import annotations

from dataclasses import dataclass

KINDS_OF_GROUPS = ENDS, ALONE, LEAN, WHOLE, OWN = "both ends of one", "alone", "lean", "whole", "in their own windows"
# Partial orders in one try: at first, how many times as many in a kind's next turn, at most (a few GB at worst).
FIRST_STATES, STATES_FACTOR, MAX_STATES = 3_000, 6, 8_000_000
FAIR_PART = 0.25  # of all that was gained, is added to what each kind gained: the others may gain with more states


@dataclass
class Share:
    """What one kind of groups has had: how many partial orders one try may take in its next turn, how many all took so far,
    and what the bound gained by them, µs."""

    states: int = FIRST_STATES
    tried: int = 0
    gained: int = 0

    @property
    def first(self) -> bool:
        """Whether it had no turn yet."""
        return self.states == FIRST_STATES

    def count(self, gained: int, tried: int) -> None:
        """One more turn, in which the bound gained so many µs by so many partial orders."""
        self.states *= STATES_FACTOR
        self.gained += gained
        self.tried += tried


def next_kind(shares: dict[str, Share], alone: bool) -> str | None:
    """The kind whose turn it is, that of the fewest partial orders for its part of what was gained; each has one turn before
    any has two. alone: whether single ranks may have more than one; None where no kind is left."""
    left = {
        kind: share
        for kind, share in shares.items()
        if share.states <= MAX_STATES and (kind != ALONE or alone or share.first)
    }
    gained = max(1, sum(share.gained for share in left.values()))

    def taken(kind: str) -> float:
        share = left[kind]
        return -1.0 if share.first else share.tried / (FAIR_PART + share.gained / gained)

    return min(left, key=taken, default=None)
