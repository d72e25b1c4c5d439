"""The parts that a rank may have: one row a feature, in the order in which they are made and asked.

Sums over ranks come last: they take in what earlier parts make of gradients.
"""

from __future__ import annotations

from collections.abc import Callable

from .attention import AttentionPeers
from .base.part import Part
from .connecting import Connecting
from .exchange.replicas import Replicas
from .exchange.shared import Shared
from .offload.rank import Offload
from .sharding.rank import Sharding
from .slices.rank import Slices
from .updates import Updates
from .vocabulary.rank import VocabularyShard

PARTS: list[Callable[[Connecting], Part | None]] = [
    Updates.of,
    Offload.of,
    VocabularyShard.of,
    AttentionPeers.of,
    lambda c: Slices.of(c.problem, c.stages),
    Sharding.of,
    Shared.of,
    Replicas.of,
]


def connect_parts(c: Connecting) -> list[Part]:
    """The parts of a rank. All ranks call this. Raises BadInput and LostRank."""
    for make in PARTS:
        if (part := make(c)) is not None:
            c.parts.append(part)
            c.peers.beside.append(part.break_off)
    return c.parts
