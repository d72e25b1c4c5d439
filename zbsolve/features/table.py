"""The table of features, and which of them exclude each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from ..kinds import ATTENTION
from ..partition.file import Partition
from ..util.errors import BadInput, Unfit
from .attention_exchange import ATTENTION_EXCHANGE
from .cuts import WHOLE, Cuts
from .feature import Feature, Field, Named
from .keeping import KEEPING
from .lengths import LENGTHS, UNEVEN
from .links import CARDS, LINKS, SENDER, SHARE, SITES
from .offload import OFFLOAD
from .recompute import RECOMPUTE
from .replicas import REPLICAS
from .sharding import SHARDING
from .sides import SIDES
from .sizes import SIZES
from .slices import SLICES
from .vocabulary import VOCABULARY
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


class Apart(NamedTuple):
    """Two conditions (see `CONDITIONS`) that exclude each other, and why."""

    one: str
    other: str
    why: str
    error: type[BadInput] = BadInput


DIVIDING = "take a number that divides the sequence"
EVEN = "is for even slices, of a number that divides the sequence; uneven ones can take as long without it"
OR_SENDER = "messages occupy their links or their sender"
NOT_YET = ("sharded vocabulary", "offload", "all-to-all", "slices", "submeshes", SHARE, SITES)
# What does not go together: every refusal, and the docs. The first row whose conditions a step fulfils is its refusal.
APART = (
    Apart("sharded vocabulary", "sharded parameters", "goes without sharded parameters"),
    Apart("sharded vocabulary", "a single rank", "is over 2 ranks or more, and there is one"),
    Apart("sharded vocabulary", "submeshes", "stages on submeshes have their vocabulary on the last one"),
    Apart("uneven slices", "offload", f"do not go with offload: {DIVIDING}", Unfit),
    *(Apart("side inputs", other, f"do not go with {other} yet") for other in NOT_YET),
    Apart("side inputs", SENDER, "messages of this link occupy their sender, and theirs do not"),
    Apart("slices", "sharded parameters", "sharded parameters do not go with slices"),
    Apart("recompute of part of a stage", "slices", "slices recompute whole stages: name these alone", Unfit),
    Apart("slices", "several routes", "microbatches take several routes, and all slices of one must stay on its ranks"),
    Apart("uneven slices", "sharded vocabulary", f"do not go with a sharded vocabulary: {DIVIDING}", Unfit),
    Apart("uneven slices", "all-to-all", f"do not go with all-to-alls: {DIVIDING}", Unfit),
    Apart(SITES, SENDER, OR_SENDER),
    Apart(SITES, "several routes", "microbatches take several routes, of which not all cross it alike"),
    Apart(SHARE, SENDER, OR_SENDER),
    Apart("lengths", "slices", "microbatches of unlike lengths are not cut into slices yet"),
    Apart("sizes", "slices", "microbatches of unlike sizes are not cut into slices yet"),
    Apart("sizes", "lengths", "lengths say what each microbatch has: give one of them"),
    Apart(ATTENTION, "whole sequences", "is between slices of sequences, and none is sliced (slices)"),
    Apart(ATTENTION, "uneven slices", EVEN, Unfit),
    Apart(ATTENTION, SENDER, "messages of this link occupy their sender, and the exchange's are not counted so"),
    Apart(ATTENTION, "unlike ranks or microbatches", "ranks or microbatches of unlike speed are not known to it"),
    Apart(ATTENTION, SITES, "the time of its messages between sites is not known"),
    Apart("replicas", "sharded parameters", "sharded parameters are reduced over their own group: give one of them"),
)


def excluded(condition: str) -> tuple[str, ...]:
    """What does not go with a condition: features of a step's fields, as `Problem.features` has them; else conditions."""
    own = {name: feature.name for feature in FEATURES if feature.fields for name in feature.conditions}
    return tuple(own.get(row.other, row.other) for row in APART if row.one == condition)


def check_together(seen: Seen) -> None:
    """Raise BadInput for the first two conditions that a step fulfils though they exclude each other."""
    for row in APART:
        if CONDITIONS[row.one](seen) and CONDITIONS[row.other](seen):
            raise row.error(f"{row.one}: {row.why}")
