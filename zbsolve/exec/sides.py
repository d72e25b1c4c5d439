"""Side inputs while a rank runs. What a layer gives beside its output is sent once to each rank that takes it, and stays
there until its last use; its gradients are summed there and sent back once (see `models.sides`, `build.sides`).

When ranks connect, they exchange what their layers give and take. Messages are those on the schedule's edges.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..build.sides import SideInput, rows_begun
from ..features.table import excluded
from ..models.sides import Carried, names_of, outer_names
from ..partition.layer import INPUTS, TARGETS, Names, begun_stages, side_values
from ..problem import Problem
from ..util.errors import BadInput
from .backward.passes import HANDLERS as PLAIN
from .backward.passes import has_backward
from .base.part import Part, RankState, Run
from .base.program import Action, Message, Program
from .base.values import constant, tensors_of, trained
from .connecting import Connecting
from .transport.peers import together


class SideValues:
    """Side inputs of the stages of one process and their gradients, by name and microbatch. stages: by number (see
    `backward.stage`). Values stay until they are removed."""

    def __init__(self, stages: Mapping[int, Any]) -> None:
        self.names = {number: outer_names(stage.layers) for number, stage in stages.items()}
        self.last = {number for number, stage in stages.items() if stage.loss is not None}
        # A pass whose graph is replayed (see `profiler.timing`) has no layers.
        self._begun = {number for number, stage in stages.items() if any(names_of(part).begins for part in stage.layers[:1])}
        self.values: dict[tuple[str, int], Any] = {}
        self.gradients: dict[tuple[str, int], list[Tensor | None]] = {}
        # (name, number of its tensors that need a gradient) for each side input that a stage takes, and that it gives.
        self._got: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self.made: dict[tuple[int, int], list[tuple[str, int]]] = {}
        self._rows: dict[tuple[int, int], int] = {}  # number of tensors in a stage's output that need a gradient

    def into(self, number: int, microbatch: int, x: Any, batch: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The stage's input: `x`, which may bring side inputs, and the side inputs that it takes, also from the `batch`."""
        takes = self.names[number][1]
        if isinstance(x, Carried):
            self.values |= {(name, microbatch): value for name, value in x.sides.items()}
            x = x.row
        x = None if number and number in self._begun else x
        sides = {name: batch[name] if name in batch else self.values[name, microbatch] for name in takes}
        self._got[number, microbatch] = _counted(sides)
        return Carried(x, sides) if takes else x

    def out(self, number: int, microbatch: int, y: Any) -> Any:
        """The output for the next stage. Side inputs that the stage gives stay here."""
        if number in self.last:
            return y
        row, sides = y if isinstance(y, Carried) else (y, {})
        self._rows[number, microbatch], self.made[number, microbatch] = len(trained(row)), _counted(sides)
        self.values |= {(name, microbatch): sides[name] for name in self.names[number][0]}
        return row

    def back_into(self, number: int, microbatch: int, given: Any) -> Any:
        """The gradients of all that the stage gave; None on the stage with the loss. given: of its output, or None."""
        if number in self.last:
            return None
        count = self._rows.pop((number, microbatch))
        gives, gradients = self.names[number][0], list(given or [None] * count)
        for name, count in self.made.pop((number, microbatch), ()):  # side inputs that it took are among its outputs, too
            gradients += self.gradients.pop((name, microbatch), [None] * count) if name in gives else [None] * count
        return gradients

    def back_out(self, number: int, microbatch: int, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients of the stage's input. Those of side inputs are added up here."""
        counts = self._got.pop((number, microbatch))
        at = len(gradients) - sum(count for _, count in counts)
        self.add(counts, microbatch, gradients[at:])
        return gradients[:at]

    def add(self, counts: Sequence[tuple[str, int]], microbatch: int, gradients: Sequence[Tensor | None]) -> None:
        """Add gradients of side inputs. counts: their names and numbers of tensors. None: nothing used the tensor."""
        for name, count in counts:
            more, gradients = gradients[:count], gradients[count:]
            before = self.gradients.get((name, microbatch), [None] * count)
            pairs = zip(before, more, strict=True)
            self.gradients[name, microbatch] = [a if b is None else b if a is None else a + b for a, b in pairs]

    def forget(self) -> None:
        """Drop all microbatches."""
        for by_microbatch in (self.values, self.gradients, self._got, self.made, self._rows):
            by_microbatch.clear()


def _counted(sides: Mapping[str, Any]) -> list[tuple[str, int]]:
    return [(name, len(trained(value))) for name, value in sides.items()]


class Between(NamedTuple):
    """The side inputs between stages. ends: name → giver and takers, in order. some: has the model any, also in a stage?"""

    ends: Mapping[str, SideInput]
    routes: Sequence[Sequence[int]]
    some: bool

    @classmethod
    def of(cls, names: Sequence[Names], counts: Sequence[int], problem: Problem) -> Between:
        """names: of all layers. counts: layers of each stage. Raises BadInput where the schedule does not fit the layers,
        and for features that do not go with side inputs."""
        stage, ends = [s for s, count in enumerate(counts) for _ in range(count)], dict[str, SideInput]()
        for name, (giver, takers) in sorted(side_values(names).items()):
            if later := tuple(sorted({stage[i] for i in takers} - {stage[giver]})):
                ends[name] = SideInput(stage[giver], later)
        if different := sorted({*begun_stages(names, counts)} ^ {*rows_begun(problem)}):
            here, first = different[0], sum(counts[: different[0]])
            does = ("no row", "does") if names[first].begins else ("a row of its own", "does not")
            which = f"stage {here} begins {does[0]}, and layer {first}, its first, {does[1]}"
            raise BadInput(f"schedule: {which}: profile the model and solve again")
        some = any(map(any, names))
        for feature in filter(problem.has, excluded("side inputs") if some else ()):
            raise BadInput(f"side inputs: run knows none beside {feature}")
        return cls(ends, problem.routes, some)

    def ranks(self, name: str, microbatch: int) -> dict[int, tuple[int, ...]]:
        """The ranks that take a side input of a microbatch → the stages there that take it."""
        return dict(self.ends[name].of_ranks(self.routes[microbatch % len(self.routes)]))

    def giver(self, name: str, microbatch: int) -> int:
        """The rank that gives a side input of a microbatch."""
        return self.routes[microbatch % len(self.routes)][self.ends[name].giver]

    def carried(self, message: Message) -> list[str]:
        """The names of the side inputs in a message, or of those whose gradients are in it."""
        rank = message.source if message.gradient else message.destination
        names = [name for name, side_input in self.ends.items() if side_input.giver == message.boundary]
        return [name for name in names if self.ranks(name, message.part).get(rank, (-1,))[0] == message.beside]

    def sent(self, rank: int) -> dict[tuple[int, int, int], str]:
        """What a rank sends to others: (stage, first stage there that takes it, other rank) → a name."""
        return {
            (side_input.giver, stages[0], other): name
            for turn in range(len(self.routes))
            for name, side_input in self.ends.items()
            for other, stages in self.ranks(name, turn).items()
            if self.giver(name, turn) == rank != other
        }


class SideInputs(Part):
    """The side inputs that this rank's stages give or take."""

    name = "side inputs"
    no_capture = "side inputs are handed on by the host"
    no_ahead = "side inputs would be made twice where a step begins again"

    def __init__(self, between: Between, program: Program, stages: Mapping[int, Any]) -> None:
        self.between, self.program, self.here = between, program, SideValues(stages)
        self._back = {(m.boundary, m.beside, m.source) for a in program.actions for m in a.sides if m.gradient}
        self._left: dict[tuple[str, int], int] = {}  # remaining uses of a value on this rank

    @classmethod
    def of(cls, c: Connecting) -> SideInputs | None:
        """The part of a rank, where layers of one stage take what another gives. All ranks call this. Raises BadInput."""
        own = {i: names_of(layer, i) for i, layer in c.own.layers.items()}
        told = c.wires.told([(i, of_layer) for i, of_layer in own.items() if any(of_layer)])
        known = {i: Names(*of_layer) for of_rank in told for i, of_layer in of_rank}
        names = [known.get(i, Names()) for i in range(sum(c.own.counts))]
        between = Between.of(names, c.own.counts, c.problem)
        with together(c.peers, "side inputs") if between.some else nullcontext():
            return cls.checked(between, c.own.program, c.stages)

    @classmethod
    def checked(cls, between: Between, program: Program, stages: Mapping[int, Any]) -> SideInputs | None:
        """The part of one rank. Raises BadInput where the schedule lacks a message that the model needs."""
        wanted = between.sent(program.rank)
        sent = (m for action in program.actions for m in action.sends if m.beside and not m.gradient)
        there = {(m.boundary, m.beside, m.destination) for m in sent}
        if different := sorted(wanted.keys() ^ there):
            (giver, taker, rank), name = different[0], wanted.get(different[0])
            what = "has a side input that the model has not," if name is None else f"has no message of side input '{name}',"
            where = f"from stage {giver} to stage {taker} on rank {rank}"
            raise BadInput(f"schedule: it {what} {where}: profile the model and solve again")
        return cls(between, program, stages) if between.some else None

    def around(self, kind: str, run: Run) -> Run:
        """Around a forward: add the side inputs that its stage takes, store those that it gives; so too for gradients."""

        def forward(state: RankState, action: Action, given: Any) -> Any:
            stage, m, takes = action.stage, action.part, self.here.names[action.stage][1]
            sources = (INPUTS, state.data.inputs), (TARGETS, state.data.targets)
            batch = {name: constant(part.get(m)) for name, part in sources if name in takes}
            x = given if stage or given is not None else state.data.inputs[m]
            x = self.here.into(stage, m, x, batch)
            for name in (taken for taken in takes if taken not in batch):
                self._used(name, m)
            y = self.here.out(stage, m, run(state, action, x))
            for message in (send for send in action.sends if send.beside):
                self._check_gradient(message, action)
            for name in self.here.names[stage][0]:
                if name not in self.between.ends:  # its takers are in this stage
                    self.here.values.pop((name, m), None)
            return () if y is None else y  # at the end of a row of stages, layers may return nothing

        def backward(state: RankState, action: Action, given: Any) -> Any:
            stage, m = action.stage, action.part
            return self.here.back_out(stage, m, run(state, action, self.here.back_into(stage, m, given)))

        return {"activation": forward, "gradient": backward}.get(PLAIN[kind].takes, run) if kind in PLAIN else run

    def _check_gradient(self, message: Message, action: Action) -> None:
        """Raise BadInput unless the schedule has a message for a gradient exactly where the model needs one. It is empty in
        a microbatch that lacks the value (None, or empty)."""
        names = self.between.carried(message)
        values = [self.here.values[name, message.part] for name in names]
        comes = (message.boundary, message.beside, message.destination) in self._back
        lacks = any(not sum(one.numel() for one in tensors_of(value)) for value in values)
        if has_backward(action) and (needed := bool(trained(values))) != comes and not (comes and lacks):
            has, needs = ("no", "one") if needed else ("a", "none")
            there = f"{has} gradient of '{names[0]}' from rank {message.destination}, and the model needs {needs}"
            raise BadInput(f"side inputs: the schedule has {there}: profile it as it is trained now, and solve again")

    def _used(self, name: str, microbatch: int) -> None:
        """Count one use of a value; after the last one it is freed."""
        key, rank = (name, microbatch), self.program.rank
        if key not in self._left:
            ranks = self.between.ranks(name, microbatch)
            away = len(ranks.keys() - {rank}) if self.between.giver(name, microbatch) == rank else 0
            self._left[key] = len(ranks.get(rank, ())) + away
        self._left[key] -= 1
        if not self._left[key]:
            del self._left[key], self.here.values[key]

    def goes(self, message: Message) -> Any:
        """What a message carries: values by name, or their gradients in one row."""
        names, m = self.between.carried(message), message.part
        if message.gradient:
            return tuple(gradient for name in names for gradient in self.here.gradients.pop((name, m), ()))
        values = {name: self.here.values[name, m] for name in names}
        for name in names:
            self._used(name, m)
        return values

    def came(self, message: Message, value: Any) -> None:
        names, m = self.between.carried(message), message.part
        if message.gradient:
            self.here.add(sorted(entry for entry in self.here.made[message.boundary, m] if entry[0] in names), m, value)
        else:
            self.here.values |= {(name, m): value[name] for name in names}

    def begin(self, data: Any) -> None:
        self.forget()

    def forget(self) -> None:
        self.here.forget()
        self._left.clear()

    def for_forwards(self, stages: Mapping[int, Any]) -> SideInputs:
        return SideInputs(self.between, self.program, stages)


def reading(program: Program, stages: Mapping[int, Sequence[nn.Module]]) -> Program:
    """The program, also reading the parts of the batch that layers take as side inputs. stages: stage → its layers."""
    takes = {stage: outer_names(layers)[1] for stage, layers in stages.items()}

    def read(before: Sequence[int], name: str) -> tuple[int, ...]:
        taking = (action for action in program.actions if action.kind in PLAIN and name in takes[action.stage])
        return tuple(sorted({*before, *(action.part for action in taking)}))

    return replace(program, inputs=read(program.inputs, INPUTS), targets=read(program.targets, TARGETS))
