"""What one rank builds by itself from a schedule and a model, before ranks connect."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

from torch import nn

from ..models.model import ties
from ..util.errors import BadInput
from .backward.stage import Stage
from .connecting import Given, Own
from .graphs.auto import Parts, parts_by_name
from .handlers import BESIDE, MAKE, SPREAD
from .layers import build, check_untrained, forwards_alone, layer_counts, layer_numbers, listed, materialise
from .lowering import lower
from .mesh import parallelized
from .sides import reading
from .step_view import StepView
from .transport.wires import Wires
from .waits import check_ends


def own_part(view: StepView, wires: Wires, given: Given) -> Own:
    """Build this rank's part. Raises BadInput where the schedule, the model and the process group do not fit together."""
    problem, whole = view.step, listed(given.layers)
    counts = layer_counts(problem, None if whole is None else len(whole))
    programs = lower(view, training=not forwards_alone(problem))
    check_ends(programs, given.device)
    if wires.size != problem.ranks:
        raise BadInput(f"the schedule is for {problem.ranks} ranks, but the process group has {wires.size}")
    if given.parallelize is not None and given.mesh is None:
        raise BadInput("Pipeline: parallelize is for a mesh: give mesh too")
    if wires.rank not in view.ranks:
        raise BadInput(f"the schedule is the part of rank {view.ranks[0]}, and this is rank {wires.rank}")
    program, tied = programs[view.ranks.index(wires.rank)], given.tied
    numbers, names = layer_numbers(counts, program.stages), [str(i) for i in range(sum(counts))]
    beside = sorted({i for needed in BESIDE for i in needed(problem, sum(counts))})
    if whole is None:
        layers = build(given.layers, sorted({*numbers, *beside}), given.device)  # type: ignore[arg-type]
    else:
        names, parts = list(whole), list(whole.values())
        tied += ties(enumerate(parts))
        # Layers that other ranks own, or that have no memory yet, are copied: the caller's model stays as it is.
        copied = {i: parts[i] for i in beside if i not in numbers or any(p.is_meta for p in parts[i].parameters())}
        kept = {i: parts[i] for i in numbers} | deepcopy(copied)
        layers = materialise(kept, given.device, given.init, given.seed, tied)
    check_untrained(problem, counts, program.stages, layers)
    if (beside or problem.model_stages - 1 in program.stages) and given.loss is None:
        raise BadInput(f"Pipeline: rank {wires.rank} has the last stage, and needs a loss")
    program = reading(program, {s: [layers[i] for i in layer_numbers(counts, [s])] for s in program.stages})
    module = nn.ModuleDict({names[i]: layers[i] for i in numbers})
    own = Own(view, programs, program, counts, layers, module, tied, names, given.loss)
    for make in MAKE:
        own = make(own, given)
    return own


def parallel_part(own: Own, given: Given) -> Own:
    """This rank's part after `parallelize` was called for each of its stages. Raises BadInput naming the stage."""
    assert given.parallelize is not None
    assert given.mesh is not None
    stages = {s: layer_numbers(own.counts, [s]) for s in own.program.stages}
    names = {i: own.names[i] for i in own.layers}
    try:
        layers = parallelized(stages, own.layers, names, given.mesh, given.parallelize)
    except BadInput as error:
        raise BadInput(f"rank {own.program.rank}, {error}") from error
    module = nn.ModuleDict(dict(own.module.items()) | {names[i]: layer for i, layer in layers.items()})
    own = replace(own, layers=layers, module=module)
    for spread in SPREAD:
        own = spread(own, given)
    return own


def own_stages(own: Own, given: Given, parts: Parts | None = None) -> dict[int, Stage]:
    """This rank's stages; the last stage of the model gets the loss. parts: how to split; None: as `given` says."""
    problem, counts, made = own.view.step, own.counts, dict[int, Stage]()
    if parts is None:
        alone = given.parallelize is None and own.alone
        parts = parts_by_name(given.split, tight=problem.capacity is not None, alone=alone)
    again, share = problem.recomputed, 1 / (problem.round or own.view.microbatches)
    for s in own.program.stages:
        layers, first = [own.layers[i] for i in layer_numbers(counts, [s])], sum(counts[:s])
        behind, n = own.loss if s == len(counts) - 1 else None, again[s] % counts[s] if again else 0
        dropped = parts(layers[:n], first, None) if n else ()
        made[s] = Stage(layers, first, behind, share, parts=[*dropped, *parts(layers[n:], first + n, behind)])
        made[s].dropping = len(dropped) or len(made[s].parts)
    return made
