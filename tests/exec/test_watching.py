"""A run that is watched: what is slow is said, a search in another process, all ranks switch between two steps."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from zbsolve import verify
from zbsolve.cli import main
from zbsolve.exec.loop import watching
from zbsolve.exec.loop.watching import Search
from zbsolve.search.today import order_again
from zbsolve.util.errors import LostRank

from ..support.exec_jobs_watch import orders
from ..support.exec_ranks import jobs_on


def test_the_memory_stays_that_of_the_order() -> None:
    """All forwards first holds 4 microbatches on every rank, so any order of ZB-H1's memory may be found: it and its bound
    are 4 · 9 + 3 · 3 ms."""
    given, h1 = orders(4)
    found = order_again(given, 100.0)  # its bound ends it long before
    assert verify(given.problem, found) == ()
    assert found.timeline().makespan == h1.timeline().makespan == 45_000 < given.timeline().makespan


@pytest.mark.slow
def test_a_search_in_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives way to all others, so here, where the machine may be busy, it is told not to."""
    monkeypatch.setattr(watching, "AGAIN", f"import os; os.nice = id; {watching.AGAIN}")
    given, h1 = orders(4)
    search = Search(given, 300.0)
    while not search.ended:
        time.sleep(0.05)
    found = search.found()
    assert found is not None
    assert found.timeline().makespan == h1.timeline().makespan
    assert Search(given, 1.0).found() is None  # it is ended before it has found anything


@pytest.mark.slow
def test_ranks_switch_together() -> None:
    found = jobs_on(4, "tests.support.exec_jobs_watch", {"watched": None, "replicas": None, "refused": None})
    first = found["watched"][0]
    looks = [i for i, one in enumerate(first["said"]) if one is not None]
    assert looks == [2, 5, 8]
    what, before, after, _ = first["said"][5]
    assert "rank 1" in what
    assert after < before
    assert "rank 1" in first["said"][8][0]  # beside what was planned first, not what it now takes
    assert len({*first["steps"][:6]}) == len({*first["steps"][6:]}) == 1
    assert first["steps"][6] < first["steps"][0]
    for one in found["watched"]:
        assert one["off"] < 1e-6
        assert one["order"][:5] != ["1F0", "1F1", "1F2", "1F3", "1B0"]
    assert all(one["said"] == [None] * 9 for one in found["watched"][1:])
    assert all(one["same"] for one in found["replicas"])
    assert len({str(one["order"]) for one in found["replicas"]}) == 1
    assert found["replicas"][0]["order"][:5] != ["0F0", "0F1", "0F2", "0F3", "0B0"]
    for other, sized, odd, wrong, _ in found["refused"]:
        assert sized == other == "switch: another order of the same passes is needed, on the same ranks, with the same edges"
        assert odd.startswith("rank 2 has another schedule than rank 0")
        assert wrong.startswith("Watch: every 2, steps 3")
    assert [one[-1] for one in found["refused"]] == ["[1]", "[]", "[]", "[]"]  # from its second step on


@pytest.mark.slow
def test_the_command_watches() -> None:
    """The trace says from which step on the other order ran, and so do `run` and `compare`."""
    first, *others = jobs_on(4, "tests.support.exec_jobs_watch", {"whole_job": None})["whole_job"]
    assert others == [None] * 3
    assert [(one["steps"], one["after"] is None) for one in first["looks"]] == [(3, True), (6, False)]
    assert first["told"] == list(first["said"])
    assert first["told"][0] == "after 6 steps another order ran: 2 steps, median 45.00 ms in place of 54.00 ms (-16.7%)"
    given, h1 = (one.timeline().makespan for one in orders(4))
    assert (first["before"], first["later"]) == ([given] * 6, [h1] * 2)
    assert first["file"]


@pytest.mark.parametrize("said", ["x", "nan,nan", "5,6", "5,", "-3"])
def test_numbers_of_steps_that_make_no_sense(said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "schedule.json", "--model", "mlp-4", "--local", f"--watch={said}"]) == 2
    assert f"--watch '{said}': nan, a whole number, or both: nan,3" in capsys.readouterr().err


@pytest.mark.slow
def test_all_ranks_hear_of_what_one_cannot() -> None:
    found = jobs_on(2, "tests.support.exec_jobs_watch", {"some_ranks": None, "fails": None})
    assert found["some_ranks"] == ["rank 1: not with work", ""]
    assert all(one.startswith("rank 0, watching: OSError: no room") for one in found["fails"])
    (alike,) = {*jobs_on(4, "tests.support.exec_jobs_watch", {"one_pipeline": None})["one_pipeline"]}
    assert alike == "replicas: pipeline 1 has another schedule than pipeline 0"


def test_a_rank_that_waits_in_vain_for_the_order_is_not_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: object, **__: object) -> None:
        raise RuntimeError(
            "[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 5000ms for recv operation to complete"
        )

    monkeypatch.setattr("torch.distributed.broadcast_object_list", late)
    with pytest.raises(LostRank, match=r"^nothing for 5 s$"):
        watching._everywhere(SimpleNamespace(rank=1, replicas=None, group="all"), b"")
