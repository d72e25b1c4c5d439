"""Which line of a person's own code an error names: not ours, not a library's."""

from __future__ import annotations

import pytest
import torch

from zbsolve.util.errors import own_line, raised


def test_the_innermost_own_line_is_named(tmp_path, monkeypatch) -> None:
    """An error inside torch is told by the line of the file that called torch, from the current folder."""
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef f():\n    return torch.ones(2) @ torch.ones(3)\n", encoding="utf-8"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import mine  # type: ignore[import-not-found]

    with pytest.raises(RuntimeError) as caught:
        mine.f()
    assert own_line(caught.value) == "mine.py:4"
    assert raised(caught.value).startswith("RuntimeError at mine.py:4: ")
    monkeypatch.chdir("/")
    assert own_line(caught.value) == f"{tmp_path}/mine.py:4"


def test_without_own_code_there_is_no_line() -> None:
    with pytest.raises(AttributeError) as caught:
        torch.nn.Linear(2, 2).__getattr__("nothing")
    assert caught.value.__traceback__ is not None
    inside = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without this test's own frame
    assert own_line(inside) == ""
    assert raised(inside).startswith("AttributeError: ")


def test_a_syntax_error_is_at_its_own_line(tmp_path) -> None:
    path = tmp_path / "wrong.py"
    with pytest.raises(SyntaxError) as caught:
        compile("a = 1\nb = = 2\n", str(path), "exec")
    assert raised(caught.value) == f"SyntaxError at {path}:2: invalid syntax"
