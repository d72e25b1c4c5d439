"""Pictures: what must be in them, what must not, and files that other programs can read."""

from __future__ import annotations

import base64
import gzip
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from zbsolve import BadInput, Certificate, Edge, Pass, Problem, Schedule, preset, problem_for
from zbsolve.cli import main
from zbsolve.kinds import OURS, TABLE
from zbsolve.schedule.trace import Trace
from zbsolve.show.pages import packed
from zbsolve.show.pictures.drawing import to_svg
from zbsolve.show.pictures.files import save_schedule_picture
from zbsolve.show.pictures.schedule import schedule_drawing
from zbsolve.show.schedule_report import schedule_as_page, schedule_as_text
from zbsolve.show.tracks import cell_kinds, letters, levels, schedule_as_trace

from ..support.runs import one_f_one_b, random_run, trace_of

HOSTILE = "</script><b>\"&'\x1b[31m\u2028"


def certified(schedule: Schedule, proof: str = "busiest rank") -> Schedule:
    value = int(schedule.timeline().value)
    objective, digest = schedule.problem.objective, schedule.problem.digest
    return schedule.certified(Certificate(objective, value, value - 7, "idle", (1,), proof, "by hand", 1.5, 3, digest))


def with_copies() -> Schedule:
    """Two streams on a rank: one forward whose memory travels to the host and back."""
    copy = {"O": ("d2h:0",), "R": ("h2d:0",)}
    passes = [Pass(kind, 0, 0, 0, 10, streams=copy.get(kind, ("compute:0",))) for kind in ("F", "O", "R", "BW", "U")]
    names = [one.name for one in passes]
    edges = [Edge(a, b, bytes=1 << 30) for a, b in zip(names, names[1:], strict=False)]
    order = {"compute:0": ("0F0", "0BW0", "0U0"), "d2h:0": ("0O0",), "h2d:0": ("0R0",)}
    return Schedule(Problem.of(passes, edges, capacity=[2 << 30]), order)


@pytest.fixture
def schedule() -> Schedule:
    return certified(one_f_one_b(4, 8, capacity=15))


@pytest.fixture
def trace(schedule: Schedule) -> Trace:
    return trace_of(schedule, *(random_run(schedule, i) for i in range(3)))


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    body: dict[str, Any] = json.loads(found[1])
    return body


def columns_of(body: dict[str, Any]) -> dict[str, np.ndarray]:
    """What `unpacking.js` makes of a page's data."""
    data, at, found = gzip.decompress(base64.b64decode(body["packed"]["text"])), 0, {}
    for name, kind, length in body["packed"]["columns"]:
        found[name] = np.frombuffer(data, f"<{kind}", length, at).cumsum().astype(np.int64)
        at += length * int(kind[1])
    assert at == len(data)
    return found


def test_every_kind_has_a_colour_and_a_meaning() -> None:
    assert len({one.colour for one in OURS}) == len({one.words for one in OURS}) == len(OURS)


def test_a_letter_stands_for_one_kind() -> None:
    assert letters(["F", "BW"]) == {"F": "F", "BW": "B"}
    assert letters(["F", "B", "BW"]) == {"F": "F", "B": "B", "BW": "D"}
    assert len(set(letters([one.label for one in OURS]).values())) == len(OURS)


def lightness(colour: str) -> float:
    """CIE L*, 0 to 100."""
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in (one / 255 for one in levels(colour))]
    return float(116 * (0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]) ** (1 / 3) - 16)


def test_kinds_differ_in_lightness() -> None:
    ranked = sorted(lightness(one.colour) for one in OURS)
    assert min(b - a for a, b in zip(ranked, ranked[1:], strict=False)) > 2
    assert 27 < ranked[0] < ranked[-1] < 91
    forward, both, weights = (lightness(TABLE[kind].colour) for kind in ("F", "B", "W"))
    assert min(abs(forward - both), abs(forward - weights), abs(both - weights)) > 15


def test_cells_show_what_fills_most() -> None:
    timeline = one_f_one_b(1, 1).timeline()  # F 0–10, B 10–22, W 22–30
    rows = timeline.start.argsort()
    assert cell_kinds(timeline, rows, np.array([0, 8, 16, 25, 31, 40])).tolist() == [0, 1, 1, 2, -1]


def test_terminal_in_plain_letters(schedule: Schedule) -> None:
    text = schedule_as_text(schedule, width=160)
    rows = text.splitlines()
    assert "\x1b" not in text
    assert [row.split("│")[0].strip() for row in rows[1:5]] == ["0", "1", "2", "3"]
    assert rows[1].split("│")[1].startswith("F0-")
    assert "12 B / 15 B" in rows[1]  # 4 microbatches of 3 bytes
    assert "another saves 1.99% at most" in text
    assert "bubble" in text


@pytest.mark.parametrize("width", [1, 40, 80, 200])
def test_terminal_keeps_its_width(schedule: Schedule, trace: Trace, width: int) -> None:
    for colour in (False, True):
        rows = schedule_as_text(schedule, trace, width, colour).splitlines()
        plain = [re.sub(r"\x1b\[[0-9;]*m", "", row) for row in rows if "│" in row]
        assert len(plain) == 8
        assert max(map(len, plain)) <= max(width, 40)
        assert len({row.rindex("│") for row in plain}) == 1


def test_terminal_says_peak_where_there_is_one(schedule: Schedule) -> None:
    said = schedule_as_text(schedule).splitlines()[0]
    assert said.split()[-1] == "peak"
    bare = preset("1f1b", problem_for("1f1b", 2, 4, 600_000, 600_000, 600_000))
    said = schedule_as_text(bare).splitlines()[0]
    assert said.split()[-1] == "ms"


def test_terminal_colours_end(schedule: Schedule) -> None:
    for row in schedule_as_text(schedule, colour=True).splitlines():
        assert row.count("\x1b[48;5;") == row.count("\x1b[0m")


def test_terminal_names_streams_and_shows_a_fused_backward_as_b() -> None:
    text = schedule_as_text(with_copies())
    assert " d2h " in text
    assert " h2d " in text
    assert "B both gradients" in text
    assert "no certificate" in text


def test_terminal_obeys_no_file(schedule: Schedule) -> None:
    problem = replace(schedule.problem, source=HOSTILE)
    text = schedule_as_text(certified(Schedule(problem, schedule.order), HOSTILE))
    assert "\x1b" not in text
    assert "\u2028" not in text


def test_page_tells_everything(schedule: Schedule, trace: Trace) -> None:
    for text in (schedule_as_page(schedule), schedule_as_page(schedule, trace, "A title")):
        for rank in range(4):
            row = text.split(f"<td>rank {rank}</td>")[1].split("</tr>")[0]
            assert f"<td>{1 - 8 * (30 + rank) / schedule.timeline().value:.1%}</td>" in row
        assert "another saves 1.99% at most" in text
        assert "busiest rank" in text
        assert schedule.problem.digest in text
    assert "<title>A title</title>" in schedule_as_page(schedule, trace, "A title")


def test_copies_are_no_work_of_a_rank() -> None:
    row = schedule_as_page(with_copies()).split("<td>rank 0</td>")[1].split("</tr>")[0]
    assert f"<td>{1 - 3 * 10 / 50:.1%}</td>" in row


def test_page_is_self_contained(schedule: Schedule, trace: Trace) -> None:
    text = schedule_as_page(schedule, trace)
    assert re.search(r"https?:|src=|href=|@import|url\(|//[a-z]+\.", text) is None
    assert "default-src 'none'" in text
    assert "{{" not in text


def test_page_data_is_the_schedule(schedule: Schedule, trace: Trace) -> None:
    body = data_of(schedule_as_page(schedule, trace))
    columns, problem, step = columns_of(body), schedule.problem, trace.steps[trace.median_step]
    assert [run["name"] for run in body["runs"]] == ["predicted", "measured"]
    assert [run["peaks"] for run in body["runs"]] == [[12, 9, 6, 3]] * 2
    for name in ("kind", "stage", "microbatch", "slice", "rank"):
        assert columns[name].tolist() == getattr(problem.passes, name).tolist()
    assert (columns["taken"].tolist(), columns["freed"].tolist()) == (problem.taken.tolist(), problem.freed.tolist())
    assert columns["after"].tolist() == problem.edges.after.tolist()
    assert columns["start0"].tolist() == schedule.timeline().start.tolist()
    assert (columns["start1"] / 10).tolist() == (step.start - step.start.min()).tolist()
    assert (columns["length1"] / 10).tolist() == (step.end - step.start).tolist()


def test_a_run_shows_the_bytes_that_were_counted(schedule: Schedule, trace: Trace) -> None:
    """Not the problem's at measured times: what an operator looks for is where the two differ."""
    counted = replace(trace, held=np.full(len(schedule.problem.passes), 7.0))
    rows = schedule_as_text(schedule, counted).splitlines()
    assert [row.split()[-5:-3] for row in rows if row.strip().startswith("run")] == [["7", "B"]] * 4
    page = schedule_as_page(schedule, counted)
    body = data_of(page)
    assert [(run["peaks"], run["memory"]) for run in body["runs"]] == [
        ([12, 9, 6, 3], "predicted"),
        ([7] * 4, "counted after passes"),
    ]
    assert set(columns_of(body)["held1"].tolist()) == {7}
    assert "<td>7 B</td>" in page
    assert to_svg(schedule_drawing(schedule, counted)).count("peak 7 B") == 4


def test_a_run_without_counted_bytes_says_so(schedule: Schedule, trace: Trace) -> None:
    rows = schedule_as_text(schedule, trace).splitlines()
    assert all(row.endswith("│") for row in rows if row.strip().startswith("run"))
    page = schedule_as_page(schedule, trace)
    assert "peak memory (predicted bytes at measured times), measured" in page
    assert data_of(page)["runs"][1]["memory"] == "predicted bytes at measured times"
    assert "(memory: predicted bytes at measured times)" in to_svg(schedule_drawing(schedule, trace))


def test_columns_of_any_size_are_packed_whole() -> None:
    columns = {"none": [], "small": [0, 5, -3], "large": [2**52, -(2**52) + 1, 7]}
    found = columns_of({"packed": packed(columns)})
    assert {name: values.tolist() for name, values in found.items()} == columns


def test_a_page_of_many_passes_is_small() -> None:
    schedule = one_f_one_b(8, 1000)
    assert len(schedule_as_page(schedule)) < 5 * len(schedule.problem.passes)


def test_hostile_names_stay_text(schedule: Schedule) -> None:
    problem = replace(schedule.problem, source=HOSTILE)
    hostile = certified(Schedule(problem, schedule.order), HOSTILE)
    text = schedule_as_page(hostile, title="{{DATA}}" + HOSTILE)
    assert "<b>" not in text.split("<script>")[0]
    assert text.count("</script>") == 2
    assert "{{DATA}}" in text  # filled in once, never again
    data_of(text)
    named = Pass("F", 0, 0, 0, 5, streams=("</script><b>:0",))
    odd = Schedule(Problem.of([named], []), {"</script><b>:0": ("0F0",)})
    assert schedule_as_page(odd).count("</script>") == 2
    for picture in (hostile, odd):
        ElementTree.fromstring(to_svg(schedule_drawing(picture)))
        json.loads(schedule_as_trace(picture))


def test_svg_is_well_formed(schedule: Schedule, trace: Trace) -> None:
    root = ElementTree.fromstring(to_svg(schedule_drawing(schedule, trace)))
    texts = ["".join(one.itertext()) for one in root.iter("{http://www.w3.org/2000/svg}text")]
    for rank in range(4):
        assert texts.count(f"rank {rank}") == 2
    assert any("another saves 1.99% at most" in text for text in texts)
    assert root.find("{http://www.w3.org/2000/svg}title") is not None


def test_svg_of_many_passes_stays_small() -> None:
    text = to_svg(schedule_drawing(one_f_one_b(8, 600)))
    ElementTree.fromstring(text)
    assert len(text) < 1_000_000


FILES = ("x.html", "x.svg", "x.pdf", "x.png", "x.trace.json")


@pytest.mark.slow
def test_files_by_ending(schedule: Schedule, trace: Trace, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="no matplotlib: pip install '.[pictures]'")
    for name in FILES:
        save_schedule_picture(schedule, tmp_path / name, trace)
        assert (tmp_path / name).stat().st_size > 1000
    with pytest.raises(BadInput, match=r"name a file: x.html, x.svg, x.pdf, x.png, x.trace.json"):
        save_schedule_picture(schedule, "-")
    with pytest.raises(BadInput, match=r"x.gif: unknown ending; one of .html .svg .pdf .png .trace.json"):
        save_schedule_picture(schedule, tmp_path / "x.gif")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(FILES)


def test_a_trace_of_another_schedule_is_refused(schedule: Schedule) -> None:
    other = one_f_one_b(4, 7)
    wrong = trace_of(other, random_run(other, 0))
    for picture in (schedule_as_page, schedule_drawing, schedule_as_trace, schedule_as_text):
        with pytest.raises(BadInput, match="a run of problem"):
            picture(schedule, wrong)


def test_commands(schedule: Schedule, trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, run, picture = (str(tmp_path / name) for name in ("s.json", "t.json", "x.html"))
    schedule.save(plan)
    trace.save(run)
    assert main(["show", plan]) == 0
    said = capsys.readouterr().out
    assert "\x1b" not in said  # not a terminal
    assert ", and no order of these passes takes less than 344 µs; not proven here" in said
    assert main(["show", plan, "--trace", run, "-o", picture]) == 0
    assert capsys.readouterr().out == ""
    assert main(["compare", plan, run, "--baseline", plan, run, "--json", "-o", picture]) == 0
    assert json.loads(capsys.readouterr().out)["speedup"]["measured"] == 1.0
    assert main(["compare", plan, run]) == 0
    assert "each row adds up" in capsys.readouterr().out
    assert main(["show", plan, "-o", "x.gif"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
