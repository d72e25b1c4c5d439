"""`python -m zbsolve.cli`, which scripts use."""

from .app import entry_point

entry_point()
