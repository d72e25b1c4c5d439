"""HTML pages from the templates beside this file: they load nothing, and whatever names a file holds stays text in them."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


def render(template: str, **values: Any) -> str:
    """The page that `templates/<template>` makes of these values. Every text among them is escaped; `picture` marks
    what is a picture of ours."""
    return _environment().get_template(template).render(**values) + "\n"


def script(name: str) -> str:
    """The text of a script that a page of a server asks for."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def picture(document: str) -> Markup:
    """An SVG document that `svg.to_svg` made, to stand in a page as it is."""
    from markupsafe import Markup

    return Markup(document)


@cache
def _environment() -> Environment:
    """Jinja2 is loaded here, where the first page is written: it takes 40 ms, which no other command should wait for."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("zbsolve.show")
    found = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    found.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    # Styles and scripts are files of their own, put in as they are: they are ours, and no templates.
    found.globals["verbatim"] = lambda name: Markup(loader.get_source(found, name)[0].rstrip())
    return found
