"""The roofline beside measured passes (`benchmarks/gpu_roofline.py`), at its smallest."""

from benchmarks.gpu_roofline import KINDS, card_of, lines, measure, pieces


def test_a_row_for_each_part_and_pass() -> None:
    found = measure("cpu", True)
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
