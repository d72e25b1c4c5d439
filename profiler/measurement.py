"""`measure`: profiles a model's layers, its memory and the links between ranks → Profile."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from zbsolve.exec.choices import BACKENDS, Row, choose, described, device_of
from zbsolve.exec.graphs.auto import decisions_of, parts_by_name
from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.exec.run.job import OPTIMIZERS
from zbsolve.exec.run.torchrun import torchrun_environment
from zbsolve.features.cuts import Slices
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.partition.layer import Layer, without_backwards
from zbsolve.profile.doubtful import split_doubts
from zbsolve.profile.profile import FACT, Profile
from zbsolve.util.errors import BadInput
from zbsolve.util.machine import cores, free_memory, processor

from .busy_process import busy, times_beside_messages
from .copies import host_link, measure_copies, slowed_by_copies, slowed_by_messages
from .dataflow import chosen, fake_mode, flow, microbatch_facts, quiet
from .devices import cache_bytes, clock_of
from .links import Survey, ends, fit, measure_links, over_sockets, samples_of, slowest, survey, with_others
from .memory import LayerMemory, costs_of, held, least_held
from .operation_costs import OptimizerState, state_of
from .slices import SlicePart
from .stage_rounds import BY_LAYERS, Spread, bytes_here, of_two_kinds, stages_of
from .timing import TIMED_KINDS, Bench, Measuring, Part, Progress, Timed, host_times, layer_of, time_layers
from .vocabulary_times import VocabularyPart

MAX_BUSY_PROCESSES = 1000  # each holds the model
COPIES = 3  # of equal layers that are measured: a rank alternates between a few layers, which share its caches
COLLECTIVE_TRIES = 3  # at counting memory with collectives
LINK_SECONDS = 120.0  # for links to be measured
KINDS = (
    "microbatches differ in shape, and this profile is of those like the first: profile each kind, and mix their problems "
    "(zbsolve.build.mixed)"
)


@dataclass(frozen=True)
class _Measured:
    """Times and sizes. what: the layers measured. equal: for each layer of the model, the measured ones equal to it. state:
    how parameters are stored and updated. memory: of the layers measured. splits: how the backward of each layer is split,
    if that was chosen per layer. parts: what features measured."""

    what: Measuring
    equal: tuple[tuple[int, ...], ...]
    state: OptimizerState
    timed: Timed
    memory: dict[int, LayerMemory]
    splits: list[Row]
    parts: Sequence[Part]

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of the model, each with the medians of those equal to it, and with what features measured of it."""
        sizes, through, whole = costs_of([self.memory[same[0]] for same in self.equal]), self.what.through, []
        for i, same in enumerate(self.equal):
            kinds = (*TIMED_KINDS, "U")
            pooled = {kind: [us for j in same for us in self.timed.samples.get((j, kind), [])] for kind in kinds}
            whole.append(layer_of(self.what.model, i, pooled, sizes[i], through.parameter_bytes[i]))
        layers = through.with_sides(without_backwards(whole, through.untrained))
        for part in self.parts:
            layers = part.on_layers(layers, [row[0] for row in self.equal])
        return layers

    def named(self, rows: Mapping[tuple[int, str], Any], behind: str = "") -> dict[str, Any]:
        """(layer, kind) → value becomes "<layer>/<kind>" → value, as in a profile."""
        names = self.what.model.layer_names
        return {f"{names[i]}/{kind}{behind}": value for (i, kind), value in rows.items()}

    @property
    def samples(self) -> dict[str, list[float]]:
        """The samples of layers, as in a profile."""
        hosts = self.named(self.timed.host, " host") if self.what.bench.device.type == "cuda" else {}
        return {**self.named(self.timed.samples), **self.named(self.timed.eager, " eager"), **hosts}

    def host_times(self) -> dict[str, float]:
        """µs of host time per pass: measured on a GPU, a lower bound on a CPU (not known for layers that a mesh shards)."""
        if self.what.bench.device.type == "cuda":
            return self.named({key: median(row) for key, row in self.timed.host.items()})
        if self.what.bench.spread is not None:
            return {}
        return self.named(host_times(self.what.model, self.what.through, self.what.layers))


def measure(
    spec: str,
    *,
    seed: int = 0,
    seconds: float = 10.0,
    busy_processes: int = 0,
    optimizer_states: str | None = None,
    device: str = "cpu",
    split: str = "layers",
    progress: Progress = lambda text: None,
    spread: Spread | None = None,
    slices: Slices = 1,
    capture: bool = False,
    traffic: bool = False,
) -> Profile:
    """Profile the model called `spec` (see `zbsolve.models.load`) with the executor's own passes, on one thread.

    seconds: how long to time passes. A minimum number of rounds is run, which takes minutes if a layer takes seconds; it
    ends early once the medians are accurate. busy_processes: processes that train the same model at the same time, as other
    ranks on this machine would: they share its caches and memory bandwidth. optimizer_states: as in the module of that name.
    device: "cuda", "cpu", one of several GPUs ("cuda:1"), or "auto" (see `exec.choices`). split: how the backward is split
    (see `Pipeline`). progress: called with a text for each step. spread: the mesh over which the model's `parallelize`
    shards layers; its other ranks beyond the first pipeline call `take_part`. slices: of sequences, which are timed too: a
    number, or lengths. capture: time passes as CUDA graph replays, if they can be captured. traffic: also measure how much
    passes slow down during messages to another process on a CPU, and computation during copies to the host on a GPU; and the
    other way round (`Profile.slowdowns`). Raises BadInput for the model and its passes that fail, RunFailed if a helper
    process does not answer, OutOfMemory.
    """
    target, spreads = _device(device), spread is not None
    limits = f"must be more than 0 and busy processes {busy_processes} from 0 to {MAX_BUSY_PROCESSES}"
    _refuse(
        (not seconds > 0 or not 0 <= busy_processes <= MAX_BUSY_PROCESSES, f"seconds {seconds:g} {limits}"),
        (busy_processes and (spreads or target.type == "cuda"), "--beside N goes with neither --mesh nor --device cuda"),
        (spreads and split != "layers", f"--mesh measures with split layers, not {split}"),
        (traffic and spreads, "--beside traffic goes without --mesh"),
        (capture and (spreads or target.type != "cuda"), "--capture is for passes on a GPU, without --mesh"),
    )
    model = load(spec, seed)
    parts = [*SlicePart.asked(slices, model, spreads or split != "layers"), VocabularyPart()]
    progress("looking at the layers")
    how = BY_LAYERS if split == "layers" else parts_by_name(split)
    bench = Bench(target, seconds, cache_bytes(target), clock_of(target), spread, how, capture)
    group = None if spread is None else spread.mesh.group
    # On a CPU starting the ends of a link now would disturb the timing.
    with ends(target) if target.type == "cuda" and not with_others(group) else nullcontext() as started:
        costs = _measured(model, seed, bench, busy_processes, optimizer_states, progress, parts)
        survey, samples, fields = _machine(costs, seed, traffic, group, started)
    for part in parts:
        part.together(survey.ranks, survey.collectives)
    run: dict[str, object] = {"seed": seed, "seconds": seconds, "neighbours": busy_processes, "split": split}
    return Profile(
        "measured",
        spec,
        costs.layers,
        slowest(survey.pairs).link,
        costs.state.factor,
        torch.cuda.get_device_properties(target).total_memory if target.type == "cuda" else None,
        _facts(costs, run | ({} if spread is None else {"mesh": spread.mesh.sizes}), survey),
        _merged(costs.samples, samples, *(part.samples for part in parts), *(curve.named for curve in survey.curves)),
        tied=costs.what.through.tied,
        **_merged(fields, *(part.fields for part in parts)),
    )


def _merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """All entries of these."""
    return {name: value for part in parts for name, value in part.items()}


def _machine(
    costs: _Measured, seed: int, traffic: bool, group: Any, started: Any
) -> tuple[Survey, dict[str, list[float]], dict[str, Any]]:
    """Measure links, copies of a GPU, and passes beside messages if `traffic` is asked for: links, and of a profile samples
    and fields. group: of the pipeline's ranks. started: the ends of a link."""
    what, bench, on_gpu = costs.what, costs.what.bench, costs.what.bench.device.type == "cuda"
    copies, beside = measure_copies() if on_gpu else {}, dict[str, dict[str, list[float]]]()
    if traffic and not on_gpu:
        what.progress("passes beside messages")
        beside = times_beside_messages(what.model.name, seed, what.layers, bench.seconds)
    what.progress("links between neighbouring ranks")
    sent = next((part.sent for part in costs.parts if part.sent is not None), None)
    survey = measure_links(LINK_SECONDS, group, sent, bench.device, started)
    slowdowns = () if not traffic else slowed_by_messages(beside) if beside else slowed_by_copies(copies)
    loaded = {f"{name} {where}": row for where, rows in beside.items() for name, row in rows.items()}
    host = host_link(copies, free_memory(), torch.cuda.device_count())
    return survey, {**samples_of(survey.pairs), **copies, **loaded}, {"host": host, "slowdowns": slowdowns}


def _refuse(*rows: tuple[object, str]) -> None:
    """Raise BadInput for the first of these options (is it wrong?, why) that is wrong."""
    for wrong, why in rows:
        if wrong:
            raise BadInput(f"profile: {why}")


def take_part(
    spec: str, spread: Spread, *, seed: int, seconds: float, optimizer_states: str | None, device: str = "cpu"
) -> None:
    """Measure the layers of another mesh coordinate, in step with the rank that makes the profile (see `measure`)."""
    target = _device(device)
    bench = Bench(target, seconds, cache_bytes(target), clock_of(target), spread)
    _measured(load(spec, seed), seed, bench, 0, optimizer_states, lambda text: None)


def _measured(
    model: Model,
    seed: int,
    bench: Bench,
    count: int,
    optimizer_states: str | None,
    progress: Progress,
    parts: Sequence[Part] = (),
) -> _Measured:
    """Time the layers and count their memory, on one thread."""
    through, spread = flow(model), bench.spread
    if spread is not None:
        spread.check(model)
    apart = spread is not None or bench.capture or not all(part.with_sides for part in parts)
    _refuse((through.sides and apart, "a model with side inputs goes without --slices, --mesh and --capture"))
    taken, kinds = chosen(through.prints, through.inputs, through.output, COPIES)
    if spread is not None:  # `parallelize` may treat equal layers differently
        taken = kinds = tuple(range(len(model.layers)))
    equal = tuple(tuple(j for j in taken if kinds[j] == kind) for kind in kinds)
    what = Measuring(model, through, bench, taken, progress)
    each = replace(what, layers=sorted(set(kinds)))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        with fake_mode():
            state = state_of(optimizer_states, [p for layer in model.build(taken) for p in layer.parameters()])
        with busy(model.name, seed, taken, count):
            for part in parts:
                part.before(each)
            timed, stages = time_layers(what, OPTIMIZERS[state.optimizer])
            for part in parts:
                part.after(each)
        progress("memory")
        if spread is not None:
            rows = least_held(model, stages, COLLECTIVE_TRIES)
        elif stages:
            rows = held(model, stages)
        else:  # not all fit into memory at once
            with fake_mode(), quiet():
                rows = held(model, stages_of(model, taken))
        memory = dict(zip(taken, rows, strict=True))
        if spread is not None:
            sizes, tied = bytes_here(model, stages)
            what = replace(what, through=replace(through, parameter_bytes=sizes, tied=tied))
    finally:
        torch.set_num_threads(threads)
    return _Measured(what, equal, state, timed, memory, decisions_of(stages), parts)


def join(timeout: float, device: torch.device) -> bool:
    """Whether this process measures: one not started by torchrun does, and torchrun's rank 0. The other ranks wait here, at
    most `timeout` seconds, until rank 0 measures the links between their devices, and take part in that."""
    place = torchrun_environment()
    if place is None:
        return True
    if not dist.is_initialized():
        dist.init_process_group(BACKENDS[device.type], init_method="env://", timeout=timedelta(seconds=timeout))
    if place[0]:
        survey(timeout, device)
    return place[0] == 0


def _device(asked: str) -> torch.device:
    """The requested device, made torch's current one. Raises BadInput."""
    kind, colon, number = asked.partition(":")
    if colon and not (kind == "cuda" and number.isdecimal()):
        raise BadInput(f"device '{asked}': cuda, cpu, auto, or one of several GPUs as in cuda:1")
    device = device_of(choose(kind), int(number or 0))
    if device.type == "cuda":
        if device.index >= torch.cuda.device_count():
            raise BadInput(f"device '{asked}': torch sees GPUs up to cuda:{torch.cuda.device_count() - 1} here")
        torch.cuda.set_device(device)
    return device


def _facts(costs: _Measured, run: dict[str, object], survey: Survey) -> dict[str, object]:
    """The profile's facts about its measurement."""
    what, timed, layers = costs.what, costs.timed, costs.layers
    model, through, bench, taken = what.model, what.through, what.bench, what.layers
    device, mesh = bench.device, {} if bench.spread is None else bench.spread.mesh.sizes
    total = {kind: sum(getattr(layer, kind) for layer in layers) for kind in TIMED_KINDS}
    named, host = costs.named(timed.samples), costs.host_times()
    notes = [note for part in costs.parts for note in part.notes]
    warned = warnings(layers, named, host, timed.whole, timed.idle, device.type, timed.clocks)
    return {
        "host": platform.node(),
        "machine": platform.machine(),
        "processor": processor(),
        "device": described(device),
        "cores": cores(),
        "threads": 1,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **run,
        "split_over_fused": (total["B"] + total["W"]) / total["BW"] if total["BW"] else None,
        "states": costs.state.name,
        "measured_layers": [model.layer_names[i] for i in taken],
        "alone": timed.alone,
        "cache_bytes": bench.cache,
        "copies": timed.copies,
        "clock_mhz": timed.clocks,
        "host_us": host,
        "links": [pair.facts() for pair in survey.pairs],
        **({FACT: [curve.facts(fit(curve.samples)) for curve in survey.curves]} if survey.curves else {}),
        **microbatch_facts(through, mesh.get("tp", 1)),
        **({"splits": costs.splits} if costs.splits else {}),
        **({"captured": True, "not_captured": costs.named(timed.uncaptured)} if bench.capture else {}),
        "left_after_W": {model.layer_names[i]: costs.memory[i].after_W for i in taken},
        **_merged(*(part.facts for part in costs.parts)),
        "warnings": [*warned, *([KINDS] if of_two_kinds(model) else []), *over_sockets(survey.pairs), *notes],
    }


HOST_SHARE = {"cpu": 0.5, "cuda": 0.9}  # share of a pass above which the host is a bottleneck
MAX_DRIFT = 0.05
MAX_IDLE = 0.05
DISTURBED = "disturbed:"  # prefix of warnings that times are unreliable


def warnings(
    layers: Sequence[Layer],
    samples: Mapping[str, Sequence[float]],
    hosts: Mapping[str, float],
    whole: Sequence[float],
    idle: float,
    device: str,
    clocks: Sequence[int] = (),
) -> list[str]:
    """One line per warning. samples: "<layer>/<kind>" → µs; hosts: host times likewise. whole: µs of whole rounds, in order.
    idle: share of the time in which this process waited for a core. clocks: the device's during measurement, MHz."""
    lines = split_doubts(layers)
    if sum(layer.W for layer in layers) < 0.05 * sum(layer.BW for layer in layers):
        lines.append(
            "W does next to nothing: the weight gradients are made in B, by layers that are no linear layers, embeddings or "
            "convolutions, or that were compiled; a zero-bubble schedule cannot pay"
        )
    return [*lines, *_host(samples, hosts, device), *_disturbed(whole, idle, device, clocks)]


def _host(samples: Mapping[str, Sequence[float]], hosts: Mapping[str, float], device: str) -> list[str]:
    """Warnings about host time: on a GPU it may exceed the device's; on a CPU much of a pass may be overhead."""
    limit = HOST_SHARE[device]
    shares = [(host / max(median(samples[key]), 1e-9), key) for key, host in hosts.items() if key in samples and host]
    late = [row for row in shares if hosts[row[1]] >= limit * median(samples[row[1]])]
    if not late:
        return []
    worst, key = max(late)
    what = "launching takes as long as computing" if device == "cuda" else "half of the time or more computes nothing"
    return [
        f"host-bound: {what} in {len(late)} of {len(samples)} kinds of pass, most in {key} ({worst:.0%}): larger passes win"
    ]


def _disturbed(whole: Sequence[float], idle: float, device: str, clocks: Sequence[int]) -> list[str]:
    lines = []
    half = len(whole) // 2
    if half >= 3:
        before, after = median(whole[:half]), median(whole[half:])
        if abs(after - before) > MAX_DRIFT * before:
            lines.append(
                f"{DISTURBED} the second half of the rounds took {abs(after / before - 1):.0%} "
                f"{'more' if after > before else 'less'} time: the clock or another process changed"
            )
    if idle > MAX_IDLE and device == "cpu":
        lines.append(f"{DISTURBED} this process waited for a core {idle:.0%} of the time: another one was busy")
    if clocks and max(clocks) - min(clocks) > MAX_DRIFT * max(clocks):
        lines.append(
            f"{DISTURBED} the device's clock moved between {min(clocks):,} and {max(clocks):,} MHz: power or heat; longer "
            "runs see the clock that training will have"
        )
    return lines
