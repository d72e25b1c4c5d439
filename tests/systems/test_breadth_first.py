"""Breadth-first pipelines: the published bubble, and the order by hand."""

from __future__ import annotations

from zbsolve import pipeline, preset


def test_the_bubble_is_divided_by_the_chunks() -> None:
    """arXiv 2211.05953, section 4: (p − 1)(F + B)/v beside the work, all m microbatches held."""
    p, v, m, F, BW = 4, 2, 4, 3, 6
    problem = pipeline([F] * (p * v), BW=[BW] * (p * v), placement="loop", microbatches=m, held_until_B=1)
    found = preset("breadth-first", problem)
    assert found.order["compute:1"][:5] == ("1F0", "1F1", "1F2", "1F3", "5F0")
    assert found.order["compute:1"][8:13] == ("5BW0", "5BW1", "5BW2", "5BW3", "1BW0")
    assert found.timeline().makespan == (m * v + p - 1) * (F + BW)
    assert found.timeline().peak_bytes == (m * v,) * p
