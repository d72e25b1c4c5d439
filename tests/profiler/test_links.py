"""Links: two processes here, and torchrun's ranks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from profiler import links
from profiler.collectives import BYTES, CURVE_REPEATS, KINDS
from profiler.collectives import REPEATS as TOGETHER
from profiler.links import LOTS, SHARED, Pair, ends, fit, measure_links, over_sockets, samples_of, slowest
from zbsolve import Profile
from zbsolve.planner import CLUSTERS, with_links_of
from zbsolve.profile.profile import COLLECTIVES, collective_rows

from ..support.exec_ranks import torchrun

pytestmark = pytest.mark.slow


def pair(ranks: tuple[int, int], scale: float) -> Pair:
    one = {1000: [110.0 * scale], 10_000: [200.0 * scale], 100_000: [1100.0 * scale]}
    both = {size: [2 * row[0]] for size, row in one.items()}
    return Pair(ranks, one, both, [10.0], [15.0])


def test_a_link_is_a_line() -> None:
    link = fit(pair((0, 1), 1.0).one)
    assert link.latency == pytest.approx(100)
    assert link.bytes_per_us == pytest.approx(100)


def test_problems_know_the_slowest_pair_and_profiles_all() -> None:
    pairs = [pair((0, 1), 1.0), pair((1, 2), 3.0)]
    assert slowest(pairs).ranks == (1, 2)
    samples = samples_of(pairs)
    assert samples["link/1000"] == samples["link/1000 1-2"] == [330.0]
    assert samples["link/1000 0-1"] == [110.0]
    assert samples["link/1000 both ways 0-1"] == [220.0]
    assert samples["work beside messages 1-2"] == [15.0]
    facts = pairs[1].facts()
    assert (facts["ranks"], facts["both_ways"], facts["work_beside"]) == ([1, 2], 2.0, 1.5)


def test_a_link_that_no_cluster_has_is_marked() -> None:
    shared = replace(pair((0, 1), 1.0), over=SHARED)
    assert shared.facts()["over"] == SHARED
    assert "over" not in pair((0, 1), 1.0).facts()
    (said,) = over_sockets([shared, shared, pair((1, 2), 1.0)])
    assert "share one GPU: no NVLink" in said


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_two_processes_on_gpus() -> None:
    (found,), _, collectives, _ = measure_links(90, sizes=(1 << 20, 4096), device=torch.device("cuda", 0))
    assert found.over == (SHARED if torch.cuda.device_count() == 1 else "")
    assert found.link.bytes_per_us > 10
    assert min(map(min, [*found.one.values(), *found.both.values(), found.alone, found.busy])) > 0
    assert {kind: len(row) for kind, row in collectives.items()} == dict.fromkeys(KINDS, TOGETHER)


def test_nothing_waits_while_the_ends_and_mps_start(monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = threading.Event()

    @contextmanager
    def slow(*_: object) -> Iterator[list[object]]:
        assert measuring.wait(300.0)
        yield []

    monkeypatch.setattr(links, "processes", slow)
    with ends(torch.device("cpu")) as started:
        measuring.set()
        assert started().processes == []


def test_two_processes_of_this_machine() -> None:
    with ends(torch.device("cpu")) as started:
        (found,), ranks, collectives, curves = measure_links(400.0, sizes=(4096, 64), started=started)
    assert curves == []
    assert ranks == 2
    assert {kind: len(row) for kind, row in collectives.items()} == dict.fromkeys(KINDS, TOGETHER)
    assert min(map(min, collectives.values())) > 0
    assert found.ranks == (0, 1)
    lot = LOTS["cpu"]
    assert set(found.one) == set(found.both) == set(lot.sizes)
    assert all(len(row) == lot.repeats and min(row) > 0 for row in found.one.values())
    assert all(len(row) == 2 * lot.repeats and min(row) > 0 for row in found.both.values())
    assert len(found.alone) == len(found.busy) == 2 * lot.repeats
    assert found.over == ""
    assert found.link.bytes_per_us > 1


def test_every_pair_of_neighbours_under_torchrun(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    done = torchrun(3, "profile", "moe-tiny", "--seconds", "0.05", "-o", str(out))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nembedding ") == 1
    profile = Profile.load(out)
    assert [row["ranks"] for row in profile.facts["links"]] == [[0, 1], [1, 2]]
    assert len(profile.samples["link/1024 1-2"]) == LOTS["cpu"].repeats
    assert profile.samples["link/1024"] in (profile.samples["link/1024 0-1"], profile.samples["link/1024 1-2"])
    assert profile.vocabulary is not None
    assert [row.ranks for row in profile.vocabulary.shards if row.broadcast is not None] == [3]
    assert len(profile.samples["vocabulary/3/reduce"]) == TOGETHER
    rows = collective_rows(profile, "p.json")
    assert [(row.kind, row.ranks, row.nodes) for row in rows] == [(kind, n, 1) for n in (2, 3) for kind in COLLECTIVES]
    for row in rows:
        samples = [profile.samples[f"{row.kind}/{row.ranks}/{size}"] for size in BYTES["cpu"]]
        assert all(len(one) == CURVE_REPEATS and min(one) > 0 for one in samples)
    cluster = with_links_of(profile, CLUSTERS["h100"])
    assert (cluster.between, cluster.messages) == (CLUSTERS["h100"].between, CLUSTERS["h100"].messages)
    reduce = next(row for row in rows if row.kind == "all_reduce" and row.ranks == 3)
    assert cluster.inside.latency + 4 / 3 * 6e6 / cluster.inside.bytes_per_us == pytest.approx(
        reduce.latency + 6e6 / reduce.bytes_per_us
    )
    assert cluster.source.startswith("estimated: links inside nodes (3 ranks) measured; else estimated: ")
