"""A whole job: a model by name, some training steps, a trace of them. Every rank of the process group calls
`run_rank`; rank 0 returns the trace. In `run_on_one_device` all ranks are in this process."""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from math import isfinite
from typing import Any

import torch

from ...long_steps.check import RankPart
from ...models.by_name import load
from ...models.model import Model
from ...schedule import Schedule
from ...schedule.trace import SLACK, Trace
from ...util.errors import BadInput, RunFailed
from ...util.machine import cores
from ..base.part import Hooks
from ..base.values import is_dtensor
from ..choices import DEVICES, RUN_SPLITS, choose, described
from ..emulate import Times
from ..layers import layer_counts
from ..loop.watching import Watch
from ..mesh import made_mesh, mesh_sizes
from ..one_device import OneDevice
from ..pipeline import Pipeline
from ..reports import RunNumbers, run_numbers, trace_of
from ..step_view import StepView
from ..transport.wires import CPU
from ..updates import NamedParameters, as_one
from .checking import checked, mean_over_data
from .host import at_once, goes_on, keep_freed_memory

TOLD_SECONDS = 5.0  # between two lines of progress
TRACED = 3  # steps of a watched run before each look: a single step does not show how times vary
# Tasks with the timeout for starting; all others have that of a pass.
SLOW_TASKS = ("", "start", "joining", "building", "checking", "collecting", "leaving")
INTERRUPTED = "interrupted before the first step that is timed"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Options:
    """How to run. Raises BadInput.

    steps: training steps that are timed. warmup: training steps before them. One more comes first of all, which watches
    memory and is checked. seed: of parameters and batches. optimizer, lr: torch's, and its learning rate. check: compare
    the first step with the unsplit model. timeout: seconds that a pass, or waiting for one, may take. start_timeout:
    seconds for the ranks to start, join and build, and for the check. emulate: "schedule" or a profile's file, whose
    times passes take; None: this machine's own. watch: name the pass that makes the first NaN or inf. look: every so many
    timed steps say what is slow, and switch to another order where that is shorter (see `Watch`); 0: do not. mesh: its
    dimensions, the outermost first, as `pp=2,tp=2` (see `mesh_sizes`). split: how the backward is split (see
    `Pipeline`). memory_limit: bytes of activations that each rank has; None: what this machine has. whole_trace: of a
    file of rounds, put the times of all passes together on rank 0, else numbers alone; all other runs leave a trace.
    device: "cuda", "cpu", or "auto" (see `choices.choose`); share_gpus: ranks of a machine share its GPUs; capture: each
    rank's step as one CUDA graph (see `Pipeline`).
    """

    steps: int = 5
    warmup: int = 2
    seed: int = 0
    optimizer: str = "sgd"
    lr: float = 0.01
    check: bool = False
    timeout: float = 300.0
    emulate: str | None = None
    start_timeout: float = 300.0
    watch: bool = False
    look: int = 0
    split: str = "layers"
    mesh: str = ""
    memory_limit: int | None = None
    whole_trace: bool = False
    device: str = "auto"
    share_gpus: bool = False
    capture: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise BadInput(f"run: steps {self.steps}, warm-up {self.warmup}: at least 1 and 0 are needed")
        if self.memory_limit is not None and self.memory_limit < 1:
            raise BadInput(f"run: memory limit {self.memory_limit}: at least 1 byte is needed")
        for name, known in (("device", DEVICES), ("split", RUN_SPLITS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in known:
                raise BadInput(f"{name} '{getattr(self, name)}': one of {', '.join(known)}")
        if not (self.timeout > 0 and self.start_timeout > 0 and self.lr >= 0):
            raise BadInput(f"run: timeouts {self.timeout}, {self.start_timeout} and lr {self.lr} must be positive")

    def on(self, local_ranks: int) -> Options:
        """The options with the kind of device for this machine's ranks. Raises BadInput."""
        asked = "cpu" if self.emulate is not None and self.device == "auto" else self.device
        kind = choose(asked, local_ranks, self.share_gpus)
        if kind == "cpu" and self.capture:
            raise BadInput("run: --capture is for GPUs, and this run is on CPUs")
        if kind == "cuda" and self.emulate is not None:
            raise BadInput("run: --emulate gives CPUs a device's times: say --device cpu")
        return replace(self, device=kind)

    def allowed(self, name: str) -> float:
        """How many seconds a task that a rank announced may take."""
        return self.start_timeout if name in SLOW_TASKS else self.timeout

    def sizes(self, ranks: int) -> dict[str, int]:
        """Dimension → its size, for a schedule's number of ranks. Raises BadInput."""
        return mesh_sizes(self.mesh, ranks)

    def make_optimizer(self, model: Model, parameters: NamedParameters) -> torch.optim.Optimizer:
        """The optimizer of these parameters; the model's own if it has one. On GPUs torch updates all parameters at once by
        default, which fails if only some are DTensors, or of different meshes."""
        if model.optimizer is not None:
            return as_one(model.optimizer(parameters), f"model '{model.name}': optimizer()")
        meshes = {p.device_mesh if is_dtensor(p) else None for p in parameters}  # type: ignore[attr-defined]
        return OPTIMIZERS[self.optimizer](parameters, lr=self.lr, foreach=False if len(meshes) > 1 else None)


def run_rank(
    schedule: Schedule | RankPart,
    spec: str,
    options: Options,
    announce: Callable[[str], None],
    whole: Callable[[], Schedule] | None = None,
    device: torch.device = CPU,
) -> Trace | RunNumbers | None:
    """The whole job of one rank; the default process group exists. Rank 0 returns the trace of the first pipeline, with
    losses averaged over all (for a rank's part of a schedule only numbers); the others return None. whole: on rank 0, makes
    the schedule of which `schedule` is a part. device: of this rank.

    Raises BadInput for a schedule that does not fit the model, RunFailed naming rank, pass and cause.
    """
    announce("building")
    keep_freed_memory()
    model = load(spec, options.seed)
    view = StepView.of(schedule)
    layer_counts(view.step, len(model.layers))
    times = None if options.emulate is None else Times.of(view.schedule, options.emulate)
    sizes = options.sizes(view.step.ranks)
    pipeline = Pipeline(
        model.build,
        schedule,
        loss=model.loss,
        device=device,
        mesh=made_mesh(sizes, timedelta(seconds=options.start_timeout), device.type),
        capture=options.capture,
        parallelize=model.parallelize if len(sizes) > 1 else None,
        tied=model.tied,
        work=model.work,
        seed=options.seed,
        timeout=options.timeout,
        hooks=Hooks(announce=announce, limit=options.memory_limit),
        emulate=times,
        watch=options.watch,
        update=partial(options.make_optimizer, model) if view.step.round else None,
        split=options.split,
    )
    trained = train(pipeline, model, options)
    announce("collecting")
    trained.results[-1].wait()
    facts = _facts(pipeline, model, options, trained)
    if times is not None and pipeline.hooks.emulated is not None:
        facts["emulated"] = {"times": times.source, **pipeline.hooks.emulated.board.facts()}
    timed = trained.results[options.warmup :]
    facts["steps"] = len(timed)  # fewer than requested after an interrupt
    trace: Trace | RunNumbers | None
    if isinstance(schedule, Schedule) or options.whole_trace:
        trace = pipeline.trace(timed, trained.memory, facts, whole() if whole is not None and options.whole_trace else None)
    else:
        trace = run_numbers(pipeline, timed, trained.memory, facts)
    losses = mean_over_data(pipeline, [result.loss for result in timed])
    first = pipeline.mesh is not None and pipeline.mesh.first
    return replace(trace, losses=tuple(losses)) if trace is not None and first else None


def run_on_one_device(schedule: Schedule, spec: str, options: Options) -> Trace:
    """All ranks in this process, taking turns on the CPU.

    The timeouts do not apply: nothing here waits for another process. Raises BadInput, RunFailed.
    """
    for refused, text in (
        (options.emulate is not None, "emulated times need a process for each rank"),
        (options.mesh, "a mesh needs processes of its own"),
        (options.split.endswith(SLACK), "ranks run in turns, and none waits"),
        (options.memory_limit is not None, "a memory limit is for a rank with a process of its own"),
        (options.look > 0, "ranks run in turns, so none is slow"),
    ):
        if refused:
            raise BadInput(f"one device: {text}")
    torch.set_num_threads(1)  # as in a rank's own process
    model, ranks = load(spec, options.seed), schedule.problem.ranks
    layer_counts(schedule.problem, len(model.layers))
    hooks = [Hooks(watch=options.watch) for _ in range(ranks)]
    pipeline = OneDevice(model, schedule, seed=options.seed, hooks=hooks, split=options.split)
    trained, streams = train(pipeline, model, options), "cpu, taking turns: no two passes overlap"
    facts = _facts(pipeline, model, options, trained)
    facts |= {"backend": "one device", "ranks": ranks, "partitions": ranks, "streams": streams}
    facts |= {"splits": pipeline.splits} if pipeline.splits else {}
    trace = trace_of(schedule, trained.results[options.warmup :], trained.memory, facts)
    return replace(trace, host=())


@dataclass(frozen=True)
class Trained:
    """The result of training. first: the first step. verdict: of its check, on rank 0. results: of the steps after it, from
    the warm-up on. memory: as measured. looks: what was found slow, on rank 0."""

    first: Any
    verdict: dict[str, Any] | None
    results: list[Any]
    memory: Any
    looks: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """Step → its loss, from the first step on."""
        return dict(enumerate(result.loss for result in (self.first, *self.results)))


def train(pipeline: Pipeline | OneDevice, model: Model, options: Options) -> Trained:
    """All training steps of a pipeline, of this rank or of all. The first step of the warm-up measures memory; without a
    warm-up the very first one, which cannot post receives until it knows their formats. Raises BadInput, RunFailed."""
    trainer, counted = Trainer(pipeline, model, options), min(1, options.warmup)
    first = trainer.step(0, memory=counted == 0)
    if first is None:
        raise RunFailed(INTERRUPTED)
    trainer.announce("checking")
    update, looks = partial(options.make_optimizer, model), list[dict[str, Any]]()
    verdict = checked(pipeline, model, options.seed, update, first.loss) if options.check else None
    trainer.update()
    results: list[Any] = []
    total = options.warmup + options.steps + 1
    shown, watch = time.monotonic(), None
    if options.look and isinstance(pipeline, Pipeline):
        watch = Watch(pipeline, every=options.look, steps=min(TRACED, options.look))
    for number in range(1, total):
        if trainer.tells and time.monotonic() - shown > TOLD_SECONDS:
            shown, last = time.monotonic(), [first, *results][-1]
            sys.stderr.write(f"step {number} of {total}: loss {last.loss:.4g}\n")
        emulated = pipeline.hooks.emulated
        if number == options.warmup + 1 and emulated is not None and isinstance(pipeline, Pipeline):
            emulated.forget(action.name for action in pipeline.program.actions)
        if (result := trainer.step(number, memory=number == counted)) is None:
            break
        results.append(result)
        if watch is not None and (timed := number - options.warmup) > 0 and (watched := watch(result)) is not None:
            looks.append({"steps": timed, **watched.to_json()})
            sys.stderr.writelines(f"after {timed} steps: {line}\n" for line in str(watched).splitlines())
        trainer.update()
    if watch is not None:
        watch.close()
    if len(results) <= options.warmup:
        raise RunFailed(INTERRUPTED)
    return Trained(first, verdict, results, (first, *results)[counted].memory, looks)


class Trainer:
    """The training steps of a pipeline, of this rank or of all: forward and backward, then the optimizer."""

    def __init__(self, pipeline: Pipeline | OneDevice, model: Model, options: Options) -> None:
        places = 1 if pipeline.mesh is None else pipeline.mesh.places
        self.pipeline = pipeline
        self.model = model.in_steps_of(places * len(pipeline.microbatches), pipeline.view.step.sizes * places)
        layers = pipeline.layers.items()
        names = {p: f"{i}.{name}" for i, layer in layers for name, p in layer.named_parameters()}
        parameters = NamedParameters((names.get(p, ""), p) for p in pipeline.parameters() if p.requires_grad)
        self.optimizer = options.make_optimizer(model, parameters) if parameters else None

    @property
    def tells(self) -> bool:
        """Does this rank print the progress?"""
        return self.pipeline.rank == 0 and (self.pipeline.mesh is None or self.pipeline.mesh.first)

    def announce(self, name: str) -> None:
        """Tell the watchdog and the parent that this rank now does `name`."""
        if self.pipeline.hooks.announce is not None:
            self.pipeline.hooks.announce(name)

    def step(self, number: int, *, memory: bool = False) -> Any:
        """Forward and backward of step `number`; all ranks begin together. Gradients stay in `.grad`. Returns None after a
        request to stop."""
        pipeline = self.pipeline
        first, needed = pipeline.place * len(pipeline.microbatches), sorted({*pipeline.inputs, *pipeline.targets})
        batches = {m: self.model.batch(first + m, number) for m in needed}
        self.announce("starting a step")
        if isinstance(pipeline, Pipeline) and not goes_on(pipeline):
            return None
        inputs, targets = ({m: pair[i] for m, pair in batches.items()} for i in range(2))
        return pipeline.step(inputs, targets, memory=memory)

    def update(self) -> None:
        """The optimizer's step. Gradients are set to zero, not None, so that every W adds to one, at the same cost."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


def _facts(pipeline: Pipeline | OneDevice, model: Model, options: Options, trained: Trained) -> dict[str, Any]:
    """The facts of a run for its trace."""
    facts: dict[str, Any] = {
        "model": model.name,
        "backend": "gloo" if pipeline.device.type == "cpu" else "nccl",
        "on": described(pipeline.device),
        "ranks": pipeline.wires.size,
        "layers": list(pipeline.counts),
        "microbatches": len(pipeline.microbatches),
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "host": platform.node(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "peaks_are": "live bytes after each pass of one further step, without parameters and gradients",
        **{f.name: getattr(options, f.name) for f in fields(options) if f.name not in ("check", "whole_trace")},
    }
    if pipeline.mesh is not None:
        facts |= {"mesh": pipeline.mesh.sizes, "replicas": pipeline.mesh.places}
    if isinstance(pipeline, Pipeline) and pipeline.device.type == "cuda":
        facts |= {"captured": pipeline.captured, "communicators": pipeline.communicators}
        facts |= {"gpu_is": ("shared at once" if at_once() else "shared in turns") if options.share_gpus else "own"}
    if trained.looks:
        facts["looks"] = trained.looks
    if trained.verdict is not None:
        losses = trained.losses.items()
        wrong = next((f"the loss of step {step} is {loss}" for step, loss in losses if not isfinite(loss)), "")
        facts["check"] = trained.verdict | ({"passed": False, "where": wrong} if wrong else {})
    return facts if model.optimizer is None else facts | {"optimizer": "the model's", "lr": None}
