"""`Layout`: one way to split a training step over devices; or many of them, a column a field."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..util.errors import BadInput

Many = Any  # a number, or an array of them: formulas are the same
NONE, SELECTIVE, FULL = range(3)
RECOMPUTE = ("none", "selective", "full")
SINGLE, LOOP, VEE = range(3)
PLACEMENTS = ("single", "loop", "vee")
WHOLE, SHARDED = range(2)
VOCABULARIES = ("whole", "sharded")
NO_OFFLOAD, HALF_OFFLOAD, FULL_OFFLOAD = range(3)
OFFLOADS = ("none", "half", "full")  # as `Step` takes them
ZERO_STAGES = 4  # 0 (nothing sharded) to 3
FIELDS = {
    "tp": "tensor ranks",
    "pp": "pipeline ranks",
    "placement": "placement",
    "size": "sequences a microbatch",
    "recompute": "recompute",
    "sequence": "sequence parallelism",
    "zero": "ZeRO",
    "vocabulary": "vocabulary",
    "slices": "slices",
    "offload": "offload",
}
BESIDE = ("vocabulary", "slices", "offload")  # plain layouts have none of it
NAMES = {
    "placement": PLACEMENTS,
    "recompute": RECOMPUTE,
    "sequence": ("no", "yes"),
    "vocabulary": VOCABULARIES,
    "offload": OFFLOADS,
}


class Layout(NamedTuple):
    """A way to split a step. Every field is a whole number, or all are arrays of one length: then it is a table of layouts.

    dp, tp, pp: replicas, tensor ranks and pipeline ranks.
    chunks: stages a pipeline rank.
    placement: a number in `PLACEMENTS`.
    size: sequences a microbatch.
    count: microbatches of a replica.
    recompute: a number in `RECOMPUTE`.
    sequence: 1 where norms and dropouts are split over tensor ranks too (sequence parallelism, 2205.05198).
    zero: stage of ZeRO (1910.02054).
    scattered: 1 where each tensor rank sends its part of a message (2104.04473, section 4.1).
    vocabulary: a number in `VOCABULARIES`: embedding and head are on the first and the last stage, or sharded over all
        pipeline ranks with one barrier a microbatch (2411.05288).
    slices: even parts of each sequence, one after the other (2504.14519).
    offload: a number in `OFFLOADS`: what of stages' activations goes to host memory between F and B (2503.01328).
    """

    dp: Many = 1
    tp: Many = 1
    pp: Many = 1
    chunks: Many = 1
    placement: Many = SINGLE
    size: Many = 1
    count: Many = 1
    recompute: Many = NONE
    sequence: Many = 0
    zero: Many = 0
    scattered: Many = 1
    vocabulary: Many = WHOLE
    slices: Many = 1
    offload: Many = NO_OFFLOAD

    @property
    def devices(self) -> Many:
        """All devices."""
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> Many:
        """Stages of the pipeline."""
        return self.pp * self.chunks

    @property
    def gathers_by_stage(self) -> Many:
        """Whether stages gather their parameters once a step and reduce their gradients once, in passes of the graph: ZeRO 2
        of a pipeline, as FSDP's `reshard_after_forward=False`."""
        return (np.asarray(self.zero) == 2) & (np.asarray(self.pp) > 1) & (np.asarray(self.dp) > 1)

    @property
    def is_plain(self) -> Many:
        """Whether it has nothing `BESIDE` what everybody has."""
        return np.all([getattr(self, name) == getattr(Layout(), name) for name in BESIDE], axis=0)

    @property
    def spot(self) -> str:
        """The placement as `Step` takes it."""
        name = PLACEMENTS[int(self.placement)]
        return f"{name}{int(self.chunks)}" if name == "loop" else name

    @property
    def numbers(self) -> dict[str, int]:
        """Of one layout: its fields."""
        return {name: int(value) for name, value in self._asdict().items()}

    @property
    def title(self) -> str:
        """As a person reads it: `dp 4 tp 2 pp 8 vee, 64 × 1, recompute none, zero 1`."""
        parts = f"dp {self.dp} tp {self.tp} pp {self.pp} {self.spot}, {self.count} × {self.size}"
        further = ", sequence parallel" if self.sequence else ""
        further += ", vocabulary sharded" if self.vocabulary else ""
        further += f", {self.slices} slices" if self.slices > 1 else ""
        further += f", offload {OFFLOADS[int(self.offload)]}" if self.offload else ""
        return f"{parts}, recompute {RECOMPUTE[int(self.recompute)]}{further}, zero {self.zero}"

    def rows(self, keep: NDArray[Any]) -> Layout:
        """Of a table: the rows with these numbers, or those that a mask marks."""
        return Layout(*(column[keep] for column in self))

    def row(self, index: int) -> Layout:
        """Of a table: one layout."""
        return Layout(*(int(column[index]) for column in self))


def table_of(layouts: list[Layout]) -> Layout:
    """Layouts as a table."""
    return Layout(*(np.array(column, np.int64) for column in zip(*layouts, strict=True)))


def rows_of(table: Layout, layout: Layout) -> NDArray[np.int64]:
    """Numbers of a table's rows that are this layout."""
    return np.flatnonzero(np.all([column == value for column, value in zip(table, layout, strict=True)], axis=0))


def named(field: str, value: int) -> str:
    """A field's value as a person reads it."""
    return NAMES[field][value] if field in NAMES else str(value)


def recompute_by_name(name: str, where: str) -> int:
    """The number of "none", "selective" or "full". Raises BadInput naming `where`."""
    if name not in RECOMPUTE:
        raise BadInput(f"{where} '{name[:40]}': one of {', '.join(RECOMPUTE)}")
    return RECOMPUTE.index(name)
