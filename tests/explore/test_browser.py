"""The page in a browser: controls, address, late answers, bad input, what it saves, a phone, the dark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zbsolve import Schedule, verify
from zbsolve.explore.playground import answer
from zbsolve.explore.state import State
from zbsolve.util.text import format_time

from ..support.browser import PHONE, opened
from ..support.explore_site import Site, serving
from ..support.profiles import equal_layers

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    with serving() as found:
        yield found


def settled(page: Any) -> dict[str, str]:
    """What stands large at the top once nothing is asked any more: label → value."""
    page.wait_for_selector("#answer:not(.late) .figures")
    page.wait_for_selector("#table:not(.late) table")
    said = "one => [one.querySelector('dt').textContent, one.querySelector('dd').firstChild.data]"
    return dict(page.eval_on_selector_all(".figures div", f"all => all.map({said})"))


def test_the_address_is_the_state(browser: Any, site: Site) -> None:
    state = State(ranks=6, microbatches=10, placement="vee", memory=4)
    with opened(browser, f"{site.address}?{state.query}") as page:
        found = answer(state)
        shown = settled(page)
        assert shown["makespan"] == format_time(found.certificate.value)
        assert shown["bound"] == format_time(found.certificate.bound)
        page.focus("[data-for=microbatches]")
        page.keyboard.press("ArrowRight")
        page.wait_for_url(re.compile("microbatches=11"))
        more = settled(page)
        assert page.input_value("#microbatches") == "11"
        expected = answer(State(ranks=6, microbatches=11, placement="vee", memory=4))
        assert more["makespan"] == format_time(expected.certificate.value)
        page.reload()
        assert settled(page) == more


def test_back_and_forward(browser: Any, site: Site) -> None:
    """Each step asks again, and its controls are as they were; the answer before an error does not stay."""
    with opened(browser, f"{site.address}?ranks=3") as page:
        first = settled(page)
        page.select_option("#placement", "vee")
        page.wait_for_url(re.compile("placement=vee"))
        second = settled(page)
        page.fill("#ranks", "900")
        page.wait_for_selector("#answer .wrong")
        assert page.inner_text("#table") == ""
        page.go_back()
        page.wait_for_function("document.getElementById('ranks').value === '3'")
        assert settled(page) == second
        page.go_back()
        page.wait_for_function("document.getElementById('placement').value === 'single'")
        assert settled(page) == first != second
        assert page.input_value("[data-for=ranks]") == "3"
        page.go_forward()
        page.wait_for_function("document.getElementById('placement').value === 'vee'")
        assert settled(page) == second


def test_only_the_last_of_many_wishes_is_shown(browser: Any, site: Site) -> None:
    asked = []
    with opened(browser, site.address) as page:
        settled(page)
        page.on("request", lambda one: asked.append(one.url) if "/answer?" in one.url else None)
        page.evaluate(
            """() => { const m = document.getElementById("microbatches");
            for (let i = 20; i <= 60; i++) { m.value = i; m.dispatchEvent(new Event("input", { bubbles: true })); } }"""
        )
        page.wait_for_url(re.compile("microbatches=60"))
        assert settled(page)["makespan"] == format_time(answer(State(microbatches=60)).certificate.value)
        assert len(asked) < 4


def test_bad_input_is_told_at_its_control(browser: Any, site: Site) -> None:
    with opened(browser, site.address) as page:
        settled(page)
        page.fill("#ranks", "900")
        page.wait_for_selector("#control-ranks.bad")
        assert "ranks: 900 is not from 1 to 64" in page.text_content("#answer .wrong")
        page.fill("#ranks", "3")
        settled(page)
        assert page.query_selector(".bad") is None


def test_a_row_of_the_table_is_shown_by_a_click_and_saved(browser: Any, site: Site, tmp_path: Path) -> None:
    with opened(browser, site.address, accept_downloads=True) as page:
        settled(page)
        page.click("#table [data-system='zb-v']")
        page.wait_for_url(re.compile("system=zb-v"))
        assert settled(page)["makespan"] == format_time(answer(State(system="zb-v")).certificate.value)
        with page.expect_download() as coming:
            page.click("#save")
        coming.value.save_as(tmp_path / "schedule.json")
    schedule = Schedule.load(tmp_path / "schedule.json")
    assert verify(schedule.problem, schedule) == ()
    assert schedule.certificate is not None
    assert schedule.certificate.solver == "zb-v"


def test_controls_agree(browser: Any, site: Site) -> None:
    """A named schedule brings its placement; another placement ends it; what is of no account cannot be set."""
    with opened(browser, f"{site.address}?slow_factor=2") as page:
        settled(page)
        assert page.is_disabled("#slow_factor")
        page.select_option("#system", "zb-v")
        page.wait_for_url(re.compile("system=zb-v&placement=vee"))
        assert page.is_disabled("#backward")
        settled(page)
        page.select_option("#placement", "loop")
        page.wait_for_url(re.compile("[?]placement=loop"))
        assert page.input_value("#system") == "best"
        page.fill("#slow_part", "2")
        page.wait_for_url(re.compile("slow_part=2&slow_factor=2"))
        settled(page)


def test_a_longer_search_ends_with_a_drawn_answer(browser: Any, site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zbsolve.explore.playground.MORE_SECONDS", 0.5)
    with opened(browser, f"{site.address}?ranks=5&microbatches=9&placement=vee&memory=3&slow_part=2") as page:
        before = settled(page)
        page.click("#search")
        page.wait_for_selector("#search[disabled]", state="detached")
        after = settled(page)
        assert float(re.sub("[^0-9.]", "", after["makespan"])) <= float(re.sub("[^0-9.]", "", before["makespan"]))
        assert float(re.sub("[^0-9.]", "", after["bound"])) >= float(re.sub("[^0-9.]", "", before["bound"]))


def test_phone_and_dark(browser: Any, site: Site) -> None:
    query = "?ranks=8&microbatches=24"
    with opened(browser, site.address + query, PHONE, color_scheme="dark", has_touch=True) as page:
        settled(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
        chart = page.evaluate("getComputedStyle(document.querySelector('.chart svg > rect')).fill")
    with opened(browser, site.address + query) as page:
        settled(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != dark
        assert page.evaluate("getComputedStyle(document.querySelector('.chart svg > rect')).fill") != chart


def test_a_profile_hides_the_models_controls(browser: Any) -> None:
    with serving(equal_layers(8), "my profile.json") as site, opened(browser, f"{site.address}?ranks=2") as page:
        settled(page)
        assert page.query_selector("#F") is None
        assert page.query_selector("#partition") is not None
        assert "8 layers of toy" in page.text_content("header")
        assert "zbsolve solve 'my profile.json' --ranks 2" in page.text_content("#commands")
