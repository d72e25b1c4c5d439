"""Searches by seconds that are the same on every machine."""

from __future__ import annotations

from itertools import count
from types import SimpleNamespace

import pytest

from zbsolve.search import auto, race
from zbsolve.util import clock


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks of searches go on by 10 ms whenever somebody looks at them, and not otherwise."""
    numbers = count()
    for module in (clock, race, auto):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(numbers) / 100))
