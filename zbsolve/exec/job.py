"""One whole job: a model by name, some training steps, a trace of what was seen.

Every rank of the process group calls `run_rank`; rank 0 returns the trace. In `run_on_one_device` all ranks are in this
process.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..errors import BadInput
from ..machine import cores
from ..problem import KINDS
from ..schedule import Schedule
from ..trace import Trace
from . import check
from .emulate import Times
from .feed import step_seed
from .gather import trace_of
from .host import keep_freed_memory
from .layers import layer_counts
from .one_device import OneDevice, Ran
from .partitions import Partitions
from .pipeline import Pipeline, StepResult
from .streams import Streams, Turns
from .walk import Data, Hooks
from .watch import not_finite

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Options:
    """How to run. `steps` are timed; before them come one that watches memory (and is checked) and `warmup` more, all
    of them real training steps. timeout: seconds that a pass, or waiting for one, may take; start_timeout: seconds for
    the ranks to start, join and build, and for the check. emulate: whose times passes take, "schedule" or a profile's
    file; None: this machine's own. watch: name the pass that makes the first NaN or inf. replicas: pipelines side by
    side, each on as many ranks as the schedule has."""

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
    replicas: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise BadInput(f"run: steps {self.steps}, warm-up {self.warmup}: at least 1 and 0 are needed")
        if self.replicas < 1:
            raise BadInput(f"run: replicas {self.replicas}: at least 1 is needed")
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer '{self.optimizer}': one of {', '.join(OPTIMIZERS)}")
        if not (self.timeout > 0 and self.start_timeout > 0 and self.lr >= 0):
            raise BadInput(f"run: timeouts {self.timeout}, {self.start_timeout} and lr {self.lr} must be positive")


def run_rank(schedule: Schedule, spec: str, options: Options, announce: Callable[[str], None]) -> Trace | None:
    """The whole job of one rank; the default process group is up. Rank 0 returns the trace, of the first pipeline but
    with the losses' mean over all; the others None.

    Raises BadInput for a schedule that does not fit the model, RunFailed naming rank, pass and cause.
    """
    from profiler.models import load

    announce("building")
    keep_freed_memory()
    model = load(spec, options.seed)
    layer_counts(schedule.problem, len(model.layers))
    times = None if options.emulate is None else Times.of(schedule, options.emulate)
    group, replicas = _groups(schedule.problem.ranks, options)
    pipeline = Pipeline(
        model.build,
        schedule,
        loss=model.loss,
        group=group,
        replicas=replicas,
        tied=model.tied,
        seed=options.seed,
        timeout=options.timeout,
        hooks=Hooks(announce=announce),
        emulate=times,
        watch=options.watch,
        update=_optimizer(options) if _updates(schedule) else None,
    )
    trainer = Trainer(pipeline, model, options)
    watched = trainer.step(0, memory=True)
    announce("checking")
    verdict = _checked(pipeline, model, options, watched) if options.check else None
    trainer.update()
    results = []
    for number in range(1, options.warmup + options.steps + 1):
        if number == options.warmup + 1 and pipeline.hooks.emulated is not None:
            pipeline.hooks.emulated.forget(action.name for action in pipeline.program.actions)
        results.append(trainer.step(number))
        trainer.update()
    assert watched.memory is not None
    announce("collecting")
    results[-1].seen.wait()
    facts = _facts(pipeline, spec, options, verdict, [watched, *results])
    if times is not None and pipeline.hooks.emulated is not None:
        facts["emulated"] = {"times": times.source, **pipeline.hooks.emulated.board.facts()}
    trace = pipeline.trace(results[options.warmup :], watched.memory, facts)
    losses = _mean([result.loss for result in results[options.warmup :]], replicas)
    return None if trace is None or pipeline.place else replace(trace, losses=tuple(losses))


def _updates(schedule: Schedule) -> bool:
    """Whether its steps update by themselves."""
    return bool((schedule.problem.passes.kind == KINDS.index("U")).any())


def _optimizer(options: Options) -> Callable[..., torch.optim.Optimizer]:
    return partial(OPTIMIZERS[options.optimizer], lr=options.lr)


def _groups(ranks: int, options: Options) -> tuple[Any, Any]:
    """This rank's pipeline, and the ranks with its stages in all pipelines; None: all ranks, no other pipeline."""
    if options.replicas == 1:
        return None, None
    limit = timedelta(seconds=options.start_timeout)
    grid = [[place * ranks + rank for rank in range(ranks)] for place in range(options.replicas)]
    rows, columns = (
        [dist.new_group(list(one), timeout=limit) for one in lines] for lines in (grid, zip(*grid, strict=True))
    )
    place, rank = divmod(dist.get_rank(), ranks)
    return rows[place], columns[rank]


def _mean(values: Sequence[float], replicas: Any) -> list[float]:
    """Over all pipelines."""
    if replicas is None:
        return list(values)
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total, group=replicas)
    return (total / dist.get_world_size(replicas)).tolist()


def run_on_one_device(schedule: Schedule, spec: str, options: Options, device: str) -> Trace:
    """All ranks in this process, on streams of one device: "cuda" (disjoint parts of the GPU's SMs) or "cpu" (turns).

    The timeouts do not apply: nothing here waits for another process. Raises BadInput, RunFailed.
    """
    from profiler.models import load

    if options.emulate is not None:
        raise BadInput("one device: emulated times need a process for each rank")
    if options.replicas > 1:
        raise BadInput("one device: replicas need processes of their own")
    if device not in ("cuda", "cpu"):
        raise BadInput(f"one device: '{device}' is neither cuda nor cpu")
    torch.set_num_threads(1)  # as every rank has
    model, ranks = load(spec, options.seed), schedule.problem.ranks
    layer_counts(schedule.problem, len(model.layers))
    streams: Streams = Turns(ranks) if device == "cpu" else Partitions(ranks)
    hooks = [Hooks(watch=options.watch) for _ in range(ranks)]
    parts: dict[str, Any] = {"loss": model.loss, "tied": model.tied, "device": device, "seed": options.seed}
    one = OneDevice(model.build, schedule, streams, hooks=hooks, **parts)
    trainer = Trainer(one, model, options)
    watched = trainer.step(0, memory=True)
    verdict = _checked(one, model, options, watched) if options.check else None
    trainer.update()
    results = []
    for number in range(1, options.warmup + options.steps + 1):
        results.append(trainer.step(number))
        trainer.update()
    facts = _facts(one, spec, options, verdict, [watched, *results])
    facts |= {**streams.facts, "backend": "one device", "ranks": ranks}
    facts["host_us"] = float(np.median(results[-1].columns[3]))
    trace = trace_of(schedule, results[options.warmup :], watched.memory, facts)
    return trace if device == "cuda" else replace(trace, host=())  # here the host did all the work itself


class Trainer:
    """Training steps of a pipeline, this rank's or all: forward and backward, then the optimizer."""

    def __init__(self, pipeline: Pipeline | OneDevice, model: Any, options: Options) -> None:
        self.pipeline, self.model = pipeline, model
        parameters = [p for p in pipeline.parameters() if p.requires_grad]
        self.optimizer = OPTIMIZERS[options.optimizer](parameters, lr=options.lr) if parameters else None

    def step(self, number: int, *, memory: bool = False) -> Any:
        """Forward and backward of step `number`; all ranks begin together. Gradients stay in `.grad`."""
        pipeline = self.pipeline
        mine = pipeline.place * len(pipeline.microbatches) if isinstance(pipeline, Pipeline) else 0
        needed = sorted({*pipeline.inputs, *pipeline.targets})
        batches = {m: self.model.batch(mine + m, number) for m in needed}
        if pipeline.hooks.announce is not None:
            pipeline.hooks.announce("starting a step")
        if isinstance(pipeline, Pipeline):
            pipeline.peers.wait(pipeline.wires.control.barrier(), "start of a step")
        inputs, targets = ({m: pair[i] for m, pair in batches.items()} for i in range(2))
        return pipeline.step(inputs, targets, memory=memory)

    def update(self) -> None:
        """The optimizer's step. Gradients are cleared, not freed: so every W adds to one that is there, at one cost."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)


def _checked(pipeline: Pipeline | OneDevice, model: Any, options: Options, first: StepResult | Ran) -> dict[str, Any] | None:
    """Compare the first step with the unsplit model, before anything was updated; where the step itself updates, its weights
    with those of its rule in one process."""
    from profiler.models import load

    whole, losses, replicas = None, (0.0, 0.0), 1
    what = check.weight if _updates(pipeline.schedule) else check.gradient
    loss = first.loss
    if isinstance(pipeline, Pipeline) and pipeline.replicas is not None:
        pipeline.wait_gradients()
        (loss,), replicas = _mean([loss], pipeline.replicas.group), pipeline.replicas.size
        if pipeline.place:
            return None  # the first pipeline's gradients are everybody's
    if pipeline.rank == 0:
        # Another copy of the model: built anew, so its parameters are the starting ones.
        other = load(model.name, options.seed)
        whole = [layer.to(pipeline.device) for layer in other.build()]
        trained = {id(p) for p in pipeline.parameters()}
        if any(id(p) in trained for layer in whole for p in layer.parameters()):
            raise BadInput(f"model '{model.name}': its function must make new layers on every call, for the check")
        count = len(pipeline.microbatches)
        batches = {i * count + m: other.batch(i * count + m, 0) for i in range(replicas) for m in pipeline.microbatches}
        inputs, targets = ({m: pair[i].to(pipeline.device) for m, pair in batches.items()} for i in range(2))
        data = Data(inputs, targets, step_seed(options.seed, 0))
        if what is check.weight:
            cuts = [sum(pipeline.counts[:s]) for s in range(len(pipeline.counts) + 1)]
            stages = [whole[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
            losses = loss, check.updated(pipeline.schedule.problem, stages, data, other.loss, _optimizer(options))
        else:
            losses = loss, check.reference(whole, data, other.loss)
    return check.compare(pipeline.wires, pipeline.owners, pipeline.layers, whole, losses, what)


def _facts(
    pipeline: Pipeline | OneDevice, spec: str, options: Options, verdict: dict[str, Any] | None, results: Sequence[Any]
) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": spec,
        "backend": "" if pipeline.wires is None else dist.get_backend(),
        "ranks": 1 if pipeline.wires is None else pipeline.wires.size,
        "layers": list(pipeline.counts),
        "microbatches": len(pipeline.microbatches),
        "threads": torch.get_num_threads(),
        "cores": cores(),
        "host": platform.node(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "peaks_are": "live bytes after each pass of one further step, without parameters and gradients",
        **{f.name: getattr(options, f.name) for f in options.__dataclass_fields__.values() if f.name != "check"},
    }
    if verdict is not None:
        wrong = not_finite(dict(enumerate(result.loss for result in results)))
        facts["check"] = verdict | ({"passed": False, "where": wrong} if wrong else {})
    return facts
