"""A stage's step with and without offload on one device: gradients, bytes and times, compared with those of computing and of
copying alone.

A step with copies can be no shorter than either. It comes near the longer one if its order lets copies run both ways during
computing (`in_turn`); with all forwards first, the ways take turns.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from functools import partial
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zbsolve import Problem, Schedule, pipeline
from zbsolve.build import with_offload
from zbsolve.exec.backward.layer_split import seeding
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.device.rank_device import Marks
from zbsolve.exec.handlers import HANDLERS, Data, RankState
from zbsolve.exec.interpreter import Interpreter
from zbsolve.exec.lowering import lower
from zbsolve.exec.memory import LiveBytes
from zbsolve.exec.offload.rank import Offload, buffers_of

from .splits import Sizes, blocks, difference

MICROBATCHES = 8
AHEAD = 2  # microbatches that come back before their backward, or are not gone yet
IN_TURN, FLIGHT = 48, 12  # microbatches, and how many are in flight at one time
LEAD, LONG = 4, 6  # microbatches before its own that one comes back; how many must be in flight so that it leaves
CHUNK = 1 << 26  # bytes of a copy that reaches the link's rate
SIZES = Sizes(width=2048, heads=16, blocks=2, batch=2, length=1024, rounds=10)
TINY = Sizes(width=32, heads=4, blocks=1, batch=2, length=16, rounds=2)


class Times(NamedTuple):
    """µs of the passes of one microbatch, and of copies of all that it keeps."""

    F: int = 300
    B: int = 300
    W: int = 300
    O: int = 250  # noqa: E741 (the name of the pass)
    R: int = 250


def all_forwards_first(offload: bool, times: Times = Times(), fraction: float = 1.0) -> Schedule:  # noqa: B008 (immutable)
    """One stage: all its forwards, then all backwards. With offload a microbatch is in host memory until two microbatches
    before its backward; the last two stay."""
    names = [f"0F{m}" for m in range(MICROBATCHES)]
    names += [f"0{kind}{m}" for m in range(MICROBATCHES) for kind in "BW"]
    away = range(AHEAD, MICROBATCHES)
    syncs = [(f"0W{m - AHEAD}", f"0R{m}") for m in away] + [(f"0O{m}", f"0F{m + 2}") for m in away if m + 2 in away]
    return _schedule(MICROBATCHES, names, away if offload else (), syncs, times, fraction)


def in_turn(offload: bool, times: Times = Times(), fraction: float = 1.0) -> Schedule:  # noqa: B008 (immutable)
    """One stage: two forwards for each backward until `FLIGHT` microbatches are in flight, then one, at last two backwards
    for each forward. With offload every second one of those that are in flight for long leaves, so copies have as long as
    computing."""
    names: list[str] = []
    away: list[int] = []
    forwards, backwards = 0, 0
    while backwards < IN_TURN:
        rising = forwards < 2 * FLIGHT
        for _ in range(2 if rising else 1):
            if forwards < IN_TURN:
                if forwards % 2 and forwards - backwards >= LONG:
                    away.append(forwards)
                names.append(f"0F{forwards}")
                forwards += 1
        falling = IN_TURN - forwards < forwards - backwards
        for _ in range(2 if falling and not rising else 1):
            if backwards < forwards:
                names += [f"0B{backwards}", f"0W{backwards}"]
                backwards += 1
    return _schedule(IN_TURN, names, away if offload else (), [(f"0W{m - LEAD}", f"0R{m}") for m in away], times, fraction)


ORDERS: dict[str, Callable[[bool, Times], Schedule]] = {"all forwards first": all_forwards_first, "in turn": in_turn}


def _schedule(
    microbatches: int,
    names: Sequence[str],
    away: Sequence[int],
    syncs: Sequence[tuple[str, str]],
    times: Times,
    fraction: float,
) -> Schedule:
    """One stage whose passes run in this order; offloaded microbatches are copied out and back in their own order."""
    problem = pipeline(times.F, times.B, times.W, placement=(0,), microbatches=microbatches, held_until_W=100)
    if not away:
        return Schedule(problem, {"compute:0": tuple(names)})
    which = [[m in away for m in range(microbatches)]]
    made: Problem = with_offload(problem, times.O, times.R, which=which, fraction=fraction)
    order = {"compute:0": names, "d2h:0": [f"0O{m}" for m in away], "h2d:0": [f"0R{m}" for m in away]}
    return Schedule(made, {stream: tuple(row) for stream, row in order.items()}, tuple(syncs))


class OneStage:
    """A stage of transformer blocks on a device, and its step by a schedule of one rank. layers: become part of the
    stage."""

    def __init__(
        self,
        schedule: Schedule,
        device: str,
        sizes: Sizes,
        dtype: torch.dtype = torch.float32,
        layers: list[nn.Module] | None = None,
    ) -> None:
        how: dict[str, Any] = {"device": device, "dtype": dtype}
        self.device = torch.device(device) if device == "cpu" else torch.device(device, torch.cuda.current_device())
        self.layers, program = blocks(sizes, how) if layers is None else layers, lower(schedule)[0]
        microbatches = schedule.problem.microbatches
        stage = Stage(self.layers, 0, _loss, 1 / microbatches)
        buffers = buffers_of(program)
        self.offload = Offload(self.device, buffers, 60.0) if buffers else None
        self.interpreter = Interpreter(
            program, RankState({0: stage}, () if self.offload is None else (self.offload,)), _NoTransport()
        )
        torch.manual_seed(0)
        x = torch.randn((microbatches, sizes.batch, sizes.length, sizes.width), **how)
        self.data = Data(dict(enumerate(x)), dict(enumerate(x.flip(0))))

    def step(self, meter: LiveBytes | None = None) -> None:
        """One step; it is done when this returns."""
        self.interpreter.begin(self.data)
        self.interpreter.run_all(self.interpreter.program.actions, meter)
        self.synchronize()

    def synchronize(self) -> None:
        """Wait for the device, or for copies of the host's threads."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return
        for action in self.interpreter.program.actions:
            ended = HANDLERS[action.kind].ended
            if ended is not None:
                ended(self.interpreter.state, action)

    def spans(self) -> dict[str, tuple[float, float]]:
        """Of each pass its start and end in one step on a CPU, µs from the step's beginning."""
        self.step()
        record, ends = self.interpreter.record, {action.name: end for _, action, end in self.interpreter.ended()}
        rows = zip(self.interpreter.program.actions, record.start, record.end, strict=True)
        return {
            a.name: ((start - record.began) / 1e3, (ends.get(a.name, end) - record.began) / 1e3) for a, start, end in rows
        }

    def captured_spans(self) -> dict[str, tuple[float, float]]:
        """The same of a step that a graph replays on a GPU."""
        marks = self.interpreter.marks = Marks(self.device, fixed=True)
        graph, record = Captured(self), self.interpreter.record
        self.interpreter.marks = None
        marks.begin()
        graph.step()
        names = [action.name for action in self.interpreter.program.actions]
        return {n: (marks.ns(a) / 1e3, marks.ns(b) / 1e3) for n, (a, b) in zip(names, record.marks, strict=True)}

    def gradients(self) -> list[Tensor]:
        """Of all parameters, in order."""
        return [p.grad for layer in self.layers for p in layer.parameters() if p.grad is not None]

    def peak(self) -> int:
        """The most bytes of activations in one step: the allocator's own count on a GPU, else those of live storages."""
        if self.device.type != "cuda":
            meter = LiveBytes([p for layer in self.layers for p in layer.parameters()])
            meter.ignore([*self.gradients(), *self.data.inputs.values(), *self.data.targets.values()])
            with meter:
                self.step(meter)
            return meter.most
        torch.cuda.reset_peak_memory_stats(self.device)
        base = torch.cuda.memory_allocated(self.device)
        self.step()
        return torch.cuda.max_memory_allocated(self.device) - base


class Captured:
    """A step as a CUDA graph. torch's generators cannot be seeded in one, so layers draw no random numbers."""

    def __init__(self, one: OneStage) -> None:
        self.one, self.graph = one, torch.cuda.CUDAGraph()
        side: Any = torch.cuda.Stream(one.device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize(one.device)
        with torch.cuda.stream(side), seeding(lambda seed, number: None):
            one.step()
            with _external_events(one.offload), torch.cuda.graph(self.graph, stream=side):
                one.interpreter.begin(one.data)
                one.interpreter.run_all(one.interpreter.program.actions)
        self.step()

    def step(self) -> None:
        """One step; it is done when this returns."""
        self.graph.replay()
        torch.cuda.synchronize(self.one.device)


@contextmanager
def _external_events(offload: Offload | None) -> Iterator[None]:
    """Within a capture only external events have a time."""
    if offload is None:
        yield
        return
    event: Any = torch.cuda.Event
    offload.marks = SimpleNamespace(event=partial(event, enable_timing=True, external=True))
    try:
        yield
    finally:
        offload.marks = None


class _NoTransport:
    """A rank alone exchanges no messages."""

    def post(self, message: Any) -> None:
        raise AssertionError(message)

    take = send = receive = gone = post


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


class Eager:
    """The microbatches of a step one after the other, as torch runs them: a forward, and its backward."""

    def __init__(self, layers: list[nn.Module], data: Data) -> None:
        self.model, self.data = nn.Sequential(*layers), data

    def step(self) -> None:
        """One step; it is done when this returns."""
        for m, x in self.data.inputs.items():
            loss = _loss(self.model(x), self.data.targets[m]) / len(self.data.inputs)
            loss.backward()  # type: ignore[no-untyped-call]
        if x.device.type == "cuda":
            torch.cuda.synchronize(x.device)


class Copying:
    """So many bytes each way between host and device, in large copies, both ways at once."""

    def __init__(self, device: torch.device, size: int) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.parts = [min(CHUNK, size - at) for at in range(0, size, CHUNK)]
        largest = max(self.parts)
        self.host = [torch.ones(largest, dtype=torch.uint8, pin_memory=self.on_gpu) for _ in range(2)]
        self.there = [torch.ones(largest, dtype=torch.uint8, device=device) for _ in range(2)]
        self.streams: list[Any] = [torch.cuda.Stream(device) if self.on_gpu else None for _ in range(2)]  # type: ignore[no-untyped-call]
        if self.on_gpu:
            torch.cuda.synchronize(device)  # the streams wait for nothing

    def step(self) -> None:
        """All of it; it is done when this returns."""
        for part in self.parts:
            for stream, to, of in zip(
                self.streams, (self.host[0], self.there[1]), (self.there[0], self.host[1]), strict=True
            ):
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    to[:part].copy_(of[:part], non_blocking=True)
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def with_and_without(device: str, sizes: Sizes, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """orders: each order's numbers (see `measured`), by its schedule with the device's own times (times_us). rows, differs:
    those of all forwards first."""
    layers = blocks(sizes, {"device": device, "dtype": dtype})
    times = measured_times(device, sizes, dtype, layers)
    orders = {name: measured(order, times, device, sizes, dtype, layers) for name, order in ORDERS.items()}
    first = orders["all forwards first"]
    return {"rows": first["rows"], "differs": first["differs"], "times_us": times._asdict(), "orders": orders}


def measured_times(device: str, sizes: Sizes, dtype: torch.dtype, layers: list[nn.Module]) -> Times:
    """Times of one microbatch's passes without offload, and of copies of all that it keeps while other copies run the other
    way. On a GPU a graph replays them: in a schedule with launching times nothing could leave in time."""
    kept, moved = (OneStage(all_forwards_first(one), device, sizes, dtype, deepcopy(layers)) for one in (False, True))
    for one in (kept, kept, moved):
        one.step()
    spans = [span for _ in range(3) for span in (kept.spans() if device == "cpu" else kept.captured_spans()).items()]
    each = [round(median(end - start for name, (start, end) in spans if name[1] == kind)) for kind in "FBW"]
    assert moved.offload is not None
    copying = Copying(moved.device, moved.offload.moved)
    copy = median(_samples([copying], sizes.rounds)[0]) / (MICROBATCHES - AHEAD)
    return Times(*(max(one, 1) for one in (*each, round(copy), round(copy))))


def measured(
    order: Callable[[bool, Times], Schedule],
    times: Times,
    device: str,
    sizes: Sizes,
    dtype: torch.dtype,
    layers: list[nn.Module],
) -> dict[str, Any]:
    """A step by an order.

    rows: by name (kept, offloaded) peak bytes and the samples of a step's wall time, µs; also samples of copying alone (the
    same bytes each way, both at once) and of eager mode. captured: the steps as CUDA graphs, on a GPU, or why that fails.
    differs: the largest difference of a gradient, as a share of the gradient's largest value. moved_bytes: each way.
    over_longer: the step over the longer one of computing (kept) and copying alone, also of CUDA graphs. predicted_us: the
    schedule's length with `times`, and over_predicted: the step over it.
    """
    schedules = {"kept": order(False, times), "offloaded": order(True, times)}
    made = {name: OneStage(one, device, sizes, dtype, deepcopy(layers)) for name, one in schedules.items()}
    rows: dict[str, Any] = {}
    for name, one in made.items():
        one.step()
        rows[name] = {"peak_bytes": one.peak()}
    differs = _differs(made["offloaded"], made["kept"])
    offload = made["offloaded"].offload
    assert offload is not None
    ways: dict[str, Any] = made | {
        "copying": Copying(made["kept"].device, offload.moved),
        "eager": Eager(deepcopy(layers), made["kept"].data),
    }
    ways["eager"].step()
    for name, row in zip(ways, _samples(list(ways.values()), sizes.rounds), strict=True):
        rows.setdefault(name, {})["samples_us"] = row
    step, kept, copying = (median(rows[name]["samples_us"]) for name in ("offloaded", "kept", "copying"))
    predicted = {name: float(one.timeline().end.max()) for name, one in schedules.items()}
    found = {
        "rows": rows,
        "differs": differs,
        "moved_bytes": offload.moved,
        "predicted_us": predicted,
        "over_longer": step / max(kept, copying),
        "over_predicted": step / predicted["offloaded"],
    }
    return found | (_captured(made, copying, sizes.rounds) if device == "cuda" else {})


def _captured(made: dict[str, OneStage], copying: float, rounds: int) -> dict[str, Any]:
    """The steps as CUDA graphs; or why that fails."""
    try:
        graphs = {name: Captured(one) for name, one in made.items()}
        for one in made.values():
            for gradient in one.gradients():
                gradient.zero_()
        for graph in graphs.values():
            graph.step()
        rows = dict(zip(graphs, _samples(list(graphs.values()), rounds), strict=True))
        kept, step = (median(rows[name]) for name in ("kept", "offloaded"))
        differs = _differs(made["offloaded"], made["kept"])
        return {"captured": {"samples_us": rows, "differs": differs, "over_longer": step / max(kept, copying)}}
    except Exception:
        return {"captured": {"why": traceback.format_exc()}}


def _differs(found: OneStage, right: OneStage) -> float:
    return max(difference(a, b) for a, b in zip(found.gradients(), right.gradients(), strict=True))


def _samples(ways: Sequence[Any], rounds: int) -> list[list[float]]:
    """Wall times of steps, µs, a row for each of these, which take turns."""
    found: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for row, one in zip(found, ways, strict=True):
            began = time.perf_counter_ns()
            one.step()
            row.append((time.perf_counter_ns() - began) / 1000)
    return found
