"""What a profile says of the microbatch that it was made with, for plans of other ones."""

from __future__ import annotations

from typing import NamedTuple

from ...profile.profile import Profile
from ...util.errors import BadInput

MICROBATCH, SEQUENCES, TOKENS, TENSOR_RANKS, MESH = "microbatch", "sequences", "tokens", "tensor_ranks", "mesh"
STATES = "states"  # how parameters are kept, and what says: in 16 bits beside a master copy, with gradients of 32 bits
MIXED, FLOAT_GRADIENTS = "mixed", "float-gradients"


class Microbatch(NamedTuple):
    """Devices that share each layer; sequences of a microbatch; tokens of a sequence, 0: not known."""

    tensor_ranks: int
    sequences: int
    tokens: int


def microbatch_of(profile: Profile, where: str) -> Microbatch:
    """What the facts say. Raises BadInput naming `where` and what is missing."""
    tensor_ranks, said = profile.facts.get(TENSOR_RANKS), profile.facts.get(MICROBATCH)
    if not _counts(tensor_ranks):
        raise BadInput(f"{where}: facts: '{TENSOR_RANKS}' is missing: how many devices share a layer (profile writes it)")
    if not isinstance(said, dict) or not _counts(said.get(SEQUENCES)):
        raise BadInput(
            f"{where}: facts: '{MICROBATCH}' does not say '{SEQUENCES}': how many make a microbatch (profile writes it)"
        )
    mesh = profile.facts.get(MESH)
    others = set(mesh) - {"pp", "dp", "tp"} if isinstance(mesh, dict) else set()
    if others:
        raise BadInput(f"{where}: facts: '{MESH}' has {', '.join(sorted(others))}, which the space of plans does not know")
    tokens = said.get(TOKENS)
    return Microbatch(int(str(tensor_ranks)), said[SEQUENCES], tokens if isinstance(tokens, int) and tokens > 0 else 0)


def _counts(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31
