"""The command line: a file a command."""

from .app import main

__all__ = ["main"]
