"""`Sharding`: the stages of a rank whose parameters FSDP shards. AG and AGB gather a stage's parameters, RS reduces its
gradients. These passes only start the work: a pass that uses the weights waits for the gather, and code that reads gradients
waits for the reduction. Where nothing is sharded, these passes only take time on emulated devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...build.vocabulary import barriers_of
from ...problem.tables import Ints
from ...util.errors import BadInput
from ..backward.passes import HANDLERS as PLAIN
from ..base.handler import Graph, Handler
from ..base.part import Part, RankState, Run
from ..base.program import Action
from ..base.torch_private import fsdp_together
from ..base.values import local, wrapped_modules
from ..connecting import Connecting, Given, Own
from ..layers import layer_numbers
from ..mesh import ranks_along
from ..transport.wires import all_of, break_off_groups, digest
from .stage import Parameter, ShardedStage, parameters_of_module, trained

DOES = {"AG": "gather", "AGB": "gather", "RS": "reduce"}
Layers = Mapping[int, nn.Module]


def sharded_parameters(stage: int, layers: Layers, data: Collection[int] | None = None) -> list[Parameter]:
    """All parameters of a stage that FSDP shards. layers: of the stage, by number. data: the ranks over which the gradients
    of all other parameters are averaged; None: they are not. Raises BadInput where some trained parameters are neither
    sharded nor averaged, or are sharded over other ranks than the rest, or several modules are wrapped as one."""
    pairs = [(i, module) for i, layer in layers.items() for module in wrapped_modules(layer)]
    sharded = [shard for i, module in pairs for shard in parameters_of_module(i, module)]
    if not sharded:
        return []
    for i, module in pairs:
        if fsdp_together(module) > 1:
            raise BadInput(f"stage {stage}: layer {i}: fully_shard wrapped several modules as one: call it on each of them")
    known = {id(shard.sharded) for shard in sharded}
    for i, layer in layers.items():
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in known and data is None:
                raise BadInput(
                    f"stage {stage}: layer {i}'s {name} is not sharded, but layer {sharded[0].layer} is: call fully_shard "
                    "on every layer of a stage, or on none"
                )
    for shard in sharded:
        if data is not None and not set(data) <= set(shard.mesh_ranks):
            raise BadInput(
                f"stage {stage}: layer {shard.layer} is sharded over ranks {_listed(shard.mesh_ranks)}, but the batch is "
                f"divided over ranks {_listed(data)}: give fully_shard a mesh of all of these dimensions"
            )
        if sorted(shard.mesh_ranks) != sorted(sharded[0].mesh_ranks):
            raise BadInput(
                f"stage {stage}: layer {shard.layer} is sharded over ranks {_listed(shard.mesh_ranks)}, but layer "
                f"{sharded[0].layer} over ranks {_listed(sharded[0].mesh_ranks)}"
            )
    return sharded


def check_beside(stage: int, parameter: Parameter, pipeline: Collection[int]) -> None:
    """Raise BadInput where a stage is sharded over ranks of its own `pipeline`, which have other stages."""
    ranks = parameter.mesh_ranks
    if both := [rank for rank in ranks if rank in pipeline and rank != dist.get_rank()]:
        raise BadInput(
            f"stage {stage}: layer {parameter.layer} is sharded over ranks {_listed(ranks)}, but rank {both[0]} has other "
            "stages of the same pipeline: give fully_shard a mesh of the ranks with this stage"
        )


def _listed(ranks: Iterable[int]) -> str:
    return ", ".join(map(str, ranks))


class ShardedParameters(dict[int, Sequence[Parameter]]):
    """Stage → its parameters that FSDP shards."""


class Sharding(Part):
    """The sharded stages of a rank, by number. place: this rank's number among the `ranks` of the mesh over which the first
    of them is sharded. timeout: to wait for these ranks."""

    name, no_capture = "sharding", "FSDP gathers parameters on the host's word"
    no_ahead = "parameters are sharded by FSDP: what a step gathers would be validated too late"

    def __init__(self, stages: Mapping[int, ShardedStage], timeout: timedelta) -> None:
        self.stages, self.timeout = stages, timeout
        first = next(iter(stages.values())).parameters[0]
        self.ranks, self.device = first.mesh_ranks, local(first.sharded.detach()).device
        self.place = self.ranks.index(dist.get_rank())
        self.groups = list({id(g): g for s in stages.values() for p in s.parameters for g in _groups(p)}.values())
        self._mine = {id(p) for s in stages.values() for p in trained(s.parameters)}

    @classmethod
    def of(cls, c: Connecting) -> Sharding | None:
        """The part of a rank; None where FSDP shards nothing. From now on, sharded stages gather their parameters here."""
        sharded, actions, made = c.made(ShardedParameters), c.own.program.actions, dict[int, ShardedStage]()
        if not sharded:
            return None
        for s, parameters in sharded.items():
            does = frozenset(DOES[action.kind] for action in actions if action.stage == s and action.kind in DOES)
            modules = [module for layer in c.stages[s].layers for module in wrapped_modules(layer)]
            made[s] = ShardedStage(s, modules, parameters, c.peers.timeout, does)
            if "gather" not in does:
                made[s].last = [action.name for action in actions if action.stage == s and action.kind in PLAIN][-1]
        order = [made[s] for s in dict.fromkeys(action.stage for action in actions) if s in made]
        for sharded_stage, following in zip(order, order[1:], strict=False):
            sharded_stage.following = None if "gather" in following.by_passes else following
        for stage in order:
            stage.beside = order
        return cls(made, c.peers.timeout)

    def around(self, kind: str, run: Run) -> Run:
        """A pass that uses weights waits for their gather."""

        def gathered(state: RankState, action: Action, given: Any) -> Any:
            if (stage := self.stages.get(action.stage)) is None:
                return run(state, action, given)
            stage.weights()
            output = run(state, action, given)
            if PLAIN[kind].adds_gradients:
                stage.added()
            elif action.name == stage.last:
                stage.close()
            return output

        return gathered if kind in PLAIN else run

    def begin(self, data: Any) -> None:
        for stage in self.stages.values():
            stage.times.clear()

    def done(self, stage: int) -> None:
        if stage in self.stages:
            self.stages[stage].done()

    def held_bytes(self) -> int:
        return sum(stage.held_bytes for stage in self.stages.values())

    def no_activations(self) -> Iterable[Tensor]:
        return (tensor for stage in self.stages.values() for tensor in stage.tensors())

    def for_forwards(self, stages: Mapping[int, Any]) -> Part:
        """Stages gather as in a step, and release everything at the end of a round."""
        return Sharding(self.stages, self.timeout)

    def end(self) -> None:
        for stage in self.stages.values():
            stage.close()

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        if all(stage.reduction is None for stage in self.stages.values()):
            return False
        return any(id(p) in self._mine for group in optimizer.param_groups for p in group["params"])

    def wait_gradients(self) -> None:
        for stage in self.stages.values():
            stage.reduced()

    def check_alike(self, content: str) -> None:
        wrong: list[str] = []  # raised once all ranks have compared
        for number, stage in self.stages.items():
            mesh = stage.parameters[0].mesh_ranks
            mark = digest(json.dumps([content, number, mesh, [list(p.shape) for p in trained(stage.parameters)]]))
            for group in _groups(stage.parameters[0]):
                own = torch.tensor([number, mark], device=stage.parameters[0].sharded.device)
                ranks = dist.get_process_group_ranks(group)
                others = all_of(group, own, f"comparison of what is sharded over ranks {_listed(ranks)}", self.timeout)
                for rank, (other, what) in zip(ranks, others.tolist(), strict=True):
                    if other != number:
                        wrong.append(f"stage {number}: it is sharded with rank {rank}, which has stage {other} there")
                    elif what != mark:
                        wrong.append(
                            f"stage {number}: it is sharded with rank {rank}, whose schedule, layers or mesh differ"
                        )
        if wrong:
            raise BadInput(wrong[0])

    def break_off(self) -> None:
        break_off_groups(self.groups, self.device)


def with_sharded(own: Own, given: Given) -> Own:
    """`own`, with the parameters that FSDP shards. Raises BadInput naming rank and stage where sharding does not fit."""
    sharded, rank = ShardedParameters(), own.program.rank
    pipeline = dist.get_process_group_ranks(given.group)
    for s in own.program.stages:
        layers, mesh = {i: own.layers[i] for i in layer_numbers(own.counts, [s])}, given.mesh
        try:
            parameters = sharded_parameters(s, layers, None if mesh is None else ranks_along(mesh.whole, mesh.data))
            for parameter in parameters[:1]:
                check_beside(s, parameter, pipeline)
        except BadInput as error:
            raise BadInput(f"rank {rank}, {error}") from error
        if not parameters:
            continue
        sharded[s], step = parameters, own.view.step
        for refused, why in (
            (step.round, ", but passes U update whole parameters"),
            (step.slices > 1, ", but sequences are cut into slices"),
            (barriers_of(step), ", but the vocabulary is sharded over the ranks of the pipeline"),
            (
                given.replicas is not None and given.mesh is None,
                ", and replicas would average its gradients again: take a mesh of two dimensions for both",
            ),
            (
                given.replicas is not None and given.parallelize is None,
                " before the mesh's pipelines had the same values: do that in parallelize",
            ),
        ):
            if refused:
                raise BadInput(f"rank {rank}, stage {s}: layer {parameters[0].layer} is sharded by FSDP{why}")
    return replace(own, alone=own.alone and not sharded, made={**own.made, ShardedParameters: sharded})


def _groups(parameter: Parameter) -> list[Any]:
    return [group for group in (parameter.shard_group, parameter.replica_group) if group is not None]


def _ask(state: RankState, number: int, does: Callable[..., Any], *given: Any) -> Any:
    """Call a method of a sharded stage for a pass; None where its parameters are whole."""
    sharding = state.find(Sharding)
    stage = None if sharding is None else sharding.stages.get(number)
    return None if stage is None else does(stage, *given)


def _ended(state: RankState, action: Action) -> int:
    return _ask(state, action.stage, ShardedStage.ended, action.name) or 0


def _check_gather(graph: Graph, rows: Ints) -> None:
    """Check that each gather has users, all on its own rank."""
    problem, edges = graph.problem, graph.problem.edges
    for row, gather in graph.each(rows):
        users = edges.after[edges.before == row]
        if not len(users):
            raise BadInput(f"pass {gather.name}: no edge says what it gathers for")
        if (problem.passes.rank[users] != gather.rank).any():
            raise BadInput(f"pass {gather.name}: it gathers for a pass of another rank")


def _check_reduce(graph: Graph, rows: Ints) -> None:
    """Check that a stage reduces once on each of its ranks, after all of its gradients there."""
    problem = graph.problem
    last = "W" if "W" in problem.passes.kinds else "BW"
    seen: dict[tuple[int, int], str] = {}
    for row, reduce in graph.each(rows):
        other = seen.setdefault((reduce.stage, reduce.rank), reduce.name)
        if other != reduce.name:
            raise BadInput(f"pass {reduce.name}: {other} reduces the same gradients")
        for gradient in problem.rows(last, stage=reduce.stage, rank=reduce.rank).tolist():
            graph.check_order(reduce, gradient, row)


_GATHER = Handler(
    lambda state, action, _: _ask(state, action.stage, ShardedStage.gather, action.name),
    _check_gather,
    release=lambda state, stage: _ask(state, stage, ShardedStage.release),
    ended=_ended,
)
_REDUCE = Handler(
    lambda state, action, _: _ask(state, action.stage, ShardedStage.reduce, action.name),
    _check_reduce,
    ended=_ended,
)
HANDLERS = {"AG": _GATHER, "AGB": _GATHER, "RS": _REDUCE}
