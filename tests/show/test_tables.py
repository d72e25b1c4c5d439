"""Tables and lines of the command line: what a search, partitions and a report say."""

from __future__ import annotations

from dataclasses import replace

from zbsolve import Step
from zbsolve.ilp.bounds.bound import Bound
from zbsolve.partition.by_name import NAMES, partition_by_name, partitioned
from zbsolve.search.auto import Tried
from zbsolve.search.state import State
from zbsolve.show.profile_report import partitions_as_text, stages_as_text
from zbsolve.show.profile_rows import Units
from zbsolve.show.solved_text import state_as_text, tried_as_text
from zbsolve.util.clock import Clock

from ..support.profiles import equal_layers
from ..support.runs import one_f_one_b


def test_a_search_in_a_line() -> None:
    schedule = one_f_one_b(2, 3)
    value = int(schedule.timeline().makespan)
    state = State(schedule.problem, Clock(1.0), Bound(value - 10, "work"))
    assert state_as_text(state, 2.4) == f"no schedule yet, bound {value - 10} µs, 2 s"
    state.offer(schedule, "annealing")
    assert state_as_text(state, 12.6) == (
        f"makespan {value} µs, bound {value - 10} µs, gap {10 / value:.2%}, 13 s, by annealing"
    )


def test_what_was_tried() -> None:
    rows = [
        Tried("single", "equal", (2, 1), 200, 100, 1.25, "longer"),
        Tried("loop", "balanced", (), None, 190, 0.0, "no room"),
        Tried("vee", "balanced", (1, 1, 1), 150, 150, 0.0, ""),
    ]
    head, *body = tried_as_text(rows, "span").splitlines()
    assert head.split() == ["placement,", "partition", "span,", "µs", "bound,", "µs", "gap", "seconds"]
    assert [line.split() for line in body] == [
        ["single", "equal", "200", "100", "50.00%", "1.2", "longer", "2", "1"],
        ["loop", "balanced", "–", "190", "–", "–", "no", "room"],
        ["vee", "balanced", "150", "150", "0.00%", "–", "best", "1×3"],
    ]
    plain = tried_as_text([replace(one, partition="balanced") for one in rows], "makespan")
    assert plain.startswith("placement  makespan, µs")
    assert "1×3" not in plain
    longer = tried_as_text([*rows, replace(rows[0], value=10_000)], "span").splitlines()
    assert [line.split()[2] for line in longer[1:]] == ["0.200", "–", "0.150", "10.000"]  # all in the unit of the largest


def test_partitions_and_their_stages() -> None:
    profile = equal_layers(5)
    costs = Step(2, 4).costs(profile)
    found = [partitioned(costs, name, partition_by_name(costs, name)) for name in NAMES]
    head, *rows = partitions_as_text(costs, found, source="estimated: by hand").splitlines()
    assert "busiest rank µs" in head
    assert [row.split()[0] for row in rows[: len(NAMES)]] == list(NAMES)
    assert rows[0].split()[1] == "90.0"  # three layers of 10 + 12 + 8, of five on two ranks
    assert rows[-1] == "times are estimated: by hand, not measured"
    large = partitions_as_text(costs, found, Units("ms", "KiB")).splitlines()
    assert large[0].split()[:7] == ["partition", "busiest", "rank", "ms", "against", "equal", "most"]
    assert large[1].split()[1] == "0.0900"
    assert large[1].split()[3] == f"{max(found[0].need) / 1024:.3f}"
    assert large[len(NAMES) + 1].startswith("ms: of one microbatch; KiB: with parameters")
    tight = partitions_as_text(replace(costs, limit=(1, 1)), found)
    assert "!: more than the 1 B that a rank has" in tight
    assert "not measured" not in tight
    stages = stages_as_text(costs, found[0]).splitlines()
    assert stages[0] == f"{found[0].name}:"
    assert len(stages) == 2 + len(found[0].layers)
    assert sum(int(row.split()[3]) for row in stages[2:]) == len(profile.layers)
