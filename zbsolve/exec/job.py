"""One rank's whole job: build its stages, agree on shapes, walk its program step after step, hand over what it saw.

Every rank of the process group calls `run_rank`; rank 0 returns the trace.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import BadInput
from ..problem import Problem
from ..schedule import Schedule
from ..trace import Trace
from . import check
from .comm import Inbox, Outbox, clock_offset, receive_bytes, send_bytes
from .failure import RunFailed, one_line
from .gather import Report, trace_of
from .lower import Program, lower, stage_ranks
from .memory import LiveBytes
from .stage import Stage
from .walk import Data, Record, Walker

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Options:
    """How to run. `steps` are timed; before them come one that watches memory (and is checked) and `warmup` more, all
    of them real training steps. timeout: seconds for everything."""

    steps: int = 5
    warmup: int = 2
    seed: int = 0
    optimizer: str = "sgd"
    lr: float = 0.01
    check: bool = False
    timeout: float = 300.0

    def __post_init__(self) -> None:
        if self.steps < 1 or self.warmup < 0:
            raise BadInput(f"run: steps {self.steps}, warm-up {self.warmup}: at least 1 and 0 are needed")
        if self.optimizer not in OPTIMIZERS:
            raise BadInput(f"optimizer '{self.optimizer}': one of {', '.join(OPTIMIZERS)}")
        if not (self.timeout > 0 and self.lr >= 0):
            raise BadInput(f"run: timeout {self.timeout} and lr {self.lr} must be positive")


def layer_counts(problem: Problem, layers: int) -> tuple[int, ...]:
    """How many of the model's layers each stage holds. Raises BadInput where the problem does not say or disagrees."""
    stages = len(stage_ranks(problem))
    if not problem.layers:
        raise BadInput("schedule: it does not say which layers make a stage (its problem's 'layers' is empty)")
    if len(problem.layers) != stages or min(problem.layers) < 1:
        raise BadInput(f"schedule: layers {problem.layers} do not name {stages} stages of at least one layer")
    if sum(problem.layers) != layers:
        raise BadInput(f"schedule: it is for {sum(problem.layers)} layers, but the model has {layers}")
    return problem.layers


class Rank:
    """What one rank holds while it runs."""

    def __init__(self, rank: int, schedule: Schedule, model: Any, options: Options, store: Any, announce: Any) -> None:
        problem = schedule.problem
        self.rank, self.model, self.options, self.store = rank, model, options, store
        self.homes = stage_ranks(problem)
        self.counts = layer_counts(problem, len(model.layers))
        self.program: Program = lower(schedule)[rank]
        self.microbatches = sorted({action.microbatch for action in self.program.actions})
        firsts = [sum(self.counts[:s]) for s in range(len(self.counts))]
        numbers = [i for s in self.program.stages for i in range(firsts[s], firsts[s] + self.counts[s])]
        self.layers: dict[int, nn.Module] = dict(zip(numbers, model.build(numbers), strict=True))
        self.owners = [home for s, home in enumerate(self.homes) for _ in range(self.counts[s])]
        share = 1 / len(self.microbatches)
        self.stages = {
            s: Stage(
                [self.layers[i] for i in range(firsts[s], firsts[s] + self.counts[s])],
                firsts[s],
                model.loss if s == len(self.homes) - 1 else None,
                share,
            )
            for s in self.program.stages
        }
        self.parameters = list({id(p): p for s in self.stages.values() for p in s.parameters()}.values())
        self.boundaries: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        self.announce = announce

    def agree(self) -> None:
        """Stage after stage runs once on the first microbatch's shape, and tells the next what comes out of it."""
        for s, home in enumerate(self.homes[:-1]):
            if home == self.rank:
                self.announce(f"{s}F{self.microbatches[0]}")
                if s:
                    shape, dtype = self.boundaries[s - 1]
                    x = torch.zeros(shape, dtype=dtype)
                else:
                    x = self.model.batch(self.microbatches[0], 0)[0]
                y = _probe(self.rank, s, self.stages[s], x)
                self.store.set(f"boundary/{s}", json.dumps([list(y.shape), str(y.dtype).removeprefix("torch.")]))
            shape, name = json.loads(self.store.get(f"boundary/{s}"))
            self.boundaries[s] = tuple(shape), getattr(torch, name)

    def data(self, step: int) -> Data:
        """The step's batch: only what this rank's stages read."""
        first, last = 0 in self.stages, len(self.homes) - 1 in self.stages
        batches = {m: self.model.batch(m, step) for m in self.microbatches if first or last}
        return Data(
            {m: pair[0] for m, pair in batches.items() if first},
            {m: pair[1] for m, pair in batches.items() if last},
            _step_seed(self.options.seed, step),
        )


def _step_seed(seed: int, step: int) -> int:
    return (seed * 7_919 + step) * 65_537


def _probe(rank: int, number: int, stage: Stage, x: Tensor) -> Tensor:
    try:
        with torch.no_grad():
            y = stage.forward(-1, x, None, split=False)
    except Exception as error:
        raise RunFailed(f"rank {rank}, pass {number}F0: {one_line(error)}") from error
    stage.live.clear()
    return y


def run_rank(
    rank: int, schedule: Schedule, spec: str, options: Options, store: Any, announce: Callable[[str], None]
) -> Trace | None:
    """The whole job of one rank; the default process group is up. Rank 0 returns the trace, the others None.

    Raises BadInput for a schedule that does not fit the model, RunFailed naming rank, pass and cause.
    """
    from profiler.models import load

    announce("building")
    me = Rank(rank, schedule, load(spec, options.seed), options, store, announce)
    me.agree()
    offset = _offset(rank, schedule.problem.ranks, store)
    trainer = Trainer(me)
    meter = LiveBytes([*me.parameters, *(b for layer in me.layers.values() for b in layer.buffers())])
    watched = trainer.step(0, meter)
    verdict = _checked(me, watched) if options.check else None
    trainer.update()
    records = []
    for number in range(1, options.warmup + options.steps + 1):
        records.append(trainer.step(number))
        trainer.update()
    trainer.close()
    report = Report.of(rank, records[options.warmup :], max(watched.held), meter.most, offset)
    if rank:
        send_bytes(json.dumps(asdict(report)).encode(), 0)
        return None
    reports = [report, *(Report(**json.loads(receive_bytes(other))) for other in range(1, schedule.problem.ranks))]
    return trace_of(schedule, reports, _facts(me, spec, verdict))


class Trainer:
    """Training steps of one rank: walk the program, add up tied gradients, update."""

    def __init__(self, me: Rank) -> None:
        timeout = me.options.timeout
        self.me = me
        self.inbox = Inbox(me.program.incoming, lambda m: _buffer(me.boundaries[m.boundary]), timeout)
        self.outbox = Outbox(timeout)
        shapes = {s: shape for s, (shape, _) in me.boundaries.items()}
        self.walker = Walker(me.program, me.stages, self.inbox, self.outbox, shapes, me.announce)
        self.sums = _tied_sums(me)
        make = OPTIMIZERS[me.options.optimizer]
        self.optimizer = make(me.parameters, lr=me.options.lr) if me.parameters else None

    def step(self, number: int, meter: LiveBytes | None = None) -> Record:
        """Forward and backward of step `number`; all ranks begin together. Gradients stay in `.grad`."""
        data = self.me.data(number)
        self.me.announce("starting a step")
        dist.barrier()
        self.inbox.begin()
        record = self.walker.step(data) if meter is None else _metered(self.walker, data, meter)
        self.outbox.flush()
        for group, parameter in self.sums:
            self.me.announce("summing tied gradients")
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=group)
        return record

    def update(self) -> None:
        """The optimizer's step. Gradients are cleared, not freed: so every W adds to one that is there, at one cost."""
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=False)

    def close(self) -> None:
        """End the threads."""
        self.inbox.close()
        self.outbox.close()


def _buffer(boundary: tuple[tuple[int, ...], torch.dtype]) -> Tensor:
    return torch.empty(boundary[0], dtype=boundary[1])


def _metered(walker: Walker, data: Data, meter: LiveBytes) -> Record:
    meter.ignore([*data.inputs.values(), *data.targets.values()])
    with meter:
        return walker.step(data, meter)


def _offset(rank: int, ranks: int, store: Any) -> int:
    """How far this rank's clock is ahead of rank 0's, ns; one machine has one clock."""
    store.set(f"host/{rank}", _machine())
    hosts = {store.get(f"host/{other}") for other in range(ranks)}
    return clock_offset(rank, ranks) if len(hosts) > 1 else 0


def _machine() -> str:
    """Names the running system: ranks that share it share its monotonic clock."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as stream:
            return stream.read().strip()
    except OSError:
        return socket.gethostname()


def _tied_sums(me: Rank) -> list[tuple[Any, nn.Parameter]]:
    """For every parameter that lives on several ranks: their group and this rank's copy. Every rank makes every group."""
    result = []
    for group in me.model.tied:
        ranks = sorted({me.owners[layer] for layer, _ in group})
        if len(ranks) == 1:
            continue
        handle = dist.new_group(ranks)
        here = [(layer, name) for layer, name in group if layer in me.layers]
        if here:
            result.append((handle, me.layers[here[0][0]].get_parameter(here[0][1])))
    return result


def _checked(me: Rank, record: Record) -> dict[str, Any] | None:
    """Compare the first step with the unsplit model, before anything was updated."""
    me.announce("checking")
    last = me.homes[-1]
    mean = float(torch.stack(record.losses).double().mean()) if record.losses else 0.0
    if me.rank == last and last:
        send_bytes(json.dumps(mean).encode(), 0)
    whole, losses = None, (0.0, 0.0)
    if me.rank == 0:
        mean = json.loads(receive_bytes(last)) if last else mean
        # Another copy of the model: built anew, so its parameters are the starting ones.
        from profiler.models import load

        model = load(me.model.name, me.options.seed)
        whole = model.build()
        trained = {id(p) for p in me.parameters}
        if any(id(p) in trained for layer in whole for p in layer.parameters()):
            raise BadInput(f"model '{model.name}': its function must make new layers on every call, for the check")
        batches = {m: model.batch(m, 0) for m in me.microbatches}
        data = Data(
            {m: x for m, (x, _) in batches.items()}, {m: y for m, (_, y) in batches.items()}, _step_seed(me.options.seed, 0)
        )
        losses = mean, check.reference(whole, data, model.loss)
    return check.compare(me.rank, me.owners, me.layers, whole, losses)


def _facts(me: Rank, spec: str, verdict: dict[str, Any] | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "model": spec,
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
        "layers": list(me.counts),
        "microbatches": len(me.microbatches),
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "host": platform.node(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "peaks": "live bytes after each pass of one further step, without parameters and gradients",
        **{f.name: getattr(me.options, f.name) for f in me.options.__dataclass_fields__.values() if f.name != "check"},
    }
    if verdict is not None:
        facts["check"] = verdict
    return facts
