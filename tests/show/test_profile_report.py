"""The report: what a profile means, by hand, and that the page is whole and says where numbers come from."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zbsolve import BadInput, Profile
from zbsolve.cli import main
from zbsolve.profile.profile import Layer, Link
from zbsolve.show.profile_meaning import meaning, stages
from zbsolve.show.profile_report import profile_as_page, profile_as_text
from zbsolve.show.profile_rows import (
    Units,
    bar_rows,
    copy_rows,
    layer_rows,
    link_rows,
    pair_rows,
    stage_rows,
    units_of,
)

from ..support.browser import opened

UNITS = Units("µs", "B")


def profile(
    head: float = 30.0, capacity: int | None = None, source: str = "measured", states: float = 1.0, latency: float = 0.0
) -> Profile:
    def layer(name: str, time: float) -> Layer:
        return Layer(name, time / 3, time / 3, time / 3, 2 * time / 3, 100, 50, 1000, 10)

    layers = (*(layer(f"block{i}", 30.0) for i in range(7)), layer("head <b>", head))
    samples = {"block0/F": [9.0, 10.0, 11.0], "link/1000": [10.0, 12.0, 14.0]}
    return Profile(
        source,
        "toy",
        layers,
        Link(latency, 1000.0),
        states,
        capacity,
        {"warnings": ["mind the gap"], "host_us": {"block0/F": 3.0}},
        samples,
    )


def test_equal_stages_mean_what_formulas_say() -> None:
    rows = stages(profile(), 4)
    assert [(row.first, row.end) for row in rows] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert {(row.split, row.fused, row.held, row.fixed) for row in rows} == {(60.0, 60.0, 300, 2000)}
    bubble, memory, link = meaning(profile(), 4, 8)
    # (p − 1) / (m + p − 1) of the step, but for 3 messages of 0.01 µs both ways; and p − 1 of m microbatches to win.
    assert f"{3 / 11:.1%} of it bubble" in bubble
    assert f"takes {3 / 11:.1%} less time than that at most" in bubble
    assert "480 µs, the busiest rank's work" in bubble
    assert "how much the device has is not known" in memory
    assert link == "The slowest message, from stage 0, takes 0.1% of that stage's F: small."
    assert "must be hidden" in meaning(profile(latency=5.0), 4, 8)[-1]
    assert meaning(profile(), 1, 1)[0].startswith("1F1B on 1 rank with 1 microbatch takes")


def test_an_unknown_recompute_takes_as_long_as_the_forward() -> None:
    known = replace(profile(), layers=(replace(profile().layers[0], X=7.0),))
    shown = [dict(zip(*layer_rows(one, units_of(one))[:2], strict=True))["X µs"] for one in (profile(), known)]
    assert shown == ["= F", "7.0"]


def test_a_large_output_layer_is_named() -> None:
    said = "\n".join(meaning(profile(head=200.0), 4, 8))
    assert "Stages are uneven: stage 3" in said
    assert "The output layer is the bottleneck: 'head <b>' alone takes 1.95 times the mean stage (6.7 times a middle" in said
    assert "output layer" not in "\n".join(meaning(profile(), 4, 8))


@pytest.mark.parametrize(
    ("capacity", "text"),
    [
        (1000, "all beside activations does not fit into 1000 B alone"),
        (3000, "1F1B does not fit into 2.93 KiB"),
        (3300, "there is room for 1F1B and not for a bubble of zero"),
        (9000, "memory is not the bottleneck"),
    ],
)
def test_memory_is_the_bottleneck_or_not(capacity: int, text: str) -> None:
    """A stage of two layers: 2000 bytes fixed, 20 of messages, 300 a microbatch; 1F1B holds 4 of them, twice that 7."""
    assert text in meaning(profile(capacity=capacity), 4, 8)[1]


def test_rows() -> None:
    head, first, *_, last = layer_rows(profile(head=60.0), UNITS)
    assert first[:3] == ("block0 … block6", f"10.0 ±{1.57 * 1 / 3**0.5 / 10:.0%}", "10.0")
    assert first[head.index("F host µs")] == "3.0"
    assert last[0] == "head <b>"
    assert [row[0] for row in stage_rows(profile(), stages(profile(), 2), UNITS)] == ["stage", "0", "1"]
    assert link_rows(profile(), UNITS)[1] == ("1000 B", f"12.0 ±{1.57 * 2 / 3**0.5 / 12:.0%}", "1.0", "0.08")
    with pytest.raises(BadInput, match="8 layers do not make 9 stages"):
        stages(profile(), 9)
    with pytest.raises(BadInput, match="ranks: at least 1"):
        stages(profile(), 0)


class Tags(HTMLParser):
    """Keeps which tags are open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing() -> None:
    text = profile_as_page(profile(), 4)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert "<b>" not in text
    assert "head &lt;b&gt;" in text
    assert not re.search(r"https?://|<script|src=", text)
    assert "WARNING: mind the gap" in text
    assert "no number here was measured" not in text
    estimated = profile_as_page(profile(source="estimated: h200 roofline"), 4)
    assert estimated.count("estimated: h200 roofline") >= 2
    assert "no number here was measured" in estimated
    assert "no number here was measured" in profile_as_text(profile(source="estimated: h200 roofline"))


def test_one_unit_of_time_and_one_of_bytes() -> None:
    """That of the largest: of a layer, or of a stage where there are some."""
    layer = Layer("a", 12_000.0, 26.7, 0.0, 500.0, 3 << 30, 0, 1 << 20, 0)
    one = replace(profile(), layers=(layer,))
    units = units_of(one)
    assert (units.time, units.size) == ("ms", "GiB")
    assert [units.of_time(us) for us in (12_000, 26.7, 0, 500)] == ["12.000", "0.0267", "0", "0.500"]
    assert [units.of_bytes(size) for size in (3 << 30, 1 << 20, 0)] == ["3.000", "0.000977", "0"]
    many = replace(one, layers=(replace(layer, F=6_000.0, held_until_B=600 << 20),) * 2)
    assert units_of(many)[:] == ("µs", "MiB")
    assert units_of(many, stages(many, 1))[:] == ("ms", "GiB")


def test_bars_are_the_layers() -> None:
    """Seven layers of F = B = W = 10 µs, BW of 20, 150 bytes kept, 1,000 of parameters; one of 20, 20, 20 and 40."""
    first, last = bar_rows(profile(head=60.0), UNITS)
    assert (first.name, last.name, first.ratio, first.odd) == ("block0 … block6", "head <b>", "1.000", False)
    assert [[(bar.what, bar.left, bar.width) for bar in line] for line in first.times] == [
        [("F", 0, 1 / 6), ("B", 1 / 6, 1 / 6), ("W", 2 / 6, 1 / 6)],
        [("BW", 1 / 6, 2 / 6)],
    ]
    assert [[(bar.what, bar.said, bar.left, bar.width) for bar in line] for line in last.sizes] == [
        [("until B", "100", 0, 0.1), ("until W", "50", 0.1, 0.05)],
        [("parameters", "1,000", 0, 1)],
    ]
    assert [bar.unsure for bar in first.times[0]] == [True, False, False]  # F alone has samples, 9 to 11 µs
    doubtful = replace(profile(), layers=(replace(profile().layers[0], BW=16.0),))
    assert [(row.ratio, row.odd) for row in bar_rows(doubtful, UNITS)] == [("1.250", True)]


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (400, "dark")])
def test_bars_in_a_browser_are_as_long_as_times(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:
    """Of 130 layers that all differ: each bar's pixels, each number, nothing cut."""
    sizes = (1 << 19, 1 << 22, 10)
    layers = tuple(Layer(f"layer{i}", 10.0 + i, 20.0, 15.0, 30.0 + i, i << 16, *sizes) for i in range(130))
    (tmp_path / "page.html").write_text(profile_as_page(replace(profile(), layers=layers), 4), encoding="utf-8")
    with opened(browser, tmp_path / "page.html", (width, 800), color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        texts = page.query_selector_all(".layers p, .layers h3")
        assert all(page.evaluate("(e) => e.scrollWidth <= e.clientWidth", one) for one in texts)
        rows = page.evaluate("""[...document.querySelectorAll(".layers section")].map((row) =>
            [...row.querySelectorAll("i")].map((bar) => {
                const own = bar.getBoundingClientRect(), all = bar.parentNode.getBoundingClientRect();
                return [bar.title, (own.left - all.left) / all.width, own.width / all.width];
            }))""")
    longest, largest = 139 + 159.0, (129 << 16) + (1 << 19)
    for i, row in enumerate(rows):
        f = 10.0 + i
        wanted = [(f"F {f:.1f}", 0, f / longest), ("B 20.0", f / longest, 20 / longest)]
        wanted += [("W 15.0", (f + 20) / longest, 15 / longest), (f"BW {f + 20:.1f}", f / longest, (f + 20) / longest)]
        kept = f"until B {i / 16:.3f}" if i > 1 else "until B 0.0625"
        wanted += [(kept, 0, (i << 16) / largest)] if i else []
        wanted += [("until W 0.500", (i << 16) / largest, (1 << 19) / largest), ("parameters 4.000", 0, (1 << 22) / largest)]
        assert [bar[0].partition(" ±")[0] for bar in row] == [bar[0] for bar in wanted]
        assert np.array([bar[1:] for bar in row]) == pytest.approx(np.array([bar[1:] for bar in wanted]), abs=0.004)


def test_links_and_copies_are_shown() -> None:
    plain = profile()
    assert len(pair_rows(plain, UNITS)) == len(copy_rows(plain, UNITS)) == 1
    pair = {"ranks": [0, 1], "latency": 35.2, "bytes_per_us": 3210.0, "both_ways": 1.25, "work_beside": 1.5}
    copies = {f"{way}/65536{how}": [10.0 * us] for us, (way, how) in enumerate(product(("h2d", "d2h"), ("", " beside")), 1)}
    full = replace(plain, facts={**plain.facts, "links": [pair]}, samples={**plain.samples, **copies})
    assert pair_rows(full, UNITS)[1] == ("0–1", "35.2", "3.21", "1.25 times", "1.50 times")
    assert copy_rows(full, UNITS)[1] == ("64.0 KiB", "10.0", "20.0", "30.0", "40.0")
    for text in (profile_as_text(full), profile_as_page(full, 4)):
        assert "1.25 times" in text
        assert "64.0 KiB" in text
    assert "a message takes 0 µs and its bytes at 1.00 GB/s" in profile_as_text(plain)


@pytest.mark.slow
def test_the_command_line_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, report = str(tmp_path / "p.json"), tmp_path / "r.html"
    step = ["profile", "gemma2-9b@layers=6", "--estimate", "h200", "-o", out]
    assert main(step) == 0
    assert main(["show", out, "--ranks", "8"]) == 0
    said = capsys.readouterr().out
    assert "The output layer is the bottleneck: 'head' alone" in said
    assert "\nalpa:\n" in said
    assert main(["show", out, "--ranks", "8", "-o", str(report)]) == 0
    assert "The output layer is the bottleneck" in report.read_text()
    assert main(["show", out, "--ranks", "9"]) == 2
    assert "8 layers do not make 9 stages" in capsys.readouterr().err
    assert main(["show", out, "-o", str(tmp_path / "r.txt")]) == 2
    assert "r.txt: it is a page: name a file that ends in .html" in capsys.readouterr().err
    assert not (tmp_path / "r.txt").exists()
