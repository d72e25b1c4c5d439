"""Other engines' schedules, told apart by what is in the file."""

from __future__ import annotations

import os
from typing import Any

from ..util.errors import BadInput
from ..util.files import parse_json, read_text
from . import colossalai, crosspipe, primus
from .foreign_order import ForeignOrder
from .text_grid import read_text_grid

NODES = {"func_type": primus.read, "minibatch": colossalai.read}  # a field that only this engine's nodes have → its reader


def read_order(path: str | os.PathLike[str], placement: str | None = None) -> ForeignOrder:
    """The order in a file.

    path: of the file; `-` is standard input.
    placement: by name, where a file says chunks and not stages.

    Raises BadInput naming file and place.
    """
    text, where = read_text(path), str(path)
    if text.lstrip()[:1] in ("[", "{"):
        return _read_nodes(parse_json(text, path), where, placement)
    if placement is not None:
        raise BadInput(f"{where}: a grid says itself which rank runs which stage: leave --placement out")
    return read_text_grid(text, where)


def _read_nodes(body: Any, where: str, placement: str | None) -> ForeignOrder:
    """Node lists in JSON. Raises BadInput."""
    if isinstance(body, dict) and "zbsolve" in body:
        raise BadInput(f"{where}: holds a {body['zbsolve']} of zbsolve itself: there is nothing to import")
    if isinstance(body, dict) and "schedule" in body:
        return crosspipe.read(body, where, placement)
    rows = body if isinstance(body, list) else []
    first = next((row[0] for row in rows if isinstance(row, list) and row and isinstance(row[0], dict)), {})
    for field, read in NODES.items():
        if field in first:
            return read(body, where, placement)
    known = " or ".join(f"'{field}'" for field in NODES)
    raise BadInput(
        f"{where}: JSON, but no list of nodes a rank (with a field {known}: Primus, ColossalAI; or in a field 'schedule': "
        "CrossPipe); costs, such as SlackPipe's and SAPP's tables, go into a CSV for zbsolve numbers"
    )
