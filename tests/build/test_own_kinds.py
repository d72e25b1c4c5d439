"""A user's own kinds: rows that they register, and files that say them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from zbsolve import BadInput, Pass, Problem
from zbsolve.kinds import KINDS, TABLE, Kind, register


@pytest.fixture(autouse=True)
def table() -> Iterator[None]:
    """Kinds of a test are gone behind it."""
    before = list(KINDS)
    yield
    KINDS[:] = before
    for label in set(TABLE) - set(before):
        del TABLE[label]


def step() -> Problem:
    return Problem.of([Pass("F", 0, 0, 0, 3), Pass("LQ", 0, 0, 0, 5), Pass("LP", 0, 0, 0, 7)], [])


def test_digests_do_not_depend_on_the_order_of_registering() -> None:
    found = set()
    for labels in (("LP", "LQ"), ("LQ", "LP")):
        for label in labels:
            register(Kind(label, "loading", "#112233"))
        found.add(step().digest)
        for label in labels:
            KINDS.remove(label)
            del TABLE[label]
    assert len(found) == 1


def test_a_file_says_the_row(tmp_path: Path) -> None:
    for label in ("LP", "LQ"):
        register(Kind(label, "loading", "#112233", away=label == "LQ"))
    step().save(tmp_path / "p.json")
    digest = step().digest
    for label in ("LP", "LQ"):
        KINDS.remove(label)
        del TABLE[label]
    read = Problem.load(tmp_path / "p.json")
    assert read.digest == digest
    assert read.passes.that(away=True).tolist() == [False, True, False]
    assert read.names == ["0F0", "0LQ0", "0LP0"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [("label", "l", "1 to 8 of A to Z"), ("words", "<b>", "1 to 60 letters"), ("colour", "red", "such as #1a5a9c")],
)
def test_a_file_with_a_wrong_row_is_refused(tmp_path: Path, field: str, value: str, said: str) -> None:
    register(Kind("LP", "loading", "#112233"))
    register(Kind("LQ", "loading", "#112233"))
    step().save(tmp_path / "p.json")
    body = json.loads((tmp_path / "p.json").read_text(encoding="utf-8"))
    body["passes"]["kinds"][0][field] = value
    (tmp_path / "p.json").write_text(json.dumps(body), encoding="utf-8")
    with pytest.raises(BadInput, match=f"kind '.*': field '{field}': {said}"):
        Problem.load(tmp_path / "p.json")


def test_a_label_is_one_kind() -> None:
    register(Kind("LP", "loading", "#112233"))
    register(Kind("LP", "loading, in red", "#ff0000"))
    assert TABLE["LP"].colour == "#112233"
    with pytest.raises(BadInput, match="kind 'LP': is there already, as 'loading', and is another kind of pass"):
        register(Kind("LP", "loading", "#112233", per_step=True))
    with pytest.raises(BadInput, match="kind 'F': is there already, as 'forward'"):
        register(Kind("F", "loading", "#112233"))
