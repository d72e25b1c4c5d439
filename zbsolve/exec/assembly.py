"""From a schedule and a model to a rank that can run steps: what each rank makes by itself, and what all make together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..build.vocabulary import model_stages
from ..models.model import Place, ties
from ..problem import Problem
from ..util.errors import BadInput
from .backward.by_name import Parts, parts_by_name
from .backward.layer_split import Loss
from .backward.stage import Stage
from .device.rank_device import RankDevice
from .device.rows import DeviceRows
from .emulate import Board, EmulatedDevice, Times
from .feed import ShapeNumbers
from .handlers.handler import RankState
from .handlers.offload import buffers_of
from .handlers.table import HANDLERS, passes_where
from .interpreter import Hooks, Interpreter
from .layers import Layers, build, layer_counts, listed, materialise
from .lowering import lower
from .mesh.place import PipelineMesh
from .mesh.stage_module import Parallelize, parallelized
from .offload.rank import Offload
from .offload.signals import Signals
from .program import Program
from .rank import RankRunner
from .reports import Reports
from .sharding.parameters import Parameter
from .sharding.rank import Sharding, check_beside, sharded_parameters
from .shared import Shared, buckets
from .slices.cutting import Cutting
from .slices.exchange import AttentionPeers
from .slices.loss import SliceLoss
from .slices.stage import StageSlices
from .step_view import StepView
from .transport.cells import shared_cells
from .transport.clocks import clock_lead
from .transport.mailbox import Mailbox
from .transport.peers import Peers
from .transport.wires import Wires
from .untrained import check_untrained, forwards_alone
from .vocabulary.collectives import Collectives
from .vocabulary.parts import NAME, Shard, Sharded, cut_shard
from .vocabulary.rank import VocabularyShard
from .waits import circle
from .weight_versions import Update, WeightVersions

MOST_NAMED = 6  # of what waits for each other


@dataclass(frozen=True)
class Given:
    """What a person gives a pipeline together with its schedule (see `Pipeline`). mesh: this rank's place in it."""

    layers: Layers
    loss: Loss | None
    tied: tuple[Sequence[Place], ...]
    init: Callable[[int, nn.Module], None] | None
    update: Update | None
    device: torch.device
    seed: int
    split: str = "layers"
    mesh: PipelineMesh | None = None
    parallelize: Parallelize | None = None


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank makes by itself. programs: of the ranks whose passes it sees. counts: layers of each stage. layers: this
    rank's, by number; module: the same under their names in the whole model. tied: groups of places that hold one parameter.
    stage_modules: what `parallelize` made of each stage, where there is one. sharded: stage → its parameters that FSDP
    shards, where there are some. vocabulary: this rank's shard, where the vocabulary is sharded. names: of all layers in the
    whole model."""

    view: StepView
    programs: tuple[Program, ...]
    program: Program
    counts: tuple[int, ...]
    layers: dict[int, nn.Module]
    module: nn.ModuleDict
    tied: tuple[Sequence[Place], ...]
    stage_modules: Mapping[int, nn.Module] = field(default_factory=dict)
    sharded: Mapping[int, Sequence[Parameter]] = field(default_factory=dict)
    vocabulary: Shard | None = None
    names: Sequence[str] = ()


def own_part(view: StepView, wires: Wires, given: Given) -> Part:
    """This rank's part. Raises BadInput where the schedule, the model and the process group do not fit each other."""
    problem, whole = view.step, listed(given.layers)
    counts = layer_counts(problem, None if whole is None else len(whole))
    programs = lower(view, training=not forwards_alone(problem))
    if given.device.type == "cuda" and view.part is None and (found := circle(programs)):
        raise BadInput(f"schedule: on GPUs its ranks would wait for each other: {'; '.join(found[:MOST_NAMED])}")
    check_sliced(problem, given.split)
    if wires.size != problem.ranks:
        raise BadInput(f"the schedule is for {problem.ranks} ranks, but the process group has {wires.size}")
    if given.parallelize is not None and given.mesh is None:
        raise BadInput("Pipeline: parallelize is for a mesh: give mesh too")
    if wires.rank not in view.ranks:
        raise BadInput(f"the schedule is the part of rank {view.ranks[0]}, and this is rank {wires.rank}")
    program, tied, how = programs[view.ranks.index(wires.rank)], given.tied, Sharded.of(problem)
    numbers, names = layer_numbers(counts, program.stages), [str(i) for i in range(sum(counts))]
    beside = [] if how is None else how.layers(sum(counts))  # every rank has a shard of these
    if whole is None:
        layers = build(given.layers, sorted({*numbers, *beside}), given.device)  # type: ignore[arg-type]
    else:
        names, parts = list(whole), list(whole.values())
        tied += ties(enumerate(parts))
        layers = materialise(_kept_apart(parts, numbers, beside), given.device, given.init, given.seed, tied)
    check_untrained(problem, counts, program.stages, layers)
    if (how is not None or model_stages(problem) - 1 in program.stages) and given.loss is None:
        raise BadInput(f"Pipeline: rank {wires.rank} has the last stage, and needs a loss")
    shard = None if how is None else _shard(problem, wires.rank, layers, tied, given, names)
    module = nn.ModuleDict({names[i]: layers[i] for i in numbers})
    if shard is not None:
        module[NAME] = shard.module
        tied = tuple(group for group in tied if not shard.has(group))
    return Part(
        view, programs, program, counts, {i: layers[i] for i in numbers}, module, tied, vocabulary=shard, names=names
    )


def _kept_apart(parts: Sequence[nn.Module], numbers: Sequence[int], beside: Sequence[int]) -> dict[int, nn.Module]:
    """The layers of `numbers`, and copies of those `beside` that are not the rank's own, or have no memory yet: a model that
    somebody holds stays as it is."""
    copied = {i: parts[i] for i in beside if i not in numbers or any(p.is_meta for p in parts[i].parameters())}
    return {i: parts[i] for i in numbers} | deepcopy(copied)


def _shard(
    problem: Problem,
    rank: int,
    layers: dict[int, nn.Module],
    tied: Sequence[Sequence[Place]],
    given: Given,
    names: Sequence[str],
) -> Shard:
    """This rank's shard of the vocabulary, cut out of `layers`. Raises BadInput."""
    if given.mesh is not None and given.mesh.others:
        raise BadInput(f"mesh: a sharded vocabulary knows no dimension {given.mesh.others[0]}, only pp and those of data")
    if NAME in names:
        raise BadInput(f"layers: one is called '{NAME}', which is the name of a rank's shard")
    return cut_shard(problem, rank, layers, len(names), given.loss, tied, given.device)


def parallel_part(part: Part, given: Given) -> Part:
    """The part after a person's function has spread its stages over the mesh. Raises BadInput naming the stage."""
    if given.parallelize is None or given.mesh is None:
        return part
    stages = {s: layer_numbers(part.counts, [s]) for s in part.program.stages}
    names = dict(zip(part.layers, part.module, strict=True))
    try:
        layers, modules = parallelized(stages, part.layers, names, given.mesh, given.parallelize)
    except BadInput as error:
        raise BadInput(f"rank {part.program.rank}, {error}") from error
    module = nn.ModuleDict({names[i]: layer for i, layer in layers.items()})
    return replace(part, layers=layers, module=module, stage_modules=modules)


def sharded_part(part: Part, given: Given, replicas: Any, pipeline: Sequence[int]) -> Part:
    """The part with what FSDP shards of it. replicas: the process group of replicas, where there is one. pipeline: the ranks
    of this one. Raises BadInput naming rank and stage where that and what is given do not fit each other."""
    found, rank = dict[int, Sequence[Parameter]](), part.program.rank
    for s in part.program.stages:
        layers = {i: part.layers[i] for i in layer_numbers(part.counts, [s])}
        try:
            parameters = sharded_parameters(s, layers, None if given.mesh is None else given.mesh.data_ranks)
            for one in parameters[:1]:
                check_beside(s, one, pipeline)
        except BadInput as error:
            raise BadInput(f"rank {rank}, {error}") from error
        if not parameters:
            continue
        found[s], where = parameters, f"rank {rank}, stage {s}: layer {parameters[0].layer} is sharded by FSDP"
        if part.view.step.round:
            raise BadInput(f"{where}, but passes U update whole parameters")
        if part.view.step.slices > 1:
            raise BadInput(f"{where}, but sequences are cut into slices")
        if part.vocabulary is not None:
            raise BadInput(f"{where}, but the vocabulary is sharded over the ranks of the pipeline")
        if replicas is not None and given.mesh is None:
            raise BadInput(
                f"{where}, and replicas would average its gradients again: take a mesh of two dimensions for both"
            )
        if replicas is not None and given.parallelize is None:
            raise BadInput(f"{where} before the mesh's pipelines had the same values: do that in parallelize")
    return replace(part, sharded=found)


def check_updates(problem: Problem, update: Update | None, tied: Sequence[Sequence[Place]], replicas: Any) -> None:
    """Raise BadInput where passes U and what is given do not fit each other."""
    updating = problem.round > 0
    if updating and update is None:
        raise BadInput("Pipeline: the schedule has passes U, and needs update, which makes their optimizers")
    if not updating and update is not None:
        raise BadInput("Pipeline: update makes no sense for a schedule without passes U")
    if updating and replicas is not None:
        raise BadInput("Pipeline: passes U update inside a step, before replicas have averaged their gradients")
    if updating and tied:
        raise BadInput(f"Pipeline: layer {tied[0][0][0]}'s {tied[0][0][1]} is tied, which passes U do not know")


def connected(
    part: Part, given: Given, group: Any, wires: Wires, peers: Peers, hooks: Hooks, emulate: Times | None
) -> RankRunner:
    """This rank, connected to the others. wires: the plain ones; `peers` already have the paired ones. All ranks call this.
    Raises LostRank."""
    view, problem, program = part.view, part.view.step, part.program
    stage_of = [s for s, count in enumerate(part.counts) for _ in range(count)]
    exchanged = [action.stage for action in program.actions if HANDLERS[action.kind].ends_with_step]
    common = buckets(problem.stage_ranks, stage_of, part.layers, part.tied)
    gpu = None if given.device.type == "cpu" else RankDevice(given.device, peers, program.actions, hooks)
    shared = Shared(wires, common, exchanged, given.device, peers.timeout, None if gpu is None else gpu.marks)
    if gpu is not None:
        peers.beside.append(shared.close)
    microbatches = problem.round or view.microbatches
    parts = parts_by_name(
        given.split, tight=problem.capacity is not None, alone=given.parallelize is None and not part.sharded
    )
    loss = sliced_loss(problem, given.loss) if part.vocabulary is None else None
    stages = stages_of(part.counts, program.stages, part.layers, loss, microbatches, parts)
    slice_stages(stages, problem, hooks.compare_slices)
    update = given.update
    versions = {} if update is None else {s: WeightVersions(one.parameters(), update) for s, one in stages.items()}
    if emulate is not None:
        board = Board.shared(wires, view.passes)
        hooks.emulated = EmulatedDevice(emulate, view.rows, board, peers.timeout.total_seconds())
    state = RankState(stages, versions, [] if part.sharded else [shared.exchange])
    buffers = buffers_of(program)
    seconds = peers.timeout.total_seconds()
    signals = _signals(part, wires, seconds)
    state.offload = Offload(given.device, buffers, seconds, signals, emulate is not None) if buffers else None
    if part.vocabulary is not None:
        state.vocabulary = _vocabulary(part.vocabulary, problem, group, given.device, peers, hooks)
        if 0 in stages:
            stages[0].embedded = state.vocabulary.embeds(0)
    if passes_where(problem, "helps").any():
        state.attention = _attention(problem, peers, given.device)
    sharding = Sharding.of(part.sharded, program, stages, peers.timeout) if part.sharded else None
    whole = None if given.mesh is None else given.mesh.whole
    rows = None if gpu is None else DeviceRows(peers.wires, gpu.device, gpu.marks)
    mailbox = Mailbox(peers.wires, program.incoming, given.device, seconds, whole, rows)
    return RankRunner(
        schedule=view.schedule,
        module=part.module,
        peers=peers,
        mailbox=mailbox,
        shared=shared,
        sharding=sharding,
        # What FSDP shards is summed over ranks after its shards are there, at the end of the step.
        interpreter=Interpreter(program, state, mailbox, hooks),
        reports=Reports(view, part.programs, peers, clock_lead(wires), emulate is not None, gpu is not None),
        gpu=gpu,
        shapes=ShapeNumbers(problem.routes, range(view.microbatches * problem.slices), wires.rank, wires.size, compared=2),
    )


def _vocabulary(
    shard: Shard, problem: Problem, group: Any, device: torch.device, peers: Peers, hooks: Hooks
) -> VocabularyShard:
    """This rank's shard, connected to the others. All ranks call this."""
    collectives = Collectives.of(group, device, peers.timeout, hooks.emulated)
    peers.beside.append(collectives.break_off)
    return VocabularyShard(shard.homes, shard.output, shard.embedding, collectives, 1 / problem.microbatches)


def _attention(problem: Problem, peers: Peers, device: torch.device) -> AttentionPeers:
    """The exchange of attention with other ranks. Raises BadInput where it does not run."""
    if device.type != "cpu":
        raise BadInput(f"Pipeline: attention for other ranks runs on CPUs alone, and this is the device {device}")
    return AttentionPeers(peers, problem)


def _signals(part: Part, wires: Wires, seconds: float) -> Signals | None:
    """What copies of several ranks tell each other, where some wait for others. All ranks call this."""
    if not any(action.hears for program in part.programs for action in program.actions):
        return None
    problem = part.view.step
    ranks = dict(zip(problem.names, problem.passes.rank.tolist(), strict=True))
    cells = shared_cells(wires, (len(problem.names),), "offload: copies wait for those of other ranks")
    return Signals(cells, problem.index, ranks, seconds)


def layer_numbers(counts: Sequence[int], stages: Sequence[int]) -> list[int]:
    """The numbers of the layers of `stages`. counts: how many each stage has."""
    return [i for s in stages for i in range(sum(counts[:s]), sum(counts[: s + 1]))]


def check_sliced(problem: Problem, split: str) -> None:
    """Raise BadInput for a way to split the backward that does not go with slices."""
    if problem.slices > 1 and split != "layers":
        raise BadInput(f"split: '{split}' does not know slices, whose keys and values lie outside of a layer's graph")


def sliced_loss(problem: Problem, loss: Loss | None) -> Loss | None:
    """The loss of the stages, which run slices or not."""
    return loss if loss is None or problem.slices == 1 else SliceLoss(loss)


def slice_stages(stages: Mapping[int, Stage], problem: Problem, compares: bool = True) -> None:
    """Give the stages the slices of their microbatches, where sequences are cut. compares: see `StageSlices`. Raises
    BadInput."""
    cutting = Cutting.of(problem)
    for stage in stages.values():
        stage.slices = StageSlices(cutting, compares) if cutting.count > 1 else None


def stages_of(
    counts: Sequence[int],
    stages: Sequence[int],
    layers: Mapping[int, nn.Module],
    loss: Loss | None,
    microbatches: int,
    parts: Parts,
) -> dict[int, Stage]:
    """One rank's stages of these layers; the last of all stages gets the loss. microbatches: whose mean gradient is made.
    parts: how layers are split."""
    found = {}
    for s in stages:
        mine, first, last = [layers[i] for i in layer_numbers(counts, [s])], sum(counts[:s]), s == len(counts) - 1
        behind = loss if last else None
        found[s] = Stage(mine, first, behind, 1 / microbatches, parts=parts(mine, first, behind))
    return found
