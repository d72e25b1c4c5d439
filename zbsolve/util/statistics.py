"""Statistics of samples beyond the standard library's median: quartiles, the error of a median, weighted medians."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def quartiles(samples: ArrayLike) -> tuple[float, float]:
    """The lower and the upper quartile, interpolated between samples; of an array of any shape, over all of it."""
    low, high = np.quantile(np.asarray(samples), (0.25, 0.75)).tolist()
    return low, high


def weighted_median(samples: ArrayLike, weights: ArrayLike) -> float:
    """The number u with the least Σ weight · |sample − u|; the middle if there are several. With equal weights it is the
    median. samples, weights: arrays of the same shape; weights are positive."""
    values, parts = np.ravel(np.asarray(samples, np.float64)), np.ravel(np.asarray(weights, np.float64))
    order = np.argsort(values, kind="stable")
    below = np.cumsum(parts[order])
    low, high = (int(np.searchsorted(below, below[-1] / 2, side)) for side in ("left", "right"))
    return float((values[order[low]] + values[order[high]]) / 2)


def median_error(samples: Sequence[float]) -> float:
    """Half the width of a 95 % interval around the median, relative to the median: 1.57 interquartile ranges over √n
    (McGill, Tukey and Larsen 1978, the notch of a box plot). 0 where the median is 0."""
    low, middle, high = np.quantile(samples, (0.25, 0.5, 0.75)).tolist()
    return float(1.57 * (high - low) / len(samples) ** 0.5 / middle) if middle > 0 else 0.0
