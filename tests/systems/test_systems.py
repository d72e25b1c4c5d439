"""The table of systems: every one makes a schedule that holds, with the bubble and memory that its formulas say."""

from __future__ import annotations

import json

import pytest

from zbsolve import BadInput, verify
from zbsolve.build.vocabulary import Vocabulary
from zbsolve.cli import main
from zbsolve.show.gallery import exhibits, gallery_as_page, gallery_as_text
from zbsolve.systems import PRESETS, preset
from zbsolve.systems.plain_step import ORDERS
from zbsolve.systems.problems import problem_for
from zbsolve.systems.table import GROUPS, SYSTEMS, system

TIMES = [(1, 1, 1), (3, 4, 2), (4, 4, 4), (5, 6, 3)]


def run(name, p, m, F=1, B=1, W=1, **options):
    problem = problem_for(name, p, m, F, B, W, **options)
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    return problem.work, schedule.timeline()


def test_every_preset_is_a_system():
    assert {one.name for one in SYSTEMS} == set(PRESETS)


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 4), (4, 8), (4, 13), (8, 16), (3, 12)])
def test_bubbles_of_the_one_direction_systems(p, m, times):
    """arXiv 2401.10241, table 2; 2104.04473, section 2.2; W at most B and F, as the formulas need."""
    F, B, W = times
    for name in ("gpipe", "1f1b"):
        work, timeline = run(name, p, m, *times)
        assert timeline.makespan - work == (p - 1) * (F + B + W)
    if m >= p:
        work, timeline = run("zb-h1", p, m, *times)
        assert timeline.makespan - work == (p - 1) * (F + B - W)
    if m % p == 0:
        work, timeline = run("interleaved", p, m, *times)
        assert timeline.makespan - work == (p - 1) * (F + B + W)  # chunk times: a v-th of a rank's
        work, timeline = run("gis", p, m, *times)
        assert timeline.makespan - work == (p - 1) * (F + B)
        work, timeline = run("interleaved-zb", p, m, *times)
        assert timeline.makespan - work == (p - 1) * (F + B - W)
    if m >= 2 * p:
        work, timeline = run("zb-h2", p, m, 4, 4, 4)
        assert timeline.span == work  # (p − 1)(F + B − 2W) at equal times


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 16), (8, 16), (6, 18)])
def test_memory_of_every_system_in_microbatches(p, m):
    """systems' memory columns: what the fullest rank holds, in microbatches of one rank's share."""
    whole, half = {"held_until_W": 1}, {"held_until_W": 1}
    for name, most in {"gpipe": m, "1f1b": p, "zb-h1": p, "zb-h2": 2 * p - 1, "gems": 1, "pipedream": p}.items():
        if name != "gems" or p % 2 == 0:
            assert max(run(name, p, m, **whole)[1].peak_bytes) == min(most, m), name
    for name, most in {"zb-v": p, "v-zb": p, "v-half": (p + 2) // 2, "v-min": (p + 4) // 3}.items():
        assert max(run(name, p, m, **half)[1].peak_bytes) == 2 * most, name
    if m % p == 0:
        peaks = run("interleaved", p, m, **half)[1].peak_bytes
        assert peaks == tuple(2 * (p - r - 1) + p + 1 for r in range(p))


def test_wrong_use_is_named():
    with pytest.raises(BadInput, match="unknown system 'zb-x'"):
        system("zb-x")
    for option, those in (("O", "po-f, po-h"), ("slices", "slimpipe"), ("update", "pipedream")):
        with pytest.raises(BadInput, match=f"1f1b: has no option '{option}', which is for .*{those}"):
            problem_for("1f1b", 2, 4, **{option: 2})
    with pytest.raises(BadInput, match="1f1b: has no option 'vocabulary', which is for 1f1b-vocab"):
        problem_for("1f1b", 2, 4, vocabulary=Vocabulary(1, 1))
    with pytest.raises(BadInput, match="3 ranks are no multiple of 2"):
        problem_for("chimera", 3, 6)
    with pytest.raises(BadInput, match="7 microbatches do not make groups of at least 8"):
        problem_for("pipedream-2bw", 8, 7)
    with pytest.raises(BadInput, match="dualpipe-v: needs at least 2 microbatches a rank; got 4 for 4 ranks"):
        preset("dualpipe-v", problem_for("dualpipe-v", 4, 4))


def test_the_gallery_shows_every_system(tmp_path, capsys):
    shown, absent = exhibits(4, 8)
    assert absent == ()
    lines = gallery_as_text(shown).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == [one.name for one in SYSTEMS]
    assert lines[-1] == "pipedream-2bw: in the steady state, without an end, a bubble of 0.00%"
    html = gallery_as_page(shown)
    assert html.count("<svg") == len(SYSTEMS)
    assert "<script src" not in html
    assert all(one.title.split(" (")[0] in html for one in SYSTEMS)
    path = tmp_path / "gallery.html"
    assert main(["show", "systems", "--json", "-o", str(path)]) == 0
    body = json.loads(capsys.readouterr().out)
    assert {row["name"]: row["peak_microbatches"][0] for row in body}["zb-h2"] == 7
    assert path.read_text(encoding="utf-8") == html
    assert main(["show", "systems", "--ranks", "3"]) == 0
    assert "dualpipe: not here: placement mirror: 3 ranks are no multiple of 2" in capsys.readouterr().out
    assert main(["show", "systems", "--ranks", "0"]) == 2
    assert main(["show", "systems", "-o", str(tmp_path / "x.png")]) == 2


def test_every_row_has_an_order_and_every_order_a_row() -> None:
    assert set(ORDERS) == set(PRESETS)
    assert len({one.name for one in SYSTEMS}) == len(SYSTEMS)
    assert {one.group for one in SYSTEMS} == set(GROUPS)
