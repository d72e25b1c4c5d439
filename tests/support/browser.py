"""Pages in a headless browser: Debian's chromium, driven by playwright. Tests skip, and say why, where one is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
WIDE, PHONE = (1400, 900), (390, 844)  # pixels


@contextmanager
def chromium() -> Iterator[Any]:
    """A playwright Browser with an own empty profile. Skips the test where playwright or chromium is missing."""
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install '.[test]'")
    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no chromium on the path (on Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=list(FLAGS), timeout=300_000)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, path: Path | str, size: tuple[int, int] = WIDE, **more: Any) -> Iterator[Any]:
    """A page of a file or address, once it is loaded. `more` is for playwright's `new_context` (color_scheme, has_touch).
    Fails where the page itself fails, or asks for anything beside itself."""
    context = browser.new_context(viewport={"width": size[0], "height": size[1]}, **more)
    page, wrong = context.new_page(), list[str]()
    page.set_default_timeout(300_000)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    address = str(path) if "://" in str(path) else Path(path).resolve().as_uri()
    origin = address.partition("?")[0] if address.startswith("file:") else "/".join(address.split("/")[:3])
    page.on("request", lambda asked: None if asked.url.startswith((origin, "blob:")) else wrong.append(f"asks {asked.url}"))
    page.goto(address)
    yield page
    context.close()
    assert wrong == []
