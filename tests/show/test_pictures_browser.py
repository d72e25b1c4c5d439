"""Pictures in pages, in a browser: what marks say, dark and light, a phone's width, paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zbsolve.show.gallery import exhibits, gallery_as_page
from zbsolve.util.text import format_time

from ..support.browser import PHONE, opened


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A gallery, and its exhibits."""
    shown, absent = exhibits(4, 8)
    path = tmp_path_factory.mktemp("gallery") / "gallery.html"
    path.write_text(gallery_as_page(shown, absent), encoding="utf-8")
    return path, shown


@pytest.mark.slow
def test_hover_says_what_the_schedule_has(browser: Any, gallery: tuple[Path, Any]) -> None:
    path, shown = gallery
    with opened(browser, path) as page:
        for number in (0, len(shown) // 2):
            picture = page.locator(".picture").nth(number)
            mark = picture.locator("[data-said^='0F3:']")
            mark.scroll_into_view_if_needed()
            mark.hover()
            said = page.text_content("#tip")
            exhibit = next(one for one in shown if one.system.title in picture.locator("..").text_content())
            start, end = exhibit.schedule.timeline()["0F3"]
            assert said == f"0F3: {format_time(start)} to {format_time(end)}"
        page.mouse.move(3, 3)
        assert page.evaluate("document.getElementById('tip').style.visibility") == "hidden"


@pytest.mark.slow
def test_a_tap_says_it_on_a_phone_and_the_page_stays_narrow(browser: Any, gallery: tuple[Path, Any]) -> None:
    with opened(browser, gallery[0], PHONE, has_touch=True, is_mobile=True) as page:
        page.locator("[data-said^='0F1:']").first.tap()
        assert page.text_content("#tip").startswith("0F1: ")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


@pytest.mark.slow
def test_the_table_leads_to_every_system(browser: Any, gallery: tuple[Path, Any]) -> None:
    """At p = 4 and m = 8 with F = B = W ZB-V has a bubble of 1/17 (arXiv 2401.10241): 24 are work,
    (p − 1) / 2 more are the way to the last rank."""
    path, shown = gallery
    with opened(browser, path) as page:
        names = page.locator("tbody a").all_text_contents()
        assert sorted(names) == sorted(one.system.name for one in shown)
        assert names == page.eval_on_selector_all("section", "all => all.map(one => one.id)")
        row = page.locator("tr", has=page.locator("a[href='#zb-v']"))
        assert f"{1 / 17:.2%}" in row.locator("td").all_text_contents()
        assert page.eval_on_selector(".scroll", "one => one.scrollWidth <= one.clientWidth")
        page.click("a[href='#zb-v']")
        assert page.locator("section:target h3").text_content().startswith("ZB-V")
        assert page.inner_text("body").count("makespan") == 1


def test_words_can_be_read_in_the_dark(browser: Any, gallery: tuple[Path, Any]) -> None:
    """Texts that stand on the page and not on a pass are light where it is dark."""
    script = """() => [...document.querySelectorAll(".picture text:not([text-anchor=middle])")].map(
        (text) => getComputedStyle(text).fill.match(/[0-9]+/g).map(Number))"""
    for scheme, readable in (("dark", lambda level: level > 120), ("light", lambda level: level < 120)):
        with opened(browser, gallery[0], color_scheme=scheme) as page:
            levels = page.evaluate(script)
            assert levels
            assert all(readable(sum(one) / 3) for one in levels)
            label = page.locator(".picture text[text-anchor=middle][fill='#fff']").first  # on a dark pass
            assert label.evaluate("(one) => getComputedStyle(one).fill") == "rgb(255, 255, 255)"
