"""`python -m benchmarks`: what it lists, what `--help` says, and which words it refuses; nothing is measured."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from benchmarks.__main__ import main
from benchmarks.harness import scripts, tables_of


@pytest.fixture(scope="module")
def tables() -> list[tuple[str, str]]:
    """Script and name of each."""
    return [(script, name) for script in scripts() for name in tables_of(script)]


def test_without_words_all_tables_are_listed(tables: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()]
    assert [row for row in rows if tuple(row) in tables] == [list(one) for one in tables]
    assert len(tables) == len({name for _, name in tables})  # a table's name is its file's


def test_help(tables: list[tuple[str, str]], capsys: pytest.CaptureFixture[str]) -> None:
    for script, name in tables:
        with pytest.raises(SystemExit) as end:
            main([script, name, "--help"])
        assert end.value.code == 0, name
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
