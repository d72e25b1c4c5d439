"""Checkpoints: weights, optimizers, the number of steps and the random states of all ranks. They load under any partition.

Files are in `checkpoint_files`, imported at the first use: torch.distributed.checkpoint takes as long to import as all else.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ...util.errors import BadInput, prefixed
from ..backward.replay import generators_of, random_state, set_random_state
from ..base.values import as_local_of, is_dtensor, local, spread_as
from .gradients import OnRank, together_on_mesh

if TYPE_CHECKING:
    from .checkpoint_files import Reader

WHAT = "checkpoint"
MODEL, LOOP = "model", "loop"
Names = Mapping[nn.Parameter, list[str]]  # a tied parameter has several names
Entries = dict[tuple[str, str], Any]  # (parameter's name, entry of its state) → value
Optimizers = dict[str, list[tuple[Optimizer, Names]]]  # by name, with the names of their parameters


def save(pipeline: OnRank, path: str | os.PathLike[str], **objects: Any) -> None:
    """Write a checkpoint into the folder `path`, whole or not at all; it replaces an older one. Every rank calls this, and
    all ranks see the same file system.

    A checkpoint has the weights and buffers, the number of steps and the seed, the states of random generators, and
    `objects` by name: optimizers of this pipeline's parameters (each rank passes its own; some ranks may pass none), and
    anything else with `state_dict` and `load_state_dict` (the first rank that passes it decides what is loaded). With
    replicas the first pipeline writes. On a mesh each part of a DTensor is written once, and so is what several ranks hold.
    Raises BadInput on all ranks together, and RunFailed.
    """
    from .checkpoint_files import as_tensor, replace_folder, write

    pipeline.finish()
    target = Path(path).resolve()
    new = target.with_name(f".{target.name}.new")
    tensors, writers = dict[str, Tensor](), _Writers.of(pipeline)
    with together_on_mesh(pipeline, WHAT):
        if writers.here:
            tensors, facts = _state(pipeline, objects)
            tensors[f"{LOOP}.{writers.number}"] = as_tensor(facts, WHAT)
            if writers.number == 0:
                _made(new, target)
    if writers.here:
        write(new, tensors, writers.group, pipeline.peers)
    with together_on_mesh(pipeline, WHAT):
        if writers.number == 0 and writers.here:
            replace_folder(new, target)
    if pipeline.replicas is not None and pipeline.mesh is None:
        dist.barrier(group=pipeline.replicas)


def load(pipeline: OnRank, path: str | os.PathLike[str], **objects: Any) -> None:
    """Continue from a checkpoint that `save` wrote, with the same `objects`. Every rank calls this.

    The schedule, the partition, the number of ranks and the mesh may differ. Where they are the same, training continues
    with the same bits. `steps` becomes the number of steps made so far. Saved objects that are not in `objects` are not
    loaded; rank 0 gets a warning that names one. Raises BadInput on all ranks together, also where a state belongs to an
    object of another class.
    """
    from .checkpoint_files import Reader

    pipeline.finish()
    names = [*(_optimizers(pipeline, objects).keys() | objects.keys())]
    with pipeline.peers.telling(WHAT):  # ranks may have different objects
        loaded = {name for of_rank in pipeline.wires.told(names) for name in of_rank}
    with together_on_mesh(pipeline, WHAT):
        _load(pipeline, Reader(Path(path).resolve()), objects, loaded)


def state_dict(pipeline: OnRank) -> dict[str, Any]:
    """This rank's part of the whole model's state dict: the parts of all ranks together are the whole."""
    pipeline.finish()
    return _weights(pipeline)


def load_state_dict(pipeline: OnRank, state: Mapping[str, Any]) -> None:
    """Load this rank's part from a state dict of the whole model, or of this part. Values are whole tensors or DTensors.
    Raises BadInput."""
    own = _weights(pipeline)
    missing = sorted(own.keys() - state.keys())
    if missing:
        raise BadInput(f"state dict: {missing[0]} is missing")
    pipeline.finish()
    parts = {name: spread_as(state[name], like) for name, like in own.items()}
    pipeline.module.load_state_dict(pipeline.whole.own_state(parts))


def _weights(pipeline: OnRank) -> dict[str, Any]:
    """This rank's part of the whole model's weights and buffers. Parameters that are cut over ranks are DTensors."""
    return pipeline.whole.state(pipeline.module.state_dict())


@dataclass(frozen=True)
class _Writers:
    """The ranks that write a checkpoint: the `count` ranks of `group`. number: this rank's, if it is one (`here`)."""

    group: Any
    number: int
    count: int
    here: bool

    @classmethod
    def of(cls, pipeline: OnRank) -> _Writers:
        """All ranks of a mesh, which all call this; without a mesh, the ranks of the first pipeline."""
        if pipeline.mesh is None:
            return cls(pipeline.group, pipeline.rank, pipeline.wires.size, not pipeline.place)
        return cls(pipeline.mesh.everyone, pipeline.mesh.number, pipeline.mesh.whole.size(), True)


def _optimizers(pipeline: OnRank, objects: Mapping[str, Any]) -> Optimizers:
    """The optimizers on this rank. Passes U have one for each stage."""
    names = {p: pipeline.whole.names(known) for p, known in names_of(pipeline.module).items()}
    given = {name: value for name, value in objects.items() if isinstance(value, Optimizer)}
    optimizers: Optimizers = {name: [(optimizer, names)] for name, optimizer in given.items()}
    for optimizer, shown in (pair for part in pipeline.parts for pair in part.optimizers()):
        optimizers.setdefault("update", []).append((optimizer, {own: names[p] for own, p in shown.items()}))
    return optimizers


def _state(pipeline: OnRank, objects: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """This rank's tensors by name, and everything that is no tensor."""
    if {MODEL, LOOP, "update"} & objects.keys():
        raise BadInput(f"save: '{MODEL}', '{LOOP}' and 'update' are names of its own")
    tensors = {f"{MODEL}.{name}": value for name, value in _weights(pipeline).items()}
    facts: dict[str, Any] = {"steps": pipeline.steps, "seed": pipeline.seed, "ranks": _Writers.of(pipeline).count}
    facts |= {"random": random_state(), "entries": {}, "options": {}, "objects": {}}
    facts["generators"] = {name: generator.get_state() for name, generator in generators_of(pipeline.module).items()}
    facts["kinds"] = {key: kinds_of(holder) for key, holder in objects.items()}
    for name, value in tensors.items():
        if not isinstance(value, Tensor):
            raise BadInput(f"save: {name} is no tensor")
    optimizers = _optimizers(pipeline, objects)
    for key, parts in optimizers.items():
        facts["entries"][key], facts["options"][key] = {}, {}
        for optimizer, names in parts:
            facts["kinds"][key] = kinds_of(optimizer)
            facts["options"][key] |= options_of(optimizer, names)
            for (name, entry), value in entries_of(optimizer, names).items():
                if isinstance(value, Tensor) and value.dim():
                    with prefixed(f"save: the optimizer's {entry}"):
                        tensors[f"{key}.{name}.{entry}"] = pipeline.whole.spread(name, value)
                else:
                    facts["entries"][key][name, entry] = local(value) if isinstance(value, Tensor) else value
    for key, holder in objects.items():
        if key not in optimizers:
            facts["objects"][key] = holder.state_dict()
    return tensors, facts


def _made(new: Path, target: Path) -> None:
    """Make an empty folder beside the target, which must be a checkpoint, an empty folder or nothing."""
    if target.exists() and not (target / ".metadata").exists() and not (target.is_dir() and not any(target.iterdir())):
        raise BadInput(f"{target}: cannot write: there is something else, which is no checkpoint")
    try:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    except OSError as error:
        raise BadInput(f"{target}: cannot write: {error.strerror}") from None


def _load(pipeline: OnRank, reader: Reader, objects: Mapping[str, Any], loaded: Set[str]) -> None:
    """Load everything into this rank. loaded: the names of all objects that any rank loads."""
    loops, optimizers = _loops(reader, pipeline.device), _optimizers(pipeline, objects)
    others = objects.keys() - optimizers.keys()
    of_optimizers, of_others = ({key for loop in loops for key in loop[what]} for what in ("options", "objects"))
    missing = sorted((optimizers.keys() - of_optimizers) | (others - of_others))
    if missing:
        raise BadInput(f"{reader.path}: it has no '{missing[0]}'")
    mine_here = [(key, holder) for key, parts in optimizers.items() for holder, names in parts if options_of(holder, names)]
    for key, holder in [*mine_here, *((key, objects[key]) for key in others)]:
        # The first rank that has a part of it names its class; older checkpoints name none.
        having = [loop for loop in loops if loop["options"].get(key) or key in loop["objects"]]
        ours, theirs = kinds_of(holder), next((loop["kinds"][key] for loop in having if "kinds" in loop), None)
        if theirs and not related(ours, theirs):
            raise BadInput(f"{reader.path}: '{key}' is the state of {theirs[0]}, not of {ours[0]}")
    left = sorted((of_optimizers | of_others) - loaded)
    if left and pipeline.rank == 0:
        warnings.warn(f"{reader.path}: it has '{left[0]}' too, which is not loaded", stacklevel=3)
    entries = _entries(reader, optimizers, pipeline)
    weights = {f"{MODEL}.{name}": value for name, value in _weights(pipeline).items()}
    rooms = {f"{key}.{name}.{entry}": room for key, row in entries.items() for (name, entry), room in row.items()}
    reader.into(weights | rooms)
    for key, parts in optimizers.items():
        options: dict[str, Any] = {}
        for loop in loops:
            entries[key] |= loop["entries"].get(key, {})
            options |= loop["options"].get(key, {})
        entries[key] = {(n, e): local(v) if n in pipeline.whole.cut else v for (n, e), v in entries[key].items()}
        for optimizer, names in parts:
            restore(optimizer, names, entries[key], options)
    for key in others:
        objects[key].load_state_dict(next(loop["objects"][key] for loop in loops if key in loop["objects"]))
    pipeline.steps, pipeline.seed = loops[0]["steps"], loops[0]["seed"]
    writers = _Writers.of(pipeline)
    own = loops[writers.number if len(loops) == writers.count else 0]
    set_random_state(own["random"])
    for name, generator in generators_of(pipeline.module).items():
        for state in [loop["generators"][name] for loop in (own, *loops) if name in loop.get("generators", {})][:1]:
            generator.set_state(state)


def _entries(reader: Reader, optimizers: Optimizers, pipeline: OnRank) -> dict[str, Entries]:
    """Empty tensors for what the checkpoint has of these optimizers' parameters. Those of a DTensor are laid out as it is.
    Raises BadInput where the state of a DTensor has another shape."""
    rooms: dict[str, Entries] = {key: {} for key in optimizers}
    for key, parts in optimizers.items():
        own: dict[str, Tensor] = {known[0]: p for _, names in parts for p, known in names.items()}
        own = {name: pipeline.whole.spread(name, p) for name, p in own.items()}
        for name in reader.names:
            parameter, _, entry = name.removeprefix(f"{key}.").rpartition(".")
            if not name.startswith(f"{key}.") or parameter not in own:
                continue
            like, shape = own[parameter], reader.names[name].size
            if is_dtensor(like) and shape != like.shape:
                raise BadInput(f"{reader.path}: {name} has shape {tuple(shape)}, not its DTensor's {tuple(like.shape)}")
            room = reader.empty(name, pipeline.device) if not is_dtensor(like) else None
            if room is None:
                room = as_local_of(torch.empty_like(local(like), dtype=reader.names[name].properties.dtype), like)
            rooms[key][parameter, entry] = room
    return rooms


def _loops(reader: Reader, device: torch.device) -> list[dict[str, Any]]:
    """What each rank wrote beside its tensors, rank by rank. Raises BadInput."""
    from .checkpoint_files import from_tensor

    count = sum(name.startswith(f"{LOOP}.") for name in reader.names)
    if not count:
        raise BadInput(f"{reader.path}: not a checkpoint of a pipeline: {LOOP}.0 is missing")
    names = [name for i in range(count) if (name := f"{LOOP}.{i}") in reader.names]
    bodies = {name: reader.empty(name, torch.device("cpu")) for name in names}
    reader.into(bodies)
    return [from_tensor(body, device) for body in bodies.values()]


def kinds_of(state_holder: Any) -> list[str]:
    """The class names of an object and of its bases, its own first. For an optimizer that wraps another one and has its
    state (`PostValidated`), those of the inner one."""
    inner = getattr(state_holder, "optimizer", None)
    if isinstance(state_holder, Optimizer) and isinstance(inner, Optimizer):
        return kinds_of(inner)
    return [base.__name__ for base in type(state_holder).__mro__ if base is not object]


def related(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """Does one of two classes, given by `kinds_of`, derive from the other? Then each can load the other's state."""
    return ours[0] in theirs or theirs[0] in ours


def names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Parameter → its names in the whole model."""
    known: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        known.setdefault(parameter, []).append(name)
    return known


def entries_of(optimizer: Optimizer, names: Names) -> Entries:
    """(name, entry) → the optimizer's state of each parameter, under all its names."""
    pairs = [(p, name) for p, known in names.items() for name in known]
    return {(name, entry): value for p, name in pairs for entry, value in optimizer.state.get(p, {}).items()}


def options_of(optimizer: Optimizer, names: Names) -> dict[str, dict[str, Any]]:
    """Parameter's name → the options of its group (learning rate, …)."""
    return {
        name: {option: value for option, value in group.items() if option != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in names.get(parameter, ())
    }


def restore(optimizer: Optimizer, names: Names, entries: Entries, options: Mapping[str, dict[str, Any]]) -> None:
    """Give `optimizer` the state of its parameters. A group takes the options of its first parameter that has a name."""
    groups, number = [], 0
    for group in optimizer.param_groups:
        known = [names[parameter][0] for parameter in group["params"] if parameter in names]
        own = {option: value for option, value in group.items() if option != "params"}
        count = len(group["params"])
        groups.append((options.get(known[0], own) if known else own) | {"params": list(range(number, number + count))})
        number += count
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    by_name: dict[str, dict[str, Any]] = {}
    for (name, entry), value in entries.items():
        by_name.setdefault(name, {})[entry] = value.clone() if isinstance(value, Tensor) else value
    for parameter, (name, *_) in names.items():  # load_state_dict would cast it to its parameter's dtype
        if name in by_name:
            optimizer.state[parameter] = by_name[name]
