"""Folders of killed processes are removed by the next; those of living ones stay."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from zbsolve.util.files import remove_leftovers, temporary_folder

OWNER = """
import sys, time
from zbsolve.util.files import temporary_folder

with temporary_folder("test") as folder:
    (folder / "large").write_bytes(bytes(1000))
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return Path(tmp_path)


def test_the_next_removes_what_a_killed_process_left(place: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    left = Path(owner.stdout.readline().strip())
    with temporary_folder("other") as mine:
        assert sorted(one.name for one in place.iterdir()) == sorted((left.name, mine.name))
    owner.send_signal(signal.SIGKILL)
    owner.wait(300)
    assert (left / "large").exists()
    with temporary_folder("other") as mine:
        assert list(place.iterdir()) == [mine]
    assert list(place.iterdir()) == []


def test_what_is_not_known_to_be_abandoned_stays(place: Path) -> None:
    """A folder without the mark, a file, and somebody's link to a folder with it."""
    (place / "zbsolve-run-old").mkdir()
    (place / "zbsolve-notes.txt").write_text("mine")
    elsewhere = place / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / ".owned").write_text("")
    (place / "zbsolve-link").symlink_to(elsewhere)
    assert remove_leftovers() == ()
    assert len(list(place.iterdir())) == 4
