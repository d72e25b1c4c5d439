"""A table of the engines that schedules are exported to and plans are made for, with what each can express. Only this table
decides what an engine refuses, and which order of a problem, or which layout, it can run instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from ..problem.placement import describe
from ..util.errors import BadInput
from ..util.files import ending_of
from ..util.text import did_you_mean
from .layout import BESIDE, FIELDS, PLACEMENTS, SELECTIVE, Layout, Many, named

SPLIT_OR_FUSED, FUSED = ("F", "B", "W", "BW"), ("F", "BW")
ANY = "any"  # every placement that has each stage on one rank
ENDINGS = {"CSV": ".csv", "Python": ".py", "JSON": ".json"}  # format → ending of its files' names


class Rule(NamedTuple):
    """A property of layouts that an engine cannot run. breaks: tells whether a layout, or each of a table, has it; says: the
    reason in words; "": `words` names the value of `field`."""

    breaks: Callable[[Layout], Many]
    field: str = ""
    says: str = ""

    def words(self, layout: Layout) -> str:
        """The reason why the engine cannot run this layout, which breaks the rule."""
        return self.says or f"has no {FIELDS[self.field]} '{named(self.field, getattr(layout, self.field))}'"


# Only zbsolve's own engine has these fields at other values than their defaults.
PLAIN = tuple(Rule(partial(Layout.has, field=field), field) for field in BESIDE)


@dataclass(frozen=True, slots=True)
class Target:
    """One engine, or one file format of an engine.

    name: for `export --to`; the module of that name writes the file. engine: its name in messages. read: the version whose
    source code this record follows. writes: the file formats, in words. places: placement → kinds of passes it allows there;
    "vee" has two stages on each rank, "loop" any number. numbered_by: the stage (0 or −1) whose order of forwards numbers
    the microbatches. in_order: kinds whose passes every stage runs in the order of these numbers. mixed: whether some stages
    may split the backward while others do not. first_fused: whether stage 0 runs each W directly after its B. groups:
    whether the number of microbatches must be a multiple of ranks. orders: the only orders it runs; (): any order.
    has_layers: whether the file gives the layers of each stage. has_plan: whether the file of a plan gives its whole layout;
    needs_plan: whether it cannot be written for a schedule without a plan. by_rank: whether a file of rounds is written one
    rank at a time. rules: layouts that it cannot run; None: it takes no plans. gradients: bytes of one, 16-bit parameters.
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
        """The name in `places` of this placement, stage → rank; None where the engine does not have it."""
        shape = describe(placement)
        looped = shape.rstrip("0123456789")
        return next((name for name in (ANY, shape, looped if looped == "loop" else "") if name in self.places), None)

    def lacks(self, layout: Layout) -> str:
        """The reason why it cannot run a plan's layout, apart from its placement; "" where there is none."""
        broken = next((rule for rule in self.rules or () if rule.breaks(layout)), None)
        return "" if broken is None else f"layout {layout.title}: {self.engine} {broken.words(layout)}"

    def runs(self, table: Layout) -> Many:
        """[layout]: whether it can run each layout of a table."""
        able = sum(table.placement == at for at, name in enumerate(PLACEMENTS) if {ANY, name} & {*self.places}) > 0
        for rule in self.rules or ():
            able = able & ~rule.breaks(table)
        return able

    def check_ending(self, path: str) -> None:
        """Raise BadInput where a file's name has an ending of no format that this target writes."""
        formats = self.writes.split(" or ")
        if ending_of(path) not in ["", *(ENDINGS[name] for name in formats)]:
            raise BadInput(f"{path}: for {self.engine} the file is {self.writes}: name it …{ENDINGS[formats[0]]}")

    @property
    def words(self) -> dict[str, str]:
        """Its row in the table that `export --list` prints: column → text."""
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
        # It shards states with FSDP only. With a pipeline, FSDP gathers parameters and reduces gradients once in each step,
        # which is ZeRO 2. Without one it reduces gradients in each microbatch.
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
        # Its distributed optimizer is ZeRO 1. Its FSDP gathers and reduces each layer in each microbatch, which is ZeRO 3.
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

# `zbsolve run` and `Pipeline`: the user's layers implement tensor ranks and recompute inside layers.
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
    """The engine of this name, of those that plans are made for. Raises BadInput."""
    if name not in PLANNED:
        raise BadInput(f"--for '{name[:40]}': unknown{did_you_mean(name, PLANNED)} (engines: {', '.join(PLANNED)})")
    return PLANNED[name]


def target(name: str) -> Target:
    """The export target of this name. Raises BadInput."""
    for known in TARGETS:
        if known.name == name:
            return known
    raise BadInput(f"unknown target '{name}' (known: {', '.join(other.name for other in TARGETS)})")
