"""The command line: one file per command."""

from .app import entry_point, main

__all__ = ["entry_point", "main"]
