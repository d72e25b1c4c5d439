"""The roofline beside measured passes (`benchmarks/gpu_roofline.py`): at its smallest, and what was measured on GPUs."""

from typing import Any

import pytest

from benchmarks.gpu_roofline import KINDS, card_of, gpu_roofline, lines, operations, pieces
from benchmarks.harness import RESULTS, kept
from profiler import estimate
from profiler.devices import DEVICES
from profiler.roofline import time_us

NEAR = 0.15  # of what was measured, where launching does not bind
# A head of 1,024 tokens multiplies so little for each weight that reading and writing gradients shows beside its product.
FURTHER = {("h100", "head", "W"): 0.18}


def test_a_row_for_each_part_and_pass() -> None:
    found = gpu_roofline("cpu", True)
    assert (found["device"], found["roofline"]) == ("cpu", "h100")
    rows = found["rows"]
    assert [(row["part"], row["kind"]) for row in rows] == [(piece.name, kind) for piece in pieces(True) for kind in KINDS]
    for row in rows:
        assert row["measured_us"] > 0
        assert row["ratio"] >= 0
        assert row["kernels"] > 0 or row["estimated_us"] == 0
    assert len(lines(rows)) == 1 + len(rows)


def test_cards_are_known_by_their_names() -> None:
    names = {"cuda:0, NVIDIA H100 80GB HBM3": "h100", "cuda:0, NVIDIA H200": "h200", "cuda:3, NVIDIA A100-SXM4-80GB": "a100"}
    assert {name: card_of(name).name for name in names} == names


def test_estimates_are_near_what_an_h200_measured() -> None:
    """After a change of what is counted or of a share, the file says so too: the shares are fitted to it."""
    found = kept(RESULTS / "gpu_roofline.json")
    card, counted = DEVICES[found["roofline"]], {piece.name: operations(piece) for piece in pieces(False)}
    assert [(row["part"], row["kind"]) for row in found["rows"]] == [(part, kind) for part in counted for kind in KINDS]
    for row in found["rows"]:
        now = time_us(counted[row["part"]][row["kind"]], card)
        assert row["estimated_us"] == pytest.approx(now, rel=0.01)
        assert row["ratio"] == pytest.approx(row["estimated_us"] / row["measured_us"], abs=1e-3)
        assert row["host_bound"] or now == pytest.approx(row["measured_us"], rel=NEAR)
    assert sum(row["host_bound"] for row in found["rows"]) == 5


@pytest.mark.parametrize(
    "profile", kept(RESULTS / "gpu_roofline-profiles.json")["profiles"], ids=lambda one: one["roofline"]
)
@pytest.mark.slow
def test_estimates_are_near_what_was_profiled(profile: dict[str, Any]) -> None:
    """An H100's was no part of the fit. Bytes are those that the device's allocator counted."""
    layers = {layer.name: layer for layer in estimate(profile["model"], profile["roofline"]).layers}
    near = [row for row in profile["rows"] if not row["host_bound"]]
    assert len(near) >= 5
    for row in near:
        limit = FURTHER.get((profile["roofline"], row["layer"], row["kind"]), NEAR)
        assert getattr(layers[row["layer"]], row["kind"]) == pytest.approx(row["measured_us"], rel=limit)
    for name, sizes in profile["bytes"].items():
        assert {what: getattr(layers[name], what) for what in sizes} == pytest.approx(sizes, rel=1e-4)
