"""`python -m zbsolve.cli`, the earlier name of `python -m zbsolve`."""

from .app import entry_point

entry_point()
