"""`measure`: a model's layers, its memory and the links between ranks → Profile."""

from __future__ import annotations

import platform
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from statistics import median

import torch
import torch.distributed as dist

from zbsolve.errors import BadInput
from zbsolve.exec.failure import RunFailed
from zbsolve.exec.group import torchrun_environment
from zbsolve.exec.host import keep_freed_memory
from zbsolve.exec.launch import child_environment
from zbsolve.exec.stage import Stage
from zbsolve.layer import Layer
from zbsolve.machine import cores, processor
from zbsolve.profile import Profile

from .alike import chosen
from .clocks import cache_bytes, clock_of
from .copies import measure_copies
from .flow import fake_mode, flow
from .links import measure_links, samples_of, slowest, survey
from .memory import Held, held
from .models import Model, load
from .neighbour import FAILED
from .rounds import stages_of
from .states import OPTIMIZERS, state_of
from .timing import KINDS, Bench, Progress, Samples, host_times, time_layers
from .warn import warnings

MOST = 1000  # neighbours: each is a process with the model in it
COPIES = 3  # of equal layers that are measured: a rank runs a few layers in turn, and they share its caches


def measure(
    spec: str,
    *,
    seed: int = 0,
    seconds: float = 10.0,
    neighbours: int = 0,
    timeout: float = 120.0,
    states: str | None = None,
    device: str = "cpu",
    progress: Progress = lambda text: None,
) -> Profile:
    """Profile the model called `spec` (see `profiler.models.load`) with the executor's own passes, on one thread.

    seconds: how long to time passes (at least some rounds, which takes minutes where a layer takes seconds; less where the
    medians are known well before).
    neighbours: processes that train the same model meanwhile, as other ranks on this machine would: they share its caches
    and memory bandwidth. timeout: seconds for each of its helpers. states: as in `profiler.states`. device: "cpu" or
    "cuda". Raises BadInput for the model and passes of it that fail, RunFailed where a helper does not answer,
    OutOfMemory.
    """
    if not seconds > 0 or not 0 <= neighbours <= MOST:
        raise BadInput(f"profile: seconds {seconds:g} must be more than 0 and neighbours {neighbours} from 0 to {MOST}")
    target = _device(device)
    model = load(spec, seed)
    progress("looking at the layers")
    through = flow(model)
    taken, kinds = chosen(through.prints, through.inputs, through.output, COPIES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        with fake_mode():
            state = state_of(states, [p for layer in model.build(taken) for p in layer.parameters()])
        with _busy(spec, seed, taken, neighbours, timeout):
            bench = Bench(target, seconds, cache_bytes(target), clock_of(target))
            timed, stages = time_layers(model, through, taken, bench, OPTIMIZERS[state.optimizer], progress)
        progress("memory")
        memory = dict(zip(taken, _memory(model, taken, stages), strict=True))
        del stages
    finally:
        torch.set_num_threads(threads)
    copies = measure_copies() if target.type == "cuda" else {}
    progress("links between neighbours")
    pairs = measure_links(timeout)
    equal = {i: [j for j in taken if kinds[j] == kinds[i]] for i in range(len(model.layers))}
    layers = tuple(
        _layer(model, i, _pooled(timed.samples, equal[i]), memory[equal[i][0]], through.parameter_bytes[i])
        for i in range(len(model.layers))
    )
    named = {f"{model.layer_names[i]}/{kind}": row for (i, kind), row in timed.samples.items()}
    hosts: dict[str, list[float]] = {}
    if target.type == "cuda":
        hosts = {f"{model.layer_names[i]}/{kind} host": row for (i, kind), row in timed.host.items()}
        least = {key: median(row) for key, row in timed.host.items()}
    else:
        least = host_times(model, through, taken)
    host = {f"{model.layer_names[i]}/{kind}": us for (i, kind), us in least.items()}
    facts = _facts(layers, seed, seconds, neighbours, target) | {
        "states": state.name,
        "measured_layers": [model.layer_names[i] for i in taken],
        "alone": timed.alone,
        "cache_bytes": bench.cache,
        "copies": timed.copies,
        "clock_mhz": timed.clocks,
        "host_us": host,
        "links": [pair.facts() for pair in pairs],
        "left_after_W": {model.layer_names[i]: memory[i].after_W for i in taken},
        "warnings": warnings(layers, named, host, timed.whole, timed.idle, target.type, timed.clocks),
    }
    return Profile(
        "measured",
        spec,
        layers,
        slowest(pairs).link,
        state.factor,
        torch.cuda.get_device_properties(target).total_memory if target.type == "cuda" else None,
        facts,
        {**named, **hosts, **samples_of(pairs), **copies},
        tied=through.tied,
    )


def join(timeout: float) -> bool:
    """Whether this process measures: all do that torchrun did not start, and its rank 0. The others wait until it asks for
    the links, up to `timeout` seconds, and take part in those."""
    place = torchrun_environment()
    if place is None:
        return True
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
    if place[0]:
        survey(timeout)
    return place[0] == 0


def _device(name: str) -> torch.device:
    if name not in ("cpu", "cuda"):
        raise BadInput(f"device '{name}': cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise BadInput("device 'cuda': torch sees no CUDA device here")
    return torch.device(name)


def _memory(model: Model, taken: Sequence[int], stages: Sequence[Stage]) -> list[Held]:
    """Of the stages that were timed; of fake ones where they did not fit beside each other."""
    if stages:
        return held(model, stages)
    with fake_mode():
        return held(model, stages_of(model, taken))


def _pooled(samples: Samples, equal: Sequence[int]) -> dict[str, list[float]]:
    """Kind → the samples of all equal layers."""
    return {kind: [time_us for i in equal for time_us in samples.get((i, kind), [])] for kind in (*KINDS, "U")}


def _layer(model: Model, i: int, samples: dict[str, list[float]], size: Held, parameters: int) -> Layer:
    return Layer(
        name=model.layer_names[i],
        F=median(samples["F"]),
        B=median(samples["B"]),
        W=median(samples["W"]),
        BW=median(samples["BW"]),
        X=median(samples["X"]),
        U=median(samples["U"]) if samples["U"] else 0.0,
        parameter_bytes=parameters,
        **size.costs(),
    )


def _facts(layers: tuple[Layer, ...], seed: int, seconds: float, neighbours: int, device: torch.device) -> dict[str, object]:
    total = {kind: sum(getattr(layer, kind) for layer in layers) for kind in KINDS}
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "processor": processor(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "cores": cores(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "seconds": seconds,
        "neighbours": neighbours,
        "split_over_fused": (total["B"] + total["W"]) / total["BW"] if total["BW"] else None,
    }


@contextmanager
def _busy(spec: str, seed: int, taken: Sequence[int], count: int, timeout: float) -> Iterator[None]:
    """`count` processes that run rounds until the block ends."""
    command = [sys.executable, "-m", "profiler.neighbour", spec, str(seed), ",".join(map(str, taken))]
    pipe, none = subprocess.PIPE, subprocess.DEVNULL
    children: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            children.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=none, env=child_environment()))
        until = time.monotonic() + timeout
        for child in children:
            _wait_ready(child, until, spec)
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _wait_ready(child: subprocess.Popen[bytes], until: float, spec: str) -> None:
    assert child.stdout is not None
    there, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
    line = child.stdout.readline().decode(errors="replace").strip() if there else ""
    if line.startswith(FAILED):
        raise BadInput(f"model '{spec}': {line.removeprefix(FAILED)}")
    if not line:
        raise RunFailed("a neighbour did not start")
