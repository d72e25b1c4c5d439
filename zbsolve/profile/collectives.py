"""What a profile says of collectives: kinds, and the rows of its fact `collectives`."""

from __future__ import annotations

from typing import Annotated

import msgspec

from ..util.errors import BadInput
from ..util.files import checked
from .profile import Profile

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, BROADCAST = COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
)
FACT = "collectives"
Count = Annotated[int, msgspec.Meta(ge=1, lt=2**31)]


class CollectiveRow(msgspec.Struct, frozen=True):
    """A collective between `ranks` ranks on `nodes` nodes takes latency + bytes / bytes_per_us µs for a tensor of so many
    bytes, which every rank has, whole, before or after it."""

    kind: str
    ranks: Count
    nodes: Count
    latency: Annotated[float, msgspec.Meta(ge=0, lt=2.0**62)]
    bytes_per_us: Annotated[float, msgspec.Meta(gt=0, lt=2.0**62)]


class _Rows(msgspec.Struct):
    collectives: list[CollectiveRow]


def collective_rows(profile: Profile, where: str) -> list[CollectiveRow]:
    """What was measured. Raises BadInput naming `where` where nothing was."""
    if not profile.facts.get(FACT):
        raise BadInput(f"{where}: facts: '{FACT}' is missing: profile under torchrun writes it")
    return checked({FACT: profile.facts[FACT]}, _Rows, f"{where}: facts").collectives
