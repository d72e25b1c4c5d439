"""`Layout`: one way to split a training step over devices, or a table of such ways with one column for each field."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..util.errors import BadInput

Many = Any  # a number, or an array of numbers: formulas take both
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
# Fields that plain layouts leave at their defaults, and their texts in titles.
BESIDE = {"vocabulary": "vocabulary {}", "slices": "{} slices", "offload": "offload {}"}
NAMES = {
    "placement": PLACEMENTS,
    "recompute": RECOMPUTE,
    "sequence": ("no", "yes"),
    "vocabulary": VOCABULARIES,
    "offload": OFFLOADS,
}


class Layout(NamedTuple):
    """A way to split a step. Every field is a whole number, or every field is an array: then it is a table of layouts.

    dp, tp, pp: numbers of replicas, tensor ranks and pipeline ranks.
    chunks: stages on each pipeline rank.
    placement: an index into `PLACEMENTS`.
    size: sequences in a microbatch.
    count: microbatches of each replica.
    recompute: an index into `RECOMPUTE`.
    sequence: 1 where norms and dropouts are split over tensor ranks too (sequence parallelism, 2205.05198).
    zero: stage of ZeRO (1910.02054), 0 to 3.
    scattered: 1 where each tensor rank sends its part of a message (2104.04473, section 4.1).
    vocabulary: an index into `VOCABULARIES`. whole: embedding on the first stage and head on the last; sharded: both over
        all pipeline ranks, with one barrier in each microbatch (2411.05288).
    slices: even parts of each sequence, which run one after the other (2504.14519).
    offload: an index into `OFFLOADS`: the share of stages' activations in host memory between F and B (2503.01328).
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
        """The number of devices."""
        return self.dp * self.tp * self.pp

    @property
    def stages(self) -> Many:
        """The number of stages of the pipeline."""
        return self.pp * self.chunks

    @property
    def parts(self) -> Many:
        """Parts of a microbatch, which run one after the other on a stage."""
        return np.asarray(self.slices)

    @property
    def gathers_by_stage(self) -> Many:
        """Whether passes of the graph gather each stage's parameters and reduce its gradients once in a step: ZeRO 2 with a
        pipeline, as FSDP does with `reshard_after_forward=False`."""
        return (np.asarray(self.zero) == 2) & (np.asarray(self.pp) > 1) & (np.asarray(self.dp) > 1)

    @property
    def is_plain(self) -> Many:
        """Whether the fields in `BESIDE` have their defaults."""
        return ~np.any([self.has(name) for name in BESIDE], axis=0)

    def has(self, field: str) -> Many:
        """Whether a field is not at its default."""
        return getattr(self, field) != self._field_defaults[field]

    @property
    def spot(self) -> str:
        """The placement as text that `Step` takes: `single`, `loop3`, `vee`."""
        name = PLACEMENTS[int(self.placement)]
        return f"{name}{int(self.chunks)}" if name == "loop" else name

    @property
    def numbers(self) -> dict[str, int]:
        """The fields of one layout, by name."""
        return {name: int(value) for name, value in self._asdict().items()}

    @property
    def title(self) -> str:
        """One layout as readable text: `dp 4 tp 2 pp 8 vee, 64 × 1, recompute none, zero 1`."""
        parts = f"dp {self.dp} tp {self.tp} pp {self.pp} {self.spot}, {self.count} × {self.size}"
        said = [text.format(named(name, getattr(self, name))) for name, text in BESIDE.items() if self.has(name)]
        further = ", ".join(["", *(["sequence parallel"] if self.sequence else []), *said])
        return f"{parts}, recompute {RECOMPUTE[int(self.recompute)]}{further}, zero {self.zero}"

    def rows(self, keep: NDArray[Any]) -> Layout:
        """The rows of a table with these indices, or those that a mask marks."""
        return Layout(*(column[keep] for column in self))

    def row(self, index: int) -> Layout:
        """One layout of a table, by its row."""
        return Layout(*(int(column[index]) for column in self))


def table_of(layouts: list[Layout]) -> Layout:
    """A table of these layouts."""
    return Layout(*(np.array(column, np.int64) for column in zip(*layouts, strict=True)))


def rows_of(table: Layout, layout: Layout) -> NDArray[np.int64]:
    """Indices of the rows of a table that equal this layout."""
    return np.flatnonzero(np.all([column == value for column, value in zip(table, layout, strict=True)], axis=0))


def named(field: str, value: int) -> str:
    """The value of a field as readable text."""
    return NAMES[field][value] if field in NAMES else str(value)


def recompute_by_name(name: str, where: str) -> int:
    """The index of "none", "selective" or "full" in `RECOMPUTE`. Raises BadInput naming `where`."""
    if name not in RECOMPUTE:
        raise BadInput(f"{where} '{name[:40]}': one of {', '.join(RECOMPUTE)}")
    return RECOMPUTE.index(name)
