"""Offload on two gloo ranks: exact gradients, memory as predicted on the device and in the host, an enforced limit."""

from __future__ import annotations

from typing import Any

import pytest

from ..support.exec_jobs_offload import CASES
from ..support.exec_ranks import on_ranks

JOBS = [("gradients", None), ("memories", None), ("limited", None), ("shared", None), ("cheats", 100_000)]


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    found = on_ranks(2, "tests.support.exec_jobs_offload:several", JOBS, timeout=120)
    return {name: [one[i] for one in found] for i, (name, _) in enumerate(JOBS)}


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_unsplit_model(two: dict[str, list[Any]], case: str) -> None:
    """Under random schedules, over two steps; whatever is offloaded, however the backward is split."""
    for rank in two["gradients"]:
        one = rank[list(CASES).index(case)]
        assert one["worst"] <= 1e-12
        assert one["left"] == 0
        assert 0 < one["buffers"] <= 16


def test_memory_is_as_predicted_on_the_device_and_in_the_host(two: dict[str, list[Any]]) -> None:
    for rank in two["memories"]:
        for one in rank:
            assert max(one["held"]) == pytest.approx(max(one["predicted"]), rel=0.03)
            assert max(one["host"]) == pytest.approx(max(one["predicted_host"]), rel=0.03)
            assert one["host"][-1] == one["predicted_host"][-1] == 0
            assert max(one["host"]) > 0


def test_a_third_of_1f1bs_memory_is_enough_and_enforced(two: dict[str, list[Any]]) -> None:
    for rank in two["limited"]:
        assert rank["worst"] <= 1e-12
        assert rank["most"] <= rank["limit"]
        plain, held, predicted = rank["peaks"]
        assert held == pytest.approx(predicted, rel=0.03)
        assert held < plain / 3


def test_copies_wait_for_those_of_other_ranks(two: dict[str, list[Any]]) -> None:
    """On one bus, and in one host memory; on this machine's time and on emulated devices'."""
    for rank in two["shared"]:
        for one in rank:
            assert one["crossings"] > 10
            assert one["early"] == 0
            assert one["worst"] <= 1e-12


def test_a_schedule_that_holds_more_fails_with_rank_pass_and_bytes(two: dict[str, list[Any]]) -> None:
    for said in two["cheats"]:
        assert "out of memory: the device has 100000 bytes (97.7 KiB) for activations, " in said
        assert said.startswith(("rank 0, pass 0F", "rank 0, pass 2F", "rank 1, pass 1F"))
        assert "\n" not in said
