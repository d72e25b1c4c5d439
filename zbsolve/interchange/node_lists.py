"""Node lists in JSON, a list of nodes a rank: what readers of engines that write such files share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from ..placement import parse
from ..util.errors import BadInput
from ..util.text import printable
from .foreign_order import ForeignOrder, ReadCell

StageOf = Mapping[tuple[int, int], int]  # (rank, chunk) → stage


class Node(NamedTuple):
    """One node: the engine's word, its chunk (a stage's place among the stages of its rank) and its microbatch."""

    word: str
    chunk: int
    microbatch: int


class Words(NamedTuple):
    """What an engine's words are: passes, with the same names as ours, and those that follow from the passes."""

    kinds: Collection[str]
    skipped: Collection[str]


def order_of_nodes(rows: Sequence[Sequence[Node]], words: Words, stage_of: StageOf, format: str, where: str) -> ForeignOrder:
    """The order that the nodes say. Raises BadInput for an unknown word, and a chunk that no stage is."""
    found = []
    for rank, row in enumerate(rows):
        cells = []
        for i, node in enumerate(row):
            place = f"{where}: rank {rank}, node {i}"
            if node.word in words.skipped:
                continue
            if node.word not in words.kinds:
                raise BadInput(f"{place}: '{printable(node.word)[:30]}' is no pass (passes are {' '.join(words.kinds)})")
            if (rank, node.chunk) not in stage_of:
                raise BadInput(f"{place}: chunk {node.chunk} is no stage of rank {rank}")
            cells.append(ReadCell(stage_of[rank, node.chunk], node.word, node.microbatch, rank, i))
        found.append(tuple(cells))
    order = ForeignOrder(tuple(found), format, where, "rank {}, node {}")
    order.check_size()
    return order


def stages_of(placement: str, ranks: int, where: str) -> StageOf:
    """(rank, chunk) → stage of a placement by name. Raises BadInput."""
    if not ranks:
        raise BadInput(f"{where}: there are no ranks in it")
    spot = parse(placement, ranks)
    return {(rank, spot[:stage].count(rank)): stage for stage, rank in enumerate(spot)}
