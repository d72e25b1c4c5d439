"""What all tests of the page need."""

from __future__ import annotations

import math

import pytest

from zbsolve.explore import playground


@pytest.fixture(autouse=True)
def all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the machine takes."""
    monkeypatch.setattr(playground, "COMPARE_SECONDS", math.inf)
