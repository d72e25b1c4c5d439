"""The features that a step may have, and what goes with what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from ..partition.file import Partition
from ..util.errors import BadInput
from .attention_exchange import ATTENTION_EXCHANGE
from .cuts import WHOLE, Cuts, NotSliced, is_even, said_of
from .feature import Feature, Field, is_auto
from .keeping import KEEPING
from .lengths import LENGTHS, UNEVEN
from .links import CARDS, LINKS
from .offload import OFFLOAD, is_none
from .recompute import RECOMPUTE, in_part
from .replicas import REPLICAS
from .sharded_vocabulary import BARRIERS, VOCABULARY
from .sharding import SHARDING
from .sides import SIDES, has_sides
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
    "sharded parameters": lambda seen: seen.step.shards > 1,
    "replicas": lambda seen: seen.step.replicas > 1,
    "sharded vocabulary": lambda seen: is_auto(seen.step.vocabulary) or seen.step.vocabulary in BARRIERS,
    "offload": lambda seen: not is_none(seen.step.offload),
    "all-to-all": lambda seen: seen.profile is not None and any(layer.all_to_all for layer in seen.profile.layers),
    "side inputs": lambda seen: seen.profile is not None and has_sides(seen.profile),
    "slices": lambda seen: not is_auto(seen.step.slices) and said_of(seen.step.slices).number > 1,
    "lengths": lambda seen: bool(seen.step.lengths),
    "sizes": lambda seen: bool(seen.step.sizes),
    "recompute of part of a stage": lambda seen: in_part(seen.step.recompute),
    "whole sequences": lambda seen: not is_auto(seen.step.slices) and said_of(seen.step.slices).number == 1,
    "uneven slices": lambda seen: not is_even(seen.cuts),
    "attention exchange": lambda seen: seen.step.attention_exchange,
    "several routes": lambda seen: seen.profile is not None and len(seen.step.routes) > 1,
    "submeshes": lambda seen: isinstance(seen.step.partition, Partition) and max(seen.step.partition.devices) > 1,
    "a single rank": lambda seen: seen.step.ranks == 1 and not is_auto(seen.step.vocabulary),
    "messages that occupy their sender": lambda seen: seen.profile is not None and seen.profile.link.blocking,
    "links that messages share": lambda seen: seen.profile is not None and bool(seen.profile.link.shared),
    "a link between sites": lambda seen: seen.profile is not None and seen.profile.site_link is not None,
    "unlike ranks or microbatches": lambda seen: (
        seen.profile is not None
        and any(len(set(row)) > 1 for row in (seen.profile.rank_factors, seen.profile.microbatch_factors))
    ),
}


class Apart(NamedTuple):
    """Two conditions that do not go together, and why."""

    one: str
    other: str
    why: str
    error: type[BadInput] = BadInput


DIVIDING = "take a number that divides the sequence"
APART: tuple[Apart, ...] = (
    Apart("replicas", "sharded parameters", "sharded parameters are reduced over their own group: give one of them"),
    Apart("sharded vocabulary", "sharded parameters", "goes without sharded parameters"),
    Apart("sharded vocabulary", "a single rank", "is over 2 ranks or more, and there is one"),
    Apart("sharded vocabulary", "submeshes", "stages on submeshes have their vocabulary on the last one"),
    Apart("slices", "sharded parameters", "sharded parameters do not go with slices"),
    Apart("lengths", "slices", "microbatches of unlike lengths are not cut into slices yet"),
    Apart("sizes", "slices", "microbatches of unlike sizes are not cut into slices yet"),
    Apart("sizes", "lengths", "lengths say what each microbatch has: give one of them"),
    Apart("recompute of part of a stage", "slices", "slices recompute whole stages: name these alone", NotSliced),
    Apart("slices", "several routes", "microbatches take several routes, and all slices of one must stay on its ranks"),
    Apart("uneven slices", "offload", f"do not go with offload: {DIVIDING}", NotSliced),
    Apart("uneven slices", "sharded vocabulary", f"do not go with a sharded vocabulary: {DIVIDING}", NotSliced),
    Apart("uneven slices", "all-to-all", f"do not go with all-to-alls: {DIVIDING}", NotSliced),
    Apart("attention exchange", "whole sequences", "is between slices of sequences, and none is sliced (slices)"),
    Apart(
        "attention exchange",
        "uneven slices",
        "is for even slices, of a number that divides the sequence; uneven ones can take as long without it",
        NotSliced,
    ),
    Apart(
        "attention exchange",
        "messages that occupy their sender",
        "messages of this link occupy their sender, and the exchange's are not counted so",
    ),
    Apart("attention exchange", "unlike ranks or microbatches", "ranks or microbatches of unlike speed are not known to it"),
    Apart("attention exchange", "links that messages share", "its messages are not counted on links that messages share"),
    Apart("attention exchange", "a link between sites", "its messages are not counted on links that messages share"),
    Apart("a link between sites", "messages that occupy their sender", "messages occupy their links or their sender"),
    Apart("a link between sites", "several routes", "microbatches take several routes, of which not all cross it alike"),
    Apart("links that messages share", "messages that occupy their sender", "messages occupy their links or their sender"),
)


NO_SIDES = (
    "sharded vocabulary",
    "offload",
    "all-to-all",
    "slices",
    "submeshes",
    "links that messages share",
    "a link between sites",
)
APART += tuple(Apart("side inputs", other, f"do not go with {other} yet") for other in NO_SIDES)
APART += (
    Apart(
        "side inputs", "messages that occupy their sender", "messages of this link occupy their sender, and theirs do not"
    ),
)


def check_together(seen: Seen) -> None:
    """Raise BadInput for the first two things that a step has and that do not go together."""
    for row in APART:
        if CONDITIONS[row.one](seen) and CONDITIONS[row.other](seen):
            raise row.error(f"{row.one}: {row.why}")
