"""Ranks of a benchmark: each runs the function in a process group, and what it returns comes back by rank."""

from __future__ import annotations

import pytest

from benchmarks.children import found_by

pytestmark = pytest.mark.slow


def summed(rank: int, more: list[int]) -> list[int]:
    """What a rank runs here: it needs the others."""
    import torch
    import torch.distributed as dist

    total = torch.tensor(rank + more[rank])
    dist.all_reduce(total)
    return [rank, int(total), torch.get_num_threads()]


def failing(rank: int) -> None:
    """A rank that fails."""
    raise ValueError(f"rank {rank} fails, as it should")


def test_ranks_bring_back_what_they_found() -> None:
    pytest.importorskip("torch")
    assert found_by(summed, 2, 60, more=[10, 20]) == [[0, 31, 1], [1, 31, 1]]


def test_a_rank_that_fails_ends_the_benchmark() -> None:
    pytest.importorskip("torch")
    with pytest.raises(SystemExit, match=r"ranks ended with \[1, 1\]"):
        found_by(failing, 2, 60)
