"""The demo says when its numbers mean nothing."""

from dataclasses import replace

import numpy as np

from benchmarks.demo import cautions
from profiler.measurement import DISTURBED
from zbsolve.show.comparison import compare

from ..support.profiles import toy_profile
from ..support.runs import one_f_one_b, run_of, trace_of


def test_a_disturbed_profile_and_a_far_prediction_are_said() -> None:
    schedule = one_f_one_b(2, 3)
    none = np.zeros(len(schedule.problem.passes))
    near, far = (compare(schedule, trace_of(schedule, run_of(schedule, none + more, none))) for more in (1, 9))
    quiet, busy = (replace(toy_profile(), facts={"warnings": rows}) for rows in (["host-bound: x"], [f"{DISTURBED} x"]))
    assert cautions(quiet, {"1F1B": near, "solved": near}) == []
    (first, last) = cautions(busy, {"solved": near})
    assert first == "WARNING: the profile was disturbed: x"
    assert last.startswith("So the predicted speed-up means nothing here")
    assert cautions(quiet, {"1F1B": near, "solved": far})[0].startswith("WARNING: solved took +")
