"""ByteDance's StragglerAnalysis: a parquet table, a row an operation (artifact of "Understanding Stragglers in Large Model
Training Using What-if Analysis").

`start_ts` and `duration` are in seconds since the step's start, by one clock. `stage` is the rank of the pipeline, `gmc` the
stage (a rank may have several, `mc`), −1 for messages, which are numbered by `seq_id`. Replicas (`dp_rank`) are separate
pipelines, so each is a step here. A message's time includes the wait for its partner, which is subtracted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...util.errors import BadInput
from .recording import ONE, RanPass, RecordedStep, Recording

MARK = b"PAR1"
FORMAT = "StragglerAnalysis parquet"
NUMBERS = ("dp_rank", "stage", "step", "start_ts", "duration", "seq_id", "mb_id", "gmc")
COLUMNS = ("optype", *NUMBERS)
KINDS = {"forward-compute": "F", "backward-compute": "BW"}
MESSAGES = (("forward-send", "forward-recv", 1), ("backward-send", "backward-recv", -1))
SECOND = 1e6  # µs
MAX_ROWS = 20_000_000
Columns = Mapping[str, NDArray[Any]]


def read(path: Path) -> Recording:
    """The runs of all replicas and steps. Raises BadInput naming file, column, step and rank."""
    table = _columns(path)
    compute = np.isin(table["optype"], list(KINDS))
    if not compute.any():
        raise BadInput(f"{path}: column 'optype' has neither {' nor '.join(KINDS)}")
    groups: dict[tuple[int, int], list[RanPass]] = {}
    fields = [table[name][compute].tolist() for name in ("step", "dp_rank", "optype", "gmc", "mb_id", "stage")]
    start = table["start_ts"][compute].astype(np.float64) * SECOND
    end = start + table["duration"][compute].astype(np.float64) * SECOND
    for step, replica, kind, stage, microbatch, rank, a, b in zip(*fields, start.tolist(), end.tolist(), strict=True):
        if min(stage, microbatch, rank) < 0:
            raise BadInput(f"{path}: step {step}: a {kind} without stage or microbatch (gmc {stage}, mb_id {microbatch})")
        groups.setdefault((step, replica), []).append(RanPass(KINDS[kind], stage, microbatch, rank, a, b))
    _check_last(path, table)
    steps, left_out = _complete_steps(groups)
    return Recording(str(path), FORMAT, ONE, steps, _links(table), {"replicas": len({dp for _, dp in groups})}, left_out)


def _check_last(path: Path, table: Columns) -> None:
    """Raise BadInput if each rank has one stage and the last stage sends activations: then the next rank is missing."""
    last = int(table["stage"].max(initial=-1))
    if table["gmc"].max(initial=-1) == last and ((table["optype"] == MESSAGES[0][0]) & (table["stage"] == last)).any():
        raise BadInput(f"{path}: stage {last} sends to stage {last + 1}, of which no row has a pass: a rank is missing")


def _columns(path: Path) -> Columns:
    """The columns that are used. Raises BadInput if one is missing, or pyarrow is not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise BadInput(f"{path}: a parquet file needs pyarrow: pip install 'zbsolve[parquet]'") from None
    try:
        file = parquet.ParquetFile(path)
        missing = [name for name in COLUMNS if name not in file.schema_arrow.names]
        if missing:
            has = ", ".join(file.schema_arrow.names[:8])
            raise BadInput(f"{path}: no StragglerAnalysis table: column '{missing[0]}' is missing (it has {has})")
        if file.metadata.num_rows > MAX_ROWS:
            raise BadInput(f"{path}: {file.metadata.num_rows} rows, more than zbsolve reads ({MAX_ROWS})")
        table = file.read(columns=list(COLUMNS))
    except (pyarrow.ArrowException, OSError) as error:
        raise BadInput(f"{path}: damaged parquet file: {str(error).splitlines()[0][:100]}") from None
    columns = {name: table[name].to_numpy() for name in NUMBERS}
    for name, column in columns.items():
        if column.dtype.kind not in ("iuf" if name in ("start_ts", "duration") else "iu"):
            raise BadInput(f"{path}: column '{name}' has a wrong type ({column.dtype}), or values are missing in it")
    return columns | {"optype": np.array(table["optype"].to_pylist(), str)}


def _complete_steps(groups: Mapping[tuple[int, int], Sequence[RanPass]]) -> tuple[tuple[RecordedStep, ...], tuple[str, ...]]:
    """The steps with the most common number of passes, and a line about the others."""
    usual = Counter(len(group) for group in groups.values()).most_common(1)[0][0]
    kept = {of: group for of, group in groups.items() if len(group) == usual}
    steps = tuple(RecordedStep(f"{step}, replica {replica}", tuple(row)) for (step, replica), row in sorted(kept.items()))
    fewer = len(groups) - len(kept)
    return steps, (f"{fewer} of {len(groups)} steps, which do not have {usual} passes",) if fewer else ()


def _links(table: Columns) -> dict[tuple[int, int], list[float]]:
    """Pair of ranks → µs of each message, if each rank has one stage: then the n-th send of a rank in a step belongs to the
    n-th receive of its neighbour. Otherwise empty."""
    delays: dict[tuple[int, int], list[float]] = {}
    if table["gmc"].max(initial=-1) > table["stage"].max(initial=-1):
        return delays
    for send, receive, up in MESSAGES:
        sent, received = (_by_number(table, optype) for optype in (send, receive))
        for (step, replica, number, rank), (begun, _) in sent.items():
            other = received.get((step, replica, number, rank + up))
            if other is not None:
                delays.setdefault((rank, rank + up), []).append(max(0.0, other[1] - max(begun, other[0])) * SECOND)
    return delays


def _by_number(table: Columns, optype: str) -> dict[tuple[int, int, int, int], tuple[float, float]]:
    """Step, replica, number and rank of each message of this type → start and end in seconds."""
    rows = np.flatnonzero(table["optype"] == optype)
    keys = zip(*(table[name][rows].tolist() for name in ("step", "dp_rank", "seq_id", "stage")), strict=True)
    start = table["start_ts"][rows].astype(np.float64)
    end = start + table["duration"][rows].astype(np.float64)
    return dict(zip(keys, zip(start.tolist(), end.tolist(), strict=True), strict=True))
