"""Copies between host and device: what samples say of the link, what estimates assume, and measured ones on a GPU."""

from __future__ import annotations

import pytest
import torch

from profiler.copies import SIZES, host_link, measure_copies, slowed_by_copies, slowed_by_messages
from profiler.devices import DEVICES
from profiler.devices import host_link as estimated
from zbsolve.partition.layer import HostLink
from zbsolve.util.machine import free_memory


def samples(both: float) -> dict[str, list[float]]:
    """Copies of 20 µs and 50 GB/s down, 15 µs and 40 GB/s up; both ways at once those of so many times the time."""
    found: dict[str, list[float]] = {"product": [3.0]}
    for way, latency, rate in (("d2h", 20.0, 50_000.0), ("h2d", 15.0, 40_000.0)):
        for size in SIZES:
            time = latency + size / rate
            found |= {f"{way}/{size}": [time, time + 1, time - 1], f"{way}/{size} beside": [2 * time]}
            found[f"{way}/{size} both"] = [both * time]
    return found


def test_a_link_to_the_host_is_what_copies_took() -> None:
    found = host_link(samples(1.25), 10**9, 2)
    assert found is not None
    assert (found.latency, found.d2h, found.h2d) == pytest.approx((20, 50_000, 40_000))
    largest = SIZES[-1]
    assert found.d2h_both == pytest.approx(largest / (1.25 * (20 + largest / 50_000)))
    assert found.h2d_both == pytest.approx(largest / (1.25 * (15 + largest / 40_000)))
    assert (found.memory, found.ranks, found.shared_bus) == (10**9, 2, 0)
    assert host_link({}, 10**9, 1) is None


def test_both_at_once_is_never_faster_than_alone() -> None:
    found = host_link(samples(0.5), None, None)
    assert found is not None
    assert (found.d2h_both, found.h2d_both) == (found.d2h, found.h2d)


def test_estimates_are_shares_of_what_data_sheets_print() -> None:
    """PCIe Gen4 is 32 GB/s each way and Gen5 64; PipeOffload (arXiv 2503.01328, Figure 1) counts with 15 GB/s of an A100."""
    assert estimated(DEVICES["a100"]) == HostLink(10, 25_600, 25_600, 20_800, 20_800, 1600 * 10**9, 8)
    assert estimated(DEVICES["h100"]) == HostLink(10, 51_200, 51_200, 41_600, 41_600, 1600 * 10**9, 8)
    assert estimated(DEVICES["mi300x"]).memory is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_between_host_and_device() -> None:
    found = measure_copies()
    assert min(found["h2d/67108864"]) > min(found["h2d/65536"]) > 0
    assert {"product", "product beside h2d", "product beside d2h", "d2h/1048576 beside", "h2d/65536 both"} <= set(found)
    link = host_link(found, free_memory(), torch.cuda.device_count())
    assert link is not None
    assert 1_000 < min(link.rates) <= max(link.d2h, link.h2d) < 1_000_000


def test_what_slows_what_by_hand() -> None:
    """F of two layers takes 30 and 10 µs alone, 36 and 14 beside messages; B is longer by less than its own spread; messages
    take half as long again. Copies down cost a product a tenth, copies up nothing."""
    alone = {"messages": [100.0] * 9, "0/F": [30.0] * 9, "1/F": [10.0] * 9, "0/B": [20.0, 30.0, 40.0] * 3}
    loaded = {"messages": [150.0] * 9, "0/F": [36.0] * 9, "1/F": [14.0] * 9, "0/B": [21.0, 31.0, 41.0] * 3}
    found = {(one.kind, one.beside): one.factor for one in slowed_by_messages({"alone": alone, "beside": loaded})}
    assert found.pop(("F", "MF")) == found.pop(("F", "MB")) == 1.25
    assert found == {(way, kind): 1.5 for way in ("MF", "MB") for kind in ("F", "B", "W", "BW", "X")}
    size = SIZES[-1]
    copies = {"product": [50.0] * 9, "product beside d2h": [55.0] * 9, "product beside h2d": [50.0] * 9}
    copies |= {f"{way}/{size}{what}": [10.0] * 9 for way in ("d2h", "h2d") for what in ("", " beside")}
    assert {(one.kind, one.beside, one.factor) for one in slowed_by_copies(copies)} == {
        (kind, "O", 1.1) for kind in ("F", "B", "W", "BW", "X")
    }
    assert slowed_by_copies({}) == ()
