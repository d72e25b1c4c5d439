"""`python -m zbsolve`."""

from .cli import entry_point

entry_point()
