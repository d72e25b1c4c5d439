"""Measured steps as rows of a table, and what the cost model says of them."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from ...util.errors import BadInput
from ...util.files import read_text
from ..clusters.cluster import Cluster
from ..costs.layer_times import after_pipeline, block_times, embedding_times, head_times, message
from ..layout import LOOP, SINGLE, Layout, recompute_by_name
from ..model.shape import Shape
from .fixed_order import order_time

MEASURED = "step_ms"
NUMBERS = ("global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tp", "dp", "pp")
MS = 1e3  # µs
Row = Mapping[str, object]


class MeasuredStep(NamedTuple):
    """A model and how it was split."""

    shape: Shape
    layout: Layout


def predict(rows: Iterable[Row], cluster: Cluster) -> list[float]:
    """ms that each row's step takes by the cost model.

    rows: dicts with the columns of `NUMBERS` as `csv.DictReader` gives them; also chunks (1 where there is none), recompute
        ("full"), sequence_parallel (0), vocabulary (51200).
    cluster: its constants.

    Rows that say sequence_parallel are Megatron-LM's, which sends a message in parts, one from each tensor rank (2104.04473,
    section 4.1). Raises BadInput naming row and column.
    """
    return [step_time(*one, cluster) / MS for one in steps_of(rows)]


def read_rows(path: str) -> list[Row]:
    """Rows of a CSV file with a header; lines that begin with # are notes. Raises BadInput."""
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) < 2:
        raise BadInput(f"{path}: a header and a row a measured step are needed")
    return list(csv.DictReader(lines))


def steps_of(rows: Iterable[Row]) -> list[MeasuredStep]:
    """What rows say. Raises BadInput naming row and column."""
    return [_step_of(row, f"row {i}") for i, row in enumerate(rows, 1)]


def measured(rows: Iterable[Row]) -> list[float]:
    """ms that were measured, column `step_ms`. Raises BadInput naming the row."""
    return [_number(row, MEASURED, f"row {i}") for i, row in enumerate(rows, 1)]


def step_time(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """µs of a whole step under 1F1B, or interleaved 1F1B. Layers lie as evenly as they go, the first stages have one more;
    messages occupy their sender. The exchange of gradients, the update and the constant follow."""
    stages = layout.stages
    each = np.full(stages, shape.layers // stages)
    each[: shape.layers % stages] += 1
    block, head = block_times(shape, layout, cluster), head_times(shape, layout, cluster)
    forward, backward = each * block.F, each * (block.B + block.W)
    forward[-1] += head.F
    backward[-1] += head.B + head.W
    forward[0] += embedding_times(shape, layout, cluster).F
    sent = message(shape, layout, cluster)
    forward[:-1] += sent
    backward[1:] += sent
    parameters = (shape.matrices * (shape.layers / layout.pp) + shape.table) / layout.tp
    inside = order_time(forward, backward, layout.pp, layout.count)
    return float(inside + after_pipeline(parameters, layout, cluster))


def _step_of(row: Row, where: str) -> MeasuredStep:
    numbers = {name: int(_number(row, name, where)) for name in NUMBERS}
    batch, size, hidden, heads, layers, sequence, tp, dp, pp = numbers.values()
    chunks, vocabulary = (int(_number(row, name, where, usual)) for name, usual in (("chunks", 1), ("vocabulary", 51_200)))
    if layers < pp * chunks:
        raise BadInput(f"{where}: column 'layers': {layers} do not make {pp * chunks} stages")
    if batch < dp * size:
        raise BadInput(f"{where}: column 'global_batch': {batch} make no microbatch of {size} on {dp} replicas")
    recompute = recompute_by_name(str(row.get("recompute") or "full"), f"{where}: column 'recompute'")
    parallel, megatron = int(_number(row, "sequence_parallel", where, 0)), "sequence_parallel" in row
    place = SINGLE if chunks == 1 else LOOP
    layout = Layout(dp, tp, pp, chunks, place, size, batch // dp // size, recompute, parallel, 0, int(megatron))
    return MeasuredStep(Shape.gpt(hidden, heads, layers, sequence, vocabulary), layout)


def _number(row: Row, name: str, where: str, usual: int | None = None) -> float:
    """A row's number above 0 (or 0 where that is usual). Raises BadInput."""
    said = row.get(name)
    if said is None or said == "":
        if usual is None:
            raise BadInput(f"{where}: column '{name}' is missing")
        return usual
    try:
        found = float(str(said))
    except ValueError:
        found = float("nan")
    if not (0 < found < 2**62 or (found == 0 and usual == 0)):
        raise BadInput(f"{where}: column '{name}' is '{str(said)[:20]}', no number above 0")
    return found
