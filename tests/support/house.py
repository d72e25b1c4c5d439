"""The project's modules and what they import, read from their source (types and imports inside functions too)."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {_name(path): path for top in ("zbsolve", "profiler") for path in ROOT.glob(f"{top}/**/*.py")}


def package(module: str) -> str:
    """The package below `zbsolve` (or `profiler`) that a module belongs to; a module at the door is its own, but
    `__main__` is the command line's."""
    parts = module.replace(".__main__", ".cli").split(".")
    return parts[1] if parts[0] == "zbsolve" and len(parts) > 1 else parts[0]


@cache
def imports(module: str) -> frozenset[str]:
    """The project's other modules that one names. What a package hands on counts as the package."""
    return frozenset(one for one in _named(module) if one in MODULES and one != module)


def _named(module: str) -> Iterator[str]:
    path = MODULES[module]
    inside = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = inside.split(".")[: len(inside.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{home}.{alias.name}" for alias in node.names]
            yield from (one if one in MODULES else home for one in names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [one.value for one in node.args[:1] if isinstance(one, ast.Constant)]
            yield from (f"{inside}{name}" if name.startswith(".") else name for name in names)


def importing(mine: str, others: Sequence[str]) -> list[str]:
    """`a imports b` for the modules of package `mine` that import one of the packages `others`."""
    pairs = [(a, b) for a in MODULES if package(a) == mine for b in imports(a)]
    return [f"{a} imports {b}" for a, b in pairs if package(b) in others]
