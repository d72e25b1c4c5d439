"""`fit`: a cluster's constants from measured steps, with priors from data sheets; and the steps that the model predicts."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from ..build.plain import pipeline
from ..kinds import KINDS
from ..partition.layer import Link
from ..problem import Problem
from ..schedule.timeline import Floats, Precedence, longest_path
from ..systems.table import preset
from ..util.errors import BadInput
from ..util.files import read_text
from .cluster import CLUSTERS, Cluster
from .costs.layer_formulas import after_pipeline, block_times, embedding_times, head_times, message
from .layout import LOOP, SINGLE, Layout, recompute_by_name
from .shape import Shape

# --- The schedules of measured steps: 1F1B and interleaved 1F1B ---


NS = 1000  # in a µs: durations are whole numbers, and the fit needs small differences of them
KEPT_ORDERS = 64


def order_time(forward: Floats, backward: Floats, ranks: int, microbatches: int) -> float:
    """µs of a step in 1F1B, or interleaved 1F1B, from the first start to the last end. forward, backward: µs of each stage's
    passes with the messages that they send, shape (stages,); stage i is on rank i mod `ranks`."""
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
    """The step with all passes of one length, and the precedence of its passes in this order."""
    placement = tuple(range(ranks)) * chunks
    problem = pipeline([1] * len(placement), BW=[1] * len(placement), placement=placement, microbatches=microbatches)
    return problem, preset("1f1b" if chunks == 1 else "interleaved", problem).precedence()


# --- Measured steps, and the cost model's prediction of them ---


MEASURED = "step_ms"
NUMBERS = ("global_batch", "micro_batch", "hidden", "heads", "layers", "sequence", "tp", "dp", "pp")
MS = 1e3  # µs in a ms
Row = Mapping[str, object]


def predict(rows: Iterable[Row], cluster: Cluster) -> list[float]:
    """The cost model's time of each row's step, ms.

    rows: dicts with the columns of `NUMBERS`, as `csv.DictReader` gives them. Optional columns, with their defaults: chunks
        (1), recompute ("full"), sequence_parallel (0), vocabulary (51200).
    cluster: gives the constants.

    Rows with a column sequence_parallel are taken as Megatron-LM's, where each tensor rank sends its part of a message
    (2104.04473, section 4.1). Raises BadInput naming row and column.
    """
    return [step_time(*step, cluster) / MS for step in steps_of(rows)]


def read_rows(path: str) -> list[Row]:
    """The rows of a CSV file with a header; lines that begin with # are skipped. Raises BadInput."""
    lines = [line for line in read_text(path).splitlines() if line.strip() and not line.startswith("#")]
    if len(lines) < 2:
        raise BadInput(f"{path}: a header and a row a measured step are needed")
    return list(csv.DictReader(lines))


def steps_of(rows: Iterable[Row]) -> list[tuple[Shape, Layout]]:
    """The model and the layout of each row. Raises BadInput naming row and column."""
    return [_step_of(row, f"row {i}") for i, row in enumerate(rows, 1)]


def measured(rows: Iterable[Row]) -> list[float]:
    """The measured ms of each row, from column `step_ms`. Raises BadInput naming the row."""
    return [_number(row, MEASURED, f"row {i}") for i, row in enumerate(rows, 1)]


def step_time(shape: Shape, layout: Layout, cluster: Cluster) -> float:
    """µs of a whole step in 1F1B, or interleaved 1F1B. Layers are spread evenly, and the first stages get the remainder.
    Messages occupy their sender. The exchange of gradients, the update and the constant are added."""
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
    """A number of a row, above 0, or 0 where `usual`, the default, is 0. Raises BadInput."""
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


class Constants(NamedTuple):
    """The fitted constants, all above 0 (see `Cluster`)."""

    efficiency: float
    launch: float
    traffic: float
    inside: float
    latency: float
    between: float
    messages: float
    host: float
    constant: float


SPREADS = Constants(0.2, 1.0, 0.4, 0.4, 0.7, 0.7, 0.7, 0.7, 1.0)  # standard deviations of the priors' logarithms
NOISE = 0.05  # standard deviation of a measured step, as a share of it
HUBER = 2.0  # deviations from which the loss is linear (Huber 1964), since some measured steps are far off
STEP = 1e-3  # of numeric derivatives, in standard deviations of the prior
ROUNDS, TRIES, FIRST_DAMPING, MAX_MOVE, ENOUGH = 40, 6, 1.0, 1.0, 1e-6


def fit(rows: Iterable[Row], prior: Cluster | None = None) -> Cluster:
    """The cluster whose constants fit the measured steps best: those with the highest posterior.

    The loss is Huber's, of logarithms of times; priors are log-normal; Levenberg-Marquardt with numeric derivatives finds
    the minimum.

    rows: as `predict` takes them, with a column step_ms.
    prior: a cluster from a data sheet, whose constants are the medians of the priors; None: A100s.

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
    """The difference of each prediction, ms, from its measured step, as a share of the latter."""
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
    """The cluster with these constants. Both links get the one fitted latency, since few groups span nodes."""
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
    """The constants that are x standard deviations from the medians of the priors."""
    return Constants(*(np.array(medians) * np.exp(np.array(SPREADS) * x)).tolist())


def _huber(deviations: Floats) -> Floats:
    """Values whose squares are Huber's loss of these deviations."""
    size = abs(deviations)
    beyond = np.sqrt(np.maximum(2 * HUBER * size - HUBER**2, 0.0))
    return np.sign(deviations) * np.where(size > HUBER, beyond, size)


def _least_squares(deviations: Callable[[Floats], Floats], x: Floats) -> Floats:
    """The point with the least sum of squares that a search from `x` finds (Marquardt 1963)."""
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
