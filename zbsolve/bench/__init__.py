"""Benchmarks of the search: suites of problems, reports with all samples, and comparisons of two reports."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .runs import run_suite as run_suite

__getattr__, __dir__ = handing_on(__name__)
