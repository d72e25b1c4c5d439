"""Python files for other engines: data as literals, and a few fixed lines that use it. Nothing that a person typed gets in:
rows hold whole numbers and our own words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import __version__


def python_file(title: str, data: Mapping[str, Sequence[Any] | int | str], code: str) -> str:
    """A module: `title` as its docstring, each name of `data` as a literal (a tuple of tuples with a row a line), then
    `code`."""
    parts = [f'"""{title}\n\nWritten by zbsolve {__version__}."""\n']
    parts += [f"{name} = {literal(value)}\n" for name, value in data.items()]
    return "\n".join(["".join(parts[:1]), "".join(parts[1:]), code.strip("\n") + "\n"])


def literal(value: Any) -> str:
    """A literal of whole numbers, words and tuples of them; a tuple of tuples has a row a line."""
    if isinstance(value, tuple) and value and all(isinstance(row, tuple) for row in value):
        deep = any(isinstance(one, tuple) for row in value for one in row)
        rows = ",\n".join(f"    {_nested(row) if deep else _flat(row)}" for row in value)
        return f"(\n{rows},\n)"
    return _flat(value)


def _nested(row: tuple[Any, ...]) -> str:
    if not row:
        return "()"
    return "(\n" + "".join(f"        {_flat(one)},\n" for one in row) + "    )"


def _flat(value: Any) -> str:
    if isinstance(value, tuple):
        inner = ", ".join(_flat(one) for one in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if value is not None and not isinstance(value, bool | int | str):
        raise TypeError(f"no literal of {type(value).__name__}")
    return repr(value)
