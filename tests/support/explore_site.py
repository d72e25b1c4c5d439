"""A running page of `zbsolve explore`, asked through real requests on loopback."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import quote

import pytest

from zbsolve import Profile
from zbsolve.explore.playground import Playground

TOKEN = "a-token-of-22-letters-"


@dataclass
class Site:
    """A server on this port; `get` asks it."""

    port: int
    token: str = TOKEN

    @property
    def address(self) -> str:
        """Of the page."""
        return f"http://127.0.0.1:{self.port}/{self.token}/"

    def get(self, path: str, token: str = "", host: str = "", method: str = "GET") -> tuple[int, dict[str, str], str]:
        """Status, headers, text."""
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        link.request(method, f"/{token or self.token}/{path}", headers={"Host": host} if host else {})
        reply = link.getresponse()
        text = reply.read().decode()
        link.close()
        return reply.status, {name.lower(): value for name, value in reply.getheaders()}, text

    def part(self, part: str, state: str = "") -> tuple[int, str]:
        """Status and text of a part of the page."""
        status, _, text = self.get(f"{part}?width=900&state={quote(state)}")
        return status, text


@contextmanager
def serving(profile: Profile | None = None, path: str = "") -> Iterator[Site]:
    """A server in a thread of its own. Skips the test where the extra is missing."""
    pytest.importorskip("uvicorn", reason="no uvicorn: pip install '.[explore]'")
    from zbsolve.explore.server import new_server

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    running = new_server(Playground(profile, path), TOKEN)
    thread = threading.Thread(target=running.run, args=([listening],))
    thread.start()
    while not running.started:
        time.sleep(0.01)
    try:
        yield Site(listening.getsockname()[1])
    finally:
        running.should_exit = True
        thread.join(300)
    assert not thread.is_alive()
