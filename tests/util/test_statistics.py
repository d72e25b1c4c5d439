"""Quartiles and how well a median is known."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve.util.statistics import median_error, quartiles


def test_quartiles_lie_between_samples() -> None:
    assert quartiles([1.0, 2.0, 3.0, 4.0]) == (1.75, 3.25)
    assert quartiles(np.arange(5).reshape(1, 5)) == (1.0, 3.0)


def test_the_error_of_a_median_is_a_notch() -> None:
    """1.57 interquartile ranges over √n (McGill, Tukey and Larsen 1978), relative to the median."""
    assert median_error([8.0, 9.0, 10.0, 11.0, 12.0]) == pytest.approx(1.57 * 2 / 5**0.5 / 10)
    assert median_error([0.0, 0.0]) == 0
