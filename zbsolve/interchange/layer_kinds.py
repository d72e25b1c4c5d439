"""What each layer of a profile is, for engines that know their model's layers by kind."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, pairwise

from ..problem import Problem
from ..util.errors import BadInput

LETTERS = "EtmL-"  # embedding, transformer layer, multi-token prediction, loss; "-": belongs to the layer beside it


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
