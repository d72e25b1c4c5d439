"""Statistics of samples that the standard library lacks: quartiles, and the uncertainty of a median."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


def quartiles(samples: ArrayLike) -> tuple[float, float]:
    """The lower and the upper quartile, interpolated between samples; over all elements of an array of any shape."""
    low, high = np.quantile(np.asarray(samples), (0.25, 0.75)).tolist()
    return low, high


def weighted_median(samples: ArrayLike, weights: ArrayLike) -> float:
    """The number u that minimises the sum of weight · |sample − u|, the middle one of several: with equal weights the
    median. Arrays of one shape, over all elements; weights above 0."""
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
