"""Benchmarks of the search: suites of problems, reports that keep every sample, one report against another."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .regressions import ReportComparison as ReportComparison
    from .regressions import compare_reports as compare_reports
    from .regressions import regressions_as_markdown as regressions_as_markdown
    from .runs import Report as Report
    from .runs import Result as Result
    from .runs import Settings as Settings
    from .runs import TimedSolve as TimedSolve
    from .runs import report_as_text as report_as_text
    from .runs import run_suite as run_suite
    from .runs import timed_solve as timed_solve
    from .suites import SUITES as SUITES
    from .suites import problems_of as problems_of
    from .suites import suite as suite

__getattr__, __dir__ = handing_on(__name__)
