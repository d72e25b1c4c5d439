"""`Pipeline`: one rank's part of a model, trained by a schedule inside a person's own training loop."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..long_steps.check import RankPart
from ..models.model import Place
from ..schedule import Schedule
from ..schedule.trace import SLACK, Switch, Trace
from ..util.errors import BadInput
from .ahead import Ahead
from .assembly import connected
from .backward.layer_split import Loss
from .backward.stage import Stage
from .base.part import Hooks, Part, asked
from .base.torch_private import default_group
from .choices import RUN_SPLITS, group_device, merged, with_number
from .connecting import Given, Own, OwnWork, Update
from .device.capture import destroy
from .emulate import Times
from .exchange import begin_alike, check_same, optimizers_wait
from .feed import Batch, agreed_shares, checksum, shares_of, split_batch, step_seed
from .graphs.auto import decisions_of
from .handlers import passes_where
from .layers import Layers, check_untrained, forwards_alone
from .loop import checkpoint, evaluation, gradients, watching
from .lowering import lower
from .memory import Memory
from .mesh import Parallelize, pipeline_mesh
from .own import own_part, parallel_part
from .reports import StepResult, gathered, put_together, trace_of
from .slack import Slack, check_slack
from .slices.cutting import Counting, Cutting
from .step_view import StepView
from .transport.peers import Peers, agreed, shared_cells, together
from .transport.wires import Wires


def _check_device(device: torch.device, emulate: Times | None, split: str, capture: bool) -> None:
    """Make a GPU the current device. Raises BadInput where an option does not work on this device."""
    if split not in RUN_SPLITS:
        raise BadInput(f"split: '{split}' is none of {', '.join(RUN_SPLITS)}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
        if emulate is not None:
            raise BadInput(f"Pipeline: emulated devices are CPUs' processes, and this is the device {device}")
        if split.endswith(SLACK):
            raise BadInput(f"Pipeline: split '{split}': a GPU's host launches passes before it is known what waits")
    elif capture:
        raise BadInput(f"Pipeline: capture is for a GPU, and this is the device {device}")


class Pipeline:
    """One rank's stages of a model, run by a schedule. Every rank of the process group makes one.

    layers: the whole model as an nn.Sequential or a list of layers, or a builder that is called with the numbers of the
        layers that this rank owns. A rank keeps only those. How many a stage holds is the problem's `layers`.
    schedule: the same on all ranks; of a very long schedule, a rank may have its own part alone.
    loss: loss(output, target) → the mean loss of a microbatch, shape (); needed on ranks of the last stage.
    group: the process group, with one process for each rank of the schedule; None: the default group.
    device: where the stages run. None: this rank's GPU, where there is one and the backend of `group` is NCCL; else the CPU.
    init: init(number, layer) fills a layer of a model on the meta device, which is materialised only here
        (`layers.materialise`).
    tied: groups of (layer, name) of parameters that are one and the same; found automatically where `layers` is a list.
    seed: of random layers and of `init`.
    timeout: seconds to wait for any message in a step. Until all ranks are built, the process group's own timeout holds.
    hooks: see `base.part.Hooks`.
    emulate: times that passes and messages take in place of this machine's.
    watch: check the output of every pass for NaN and inf, and name the first pass that has one.
    replicas: for data parallelism, the process group of the ranks that hold the same stages, one of each pipeline, in the
        same order for all stages. `.grad` becomes the mean over them. Optimizers wait for that before they step; call
        `wait_gradients` before reading gradients otherwise. Losses, times and memory are of this pipeline alone.
    update: for a schedule with passes U: a function that makes a torch optimizer of one stage's parameters (a list; its
        attribute `names` has their names in the whole model), or a list of optimizers. `step` then updates by itself,
        and leaves no gradients.
    split: how the backward is split: "layers" queue their weight gradients, and the rest of a backward is B; the "graph" of
        each layer splits any operation, also compiled by "inductor"; "auto" measures both at a block's first forward (see
        `splits`). With ":slack" appended to layers or graph, a rank on a CPU runs a later W while it waits (see `slack`).
    mesh: a DeviceMesh with a dimension "pp", in place of group and replicas. Along each of the other dimensions every
        coordinate runs the same schedule.
    parallelize: parallelize(stage, mesh), called for each stage of this rank once its layers are built, in the same way on
        all data coordinates. stage: an nn.Module with the stage's layers under their names in the whole model. The function
        shards them in place over the other dimensions (`mesh["tp"]`: tensor parallelism, FSDP, …), or returns a module with
        as many layers under the same names.
    data: the dimensions along which the batch is divided; None: those called dp, dp_replicate, dp_shard. Gradients are
        averaged over them as over replicas, unless FSDP has sharded the parameter over them.
    capture: on a GPU, each rank's step is one CUDA graph from the second of its shape on (see `captured`, docs/gpu.md).
    work: for a schedule with passes J: work(rank, piece, pieces) is called for each (see `work.WorkBeside`).

    `step` adds the gradient of the mean loss to `.grad` of this rank's parameters; any optimizer may update them. Random
    layers (dropout) draw from numbers that depend on (seed, step, microbatch, layer) alone, whatever the placement. `steps`
    counts the steps; `load` sets it. On a GPU `step` returns when the device has finished, and times are the device's.

    Raises BadInput where an argument does not fit: on all ranks, even if it is wrong on one. Raises RunFailed where a rank
    fails; the process group is unusable after that.
    """

    def __init__(
        self,
        layers: Layers,
        schedule: Schedule | RankPart,
        *,
        loss: Loss | None = None,
        group: Any = None,
        device: torch.device | str | None = None,
        init: Callable[[int, nn.Module], None] | None = None,
        tied: Sequence[Sequence[Place]] = (),
        seed: int = 0,
        timeout: float = 300.0,
        hooks: Hooks | None = None,
        emulate: Times | None = None,
        watch: bool = False,
        replicas: Any = None,
        update: Update | None = None,
        split: str = "layers",
        mesh: DeviceMesh | None = None,
        parallelize: Parallelize | None = None,
        data: Sequence[str] | None = None,
        capture: bool = False,
        work: OwnWork | None = None,
    ) -> None:
        self.view = StepView.of(schedule)
        self.schedule, self.seed, self.steps, self.rounds = self.view.schedule, seed, 0, dict[Any, Any]()
        self.device = group_device(mesh, group) if device is None else with_number(torch.device(device))
        _check_device(self.device, emulate, split, capture)
        self.mesh = pipeline_mesh(mesh, data, (group, replicas), self.device)
        if self.mesh is not None:
            group, replicas = self.mesh.group, self.mesh.replicas
        self.wires, self.replicas = Wires.of(group, self.device), replicas
        self.group = group = default_group() if group is None else group
        self.rank, self.peers, self.hooks = self.wires.rank, Peers(self.wires, timeout), hooks or Hooks()
        self.hooks.watch |= watch
        self.split = split
        slack, split = split.endswith(SLACK), split.removesuffix(SLACK)
        how = split, self.mesh, parallelize, work, slack, group, replicas, emulate
        given = Given(layers, loss, tuple(tied), init, update, self.device, seed, *how)
        own = self._own_part(given)
        self.programs, self.program, self.counts = own.programs, own.program, own.counts
        self.layers, self.module, self.whole = own.layers, own.module, own.whole
        self.inputs, self.targets = own.program.inputs, own.program.targets
        self.microbatches = range(self.view.microbatches)
        self.cutting, self.counting = Cutting.of(self.view.step), Counting.of(loss)
        homes = self.view.step.stage_ranks  # stages beyond the model's follow; they have no layers
        self.owners = [ranks for ranks, n in zip(homes, own.counts, strict=False) for _ in range(n)]
        self._connect(own, given)
        if capture:
            weakref.finalize(self, destroy, self._runner.capture().graphs)  # called before those of `_connect`
        places = [part.place for part in self.parts if part.place is not None]
        self.alone, self._clip_watch = self.wires.size == 1 and not places, gradients.ParameterWatch(self.wires.rank)
        if not self.alone:
            refuse = partial(gradients.refuse_lbfgs, weakref.ref(self.module))
            weakref.finalize(self, register_optimizer_step_pre_hook(refuse).remove)
        self.place: int = self.mesh.place if self.mesh is not None else [*places, 0][0]

    def _own_part(self, given: Given) -> Own:
        """Build this rank's part of the model and parallelize it, once all ranks have agreed on the schedule."""
        with agreed(self.wires, "schedule", self.view.content):
            own = own_part(self.view, self.wires, given)
        if given.replicas is not None:
            with self.peers.telling("building"):
                begin_alike(given.replicas, own.module, self.view.content)
        if given.parallelize is not None:
            with together(self.peers, "parallelize"):
                own = parallel_part(own, given)
        return own

    def _connect(self, own: Own, given: Given) -> None:
        """Connect to the other ranks, and make the runner of this rank's passes."""
        with self.peers.telling("building"):
            free = None if self.device.type == "cpu" else torch.cuda.mem_get_info(self.device)[0]
            self.peers.wires = self.wires.paired(own.view.messages)
            taken = 0 if free is None else free - torch.cuda.mem_get_info(self.device)[0]
            self.communicators = {"count": len(self.peers.wires.pairs), "bytes": taken}
            weakref.finalize(self, self.peers.wires.close)
            self._runner = connected(own, given, self.wires, self.peers, self.hooks)
            self.mailbox, state = self._runner.mailbox, self._runner.interpreter.state
            parameters = dict(self.module.named_parameters())
            self.mailbox.trained = lambda: {name: p.requires_grad for name, p in parameters.items()}
            self.stages: Mapping[int, Stage] = state.stages
            for close in asked(state.parts, "close"):
                weakref.finalize(self, close)
        with together(self.peers, "sharding"):
            for check in asked(state.parts, "check_alike"):
                check(self.view.content)
            if given.slack:
                check_slack(self.view, self.parts)
        if given.slack:
            cells = shared_cells(self.wires, (self.wires.size,), f"split '{SLACK}'")
            self._runner.interpreter.slack = Slack(self.view.schedule, own.programs, self.rank, cells)
        wait = weakref.WeakMethod(self.wait_gradients)
        for concerns in asked(state.parts, "concerns"):
            weakref.finalize(self, optimizers_wait(concerns, wait).remove)

    def __deepcopy__(self, memo: Any) -> None:
        raise BadInput("a Pipeline cannot be copied: copy its `module` (as AveragedModel(pipeline.module) does)")

    @property
    def captured(self) -> list[str]:
        """Where steps are captured: one line for each graph, and for each step that was not captured, with the reason."""
        return [] if self._runner.captures is None else self._runner.captures.said

    def wait_gradients(self) -> None:
        """Wait until `.grad` is the mean over all replicas, or this rank's part of it. Raises RunFailed."""
        self._runner.wait_gradients()

    @property
    def parts(self) -> Sequence[Part]:
        """The parts of the step's features on this rank (see `Part`)."""
        return self._runner.parts

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's parameters, each once, as an optimizer takes them."""
        everything = self.module.parameters()
        return everything if self.alone else self._clip_watch.over(everything)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters with their names in the whole model."""
        return self.module.named_parameters()

    def run_ahead(self, ahead: Ahead) -> None:
        """From now on begin a step before the optimizer's last update is validated (see `PostValidated`)."""
        for part in self.parts:
            if part.no_ahead:
                raise BadInput(f"PostValidated: {part.no_ahead}")
        if self._runner.ahead is not None:
            raise BadInput("PostValidated: this pipeline has one; give it several optimizers as a list")
        if self._runner.interpreter.slack is not None:
            raise BadInput(f"PostValidated: not with split '{SLACK}'")
        if self.device.type == "cuda":
            raise BadInput("PostValidated: a GPU's host would wait for the gradients' norm: use a plain optimizer there")
        self._runner.ahead = ahead
        self.program = self._runner.interpreter.program = ahead.cut.program

    @property
    def ahead(self) -> bool:
        """Does a step begin before the optimizer's last update is validated?"""
        return self._runner.ahead is not None

    def switch(self, schedule: Schedule) -> None:
        """From the next step on run another order of the same passes on the same ranks. Their times may differ. All ranks,
        of all replicas, call this between two steps, with the same schedule. Raises BadInput on all ranks where one of them
        cannot switch."""
        with together(self.peers, "schedule", StepView.of(schedule).content):
            view = watching.checked_order(self, schedule)
            programs = lower(view, training=not forwards_alone(view.step))
        if self.replicas is not None:
            with together(self.peers, "schedule"):
                check_same(self.replicas, view.content, self.device)
        self.view, self.schedule, self.programs, self.program = view, schedule, programs, programs[self.rank]
        self._runner.switch(view, programs)

    def finish(self) -> None:
        """Wait until the optimizer's last update is final, where it is validated late. Raises RunFailed."""
        if self._runner.ahead is not None:
            self._runner.ahead.optimizer.finish()

    clip_grad_norm_, evaluate, forward = gradients.clip_grad_norm_, evaluation.evaluate, evaluation.forward
    save, load, state_dict = checkpoint.save, checkpoint.load, checkpoint.state_dict
    load_state_dict = checkpoint.load_state_dict

    def step(
        self,
        inputs: Batch | None = None,
        targets: Batch | None = None,
        *,
        uneven: bool = False,
        scaler: Any = None,
        memory: bool = False,
    ) -> StepResult:
        """Forward and backward of one batch: the gradient of its mean loss is added to `.grad`.

        inputs, targets: the batch, split along dimension 0 into equal microbatches or by the schedule's sizes; or a sequence
            of microbatches, whose shapes may differ. Ranks of the first stage read inputs, those of the last stage targets,
            and other ranks what their layers take (see `docs/side-inputs.md`). A mapping needs to hold only the microbatches
            that run there (`self.inputs`, `self.targets`). With slices tensors are (batch, length, …), and each label of a
            microbatch has the same weight in its loss.
        uneven: the batch may have any number of rows; every row of `targets` has the same weight in the mean.
        scaler: a gradient scaler (`ShardedGradScaler`): gradients are of the loss times its scale; the loss in the result is
            not.
        memory: measure the bytes held after each pass (slow).

        Raises BadInput, and RunFailed naming rank, pass and cause.
        """
        sizes, count = self.cutting.sizes, len(self.microbatches)
        if self.view.step.round and (uneven or sizes or scaler is not None):
            raise BadInput("step: passes U update inside a step, and know neither uneven nor sizes nor scaler")
        if uneven and sizes:
            raise BadInput(f"step: uneven: the schedule says how large microbatches are: {','.join(map(str, sizes))}")
        with self._refused_together(uneven):
            self._check_gradients()
            first, last = (
                self.cutting.parts(
                    split_batch(batch, what, needed, self.microbatches, self.device, None if uneven else sizes), what
                )
                for batch, what, needed in ((inputs, "inputs", self.inputs), (targets, "targets", self.targets))
            )
            scale = 1.0 if scaler is None else gradients.loss_scale(self, scaler)
            shares = shares_of(targets, self.targets, count) if uneven else {}
        shares = agreed_shares(shares, count, self.peers) if uneven else {}
        seed = step_seed(self.seed, self.steps) + self.place * count * self.cutting.count
        data = self.cutting.data(first, last, seed, shares, self.counting, scale)
        self.wait_gradients()
        reads = self._runner.shapes.compared and (self.inputs or self.targets)
        given = [checksum(batch, count) if reads else 0 for batch in (inputs, targets)]
        result = self._runner.run(data, self.device, memory, given)
        self.steps += 1
        if scaler is not None:
            self.wait_gradients()  # a scaler reads gradients before an optimizer waits for them
            gradients.lay_out(self)
        return result

    @contextmanager
    def _refused_together(self, uneven: bool) -> Iterator[None]:
        """Inside, this rank splits its part of a batch. Where one rank cannot, all ranks stop soon. Only for an uneven batch
        they ask each other first; else a refusal goes along with the messages that begin a step (see
        `RankRunner.refuse`)."""
        if uneven:
            with together(self.peers, "batch"):
                yield
            return
        try:
            yield
        except BadInput as error:
            self._runner.refuse(error, self.device)

    def _check_gradients(self) -> None:
        """Raise BadInput where a step has backwards but torch records no graphs, or a trained stage has no backward."""
        check_untrained(self.view.step, self.counts, list(self.stages), self.layers)
        if not torch.is_grad_enabled() and passes_where(self.view.step, "adds_gradients").any():
            raise BadInput("step: torch makes no gradients here (no_grad, inference_mode): call evaluate or forward")

    @property
    def splits(self) -> list[dict[str, Any]]:
        """How each layer's backward is split on this rank, where that is decided layer by layer: a row for each kind of
        block, with the numbers of its layers, the reason and what was measured. Complete after the first step."""
        return decisions_of(self.stages.values())

    def trace(
        self, results: Sequence[StepResult], memory: Memory, facts: dict[str, Any], whole: Schedule | None = None
    ) -> Trace | None:
        """A trace of these steps on rank 0, None on the others; every rank calls it, with its own `memory`. whole: on rank
        0, the schedule of the whole step, where each rank has only its own part. The trace is of the first step's schedule;
        its `switches` say from which step on another order ran."""
        gpu = self._runner.gpu
        launching = None if gpu is None else gpu.launching / 1000
        told = gathered(self.wires, json.dumps([memory.__dict__, self.splits, launching]))
        if self.view.part is not None:
            steps: Sequence[Any] = put_together(results, self.wires, whole)
        else:
            whole, steps = results[0].table.schedule, results
        if not told or whole is None:
            return None
        ranks = [json.loads(of_rank) for of_rank in told]
        if splits := merged([rows for _, rows, _ in ranks]):
            facts = facts | {"splits": splits}
        if gpu is not None:
            facts = facts | {"launching_us": [us for *_, us in ranks]}
        ran = pairwise([result.table.schedule for result in results])
        switches = tuple(Switch(i, dict(b.order), b.syncs) for i, (a, b) in enumerate(ran, 1) if a is not b)
        return replace(trace_of(whole, steps, [Memory(**fields) for fields, *_ in ranks], facts), switches=switches)
