"""`fit`: a cluster's constants from measured steps, with priors from data sheets; and what the cost model says of them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..build.plain import pipeline
from ..kinds import KINDS
from ..layer import Link
from ..problem import Problem
from ..systems.table import preset
from ..timeline import Precedence, longest_path
from ..util.errors import BadInput
from ..util.files import read_text
from .cluster import CLUSTERS, Cluster
from .costs.layer_formulas import after_pipeline, block_times, embedding_times, head_times, message
from .layout import LOOP, SINGLE, Layout, recompute_by_name
from .shape import Shape

# --- The step that measured steps ran: 1F1B, or interleaved ---


NS = 1000  # a µs: durations are whole numbers, and constants are fitted by small differences
KEPT_ORDERS = 64


def order_time(forward: NDArray[np.float64], backward: NDArray[np.float64], ranks: int, microbatches: int) -> float:
    """µs from the first start to the last end. forward, backward: µs of each stage's passes, shape (stages,), stage i on
    rank i mod `ranks`, with the messages that they send."""
    if ranks == 1:
        return float(microbatches * (forward.sum() + backward.sum()))
    problem, precedence = _order(ranks, len(forward) // ranks, microbatches)
    table = problem.passes
    each = np.where(table.kind == KINDS.index("F"), forward[table.stage], backward[table.stage])
    duration = np.rint(NS * each).astype(np.int64)
    start, _ = longest_path(replace(problem, passes=replace(table, duration=duration)), precedence)
    return float((start + duration).max()) / NS


@lru_cache(maxsize=KEPT_ORDERS)
def _order(ranks: int, chunks: int, microbatches: int) -> tuple[Problem, Precedence]:
    """The step with passes of one length, and which pass waits for which."""
    placement = tuple(range(ranks)) * chunks
    problem = pipeline([1] * len(placement), BW=[1] * len(placement), placement=placement, microbatches=microbatches)
    return problem, preset("1f1b" if chunks == 1 else "interleaved", problem).precedence()


# --- Measured steps, and what the cost model says of them ---


MEASURED = "step_ms"
NUMBERS = ("global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tp", "dp", "pp")
MS = 1e3  # µs
Row = Mapping[str, object]


def predict(rows: Iterable[Row], cluster: Cluster) -> list[float]:
    """ms that each row's step takes by the cost model.

    rows: dicts with the columns of `NUMBERS` as `csv.DictReader` gives them; also chunks (1 where there is none), recompute
        ("full"), sequence_parallel (0), vocabulary (51200).
    cluster: its constants.

    Rows that say sequence_parallel are Megatron-LM's, which sends a message in parts, one from each tensor rank (2104.04473,
    section 4.1). Raises BadInput naming row and column.
    """
    return [step_time(*step, cluster) / MS for step in steps_of(rows)]


def read_rows(path: str) -> list[Row]:
    """Rows of a CSV file with a header; lines that begin with # are notes. Raises BadInput."""
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) < 2:
        raise BadInput(f"{path}: a header and a row a measured step are needed")
    return list(csv.DictReader(lines))


def steps_of(rows: Iterable[Row]) -> list[tuple[Shape, Layout]]:
    """What rows say: a model, and how it was split. Raises BadInput naming row and column."""
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


def _step_of(row: Row, where: str) -> tuple[Shape, Layout]:
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
    return Shape.gpt(hidden, heads, layers, sequence, vocabulary), layout


def _number(row: Row, name: str, where: str, usual: int | None = None) -> float:
    """A row's number above 0 (or 0 where that is usual). Raises BadInput."""
    cell = row.get(name)
    if cell is None or cell == "":
        if usual is None:
            raise BadInput(f"{where}: column '{name}' is missing")
        return usual
    with suppress(ValueError):
        number = float(str(cell))
        if 0 < number < 2**62 or (number == 0 and usual == 0):
            return number
    raise BadInput(f"{where}: column '{name}' is '{str(cell)[:20]}', no number above 0")


# --- The fit ---


Floats = NDArray[np.float64]


class Constants(NamedTuple):
    """What is fitted, all above 0 (see `Cluster`)."""

    efficiency: float
    launch: float
    traffic: float
    inside: float
    latency: float
    between: float
    messages: float
    host: float
    constant: float


SPREADS = Constants(0.2, 1.0, 0.4, 0.4, 0.7, 0.7, 0.7, 0.7, 1.0)  # standard deviations of priors, of logarithms
NOISE = 0.05  # of a measured step, as a share
HUBER = 2.0  # deviations beyond which a step counts in proportion only (Huber 1964): some measured steps are far off
STEP = 1e-3  # of a derivative, in standard deviations of the prior
ROUNDS, TRIES, FIRST_DAMPING, MAX_MOVE, ENOUGH = 40, 6, 1.0, 1.0, 1e-6


def fit(rows: Iterable[Row], prior: Cluster | None = None) -> Cluster:
    """The cluster under which the cost model says best what was measured: the constants with the highest posterior.

    Huber's loss of log times, log-normal priors, Levenberg-Marquardt by numeric derivatives: nine numbers need no more than
    NumPy.

    rows: as `predict` takes them, with a column step_ms.
    prior: a data sheet's cluster, whose constants are the priors' medians; None: A100s.

    Raises BadInput naming row and column.
    """
    rows, prior = list(rows), CLUSTERS["a100"] if prior is None else prior
    if not rows:
        raise BadInput("rows: at least one measured step is needed")
    steps, times = steps_of(rows), np.log(np.array(measured(rows)) * 1e3)
    medians = _constants(prior)

    def deviations(x: Floats) -> Floats:
        cluster = _with_constants(prior, _at(medians, x))
        logs = np.log([step_time(*step, cluster) for step in steps])
        return np.concatenate([_huber((logs - times) / NOISE), x])

    best = _least_squares(deviations, np.zeros(len(medians)))
    source = f"fitted: {len(rows)} measured steps, priors of {prior.name}"
    fitted = _with_constants(prior, _at(medians, best))
    off = np.abs(errors(predict(rows, fitted), rows)).mean()
    return replace(fitted, source=source, error=float(off))


def errors(predicted: Iterable[float], rows: Iterable[Mapping[str, object]]) -> list[float]:
    """What predictions, ms, differ from the measured steps, as shares of them."""
    return [step / true - 1 for step, true in zip(predicted, measured(rows), strict=True)]


def _constants(cluster: Cluster) -> Constants:
    inside, between = cluster.inside, cluster.between
    rates = (inside.bytes_per_us, inside.latency, between.bytes_per_us, cluster.messages)
    constants = Constants(cluster.efficiency, cluster.launch, cluster.traffic, *rates, cluster.host, cluster.constant)
    for name, value in constants._asdict().items():
        if value <= 0:
            raise BadInput(f"cluster {cluster.name}: '{name}' is {value:g}: a prior must be above 0")
    return constants


def _with_constants(cluster: Cluster, to: Constants) -> Cluster:
    """The cluster with these constants. One latency is fitted: few groups reach beyond a node."""
    return replace(
        cluster,
        efficiency=to.efficiency,
        launch=to.launch,
        traffic=to.traffic,
        inside=Link(to.latency, to.inside),
        between=Link(to.latency, to.between),
        messages=to.messages,
        host=to.host,
        constant=to.constant,
    )


def _at(medians: Constants, x: Floats) -> Constants:
    """The constants so many standard deviations from the priors' medians."""
    return Constants(*(np.array(medians) * np.exp(np.array(SPREADS) * x)).tolist())


def _huber(deviations: Floats) -> Floats:
    """Numbers whose squares are Huber's loss."""
    size = abs(deviations)
    beyond = np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0))
    return np.sign(deviations) * np.where(size > HUBER, beyond, size)


def _least_squares(deviations: Callable[[Floats], Floats], x: Floats) -> Floats:
    """Where the sum of squares is least, from `x` on (Marquardt 1963)."""
    damping, now = FIRST_DAMPING, deviations(x)
    for _ in range(ROUNDS):
        slopes = np.stack([(deviations(x + STEP * unit) - now) / STEP for unit in np.eye(len(x))], axis=1)
        normal, slope = slopes.T @ slopes, slopes.T @ now
        for _ in range(TRIES):
            move = -np.linalg.solve(normal + damping * np.diag(np.diag(normal)), slope)
            there = x + np.clip(move, -MAX_MOVE, MAX_MOVE)
            new = deviations(there)
            if new @ new < now @ now:
                break
            damping *= 4
        else:
            return x
        gain = now @ now - new @ new
        x, now, damping = there, new, damping / 3
        if gain < ENOUGH:
            return x
    return x
