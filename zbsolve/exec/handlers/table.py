"""The table of handlers. `HANDLERS[kind]` is all that the executor knows of a kind; a kind without a row does not run."""

from __future__ import annotations

from ...problem import Problem
from ...tables import Bools
from .all_to_all import BEHIND_BACKWARD, BEHIND_FORWARD
from .attention import HELP, PART
from .compute import BACKWARD, FORWARD, RECOMPUTE, WEIGHTS
from .exchange import EXCHANGE
from .handler import Handler
from .offload import OFFLOAD, RELOAD
from .sharded import GATHER, REDUCE
from .update import UPDATE
from .vocabulary import BROADCAST, EMBEDDED, EMBEDDING_GRADIENT, INPUT_GRADIENT, MERGE, SCORES, SHARD_WEIGHTS

HANDLERS: dict[str, Handler] = {
    "F": FORWARD,
    "B": BACKWARD,
    "W": WEIGHTS,
    "BW": BACKWARD,
    "X": RECOMPUTE,
    "O": OFFLOAD,
    "R": RELOAD,
    "AF": BEHIND_FORWARD,
    "AB": BEHIND_BACKWARD,
    "C": EXCHANGE,
    "AG": GATHER,
    "AGB": GATHER,
    "RS": REDUCE,
    "U": UPDATE,
    "VB": BROADCAST,
    "S": SCORES,
    "VR": MERGE,
    "T": SHARD_WEIGHTS,
    "VG": INPUT_GRADIENT,
    "VE": EMBEDDED,
    "VS": EMBEDDING_GRADIENT,
    **dict.fromkeys(("FQ", "FA", "BQ", "BA"), PART),
    **dict.fromkeys(("FH", "BH"), HELP),
}


def passes_where(problem: Problem, field: str, value: object = True) -> Bools:
    """Which passes have a handler whose `field` is `value`, shape (passes,)."""
    return problem.passes.are(*(kind for kind in problem.passes.kinds if getattr(HANDLERS[kind], field) == value))
