"""The features that a step may have, and what goes with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..partition.file import Partition
from .attention_exchange import ATTENTION_EXCHANGE
from .cuts import WHOLE, Cuts
from .feature import Feature, Field
from .keeping import KEEPING
from .lengths import LENGTHS, UNEVEN
from .links import CARDS, LINKS
from .offload import OFFLOAD
from .recompute import RECOMPUTE
from .replicas import REPLICAS
from .sharded_vocabulary import VOCABULARY
from .sharding import SHARDING
from .sides import SIDES
from .sizes import SIZES
from .slices import SLICES
from .work import WORK

# In the order in which they come into a problem.
FEATURES: tuple[Feature, ...] = (
    RECOMPUTE,
    VOCABULARY,
    OFFLOAD,
    SIDES,
    SLICES,
    LINKS,
    UNEVEN,
    LENGTHS,
    SIZES,
    ATTENTION_EXCHANGE,
    SHARDING,
    REPLICAS,
    CARDS,
    WORK,
    KEEPING,
)
FIELDS: tuple[Field, ...] = tuple(field for feature in FEATURES for field in feature.fields)


class Seen(NamedTuple):
    """What the table's conditions look at: a step, and with a profile that and where its sequences are cut."""

    step: Any
    profile: Any = None
    cuts: Cuts = WHOLE


# Whether a step has it. What only a profile tells does not hold until there is one.
CONDITIONS: dict[str, Callable[[Seen], bool]] = {
    "all-to-all": lambda seen: seen.profile is not None and any(layer.all_to_all for layer in seen.profile.layers),
    "several routes": lambda seen: seen.profile is not None and len(seen.step.routes) > 1,
    "submeshes": lambda seen: isinstance(seen.step.partition, Partition) and max(seen.step.partition.devices) > 1,
    "unlike ranks or microbatches": lambda seen: (
        seen.profile is not None
        and any(len(set(row)) > 1 for row in (seen.profile.rank_factors, seen.profile.microbatch_factors))
    ),
}
CONDITIONS |= {name: holds for feature in FEATURES for name, holds in feature.conditions.items()}
APART = tuple(row for feature in FEATURES for row in feature.apart)


def check_together(seen: Seen) -> None:
    """Raise BadInput for the first two things that a step has and that do not go together."""
    for row in APART:
        if CONDITIONS[row.one](seen) and CONDITIONS[row.other](seen):
            raise row.error(f"{row.one}: {row.why}")
