"""What many tests need and is dear to make anew."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any

import pytest

from .support.browser import chromium
from .support.exec_ranks import Forked


def pytest_configure() -> None:
    """Ctrl-C works in all that tests start: a shell's background job, and what that starts, ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Tests and what they are given are kept to the end, so nobody looks for garbage among them, then or later: while there
    are more and more of them that takes two thirds of the time."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.enable()
    return collected


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process has a long one left when all others are done."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Each test draws the same numbers, whichever tests ran before it in its process (who runs where changes by the run)."""
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
    if "torch" in sys.modules:
        # Not `torch.manual_seed`, which formats the stack for each kind of device that is not there.
        sys.modules["torch"].default_generator.manual_seed(0)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Of torch: threads that wait for a busy machine's cores take longer than small layers."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of `run_local` are forked with their imports done: for tests of what ranks do, not of how they start."""
    monkeypatch.setattr("zbsolve.exec.run.launch._start", Forked)
    monkeypatch.setattr("zbsolve.exec.run.launch.REPORT_SECONDS", 300.0)  # a rank that fails may end late


@pytest.fixture(scope="session")
def links() -> Any:
    from profiler.links import measure_links

    return measure_links(400.0, sizes=(196_608, 2048))


@pytest.fixture
def one_link(monkeypatch: pytest.MonkeyPatch, links: Any) -> None:
    """Profiles take this machine's link as measured once: for tests of what else is in them."""
    monkeypatch.setattr("profiler.measurement.measure_links", lambda *given: links)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A headless chromium; skips, and says why, where there is none."""
    with chromium() as found:
        yield found
