"""The command line: a file a command."""

from .app import entry_point, main

__all__ = ["entry_point", "main"]
