"""What ranks do for tests of the pages."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock


def run_page(rank: int, argument: dict[str, Any]) -> list[str]:
    """Run the Python blocks of a page as one script in `folder`. The process group is up already. Returns the names that the
    script has defined."""
    os.chdir(argument["folder"])
    names: dict[str, Any] = {"__name__": "page"}
    with mock.patch("torch.distributed.init_process_group"):
        for place, text in argument["blocks"]:
            exec(compile(text, place, "exec"), names)
    return sorted(names)
