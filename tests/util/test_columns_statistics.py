"""Quartiles and how well a median is known."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve.util.columns import median_error, quartiles, weighted_median


def test_quartiles_lie_between_samples() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0]) == (1.75, 3.25)
    assert quartiles(np.arange(5).reshape(1, 5)) == (1.0, 3.0)


def test_the_error_of_a_median_is_a_notch() -> None:
    """1.57 interquartile ranges over √n (McGill, Tukey and Larsen 1978), relative to the median."""
    assert median_error([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(1.57 * 2 / 5**0.5 / 10)
    assert median_error([0.0, 0.0]) == 0


def test_a_weighted_median_has_the_least_absolute_deviations() -> None:
    random = np.random.default_rng(1)
    for count in range(1, 9):
        samples, weights = random.integers(0, 20, count).astype(float), random.integers(1, 5, count).astype(float)
        off = [float((weights * np.abs(samples - u)).sum()) for u in np.arange(0, 20.25, 0.25)]
        found = weighted_median(samples, weights)
        assert float((weights * np.abs(samples - found)).sum()) == pytest.approx(min(off))
        assert weighted_median(samples, np.ones(count)) == np.median(samples)
    assert weighted_median([[1.0, 2.0], [9.0, 9.0]], [[5.0, 5.0], [1.0, 1.0]]) == 2.0
