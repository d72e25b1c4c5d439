"""What is known of one system of the literature: a row of the table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..build.numbers import Numbers
from ..problem import Problem
from ..schedule import Schedule

ONE_DIRECTION, SLICES, VOCABULARY, OFFLOAD, TWO_DIRECTIONS, ASYNCHRONOUS = GROUPS = (
    "one direction",
    "sequence slices",
    "sharded vocabulary",
    "offload to host memory",
    "two directions",
    "asynchronous",
)


@dataclass(frozen=True, slots=True)
class System:
    """One schedule of the literature.

    name: as `--method` takes it.
    title, paper, group: for tables and the gallery.
    order: makes its schedule of a problem without side streams. Raises BadInput where it is not defined for that; memory is
        not looked at (`verify` does).
    placement: as `placement.parse_routes` reads it.
    bubble, memory, weights: formulas, in words.
    fused: its backward is one pass BW.
    needs: what a problem must fulfil, in words.
    rounds: of ranks and microbatches, how many of these an update takes in and how many updates late its weights are used.
    searched: searches try its order anyway, as a policy of the list scheduler or as another system's.
    split: what its order is called where the backward of a problem is split; "": the same.
    copies: of a plain step and of µs of copies out and back, one number or one a stage each, which stages it offloads; its
        order is then one of the whole problem, with the copies.
    vocabulary: its step has a sharded vocabulary.
    slices: its microbatches are cut into slices.
    even_work: these take as long as each other.
    in_groups: of a number of microbatches, its order in groups of so many, which is called "name:number".
    """

    name: str
    title: str
    order: Callable[[Problem], Schedule]
    paper: str
    placement: str
    bubble: str
    memory: str
    fused: bool = False
    needs: str = ""
    group: str = ONE_DIRECTION
    weights: str = "1×"
    rounds: Callable[[int, int], tuple[int, Any]] | None = None
    searched: bool = False
    split: str = ""
    copies: Callable[[Problem, Numbers, Numbers], Any] | None = None
    vocabulary: bool = False
    slices: bool = False
    even_work: bool = False
    in_groups: Callable[[int], Callable[[Problem], Schedule]] | None = None

    @property
    def words(self) -> dict[str, Any]:
        """What can be said of it in a file: everything but functions."""
        said = ("name", "title", "group", "paper", "placement", "fused", "bubble", "memory", "weights", "needs")
        return {name: getattr(self, name) for name in said}
