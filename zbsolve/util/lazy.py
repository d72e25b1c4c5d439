"""Names that a package re-exports and loads on first use, so that importing the package stays fast."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def handing_on(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` for `package`: what its `if TYPE_CHECKING:` block imports is loaded on first access."""

    @cache
    def homes() -> dict[str, tuple[str, str]]:
        source = sys.modules[package].__spec__.loader.get_source(package)  # type: ignore[union-attr]
        blocks = [block.body for block in ast.parse(source).body if isinstance(block, ast.If)]
        imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
        return {
            name.asname or name.name: ("." * node.level + (node.module or ""), name.name)
            for node in imports
            for name in node.names
        }

    def load(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module '{package}' has no attribute '{name}'")
        module, member = homes()[name]
        return import_module(module + member, package) if module == "." else getattr(import_module(module, package), member)

    return load, lambda: sorted(homes())
