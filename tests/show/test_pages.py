"""Pages: texts are escaped, what a template misses is an error, and every template belongs to a page."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest
from jinja2 import UndefinedError

from zbsolve.show.pages import picture, render

TEMPLATES = files("zbsolve.show") / "templates"
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def test_texts_are_escaped_and_pictures_are_not() -> None:
    rows = [("a",), ("</td><script>",)]
    text = render("frontier.html", title="<b>", picture=picture("<svg></svg>"), sentence="<i>", rows=rows)
    assert "<title>&lt;b&gt;</title>" in text
    assert "<p>&lt;i&gt;</p>" in text
    assert "<svg></svg>" in text
    assert text.count("<script>") == 1  # ours
    assert "{{" not in text
    assert "{%" not in text


def test_a_missing_value_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'rows' is undefined"):
        render("frontier.html", title="t", picture="", sentence="")


def test_pages_load_nothing() -> None:
    layout = (TEMPLATES / "layout.html").read_text(encoding="utf-8")
    assert f'<meta http-equiv="Content-Security-Policy" content="{POLICY}' in layout
    for file in TEMPLATES.iterdir():
        text = file.read_text(encoding="utf-8").replace('href="#', "")  # a place on the page itself
        served = file.name.startswith("explore")  # by a server of ours, with its script beside it
        loads = ("http:", "https:", "@import", "url(", *(() if served else ("src=", "href=")))
        assert not any(word in text for word in loads), file.name
        whole = file.name == "layout.html" or text.startswith('{% extends "layout.html" %}')
        assert whole or "<html" not in text, f"{file.name}: a page that is not the layout's, so without its policy"


def test_the_template_library_is_loaded_with_the_first_page() -> None:
    code = "import sys, zbsolve.show.pictures.files, zbsolve.show.profile_report as _; names = sys.modules"
    code += "; print('jinja2' in names, 'matplotlib' in names)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == "False False\n"
