"""The engines that schedules are exported to and plans are made for, as data: what each can express. What it cannot is
refused by this table alone, and from it follows which order of a problem, and which layout, it can run instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import PurePath
from typing import NamedTuple

from ..placement import describe
from ..util.errors import BadInput
from ..util.text import did_you_mean
from .layout import BESIDE, FIELDS, PLACEMENTS, SELECTIVE, Layout, Many, named

SPLIT_OR_FUSED, FUSED = ("F", "B", "W", "BW"), ("F", "BW")
ANY = "any"  # every placement that has each stage on one rank
ENDINGS = {"CSV": ".csv", "Python": ".py", "JSON": ".json"}  # format → how files of it are called


def ending_of(path: str) -> str:
    """How a file's name ends, compressed or not: `.json` of `x.json.gz`; "" without a dot."""
    return PurePath(path.removesuffix(".gz")).suffix


class Rule(NamedTuple):
    """What an engine cannot have of a plan's layout. breaks: of one layout, or of a table. says: why; "": `field` does."""

    breaks: Callable[[Layout], Many]
    field: str = ""
    says: str = ""

    def words(self, layout: Layout) -> str:
        """Why it cannot run this layout, which breaks the rule."""
        return self.says or f"has no {FIELDS[self.field]} '{named(self.field, getattr(layout, self.field))}'"


def _is_not_plain(field: str, layout: Layout) -> Many:
    return getattr(layout, field) != getattr(Layout(), field)


# Nobody else has these.
PLAIN = tuple(Rule(partial(_is_not_plain, field), field) for field in BESIDE)


@dataclass(frozen=True, slots=True)
class Target:
    """One engine, or one of its files.

    name: as `export --to` takes it; the module of that name writes the file. engine: as messages call it. read: the version
    whose sources this record was read from. writes: the file, in words. places: placement → kinds of passes that run there;
    "vee" means two stages a rank, "loop" any number. numbered_by: the stage (0 or -1) whose forwards number the
    microbatches. in_order: kinds of which every stage runs its passes in the order of these numbers. mixed: whether some
    stages may split the backward and others not. first_fused: whether stage 0 runs each W right behind its B. groups:
    whether microbatches must be a multiple of ranks. orders: the only orders that it has; (): any order of these passes.
    has_layers: whether the file says which layers each stage has. has_plan: whether, for a plan, it says its whole layout;
    needs_plan: whether it says nothing of a schedule alone. by_rank: whether a file of rounds is written a rank at a time.
    rules: what it cannot have of a plan's layout; None: it takes no plans. gradients: bytes of one of a 16-bit parameter.
    """

    name: str
    engine: str
    read: str
    writes: str
    places: Mapping[str, tuple[str, ...]]
    numbered_by: int = 0
    in_order: tuple[str, ...] = ()
    mixed: bool = True
    first_fused: bool = False
    groups: bool = False
    orders: tuple[str, ...] = ()
    has_layers: bool = False
    has_plan: bool = False
    needs_plan: bool = False
    by_rank: bool = False
    rules: tuple[Rule, ...] | None = None
    gradients: int = 4

    def place(self, placement: tuple[int, ...]) -> str | None:
        """The name in `places` that stages on these ranks have; None where the engine cannot lay them out so."""
        shape = describe(placement)
        looped = shape.rstrip("0123456789")
        return next((name for name in (ANY, shape, looped if looped == "loop" else "") if name in self.places), None)

    def lacks(self, layout: Layout) -> str:
        """Why it cannot run a plan's layout; "" where it can, but for its placement."""
        broken = next((rule for rule in self.rules or () if rule.breaks(layout)), None)
        return "" if broken is None else f"layout {layout.title}: {self.engine} {broken.words(layout)}"

    def runs(self, table: Layout) -> Many:
        """Of a table's layouts: which it can run."""
        able = sum(table.placement == at for at, name in enumerate(PLACEMENTS) if {ANY, name} & {*self.places}) > 0
        for rule in self.rules or ():
            able = able & ~rule.breaks(table)
        return able

    def check_ending(self, path: str) -> None:
        """Raise BadInput for a file's name that promises a format which this target does not write."""
        formats = self.writes.split(" or ")
        if (ending := ending_of(path)) in ENDINGS.values() and ending not in [ENDINGS[name] for name in formats]:
            raise BadInput(f"{path}: for {self.engine} the file is {self.writes}: name it …{ENDINGS[formats[0]]}")

    @property
    def words(self) -> dict[str, str]:
        """A row of the table that `export --list` prints."""
        words = {ANY: "any with each stage on one rank"}
        backward = {SPLIT_OR_FUSED: "", FUSED: " (fused backward)"}
        return {
            "target": self.name,
            "read": f"{self.engine} {self.read}",
            "placements": ", ".join(f"{words.get(place, place)}{backward[kinds]}" for place, kinds in self.places.items()),
            "order": " or ".join(self.orders) or "any",
            "writes": self.writes,
        }


TARGETS = (
    Target(
        *("torch-csv", "torch-csv", "2.13", "CSV"),
        {ANY: SPLIT_OR_FUSED},
        numbered_by=-1,
        by_rank=True,
        rules=PLAIN,
        gradients=2,
    ),
    Target(
        *("torchtitan", "torchtitan", "0.3.0", "CSV"),
        {"single": SPLIT_OR_FUSED, "loop": SPLIT_OR_FUSED, "vee": SPLIT_OR_FUSED},
        numbered_by=-1,
        has_plan=True,
        by_rank=True,
        # It shards states by FSDP alone. With a pipeline that gathers parameters and reduces gradients once a step: ZeRO 2.
        # Without one it reduces in each microbatch.
        rules=(
            Rule(lambda layout: (layout.zero == 1) | ((layout.zero == 3) & (layout.pp > 1)), "zero"),
            Rule(
                lambda layout: (layout.zero == 0) & (layout.dp > 1) & (layout.pp == 1) & (layout.count > 1),
                says="without a pipeline reduces gradients in each microbatch (zero 2 or 3)",
            ),
            *PLAIN,
        ),
    ),
    Target(
        *("jaxpp", "JaxPP", "0.9.2", "Python"), {ANY: SPLIT_OR_FUSED}, in_order=SPLIT_OR_FUSED, mixed=False, first_fused=True
    ),
    Target("deepspeed", "DeepSpeed", "0.19.8", "Python", {"single": FUSED}, in_order=("F",), has_layers=True),
    Target(
        *("colossalai", "ColossalAI", "0.5.0", "Python or JSON"),
        {"vee": SPLIT_OR_FUSED},
        in_order=SPLIT_OR_FUSED,
        groups=True,
        has_layers=True,
    ),
    Target(
        *("primus", "Primus", "August 2026", "Python or JSON"),
        {"single": SPLIT_OR_FUSED, "loop": FUSED, "vee": SPLIT_OR_FUSED},
        in_order=("F",),
    ),
    Target(
        *("megatron", "Megatron", "core 0.16.1", "JSON"),
        {"single": FUSED, "loop": FUSED},
        orders=("1F1B", "interleaved 1F1B in groups of g"),
        has_layers=True,
        has_plan=True,
        # Its distributed optimizer is ZeRO 1. Its FSDP gathers and reduces layer by layer in each microbatch: ZeRO 3.
        rules=(Rule(lambda layout: layout.zero == 2, "zero"), *PLAIN),
    ),
    Target(
        *("galvatron", "Galvatron", "2.4.1", "JSON"),
        {"single": FUSED},
        orders=("1F1B",),
        has_layers=True,
        has_plan=True,
        needs_plan=True,
        rules=(
            Rule(lambda layout: layout.recompute == SELECTIVE, "recompute"),
            Rule(
                lambda row: (row.tp > 1) & (row.sequence == 0), says="splits norms over tensor ranks too (sequence parallel)"
            ),
            *PLAIN,
        ),
    ),
)

# `zbsolve run` and `Pipeline`: tensor ranks and recompute inside layers are the user's own.
OWN = Target(
    "zbsolve",
    "zbsolve",
    "",
    "",
    {ANY: SPLIT_OR_FUSED},
    rules=(
        Rule(
            lambda layout: (layout.zero % 2 == 1) | ((layout.zero == 2) & (layout.pp == 1)),
            says="shards states with the stages of a pipeline alone, which is ZeRO 2 (fully_shard)",
        ),
        Rule(
            lambda layout: (layout.slices > 1) & ((layout.sequence > 0) | (layout.zero > 0)),
            says="slices no sequences of sharded layers",
        ),
    ),
    gradients=2,
)
PLANNED = {OWN.name: OWN, "torch": TARGETS[0], **{known.name: known for known in TARGETS if known.has_plan}}  # `plan --for`


def engine(name: str) -> Target:
    """The engine of that name that plans are made for. Raises BadInput."""
    if name not in PLANNED:
        raise BadInput(f"--for '{name[:40]}': unknown{did_you_mean(name, PLANNED)} (engines: {', '.join(PLANNED)})")
    return PLANNED[name]


def target(name: str) -> Target:
    """The target called `name`. Raises BadInput."""
    for known in TARGETS:
        if known.name == name:
            return known
    raise BadInput(f"unknown target '{name}' (known: {', '.join(other.name for other in TARGETS)})")
