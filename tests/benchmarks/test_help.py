"""`python -m benchmarks`: what it lists, what `--help` says, and which words it refuses; nothing is measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.__main__ import main
from benchmarks.harness import scripts, tables_of

ALL = [(script, name) for script in scripts() for name in tables_of(script)]


def test_without_words_all_tables_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if tuple(row) in ALL] == [list(one) for one in ALL]
    assert len(ALL) == len({name for _, name in ALL})  # a table's name is its file's


@pytest.mark.parametrize(("script", "name"), ALL)
def test_help(script: str, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([script, name, "--help"])
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m benchmarks {script} {name} ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing"], "no script is called 'nothing'"),
        (["slices", "--seconds", "1"], "slices has several tables, say which one: slices, contexts, slices_search"),
    ],
)
def test_words_that_say_nothing_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        main(words)
