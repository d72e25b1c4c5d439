"""A rank that waits runs a later W: when it does, what that gives, that gradients keep their bits."""

from __future__ import annotations

import numpy as np
import pytest

from zbsolve.exec.lowering import lower
from zbsolve.exec.slack import PASSED, Slack, earliest

from ..support.exec_jobs_slack import three_ranks
from ..support.exec_ranks import jobs_on


def test_the_first_place_of_each_w() -> None:
    """Behind its own B, and behind whatever it may not pass."""
    schedule = three_ranks()
    actions = lower(schedule)[2].actions  # F0 B0 F1 B1 W0 W1
    assert earliest(schedule.problem, (), actions, PASSED) == {4: 2, 5: 4}
    assert earliest(schedule.problem, (), actions, ("F", "W")) == {4: 4, 5: 4}
    assert earliest(schedule.problem, (("2F1", "2W0"),), actions, PASSED) == {4: 3, 5: 4}
    assert earliest(schedule.problem, (("0F1", "2W0"),), actions, PASSED) == {4: 4, 5: 4}


def test_a_w_runs_where_it_surely_fits() -> None:
    """2F1 waits for 1F1 (20 ms): W0 (20 ms) fits while rank 1 has not begun that pass, and not once it has."""
    programs, cells = lower(three_ranks()), np.zeros(3, np.int64)
    slack, message = Slack(three_ranks(), programs, 2, cells), programs[2].actions[2].messages[0]
    for _ in range(2):  # nothing runs early in the first step
        slack.begin(())
        slack.at = 2
        cells[1] = 6 * slack._step + 1  # 1F0
        found = slack.pull([message])
    assert found is not None
    assert found.name == "2W0"
    assert slack.pull([message]) is None  # W1's B has not run
    slack.begin(())
    slack.at, cells[1] = 2, 12 + 2  # 1F1 has begun: who knows how long it still takes
    assert slack.pull([message]) is None


@pytest.mark.slow
def test_a_rank_that_waits() -> None:
    """By hand, in passes of 20 ms, where 0F1 takes six: 1F1 runs from 7, 2F1 from 8, 2B1 from 9 to 10. As given rank 2 runs
    W0 and W1 then, to 12. It stood idle from 4, and with slack W0 runs there, so it ends at 11."""
    found = jobs_on(3, "tests.support.exec_jobs_slack", {"stalled": None, "alike": 4, "refused": None})
    for one in found["stalled"]:
        assert one["fixed"]["gradients"] == one["slack"]["gradients"]
        for name, w, end in (("fixed", 10, 12), ("slack", 4, 11), ("graph", 4, 11), ("both", 10, 12)):
            starts, ends = one[name]["start"], one[name]["ends"]
            assert (starts["2W0"], ends[2]) == (20_000 * w, 20_000 * end)
            assert one[name]["host"] == [0, 0]  # what ran early is no time of the host
    assert all(one["same"] for one in found["alike"])
    assert min(one["early"] for one in found["alike"]) > 3
    assert {line for one in found["refused"] for line in one} == {
        "split ':slack': not with a step without W",
        "split: 'auto:slack' is none of layers, graph, graph:least, inductor, inductor:least, auto, auto:inductor, "
        "layers:slack, graph:slack",
    }
