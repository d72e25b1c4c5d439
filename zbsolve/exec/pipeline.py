"""`Pipeline`: one rank's part of a model, trained by a schedule, in a person's own loop."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..errors import BadInput
from ..problem import KINDS
from ..schedule import Schedule
from ..timeline import Timeline
from ..trace import Trace
from .ahead import Ahead
from .comm import Links
from .emulate import Board, Device, Times, sleep_until
from .feed import Batch, Shapes, split, step_seed
from .gather import Exchange, Seen, trace_of
from .groups import group_size
from .layers import Layers, Place, build, layer_counts, listed, materialise, ties
from .lower import Message, lower, microbatches, routes, stage_ranks
from .memory import LiveBytes, Memory, predicted
from .peers import Peers, agreed, content
from .replicas import Replicas
from .shared import Shared, buckets
from .stage import Loss, Stage
from .versions import Update, Versions
from .walk import Data, Hooks, Record, Walker
from .wires import Wires, clock_lead, receive_bytes, send_bytes


@dataclass(frozen=True)
class StepResult:
    """One training step. `memory`: this rank's, where it was asked for. `seen`: what all ranks saw of it."""

    seen: Seen = field(repr=False)
    memory: Memory | None

    @property
    def loss(self) -> float:
        """The mean of the microbatches' losses, on every rank. Waits until all ranks have ended the step."""
        return self.seen.loss

    @property
    def timeline(self) -> Timeline:
        """When each pass of every rank ran, µs since the first rank began. Waits until all ranks have ended the step."""
        return self.seen.timeline


class Pipeline:
    """This rank's stages of a model, and the program that a schedule makes of them.

    layers: the whole model as an nn.Sequential or a list of layers, or a builder that is called with the numbers of the
    layers that this rank owns. A rank keeps only those; a model on the meta device is materialised only there (see
    `layers.materialise` for `init`, `seed`). How many layers a stage holds is the problem's `layers`. loss(output, target):
    a mean, one number; needed on ranks of the last stage. group: the process group with one process a rank of the
    schedule (the default group without). tied: groups of (layer, name) that hold one parameter; found by itself where
    `layers` is a list. timeout: seconds to wait for any message in a step (while the ranks build, the process group's own
    timeout holds). hooks: see `walk.Hooks`. watch: look for NaN and inf in all that passes make, and name the first.
    emulate: times that passes and messages take in place of this machine's (see `emulate`). replicas: for data
    parallelism, the process group of the ranks with the same stages in all pipelines, in one order everywhere (`group`
    is this pipeline's own): `.grad` becomes the mean over them. Any optimizer of torch's waits for that before it steps; who
    reads gradients otherwise calls `wait_gradients`. Losses, times and memory are this pipeline's.
    update: for a schedule with passes U: makes a torch optimizer of a stage's parameters; `step` then updates by itself,
    and leaves no gradients.

    Every rank of the group makes one, with the same schedule. Raises BadInput where something does not fit, on all ranks
    also where it does not fit on one, and RunFailed where a rank fails. After RunFailed the process group is of no use.

    The gradient of the mean loss is added to `.grad` of this rank's parameters; any optimizer may update them. Random
    layers (dropout) draw from numbers that (seed, step, microbatch, layer) fix, whatever the placement; `steps` counts
    the steps, and is to be set where training goes on from a checkpoint. On a GPU times are when the host launched.
    """

    def __init__(
        self,
        layers: Layers,
        schedule: Schedule,
        *,
        loss: Loss | None = None,
        group: Any = None,
        device: torch.device | str = "cpu",
        init: Callable[[int, nn.Module], None] | None = None,
        tied: Sequence[Sequence[Place]] = (),
        seed: int = 0,
        timeout: float = 300.0,
        hooks: Hooks | None = None,
        emulate: Times | None = None,
        watch: bool = False,
        replicas: Any = None,
        update: Update | None = None,
    ) -> None:
        self.schedule, self.seed, self.steps = schedule, seed, 0
        self.device = torch.device(device)
        self.wires = Wires.of(group, self.device)
        self.rank = self.wires.rank
        self.peers = Peers(self.wires, timeout)
        self.hooks = hooks or Hooks()
        self.hooks.watch |= watch
        with agreed(self.wires, "schedule", content(schedule)):
            groups = self._build(layers, loss, [*tied], init)
            self._check_updates(update, groups, replicas)
        with self.peers.telling("building"):
            self._connect(group, groups, loss, emulate, update)
            self.replicas = None if replicas is None else self._replicated(replicas)
            self.place = 0 if self.replicas is None else self.replicas.place

    def _build(
        self, layers: Layers, loss: Loss | None, groups: list[Any], init: Callable[[int, nn.Module], None] | None
    ) -> list[Any]:
        """What this rank does by itself; the groups of tied parameters."""
        problem = self.schedule.problem
        whole = listed(layers)
        self.counts = layer_counts(problem, None if whole is None else len(whole))
        self.homes = stage_ranks(problem)
        programs = lower(self.schedule)
        if self.wires.size != problem.ranks:
            raise BadInput(f"the schedule is for {problem.ranks} ranks, but the process group has {self.wires.size}")
        self.programs, self.program = programs, programs[self.rank]
        self.inputs, self.targets = self.program.inputs, self.program.targets
        self.microbatches = microbatches(problem)
        self.owners = [ranks for s, ranks in enumerate(self.homes) for _ in range(self.counts[s])]
        numbers = layer_numbers(self.counts, self.program.stages)
        called = [str(i) for i in range(sum(self.counts))]
        if whole is None:
            self.layers = build(layers, numbers, self.device)  # type: ignore[arg-type]
        else:
            called, parts = list(whole), list(whole.values())
            groups += ties(enumerate(parts))
            self.layers = materialise({i: parts[i] for i in numbers}, self.device, init, self.seed)
        self.module = nn.ModuleDict({called[i]: layer for i, layer in self.layers.items()})
        if len(self.homes) - 1 in self.program.stages and loss is None:
            raise BadInput(f"Pipeline: rank {self.rank} has the last stage, and needs a loss")
        return groups

    def _check_updates(self, update: Update | None, groups: Sequence[Sequence[Place]], replicas: Any) -> None:
        updating = (self.schedule.problem.passes.kind == KINDS.index("U")).any()
        if updating and update is None:
            raise BadInput("Pipeline: the schedule has passes U, and needs update, which makes their optimizers")
        if not updating and update is not None:
            raise BadInput("Pipeline: update makes no sense for a schedule without passes U")
        if updating and replicas is not None:
            raise BadInput("Pipeline: passes U update inside a step, before replicas have averaged their gradients")
        if updating and groups:
            raise BadInput(f"Pipeline: layer {groups[0][0][0]}'s {groups[0][0][1]} is tied, which passes U do not know")

    def _connect(
        self, group: Any, groups: list[Any], loss: Loss | None, emulate: Times | None, update: Update | None
    ) -> None:
        """What all ranks do together."""
        problem = self.schedule.problem
        edges = {(source, p.rank): len(sent) for p in self.programs for source, sent in p.incoming.items()}
        self.peers.wires = carriers = self.wires.paired(group, self.device, edges)
        weakref.finalize(self, carriers.close)
        stage_of = [s for s, count in enumerate(self.counts) for _ in range(count)]
        exchanged = [action.stage for action in self.program.actions if action.kind == "C"]
        common = buckets(self.homes, stage_of, self.layers, groups)
        self.shared = Shared(self.wires, common, exchanged, self.device, group, self.peers.timeout)
        self.stages = stages_of(self.counts, self.program.stages, self.layers, loss, group_size(problem))
        self.versions = {} if update is None else {s: Versions(one.parameters(), update) for s, one in self.stages.items()}
        if emulate is not None:
            self.hooks.emulated = Device(emulate, problem.names, Board.shared(self.wires, len(problem.names)))
        self.links = Links(carriers, self.program.incoming, self.device, self.peers.timeout.total_seconds())
        self.walker = Walker(self.program, self.stages, self.links, self.hooks, self.shared.exchange, self.versions)
        self.exchange = Exchange(self.schedule, self.programs, self.peers, clock_lead(self.wires))
        self.shapes = Shapes(routes(problem), self.microbatches, self.rank, self.wires.size)
        self._before: Seen | None = None
        self._ahead: Ahead | None = None

    def _replicated(self, group: Any) -> Replicas:
        """Stages give their gradients to the other pipelines when they are done; optimizers wait for them."""
        stages = {s: stage.parameters() for s, stage in self.stages.items()}
        result = Replicas(group, self.module, stages, self.shared.parameters(), content(self.schedule))
        given, me = self.hooks.done, weakref.ref(self)

        def done(stage: int) -> None:
            result.done(stage)
            if given is not None:
                given(stage)

        def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            one = me()
            if one is not None and result.concerns(optimizer):
                one.wait_gradients()

        self.hooks.done = done
        weakref.finalize(self, register_optimizer_step_pre_hook(before).remove)
        return result

    def wait_gradients(self) -> None:
        """Until `.grad` is the mean over all replicas of the pipeline. Raises RunFailed."""
        if self.replicas is not None:
            with self.peers.telling("mean of gradients"):
                self.replicas.wait(self.peers.timeout)

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once: for the optimizer."""
        return self.module.parameters()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """With the names that they have in the whole model."""
        return self.module.named_parameters()

    def run_ahead(self, ahead: Ahead) -> None:
        """From now on begin steps before the optimizer's last one is validated (see `PostValidated`)."""
        if self.versions:
            raise BadInput("PostValidated: the schedule has passes U, which update by themselves")
        self._ahead, self.program, self.walker.program = ahead, ahead.cut.program, ahead.cut.program

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the whole model's state dict: the parts of all ranks together are the whole."""
        self._finish()
        state: dict[str, Any] = self.module.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take this rank's part out of a state dict of the whole model or of this part. Raises BadInput."""
        mine = self.module.state_dict()
        missing = sorted(mine.keys() - state.keys())
        if missing:
            raise BadInput(f"state dict: {missing[0]} is missing")
        self._finish()
        self.module.load_state_dict({name: state[name] for name in mine})

    def _finish(self) -> None:
        if self._ahead is not None:
            self._ahead.optimizer.finish()

    def step(self, inputs: Batch | None = None, targets: Batch | None = None, *, memory: bool = False) -> StepResult:
        """Forward and backward of one batch: the gradient of its mean loss is added to `.grad`.

        inputs, targets: the batch (split into equal microbatches along dimension 0), or a microbatch each; shapes may
        differ from one to the next. Inputs are read on ranks of the first stage, targets on those of the last; as a
        mapping they need to hold only the microbatches that run there (`self.inputs`, `self.targets`). memory:
        count bytes (slow). Raises BadInput, and RunFailed naming rank, pass and cause.
        """
        data = Data(
            split(inputs, "inputs", self.inputs, self.microbatches, self.device),
            split(targets, "targets", self.targets, self.microbatches, self.device),
            step_seed(self.seed, self.steps) + self.place * len(self.microbatches),
        )
        self.wait_gradients()
        self.steps += 1
        with self.peers.telling(f"pass {self.program.actions[0].name}"):
            self.links.begin(self.shapes.agree(self.links, data.inputs, self.device))
        with self.peers.telling("end of the step"):
            return self._run(data, memory)

    def _run(self, data: Data, memory: bool) -> StepResult:
        record, counted = self._metered(data) if memory else (self._walk(data), None)
        if self._ahead is None:  # else nothing may wait here: the next step begins, and what is on its way arrives in it
            self.links.flush()
            self._hear()
        self._exchanged(record, self.shared.finish())
        if self.replicas is not None:
            self.replicas.rest()
        for versions in self.versions.values():
            versions.end()
        loss = torch.stack(record.losses).double().sum() if record.losses else None
        self._before = self.exchange.start(record, loss)
        return StepResult(self._before, counted)

    def trace(self, results: Sequence[StepResult], memory: Memory, facts: dict[str, Any]) -> Trace | None:
        """A trace of these steps on rank 0, None on the others; every rank calls it, with its own `memory`."""
        if self.rank:
            send_bytes(self.wires, json.dumps(memory.__dict__).encode(), 0)
            return None
        others = [json.loads(receive_bytes(self.wires, rank)) for rank in range(1, self.wires.size)]
        return trace_of(self.schedule, [r.seen for r in results], [memory, *(Memory(**one) for one in others)], facts)

    def _exchanged(self, record: Record, ended: Mapping[int, int]) -> None:
        """A pass C ends when its sum is there, on an emulated device after its time."""
        for i, action in enumerate(self.program.actions):
            if action.kind == "C":
                record.end[i] = ended.get(action.stage, record.end[i])
                if self.hooks.emulated is not None:
                    record.end[i] = max(record.end[i], sleep_until(self.hooks.emulated.ran_beside(action.name)[1]))

    def _size(self, message: Message) -> int:
        local = message.source == message.destination
        return self.walker.handed_bytes[message.after] if local else self.links.size(message)

    def _walk(self, data: Data, meter: LiveBytes | None = None) -> Record:
        """The passes of a step."""
        record, done = self.walker.begin(), 0
        if self._ahead is not None:
            done = self._ahead.run(self.walker, self.links, data, record, meter)
            self._hear()
        self.shared.begin()  # not before: the last step's gradients may have been needed once more
        self.walker.walk(self.program.actions[done:], data, record, meter)
        return record

    def _hear(self) -> None:
        """Until all ranks have ended the step before: the times of one only are on their way."""
        if self._before is not None:
            self._before.wait()

    def _metered(self, data: Data) -> tuple[Record, Memory]:
        meter = LiveBytes([*self.module.parameters(), *self.module.buffers()])
        meter.ignore([*data.inputs.values(), *data.targets.values()])
        with meter:
            record = self._walk(data, meter)
        names = tuple(action.name for action in self.program.actions)
        curve = predicted(self.schedule.problem, self.program, self._size)
        return record, Memory(names, tuple(record.held), curve, meter.most)


def layer_numbers(counts: Sequence[int], stages: Sequence[int]) -> list[int]:
    """The numbers of the layers of `stages`; `counts`: how many each stage has."""
    return [i for s in stages for i in range(sum(counts[:s]), sum(counts[: s + 1]))]


def stages_of(
    counts: Sequence[int], stages: Sequence[int], layers: Mapping[int, nn.Module], loss: Loss | None, microbatches: int
) -> dict[int, Stage]:
    """One rank's stages of these layers; the last of all gets the loss."""
    return {
        s: Stage(
            [layers[i] for i in layer_numbers(counts, [s])],
            sum(counts[:s]),
            loss if s == len(counts) - 1 else None,
            1 / microbatches,
        )
        for s in stages
    }
