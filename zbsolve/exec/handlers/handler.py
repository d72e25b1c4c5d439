"""What the executor knows of one kind of pass, as one record: a `Handler`.

The interpreter and lowering read handlers and know no kind themselves. A new kind of pass is a row of `zbsolve.kinds`, which
says all else that is known of it, a builder that puts it into a problem, and a handler in `table.HANDLERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...tables import Ints
from ..backward.stage import Stage
from ..offload.rank import Offload
from ..program import Action
from ..slices.exchange import AttentionPeers
from ..vocabulary.rank import VocabularyShard
from ..weight_versions import WeightVersions
from .graph import Graph


@dataclass(frozen=True)
class Data:
    """What a step feeds in. inputs, targets: microbatch → pytree of tensors, for the first and for the last stage. seed:
    microbatch m draws its random numbers from seed + m. shares: what each microbatch counts in the mean, 1 on average
    (empty: all count alike). Where sequences run in slices, each part (see `slices.cutting`) is in place of a microbatch.
    scale: losses are multiplied by it before their backward."""

    inputs: Mapping[int, Any]
    targets: Mapping[int, Any]
    seed: int = 0
    shares: Mapping[int, float] = field(default_factory=dict)
    scale: float = 1.0

    def share(self, microbatch: int) -> float:
        """What a microbatch counts in the mean."""
        return self.shares.get(microbatch, 1.0)


def sum_of(losses: Sequence[Tensor]) -> Tensor | None:
    """The sum of losses, which may differ in type; None where there are none."""
    return torch.stack([one.double() for one in losses]).sum() if losses else None


@dataclass(slots=True)
class RankState:
    """What the passes of one rank work on. stages, versions: by stage number (versions only where there are updates);
    exchanges: start to sum a stage's gradients, over its ranks and over replicas; offload: what is in host memory, where
    passes bring it there; vocabulary: this rank's shard, where the vocabulary is sharded; attention: where ranks make it for
    each other; data, losses: of the step that runs."""

    stages: Mapping[int, Stage]
    versions: Mapping[int, WeightVersions] = field(default_factory=dict)
    exchanges: list[Callable[[int], None]] = field(default_factory=list)
    offload: Offload | None = None
    vocabulary: VocabularyShard | None = None
    attention: AttentionPeers | None = None
    data: Data = field(default_factory=lambda: Data({}, {}))
    losses: list[Tensor] = field(default_factory=list)


# (state, stage) → nothing; (state, name of a pass, surely?) → nothing; (state, pass) → monotonic ns or an event of a GPU; 0
# where nothing ran.
Release = Callable[[RankState, int], None]
Settle = Callable[[RankState, str, bool], None]
Ended = Callable[[RankState, Action], Any]
Run = Callable[[RankState, Action, Any], Any]
Check = Callable[[Graph, Ints], None]


def check_nothing(graph: Graph, rows: Ints) -> None:
    """The check of a kind that runs wherever a schedule puts it."""


@dataclass(frozen=True)
class Handler:
    """One kind of pass.

    run(state, action, given): does the pass's work and returns its output, a pytree of tensors, or None. `given` is what the
    edge to the pass carries, or None. The interpreter takes the output wherever the schedule's edges carry it.
    check(graph, rows): raises BadInput where the executor cannot run these passes, all that a problem has of the kind.
    takes: what the pass cannot do without: "activation" (on the first stage it reads the batch instead), "gradient" (on the
    last stage the loss gives it), or "" where it needs nothing.
    makes: what its output is called when a number in it is not finite.
    adds_gradients: it adds to the gradients of its stage's parameters.
    uses_weights: it uses the weights of its stage, so it has a version of them where there are updates.
    repeatable: it leaves nothing that stays, so it can run once more (see `optimizer.ahead`).
    only_time: nothing runs; an emulated device gives it a time.
    joins: it begins a collective of all ranks, which ends nowhere before each rank has begun it. So edges between ranks to
    and from it carry nothing. On an emulated device it takes its time from when it has really ended.
    reads: what of the batch it needs of its microbatch ("inputs", "targets"), on whichever rank.
    sliced: it can run for a slice of a sequence.
    helps: the pass that it helps exchanges with it by itself: edges between ranks to and from it carry nothing.
    before_its_pass: what it does is done by the pass of its stage and part that comes behind it. Where that does not come
    right behind, the rank of one that `helps` goes on while its work is done.
    ends_with_step: it sums gradients with other ranks, and when it has ended is known only when the step ends.
    does: what it does beside the passes that compute: with sharded parameters ("gather", "reduce"), so that no one else
    needs to, with what a microbatch keeps ("offload", "reload"), or with a sharded vocabulary ("broadcast",
    "merge", "sum", "embedding").
    release(state, stage): the last pass has ended that an edge from this one goes to.
    settle(state, name, sure): work that pass `name` began is to be done now, for what waits for it or takes what it frees;
    not sure: only if it is done anyway.
    ended(state, action): for a pass that only begins work, while its rank goes on. Asked when the step ends: waits until the
    work is done, and says when that was.
    """

    run: Run
    check: Check = check_nothing
    takes: str = ""
    makes: str = ""
    adds_gradients: bool = False
    uses_weights: bool = False
    repeatable: bool = False
    only_time: bool = False
    sliced: bool = False
    helps: bool = False
    before_its_pass: bool = False
    ends_with_step: bool = False
    joins: bool = False
    reads: str = ""
    does: str = ""
    release: Release | None = None
    settle: Settle | None = None
    ended: Ended | None = None

    @property
    def goes_on(self) -> bool:
        """Does its rank go on while its work is done? (For one that `helps` the action says so.)"""
        return self.ended is not None or self.ends_with_step
