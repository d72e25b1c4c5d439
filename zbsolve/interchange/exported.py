"""What one asks of an export, and what it gives; what each layer is, for engines that know their model's layers by kind."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..planner.engines import ENDINGS, ending_of
from ..problem import Problem
from ..util.errors import BadInput

if TYPE_CHECKING:
    from ..planner.candidate import Choice

LETTERS = "EtmL-"  # embedding, transformer layer, multi-token prediction, loss; "-": belongs to the layer beside it


@dataclass(frozen=True)
class Options:
    """What one may ask for. path: the file's name, as notes say it. or_best: where the engine cannot express the schedule,
    its best order is written instead. defer_recv: for torch's `defer_pp_recv=True`. layers: for Megatron and torchtitan,
    what each layer of the profile is. plan: the plan whose schedule it is, for targets that take a whole layout."""

    path: str = "FILE"
    or_best: bool = False
    defer_recv: bool = False
    layers: str | None = None
    plan: Choice | None = None

    @property
    def json(self) -> bool:
        """Whether the file is to be JSON where an engine has both."""
        return ending_of(self.path) == ENDINGS["JSON"]


@dataclass(frozen=True)
class Export:
    """A file for another engine. text: what is in it. notes: what whoever loads it must know, a line each. facts: the same
    for programs; rows: each rank's line in the engine's words, for `--json` without a file."""

    text: str
    notes: tuple[str, ...]
    facts: dict[str, Any]
    rows: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class LongExport:
    """A file of a repeated schedule. made: what is known of it, without its text; lines: its text, a rank a line, made as it
    is read."""

    made: Export
    lines: Iterator[str]


def layer_letters(problem: Problem, given: str | None, engine: str) -> str:
    """What each layer of the profile is, one of LETTERS each. given: in Megatron's own way, `E,t*30,L`; None: an embedding,
    transformer layers and a loss. Raises BadInput."""
    count = sum(problem.layers)
    if not count:
        raise BadInput(f"schedule: it does not say how many layers its stages have, which {engine} needs")
    if given is None:
        if count < 2:
            raise BadInput(f"schedule: {count} layer is too few for an embedding and a loss; say what it is with --layers")
        return "E" + "t" * (count - 2) + "L"
    plain = given.replace(",", "").replace(" ", "")
    if not re.fullmatch(rf"([{LETTERS}](\*\d{{1,6}})?)+", plain):
        raise BadInput(f"layers '{given[:40]}': write E, t, m, L or - for each layer, such as E,t*30,L")
    letters = "".join(one * int(times or 1) for one, times in re.findall(r"(.)(?:\*(\d+))?", plain))
    if len(letters) != count:
        raise BadInput(f"layers '{given[:40]}': {len(letters)} layers, but the schedule's stages have {count}")
    if not re.fullmatch(r"Et*m*L", letters.replace("-", "")):
        raise BadInput(f"layers '{given[:40]}': {engine} wants one E first, then t, then m, and one L last")
    return letters


def stage_letters(letters: str, layers: Sequence[int]) -> list[str]:
    """The letters of each stage, without those of neighbours."""
    return [letters[a:b].replace("-", "") for a, b in pairwise((0, *accumulate(layers)))]
