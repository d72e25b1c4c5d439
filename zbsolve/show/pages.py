"""HTML pages from `templates/`. A page loads no other file, escapes all names, and has its columns packed (see `packed`)."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from ..problem import Ints

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

NARROW, EXACT = 2**31 - 1, 2**53  # the largest 32-bit integer; below 2**53 a double holds every whole number exactly
STEPS, WIDE_STEPS, VALUES = "i4", "f8", "values"


def render(template: str, **values: Any) -> str:
    """The page that `templates/<template>` makes of these values. It escapes all texts but what `picture` has marked."""
    return _environment().get_template(template).render(**values) + "\n"


def script(name: str) -> str:
    """The text of a script in `templates/`, for pages that a server sends."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def picture(document: str) -> Markup:
    """An SVG document made by `to_svg`, marked so that `render` does not escape it."""
    from markupsafe import Markup

    return Markup(document)


@cache
def _environment() -> Environment:
    """Jinja2's environment. It is loaded for the first page only: this takes 40 ms, which other commands need not spend."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("zbsolve.show")
    jinja = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    # Styles and scripts are zbsolve's own files. They are inserted without escaping, and are no templates.
    jinja.globals["verbatim"] = lambda name: Markup(loader.get_source(jinja, name)[0].rstrip())
    return jinja


def packed(columns: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """All columns, each of shape (n,), in one text (base64 of gzip), and `columns`: (name, type, length) of each, in the
    order of the text. Types: `i4` and `f8` are differences of neighbours, as 32-bit integers or doubles; `values` are the
    values themselves as doubles, used where sums of differences would not be exact."""
    kinds, pieces = [], []
    for name, values in columns.items():
        column = np.asarray(values, np.int64)
        steps = np.diff(column, prepend=0)
        kind = _type_of(column)
        kinds.append((name, kind, len(column)))
        pieces.append((column if kind == VALUES else steps).astype("<i4" if kind == STEPS else "<f8").tobytes())
    text = base64.b64encode(gzip.compress(b"".join(pieces), 6, mtime=0)).decode("ascii")  # no clock: the same file each time
    return {"columns": kinds, "text": text}


def _type_of(column: Ints) -> str:
    """The narrowest type that holds every value and every difference. Computed in floats, since int64 may overflow."""
    values = column.astype(float)
    largest = max(np.abs(values).max(initial=0), np.abs(np.diff(values, prepend=0)).max(initial=0))
    return STEPS if largest <= NARROW else WIDE_STEPS if largest < EXACT else VALUES
