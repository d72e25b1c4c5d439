"""`ForeignOrder`: which pass runs after which on every rank, as another engine's file says it, in our words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ..build.plain import MAX_PASSES
from ..placement import check_routes
from ..problem import Ints, pass_name
from ..util.errors import BadInput

Routes = tuple[tuple[int, ...], ...]


class ReadCell(NamedTuple):
    """One pass in a file: stage, kind (our word) and microbatch; `row` and `column`: its place there."""

    stage: int
    kind: str
    microbatch: int
    row: int
    column: int

    @property
    def name(self) -> str:
        """The pass's name."""
        return pass_name(self.kind, self.stage, self.microbatch)


@dataclass(frozen=True, eq=False)
class ForeignOrder:
    """`rows`: the passes of each rank in their order. `format`: what the file is, in words. `where`: its path. `place`: how
    one says where a cell stands, with its row and column: "line {}, cell {}". `notes`: what the file says and this order
    does not, a line each. `factors`: how much larger each microbatch is than their mean; () where the file does not say
    it."""

    rows: tuple[tuple[ReadCell, ...], ...]
    format: str
    where: str
    place: str
    notes: tuple[str, ...] = ()
    factors: tuple[float, ...] = ()

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        """The number of stages: up to the highest that is named."""
        return 1 + max(cell.stage for cell in self.cells())

    @cached_property
    def microbatches(self) -> int:
        """The number of microbatches: up to the highest that is named."""
        return 1 + max(cell.microbatch for cell in self.cells())

    def cells(self) -> Iterator[ReadCell]:
        """All cells, rank by rank."""
        return (cell for row in self.rows for cell in row)

    @cached_property
    def places(self) -> dict[str, list[str]]:
        """Pass name → where it stands in the file, in words; a doubled pass stands in several places."""
        found: dict[str, list[str]] = {}
        for cell in self.cells():
            found.setdefault(cell.name, []).append(self.place.format(cell.row, cell.column))
        return found

    def check_size(self) -> None:
        """Raise BadInput for no passes at all, or more than zbsolve handles."""
        if not any(self.rows):
            raise BadInput(f"{self.where}: there are no passes in it")
        if self.stages * self.microbatches > MAX_PASSES:
            largest = max(self.cells(), key=lambda cell: max(cell.stage, cell.microbatch))
            raise BadInput(
                f"{self.where}: {self.place.format(largest.row, largest.column)}: {largest.name} makes {self.stages} stages "
                f"of {self.microbatches} microbatches, more than zbsolve handles ({MAX_PASSES} in all)"
            )

    @cached_property
    def routes(self) -> Routes:
        """The ranks that microbatches visit, stage by stage: microbatch i follows route i modulo their number.

        Where passes of one stage and microbatch stand on several ranks, most of them decide; the others are misplaced.
        Raises BadInput for a stage or a rank without a pass, and where microbatches do not count from 0.
        """
        self.check_size()
        votes: dict[tuple[int, int], Counter[int]] = {}
        of_stage: list[Counter[int]] = [Counter() for _ in range(self.stages)]
        for rank, row in enumerate(self.rows):
            for cell in row:
                votes.setdefault((cell.microbatch, cell.stage), Counter())[rank] += 1
                of_stage[cell.stage][rank] += 1
        empty = next((stage for stage, ranks in enumerate(of_stage) if not ranks), None)
        if empty is not None:
            raise BadInput(f"{self.where}: no rank has a pass of stage {empty} (stages are 0 to {self.stages - 1})")
        if lowest := min(cell.microbatch for cell in self.cells()):
            raise BadInput(f"{self.where}: microbatches count from 0, and the lowest in the file is {lowest}")
        usual = [ranks.most_common(1)[0][0] for ranks in of_stage]
        table: Ints = np.tile(np.array(usual, np.int64), (self.microbatches, 1))
        for (microbatch, stage), ranks in votes.items():
            table[microbatch, stage] = ranks.most_common(1)[0][0]
        return self._shortest_period([tuple(row) for row in table.tolist()])

    def _shortest_period(self, every: list[tuple[int, ...]]) -> Routes:
        """The fewest routes that, taken in turn, are the route of every microbatch."""
        period = next(n for n in range(1, len(every) + 1) if all(one == every[i % n] for i, one in enumerate(every)))
        idle = sorted(set(range(self.ranks)) - {rank for route in every[:period] for rank in route})
        if idle:
            raise BadInput(f"{self.where}: rank {idle[0]} has no stage of its own (rows are ranks 0 to {self.ranks - 1})")
        try:
            return check_routes(every[:period], self.ranks)
        except BadInput as error:
            raise BadInput(f"{self.where}: {error}") from None
