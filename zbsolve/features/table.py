"""The table of features, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..partition.file import Partition
from .attention_exchange import ATTENTION_EXCHANGE
from .cuts import WHOLE, Cuts
from .feature import Feature, Field, Named
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

# In the order in which their builders run.
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
COMPARED = tuple(feature for feature in FEATURES if feature.choices is not None and feature.choices.compared)


def usual(step: Any) -> Any:
    """The step without the features that the usual 1F1B lacks: see `Feature.usual`."""
    return replace(step, **{row.name: row.default for feature in FEATURES if not feature.usual for row in feature.fields})


def compared(step: Any) -> list[Named]:
    """The step with each choice of the fields whose choices are all compared; the step itself where none is open."""
    steps = [("", step)]
    for choices in (feature.choices for feature in COMPARED if feature.choices is not None):
        steps = [(name + more, chosen) for name, before in steps for more, chosen in choices.first(before)]
    return steps


class Seen(NamedTuple):
    """What conditions are about: a step; with a profile also that, and the cuts of its sequences."""

    step: Any
    profile: Any = None
    cuts: Cuts = WHOLE


# Condition → does a step fulfil it? Conditions that need a profile are false without one.
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
    """Raise BadInput for the first two conditions that a step fulfils though they exclude each other."""
    for row in APART:
        if CONDITIONS[row.one](seen) and CONDITIONS[row.other](seen):
            raise row.error(f"{row.one}: {row.why}")
