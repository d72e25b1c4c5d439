"""`Only`: which layouts of a space a plan looks at: those that an engine can run, those with fields that are given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..util.errors import BadInput
from ..util.text import did_you_mean
from .engines import Target, engine
from .layout import BESIDE, NAMES, Layout, named

NUMBERS = ("dp", "tp", "pp", "chunks", "size", "zero", "slices")
FIXABLE = (*NUMBERS, *NAMES)


class Only(NamedTuple):
    """engine: a name in `engines.PLANNED`; "": any that could be. fixed: fields of layouts, and the number each has."""

    engine: str = ""
    fixed: tuple[tuple[str, int], ...] = ()

    @property
    def target(self) -> Target | None:
        """The engine; None: any. Raises BadInput."""
        return engine(self.engine) if self.engine else None

    @property
    def title(self) -> str:
        """`for megatron, tp 8, pp 8`; "" for all layouts."""
        return ", ".join([*([f"for {self.engine}"] if self.engine else []), *self._said])

    @property
    def _said(self) -> list[str]:
        return [f"{name} {named(name, value)}" for name, value in self.fixed]

    @property
    def plain(self) -> Only:
        """Of these layouts those that are plain in all that is not given, with one stage a rank: few of many."""
        plain = {name: getattr(Layout(), name) for name in ("placement", *BESIDE)}
        return self._replace(fixed=tuple({**plain, **dict(self.fixed)}.items()))

    @property
    def takes_no_order(self) -> bool:
        """Whether the engine has orders of its own alone."""
        return self.target is not None and bool(self.target.orders)

    def of(self, table: Layout) -> Layout:
        """The layouts of a table that are looked at. Raises BadInput where there is none."""
        keep = np.ones(len(table.dp), bool) if self.target is None else self.target.runs(table)
        for name, value in self.fixed:
            column = getattr(table, name)[keep]
            keep = keep & (getattr(table, name) == value)
            if not keep.any():
                others = ", ".join(named(name, one) for one in np.unique(column).tolist()) or "none"
                all_of = f" (dp × tp × pp is {int(table.devices[0])} devices)" if name in NUMBERS[:3] else ""
                own = f"no layout{' for ' * bool(self.engine)}{self.engine} has {', '.join(self._said)}"
                raise BadInput(f"{own}: with all before {name} there are {others}{all_of}")
        if not keep.any():
            raise BadInput(f"{self.engine} can run no layout of this space")
        return table.rows(keep)


ALL = Only()


def parse_only(engine_name: str | None, fixed: str | None) -> Only:
    """Of an engine's name, and of text like `tp=8,pp=8,placement=vee`. Raises BadInput naming the part."""
    if engine_name:
        engine(engine_name)
    only = Only(engine_name or "", tuple(map(_field, fixed.split(","))) if fixed is not None else ())
    names = [name for name, _ in only.fixed]
    for name in names:
        if names.count(name) > 1:
            raise BadInput(f"--fix '{name}': it is there twice")
    return only


def _field(part: str) -> tuple[str, int]:
    name, _, said = (word.strip() for word in part.partition("="))
    if name not in FIXABLE:
        raise BadInput(f"--fix '{part[:40]}': '{name[:20]}' is no field{did_you_mean(name, FIXABLE)} ({', '.join(FIXABLE)})")
    if name in NAMES and said in NAMES[name]:
        return name, NAMES[name].index(said)
    if name in NAMES or not said.isdecimal() or len(said) > 9:
        raise BadInput(
            f"--fix '{part[:40]}': {name} is {'one of ' + ', '.join(NAMES[name]) if name in NAMES else 'a number'}"
        )
    return name, int(said)
