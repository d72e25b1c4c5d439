"""Models by name for `zbsolve plan`: published sizes. `name@sequence=8192,layers=40` changes them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from ...util.errors import BadInput
from ...util.text import did_you_mean
from .shape import Shape


def _llama(name: str, layers: int, hidden: int, heads: int, inner: int) -> Shape:
    """2407.21783, Table 3; 8,192 tokens, 128,256 rows of the released vocabulary."""
    return Shape(name, layers, hidden, heads, 8, 128, inner, 8192, 128_256, gated=True, fused=True)


SHAPES = {
    one.name: one
    for one in (
        replace(Shape.gpt(3072, 32, 30), name="gpt-3.6b"),  # vTrain's (2312.12391)
        replace(Shape.gpt(6144, 48, 40), name="gpt-18.4b"),
        replace(Shape.gpt(8192, 64, 48), name="gpt-39.1b"),
        replace(Shape.gpt(6144, 64, 48), name="gpt-22b"),  # Korthikanti et al. (2205.05198), Table 3
        replace(Shape.gpt(12_288, 96, 96), name="gpt-175b"),
        replace(Shape.gpt(20_480, 128, 105), name="gpt-530b"),
        replace(Shape.gpt(25_600, 160, 128), name="gpt-1t"),
        _llama("llama3-8b", 32, 4096, 32, 14_336),
        _llama("llama3-70b", 80, 8192, 64, 28_672),
        _llama("llama3-405b", 126, 16_384, 128, 53_248),
    )
}
CHANGED = tuple(one.name for one in fields(Shape) if one.type == "int")


def shape_by_name(spec: str) -> Shape:
    """A published model.

    spec: its name, or `name@field=number,…`.

    Raises BadInput with near names.
    """
    name, at, said = spec.partition("@")
    if name not in SHAPES:
        raise BadInput(f"model '{name[:40]}': unknown{did_you_mean(name, SHAPES)} (models: {', '.join(SHAPES)})")
    changes: dict[str, Any] = {}
    for part in said.split(",") if at else ():
        what, _, number = (one.strip() for one in part.partition("="))
        if what not in CHANGED:
            raise BadInput(f"model '{spec[:60]}': '{part}' is none of {', '.join(f'{one}=N' for one in CHANGED)}")
        if what in changes:
            raise BadInput(f"model '{spec[:60]}': {what} is there twice")
        if not number.isdecimal():
            raise BadInput(f"model '{spec[:60]}': {what} is '{number}', no whole number")
        changes[what] = int(number)
    return replace(SHAPES[name], name=spec, **changes)
