"""`fit`: a cluster's constants from measured steps, with priors from data sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...layer import Link
from ...util.errors import BadInput
from ..clusters.cluster import Cluster
from ..clusters.cluster_presets import CLUSTERS
from .measured_rows import Row, measured, predict, step_time, steps_of

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

    rows: as `predict` takes them, with a column step_ms.
    prior: a data sheet's cluster, whose constants are the priors' medians; None: A100s.

    Huber's loss of log times, log-normal priors, Levenberg-Marquardt by numeric derivatives: nine numbers need no more than
    NumPy. Raises BadInput naming row and column.
    """
    rows, prior = list(rows), CLUSTERS["a100"] if prior is None else prior
    if not rows:
        raise BadInput("rows: at least one measured step is needed")
    steps, times = steps_of(rows), np.log(np.array(measured(rows)) * 1e3)
    medians = _constants(prior)

    def deviations(x: Floats) -> Floats:
        cluster = _with_constants(prior, _at(medians, x))
        said = np.log([step_time(*one, cluster) for one in steps])
        return np.concatenate([_huber((said - times) / NOISE), x])

    found = _least_squares(deviations, np.zeros(len(medians)))
    source = f"fitted: {len(rows)} measured steps, priors of {prior.name}"
    fitted = _with_constants(prior, _at(medians, found))
    off = np.abs(errors(predict(rows, fitted), rows)).mean()
    return replace(fitted, source=source, error=float(off))


def errors(said: Iterable[float], rows: Iterable[Mapping[str, object]]) -> list[float]:
    """What predictions, ms, differ from the measured steps, as shares of them."""
    return [one / true - 1 for one, true in zip(said, measured(rows), strict=True)]


def _constants(cluster: Cluster) -> Constants:
    inside, between = cluster.inside, cluster.between
    rates = (inside.bytes_per_us, inside.latency, between.bytes_per_us, cluster.messages)
    found = Constants(cluster.efficiency, cluster.launch, cluster.traffic, *rates, cluster.host, cluster.constant)
    for name, value in found._asdict().items():
        if value <= 0:
            raise BadInput(f"cluster {cluster.name}: '{name}' is {value:g}: a prior must be above 0")
    return found


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
