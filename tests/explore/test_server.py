"""The server through real requests on loopback: who may ask, what is refused, what comes out."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote

import pytest

from zbsolve import Schedule, verify
from zbsolve.cli.app import main
from zbsolve.explore.playground import Playground
from zbsolve.explore.state import State

from ..support.explore_site import TOKEN, Site, serving

pytest.importorskip("uvicorn", reason="no uvicorn: pip install '.[explore]'")


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


def test_the_page_begins_where_its_address_says(site: Site) -> None:
    status, headers, text = site.get("?ranks=6&placement=vee&F=12.5")
    assert status == 200
    assert re.search(r'name="ranks" id="ranks" value="6"', text)
    assert re.search(r'name="F" id="F" value="12.5"', text)
    assert '<option value="vee" selected>' in text
    assert "default-src 'none'" in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cache-control"] == "no-store"
    assert not re.search(r'(src|href)="(https?:)?//', text)


def test_nobody_without_the_token_and_no_other_host(site: Site) -> None:
    assert site.get("", token="wrong")[0] == 404
    assert site.get("answer", token="wrong")[0] == 404
    assert TOKEN not in site.get("", token="wrong")[2]
    assert site.get("nothing")[0] == 404
    assert site.get("", host="evil.example")[0] == 400
    assert site.get("", host=f"evil.example:{site.port}")[0] == 400
    assert site.get("", host=f"localhost:{site.port}")[0] == 200
    assert site.get("", method="POST")[0] == 405


def test_it_listens_on_loopback_alone() -> None:
    from zbsolve.explore.server import _listen

    listening = _listen(0)
    assert listening.getsockname()[0] == "127.0.0.1"
    listening.close()


def test_the_answer_has_figures_chart_and_commands(site: Site) -> None:
    status, text = site.part("answer", "system=1f1b")
    assert status == 200
    assert "450.00 ms" in text
    assert "<svg" in text
    assert "zbsolve solve numbers.json --ranks 4 --microbatches 12" in text
    assert "4.00 GiB" in text


@pytest.mark.parametrize(
    ("state", "control", "line"),
    [
        ("ranks=x", "ranks", "ranks: &#39;x&#39; is not a whole number"),
        ("memory=0.5", "memory", "rank 0 needs"),
        ("system=chimera&ranks=3", "placement", "multiple"),
        ("system=dualpipe&microbatches=3", "system", "dualpipe"),
        ("<script>=1", "", "&lt;script&gt;"),
        ("F=0&B=0&W=0", "F", "take no time"),
        ("ranks=64&microbatches=512", "microbatches", "more than this page shows"),
    ],
)
def test_bad_input_is_a_line_at_its_control(site: Site, state: str, control: str, line: str) -> None:
    status, text = site.part("answer", state)
    assert status == 200
    assert f'data-control="{control}"' in text
    assert line in text
    assert "Traceback" not in text
    assert "<script>" not in text


def test_a_wrong_address_still_shows_the_page(site: Site) -> None:
    status, _, text = site.get("?ranks=999")
    assert status == 422
    assert "ranks: 999 is not from 1 to 64" in text
    assert 'id="controls"' in text


def test_requests_are_limited(site: Site) -> None:
    assert site.part("answer", "F=" + "1" * 3000)[1].count("longer than") == 1
    with socket.create_connection(("127.0.0.1", site.port), timeout=300) as link:
        link.sendall(b"GET /" + b"a" * 100_000)
        assert b" 400 " in link.recv(4096)


def test_many_at_once(site: Site) -> None:
    states = [f"ranks={p}&microbatches={m}" for p in (2, 3, 4, 5) for m in (4, 6)] * 2
    with ThreadPoolExecutor(len(states)) as pool:
        replies = list(pool.map(lambda state: site.part("answer", state), states))
    assert all(status == 200 for status, _ in replies)
    for state, (_, text) in zip(states, replies, strict=True):
        ranks, microbatches = re.findall(r"\d+", state)
        assert f"{ranks} ranks, {ranks} stages, {microbatches} microbatches" in text


def test_the_saved_file_holds(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, headers, _ = site.get(f"schedule.json?state={quote('placement=vee&memory=3')}")
    assert (status, headers["content-disposition"]) == (200, "attachment")
    path = tmp_path / "schedule.json"
    path.write_text(site.part("schedule.json", "placement=vee&memory=3")[1], encoding="utf-8")
    schedule = Schedule.load(path)
    assert verify(schedule.problem, schedule) == ()
    assert main(["check", str(path)]) == 0
    assert "holds" in capsys.readouterr().out
    status, text = site.part("schedule.json", "system=1f1b&memory=3")
    assert status == 422
    assert "there is no schedule to save" in text


def test_the_table_marks_the_shown_one(site: Site) -> None:
    status, text = site.part("compare", "memory=3")
    assert status == 200
    text = json.loads(text.splitlines()[-1])["part"]
    assert text.count('class="shown"') == 1
    assert "rank 0 has 3.00 GiB" in text
    assert "needs p even" not in text


def test_a_longer_search_streams_and_is_kept(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbsolve.explore.playground.MORE_SECONDS", 0.3)
    state = "ranks=5&microbatches=9&placement=vee&memory=3&slow_part=2"
    status, text = site.part("search", state)
    assert status == 200
    lines = [json.loads(line) for line in text.splitlines()]
    assert all("bound" in line["said"] for line in lines[:-1])
    assert "--seconds" in lines[-1]["part"]
    assert "--seconds" in site.part("answer", state)[1]


@pytest.mark.slow
def test_the_command_serves_and_ends_on_ctrl_c(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "zbsolve", "explore", "--state", "http://127.0.0.1:1/x/?F=5&ranks=3"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as running:
        assert running.stdout is not None
        address = running.stdout.readline().strip()
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/([\w-]{22})/\?(.*)", address)
        assert found is not None
        assert State.parse(address) == State(ranks=3, F=5.0)
        status, _, text = Site(int(found[1]), found[2]).get(f"?{found[3]}")
        assert (status, 'name="ranks" id="ranks" value="3"' in text) == (200, True)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=300)
    assert (running.returncode, said) == (0, "")


def test_no_thread_goes_on_at_the_end() -> None:
    """Python refuses imports of some modules at its own end, so a thread that goes on would end in a traceback."""
    playground = Playground()
    playground.warm(State())
    playground.stop()
    assert not [thread for thread in threading.enumerate() if "answer_all" in thread.name]


def test_a_port_that_is_taken_is_one_line(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--port", str(site.port), "--seconds", "0.1"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]  # a machine's first command compiles before, and says so
    assert said.startswith(f"zbsolve explore: port {site.port}: cannot listen: ")
