"""`python -m zbsolve.cli`."""

from .app import entry_point

entry_point()
