"""`measure`: a model's layers, its memory and the links between ranks → Profile."""

from __future__ import annotations

import os
import platform
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from zbsolve.errors import BadInput
from zbsolve.exec.failure import RunFailed, one_line
from zbsolve.exec.host import keep_freed_memory
from zbsolve.exec.launch import child_environment
from zbsolve.profile import Layer, Profile

from .alike import chosen
from .flow import flow
from .links import measure_link
from .memory import Held, held
from .models import Model, load
from .rounds import rounds, stages_of
from .states import state_of

KINDS = ("F", "B", "W", "BW")
COPIES = 3  # of equal layers that are measured: a rank runs a few layers in turn, and they share its caches
LEAST = 6  # rounds, however little time is given
Progress = Callable[[str], None]


def measure(
    spec: str,
    *,
    seed: int = 0,
    seconds: float = 10.0,
    neighbours: int = 0,
    timeout: float = 120.0,
    states: str | None = None,
    progress: Progress = lambda text: None,
) -> Profile:
    """Profile the model called `spec` (see `profiler.models.load`) with the executor's own passes, on one thread.

    seconds: how long to time passes (at least some rounds). neighbours: processes that train the same model meanwhile,
    as other ranks on this machine would: they share its caches and memory bandwidth. timeout: seconds for each of its
    helpers. states: as in `profiler.states`. Raises BadInput for the model, RunFailed where a helper does not answer.
    """
    if not seconds > 0 or neighbours < 0:
        raise BadInput(f"profile: seconds {seconds} and neighbours {neighbours} must be positive")
    model = load(spec, seed)
    through = flow(model)
    taken, kinds = chosen(through.prints, through.inputs, through.output, COPIES)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        with _busy(spec, seed, taken, neighbours, timeout):
            samples, memory, parameters = _layers(model, taken, spec, seconds, progress)
    finally:
        torch.set_num_threads(threads)
    state = state_of(states, parameters)
    progress("link between two processes")
    link, times = measure_link(timeout=timeout)
    equal = {i: [j for j in taken if kinds[j] == kinds[i]] for i in range(len(model.layers))}
    layers = tuple(
        _layer(model, i, _pooled(samples, equal[i]), memory[equal[i][0]], through.parameter_bytes[i])
        for i in range(len(model.layers))
    )
    named = {f"{model.layer_names[i]}/{kind}": row for (i, kind), row in samples.items()}
    return Profile(
        "measured",
        spec,
        layers,
        link,
        state.factor,
        None,
        _facts(layers, [memory[equal[i][0]] for i in equal], seed, seconds, neighbours)
        | {"measured_layers": [model.layer_names[i] for i in taken]},
        {**named, **{f"link/{size}": row for size, row in times.items()}},
    )


Samples = dict[tuple[int, str], list[float]]


def _layers(
    model: Model, taken: Sequence[int], spec: str, seconds: float, progress: Progress
) -> tuple[Samples, dict[int, Held], list[Tensor]]:
    """Samples of (layer, kind), µs, and memory, of the layers `taken`; their parameters."""
    samples: Samples = {(i, kind): [] for i in taken for kind in KINDS}
    try:
        stages = stages_of(model, taken)
        turns = rounds(model, stages)
        progress("warming up")
        for _ in range(4):
            next(turns)
        begin, done = time.monotonic(), 0
        while done < LEAST or time.monotonic() - begin < seconds:
            for i, kind, time_us in next(turns):
                samples[i, kind].append(time_us)
            done += 1
            progress(f"{len(taken)} layers, round {done}, {time.monotonic() - begin:.1f} of {seconds:g} s")
        progress("memory")
        memory = held(model, stages)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"model '{spec}': {one_line(error)}") from error
    return samples, dict(zip(taken, memory, strict=True)), [p for stage in stages for p in stage.parameters()]


def _pooled(samples: Samples, equal: Sequence[int]) -> dict[str, list[float]]:
    """Kind → the samples of all equal layers."""
    return {kind: [time_us for i in equal for time_us in samples[i, kind]] for kind in KINDS}


def _layer(model: Model, i: int, samples: dict[str, list[float]], size: Held, parameters: int) -> Layer:
    """B may leave more than it frees (output gradients that W needs): then W's share is all there ever is."""
    return Layer(
        name=model.layer_names[i],
        F=median(samples["F"]),
        B=median(samples["B"]),
        W=median(samples["W"]),
        BW=median(samples["BW"]),
        parameter_bytes=parameters,
        **size.costs(),
    )


def _facts(layers: tuple[Layer, ...], memory: list[Held], seed: int, seconds: float, neighbours: int) -> dict[str, object]:
    total = {kind: sum(getattr(layer, kind) for layer in layers) for kind in KINDS}
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "seed": seed,
        "seconds": seconds,
        "neighbours": neighbours,
        "split_over_fused": (total["B"] + total["W"]) / total["BW"] if total["BW"] else None,
        "left_after_W": [size.after_W for size in memory],
    }


@contextmanager
def _busy(spec: str, seed: int, taken: Sequence[int], count: int, timeout: float) -> Iterator[None]:
    """`count` processes that run rounds until the block ends."""
    command = [sys.executable, "-m", "profiler.neighbour", spec, str(seed), ",".join(map(str, taken))]
    children = [
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=child_environment()
        )
        for _ in range(count)
    ]
    try:
        until = time.monotonic() + timeout
        for child in children:
            _wait_ready(child, until)
        yield
    finally:
        for child in children:
            child.kill()
            child.communicate()


def _wait_ready(child: subprocess.Popen[bytes], until: float) -> None:
    assert child.stdout is not None
    there, _, _ = select.select([child.stdout], [], [], max(0.0, until - time.monotonic()))
    if not there or not child.stdout.readline():
        raise RunFailed("profile: a neighbour did not start")
