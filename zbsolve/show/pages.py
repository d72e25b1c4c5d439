"""HTML pages from the templates beside this file: self-contained, with text from files escaped and columns packed."""

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

NARROW, EXACT = 2**31 - 1, 2**53  # the largest 32-bit integer; doubles hold all whole numbers up to 2**53
STEPS, WIDE_STEPS, VALUES = "i4", "f8", "values"


def render(template: str, **values: Any) -> str:
    """The page rendered from `templates/<template>` with these values. All text is escaped, except our own pictures (see
    `picture`)."""
    return _environment().get_template(template).render(**values) + "\n"


def script(name: str) -> str:
    """The text of a script, for the local server."""
    loader = _environment().loader
    assert loader is not None
    return loader.get_source(_environment(), name)[0]


def picture(document: str) -> Markup:
    """An SVG document made by `svg.to_svg`, marked for inclusion in a page unescaped."""
    from markupsafe import Markup

    return Markup(document)


@cache
def _environment() -> Environment:
    """Jinja2 is imported only when the first page is written: it takes 40 ms, which no other command should wait for."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    loader = PackageLoader("zbsolve.show")
    jinja = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, auto_reload=False
    )
    jinja.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    # Styles and scripts are our own separate files, included unescaped and not rendered as templates.
    jinja.globals["verbatim"] = lambda name: Markup(loader.get_source(jinja, name)[0].rstrip())
    return jinja


def packed(columns: Mapping[str, ArrayLike]) -> dict[str, Any]:
    """One text for all columns, each of shape (n,), and how to decode it: `columns` has (name, type, length) in their order
    within `text`. Types: `i4` and `f8`: differences of neighbours in 32 bits, and in doubles; `values`: doubles as they are,
    where a sum of differences would not be exact."""
    kinds, pieces = [], []
    for name, values in columns.items():
        column = np.asarray(values, np.int64)
        steps = np.diff(column, prepend=0)
        kind = _type_of(column)
        kinds.append((name, kind, len(column)))
        pieces.append((column if kind == VALUES else steps).astype("<i4" if kind == STEPS else "<f8").tobytes())
    text = base64.b64encode(gzip.compress(b"".join(pieces), 6, mtime=0)).decode(
        "ascii"
    )  # no time stamp: the same file each time
    return {"columns": kinds, "text": text}


def _type_of(column: Ints) -> str:
    """The narrowest type that holds every value and every difference. Floats do not wrap, as 64 bits may."""
    values = column.astype(float)
    largest = max(np.abs(values).max(initial=0), np.abs(np.diff(values, prepend=0)).max(initial=0))
    return STEPS if largest <= NARROW else WIDE_STEPS if largest < EXACT else VALUES
