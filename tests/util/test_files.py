"""Results that cannot be written where they were to go are kept elsewhere."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from zbsolve import Schedule
from zbsolve.cli.app import main
from zbsolve.util.errors import BadInput
from zbsolve.util.files import CannotWrite, check_writable, write_elsewhere, write_text

from ..support.profiles import toy_profile


@pytest.fixture
def kept_in(tmp_path, monkeypatch) -> Path:
    """The folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def full(tmp_path, monkeypatch) -> Path:
    """A folder on a disk that is full."""
    folder, make = tmp_path / "full", tempfile.mkstemp

    def mkstemp(suffix: str = "", prefix: str = "", directory: object = None) -> tuple[int, str]:
        handle, name = make(suffix, prefix, directory)
        if Path(name).parent != folder:
            return handle, name
        os.close(handle)
        return os.open("/dev/full", os.O_WRONLY), name

    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)
    folder.mkdir()
    return folder


def test_a_full_disk_is_seen_before_the_work(full) -> None:
    with pytest.raises(BadInput, match="cannot write: No space left on device"):
        check_writable(full / "schedule.json")
    assert list(full.iterdir()) == []


def test_what_a_full_disk_does_not_take_is_kept(full, kept_in) -> None:
    with pytest.raises(CannotWrite) as caught:
        write_text(full / "schedule.json", "found")
    kept = write_elsewhere(caught.value)
    assert kept is not None
    assert kept.parent == kept_in
    assert kept.read_text(encoding="utf-8") == "found"
    assert kept.name.startswith("schedule-")
    assert list(full.iterdir()) == []


def test_without_a_folder_for_temporary_files_the_home_folder_serves(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "nowhere"))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    kept = write_elsewhere(CannotWrite("x/schedule.json", os.strerror(errno.ENOSPC), "found"))
    assert kept is not None
    assert kept.parent == tmp_path
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "nowhere")
    assert write_elsewhere(CannotWrite("x/schedule.json", os.strerror(errno.ENOSPC), "found")) is None


def test_solve_keeps_its_schedule_where_the_folder_vanished(tmp_path, kept_in, monkeypatch, capsys) -> None:
    """The folder is there when the search begins and gone when it ends: the result is printed, the file is kept, exit 2."""
    folder, save = tmp_path / "results", Schedule.save

    def save_late(schedule: Schedule, path: str) -> None:
        folder.rmdir()
        save(schedule, path)

    folder.mkdir()
    toy_profile().save(tmp_path / "profile.json")
    monkeypatch.setattr(Schedule, "save", save_late)
    wanted = ["--ranks", "2", "--microbatches", "4", "--effort", "0.1", "-o", str(folder / "schedule.json")]
    assert main(["solve", str(tmp_path / "profile.json"), *wanted]) == 2
    said = capsys.readouterr()
    assert "makespan" in said.out
    (kept,) = kept_in.iterdir()
    assert said.err.endswith(f"schedule.json: cannot write: no such folder, or not allowed; it is kept in {kept}\n")
    assert Schedule.load(kept).certificate is not None


def test_one_file_that_cannot_be_written_keeps_no_other(full, kept_in, tmp_path, capsys) -> None:
    """Of three files two are on the full disk: the third is written, and both others are kept."""
    from zbsolve.cli.tools import saving

    written = []
    with (
        pytest.raises(CannotWrite) as caught,
        saving(
            lambda: write_text(full / "a", "1"), lambda: write_text(full / "b", "2"), lambda: write_text(tmp_path / "c", "3")
        ),
    ):
        written.append((tmp_path / "c").read_text(encoding="utf-8"))
    assert written == ["3"]
    assert [one.path.name for one in (caught.value, *caught.value.others)] == ["a", "b"]
