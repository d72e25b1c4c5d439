"""Versions of a stage's weights, as in PipeDream (arXiv 1806.03377) and PipeDream-2BW (arXiv 2006.09503). The layers'
parameters hold one version at a time: that of the current pass, with the gradients of its group. An update works on
parameters of its own, so it changes nothing that a microbatch still needs, or that autograd has saved."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from ..problem import Problem
from ..problem.tables import Bools, Ints
from ..util.errors import BadInput
from .base.handler import Graph, Handler
from .base.part import Part, Run
from .base.program import Action, VersionUse
from .base.torch_private import tree_leaves
from .connecting import Connecting, Given, Own, Update

Spot = tuple[int, int]  # (stage, microbatch)


class Updates(Part):
    """The versions of the weights of a rank's stages, by stage, if passes U update them inside a step."""

    name = "updates"
    no_capture = "passes U update weights inside a step, each time in other memory"
    no_ahead = "the schedule has passes U, which update by themselves"

    def __init__(self, stages: Mapping[int, WeightVersions]) -> None:
        self.stages = stages

    @classmethod
    def of(cls, c: Connecting) -> Updates | None:
        """The part of a rank; None without an `update` function."""
        update, names = c.given.update, {p: name for name, p in c.own.module.named_parameters()}
        if update is None:
            return None
        named = {s: NamedParameters((names.get(p, ""), p) for p in stage.parameters()) for s, stage in c.stages.items()}
        return cls({s: WeightVersions(parameters, update) for s, parameters in named.items()})

    def around(self, kind: str, run: Run) -> Run:
        """While a pass runs that uses weights, its layers hold its version of them."""

        def shown(state: Any, action: Action, given: Any) -> Any:
            use, versions = action.use, self.stages[action.stage]
            if use is not None:
                versions.show(use)
            output = run(state, action, given)
            if use is not None:
                versions.done(use)
            return output

        return run if kind in HANDLERS else shown

    def begin(self, data: Any) -> None:
        for stage in self.stages.values():
            stage.begin()

    def held_bytes(self) -> int:
        return sum(tensor.nbytes for stage in self.stages.values() for kept in stage.kept.values() for tensor in kept)

    def no_activations(self) -> Iterator[Tensor]:
        for stage in self.stages.values():
            yield from stage.tensors()

    def optimizers(self) -> Iterator[tuple[Optimizer, Mapping[nn.Parameter, nn.Parameter]]]:
        for stage in self.stages.values():
            if stage.optimizer is not None:
                yield stage.optimizer, dict(zip(stage.newest, stage.parameters, strict=True))

    def update(self, action: Action) -> None:
        """The pass U of a stage."""
        assert action.use is not None
        self.stages[action.stage].update(action.use)

    def end(self) -> None:
        for stage in self.stages.values():
            stage.end()


class WeightVersions:
    """The versions of one stage's weights. parameters: the trained ones of its layers. update: makes an optimizer (or
    several) of them. kept: version → its tensors, from the update that makes it to the last pass that uses it."""

    def __init__(self, parameters: NamedParameters, update: Update) -> None:
        self.parameters = parameters
        newest = (nn.Parameter(p.data) for p in parameters)  # (detach would share its version counter)
        self.newest = NamedParameters(zip(parameters.names, newest, strict=True))
        self.optimizer = as_one(update(self.newest), "update") if self.newest else None
        self.kept: dict[int, list[Tensor]] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}
        self._shown: tuple[int, int] | None = None

    def begin(self) -> None:
        """A step begins, with the weights that the last one left."""
        self.kept, self._gradients, self._shown = {0: [p.data for p in self.newest]}, {}, None

    def show(self, use: VersionUse) -> None:
        """Before a pass: put its version into the layers, with the gradients of its group so far."""
        if self._shown == (use.version, use.group):
            return
        self._put_away()
        self._shown = use.version, use.group
        gradients = self._gradients.get(use.group, [None] * len(self.parameters))
        for parameter, weights, gradient in zip(self.parameters, self.kept[use.version], gradients, strict=True):
            parameter.data, parameter.grad = weights, gradient

    def done(self, use: VersionUse) -> None:
        """After a pass: drop its version if it is the last pass that uses it."""
        if use.over:
            del self.kept[use.version]

    def update(self, use: VersionUse) -> None:
        """The pass U: make the next version from the newest weights and the mean gradient of its group."""
        self._put_away()
        gradients = self._gradients.pop(use.group)
        needed = use.version - 1 in self.kept
        for parameter, gradient in zip(self.newest, gradients, strict=True):
            if needed:
                parameter.data = parameter.data.clone()
            parameter.grad = gradient
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        if not use.over:
            self.kept[use.version] = [p.data for p in self.newest]

    def end(self) -> None:
        """After a step: put the newest weights into the layers, without gradients."""
        self._put_away()
        for parameter, newest in zip(self.parameters, self.newest, strict=True):
            parameter.data, parameter.grad = newest.data, None

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are kept: weights, gradients and the optimizer's state."""
        state = [] if self.optimizer is None else tree_leaves(list(self.optimizer.state.values()))
        for leaf in (*self.newest, *tree_leaves([*self.kept.values(), *self._gradients.values()]), *state):
            if isinstance(leaf, Tensor):
                yield leaf

    def _put_away(self) -> None:
        if self._shown is not None:
            self._gradients[self._shown[1]] = [p.grad for p in self.parameters]
            self._shown = None


OptimizerState = dict[str, Any]


class NamedParameters(list[nn.Parameter]):
    """Parameters for an optimizer. names: of each in the whole model."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        rows = list(named)
        super().__init__(parameter for _, parameter in rows)
        self.names = [name for name, _ in rows]


def as_one(made: Any, where: str) -> Optimizer:
    """One optimizer from an optimizer or a list. Raises BadInput for anything else, and for a parameter in two of them."""
    if isinstance(made, Optimizer):
        return made
    several = list(made) if isinstance(made, list | tuple) else []
    if not several or not all(isinstance(part, Optimizer) for part in several):
        raise BadInput(f"{where}: a torch optimizer or a list of them is needed, not {str(made)[:60]!r}")
    return Joined(several, where)


class Joined(Optimizer):
    """Several optimizers with different parameters as one. They step one after the other, with their own groups and
    state."""

    def __init__(self, optimizers: Iterable[Optimizer], where: str) -> None:
        self.optimizers = list(optimizers)
        self.defaults: OptimizerState = {}
        parameters = [p for group in self.param_groups for p in group["params"]]
        if len(set(parameters)) < len(parameters):
            raise BadInput(f"{where}: a parameter is in two of the optimizers")
        self.__setstate__({})  # the hooks that every optimizer has

    @property
    def param_groups(self) -> list[OptimizerState]:  # type: ignore[override]
        """The groups of all optimizers, in order."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[nn.Parameter, OptimizerState]:  # type: ignore[override]
        """The state of all optimizers' parameters."""
        return _States(self.optimizers)

    def __setstate__(self, state: OptimizerState) -> None:
        """Hand groups and state, as `load_state_dict` makes them, to the optimizers to which they belong."""
        groups = iter(state.pop("param_groups", ()))
        of_parameters = state.pop("state", None)
        super().__setstate__(state)
        for each_optimizer in self.optimizers if of_parameters is not None else ():
            taken = [next(groups) for _ in each_optimizer.param_groups]
            own = {p: of_parameters[p] for group in taken for p in group["params"] if p in of_parameters}
            each_optimizer.__setstate__({"state": defaultdict(dict, own), "param_groups": taken})

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step every optimizer."""
        for optimizer in self.optimizers:
            optimizer.step()


class _States(MutableMapping[nn.Parameter, OptimizerState]):
    """The state of several optimizers as one mapping."""

    def __init__(self, optimizers: list[Optimizer]) -> None:
        groups = [(optimizer.state, group) for optimizer in optimizers for group in optimizer.param_groups]
        self._of: dict[nn.Parameter, Any] = {p: state for state, group in groups for p in group["params"]}

    def __getitem__(self, parameter: nn.Parameter) -> OptimizerState:
        if parameter not in self._of or parameter not in self._of[parameter]:  # (a defaultdict would make it)
            raise KeyError(parameter)
        return self._of[parameter][parameter]

    def __setitem__(self, parameter: nn.Parameter, value: OptimizerState) -> None:
        self._of[parameter][parameter] = value

    def __delitem__(self, parameter: nn.Parameter) -> None:
        del self._of[parameter][parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return (parameter for parameter, state in self._of.items() if parameter in state)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def check_groups(problem: Problem) -> None:
    """Raise BadInput unless all stages update after the same microbatches, and every update takes equally many."""
    groups = groups_of(problem)
    by_stage = [{m: g for (s, m), g in groups.items() if s == stage} for stage in range(problem.stages)]
    if any(row != by_stage[0] for row in by_stage):
        raise BadInput("updates: every stage must update after the same microbatches")
    sizes = set(np.bincount(list(by_stage[0].values())).tolist())
    if len(sizes) != 1:
        raise BadInput(f"updates: groups of {', '.join(map(str, sorted(sizes)))} microbatches: all must be of one size")


def versions_of(problem: Problem) -> dict[Spot, int]:
    """(stage, microbatch) → the version that it uses: that of the last update for which its forward waits. Microbatches
    that wait for none, and so use the model's own weights, are left out."""
    p, e = problem.passes, problem.edges
    versions: dict[Spot, int] = {}
    rows = np.flatnonzero(p.are("U")[e.before] & p.are("F")[e.after])
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        spot = int(p.stage[b]), int(p.microbatch[b])
        versions[spot] = max(versions.get(spot, 0), int(p.microbatch[a]) + 1)
    return versions


def groups_of(problem: Problem) -> dict[Spot, int]:
    """(stage, microbatch) → the update that waits for its gradients. Raises BadInput for several, or another stage's."""
    p, e = problem.passes, problem.edges
    update = p.are("U")
    rows = np.flatnonzero(~update[e.before] & update[e.after])
    groups: dict[Spot, int] = {}
    for a, b in zip(e.before[rows].tolist(), e.after[rows].tolist(), strict=True):
        spot, number = (int(p.stage[a]), int(p.microbatch[a])), int(p.microbatch[b])
        if p.stage[a] != p.stage[b] or groups.setdefault(spot, number) != number:
            raise BadInput(f"pass {problem.names[a]}: its gradient goes to {problem.names[b]} and to another update")
    return groups


def uses_of(problem: Problem, order: Sequence[str], weighted: Bools) -> dict[str, VersionUse]:
    """Pass → its use of versions, for the passes of one rank in order; empty without updates. All passes of a microbatch use
    the version of its forward (see `versions_of`). weighted: which passes of the problem use weights, shape (passes,).
    Raises BadInput where a gradient goes to no update, or updates are out of order."""
    p, groups, version = problem.passes, groups_of(problem), versions_of(problem)
    if not groups:
        return {}
    update, uses = p.are("U"), dict[str, VersionUse]()
    last: dict[tuple[int, int], str] = {}
    made = [0] * problem.stages
    for name in order:
        row = problem.index[name]
        stage, microbatch = spot = int(p.stage[row]), int(p.microbatch[row])
        if update[row]:
            if microbatch != made[stage]:
                raise BadInput(f"pass {name}: updates of stage {stage} must run in turn, from 0")
            made[stage] += 1
            uses[name] = VersionUse(made[stage], microbatch, False)
        elif weighted[row]:
            if spot not in groups:
                raise BadInput(f"pass {name}: its gradient goes to no update")
            uses[name] = VersionUse(version.get(spot, 0), groups[spot], False)
        else:
            continue
        last[stage, uses[name].version] = name
    return uses | {name: replace(uses[name], over=True) for name in last.values()}


def _check(graph: Graph, rows: Ints) -> None:
    """Check that groups of microbatches are equal on all stages, and a stage with updates is on one rank."""
    check_groups(graph.problem)
    for _, update in graph.each(rows):
        homes = graph.problem.stage_ranks[update.stage]
        if len(homes) > 1:
            raise BadInput(f"pass {update.name}: its stage is on ranks {homes}; updates need it on one")


def checked(own: Own, given: Given) -> Own:
    """`own` itself. Raises BadInput where passes U and the arguments of `Pipeline` do not fit together."""
    updating, (layer, name) = own.view.step.round > 0, own.tied[0][0] if own.tied else (0, "")
    for refused, why in (
        (updating and given.update is None, "the schedule has passes U, and needs update, which makes their optimizers"),
        (not updating and given.update is not None, "update makes no sense for a schedule without passes U"),
        (updating and given.replicas, "passes U update inside a step, before replicas have averaged their gradients"),
        (updating and own.tied, f"layer {layer}'s {name} is tied, which passes U do not know"),
    ):
        if refused:
            raise BadInput(f"Pipeline: {why}")
    return own


HANDLERS = {"U": Handler(lambda state, action, _: state.part(Updates).update(action), _check)}
