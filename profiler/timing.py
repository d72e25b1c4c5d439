"""How long passes take, in rounds until medians are accurate enough or time is up; also as CUDA graphs, as runs replay."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from zbsolve.exec.backward.layer_split import seeding
from zbsolve.exec.backward.stage import Stage
from zbsolve.exec.base.torch_private import end_pool
from zbsolve.exec.graphs.auto import Parts
from zbsolve.models.model import Model
from zbsolve.partition.layer import Layer
from zbsolve.util.columns import median_error
from zbsolve.util.errors import BadInput, RunFailed, is_out_of_memory, one_line

from .dataflow import Flow, batch_of, fake_mode, place, quiet
from .operation_costs import Turn, passes, turn
from .stage_rounds import (
    BY_LAYERS,
    MAX_COPIES,
    SAMPLED,
    TURNS,
    Feed,
    PassTimer,
    Spread,
    alone,
    rotated,
    rounds,
    stages_of,
    updates,
)


class CapturedStage:
    """A stage whose passes replay graphs, turn by turn; it replaces the stage in `rounds`. A turn that cannot be captured
    runs eagerly. All microbatches share the graphs' memory: times do not depend on values.

    x, target: inputs, on a GPU. stream: where captured work is enqueued. why: turn → why it is not captured.
    """

    layers = ()  # read for side inputs: passes with any are not captured

    def __init__(self, stage: Stage, x: Any, target: Any, stream: Any) -> None:
        self.first, self.loss = stage.first, stage.loss
        self.why: dict[str, str] = {}
        self._stage, self._given, self._stream = stage, (x, target), stream
        self._graphs: dict[str, dict[str, Any]] = {}  # turn → kind → graph
        self._made: dict[str, Turn] = {}  # turn → the tensors that its graphs read and make
        self._turn = ""
        for name in TURNS:
            try:
                self._graphs[name], self._made[name] = self._captured(name)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self.why[name] = one_line(error)
                stage.forget()

    def parameters(self) -> list[nn.Parameter]:
        """The stage's parameters."""
        return self._stage.parameters()

    def forward(self, microbatch: int, x: Any, target: Any, *, split: bool, recompute: bool) -> Any:
        """F, which begins a turn."""
        self._turn = "recompute" if recompute else "split" if split else "fused"
        if self._replayed("F"):
            return self._made[self._turn].output
        return self._stage.forward(microbatch, x, target, split=split, recompute=recompute)

    def recompute(self, microbatch: int) -> None:
        """X."""
        if not self._replayed("X"):
            self._stage.recompute(microbatch)

    def backward(self, microbatch: int, gradients: Any) -> Any:
        """B, or BW: always with the captured gradients, ignoring `gradients`."""
        if self._replayed("BW" if self._turn == "fused" else "B"):
            return self._made[self._turn].gradients
        return self._stage.backward(microbatch, gradients)

    def weights(self, microbatch: int) -> None:
        """W."""
        if not self._replayed("W"):
            self._stage.weights(microbatch)

    def _replayed(self, kind: str) -> bool:
        graphs = self._graphs.get(self._turn)
        if graphs is not None:
            graphs[kind].replay()
        return graphs is not None

    def _captured(self, name: str) -> tuple[dict[str, Any], Turn]:
        """Kind → graph of one turn, and the tensors that they read and write. The turn runs eagerly before. Random numbers
        are not seeded, which a capture forbids: times do not depend on them."""
        graphs: dict[str, Any] = {}
        run = partial(turn, self._stage, *self._given, split=name != "fused", recompute=name == "recompute")
        pool = torch.cuda.graph_pool_handle()  # one per turn: what F saves lives until W

        def capture(kind: str, call: Callable[[], Any]) -> Any:
            graph = graphs[kind] = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=pool)
            try:
                made = call()
                graph.capture_end()
            except BaseException:
                with suppress(RuntimeError):  # the error that aborted the capture is the reason
                    graph.capture_end()
                end_pool(self._stream.device, pool)
                raise
            return made

        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), seeding(lambda seed, number: None):
            run(lambda kind, call: call())
            torch.cuda.synchronize()
            return graphs, run(capture)


def replayed(sets: Sequence[list[Stage]], feed: Feed) -> tuple[list[list[Any]], dict[tuple[int, str], str]]:
    """The same copies of stages with their passes captured; and (layer, kind) → why that failed. feed: as for `rounds`."""
    replays: list[list[Any]] = []
    missing: dict[tuple[int, str], str] = {}
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for number, stages in enumerate(sets):
        x, target = feed(number, 0)
        replays.append([])
        for stage in stages:
            captured_stage = CapturedStage(stage, x, target, stream)
            missing |= {(stage.first, kind): why for turn, why in captured_stage.why.items() for kind in SAMPLED[turn]}
            replays[-1].append(captured_stage)
            x = stage.forward(0, x, target, split=False)
            stage.forget()
    return replays, missing


TIMED_KINDS = ("F", "B", "W", "BW", "X")
MIN_ROUNDS = 9  # however little time is given
WARM_ROUNDS = 6
EXTRA_SECONDS = 20.0  # beyond the given time: if rounds are longer, fewer suffice
UPDATES = 5
SETTLED_SPREAD = 0.01  # relative error of a median at which timing stops
ADDITIONS = 2000  # of two numbers: their median µs is the time of an operation
CLOCK_SECONDS = 0.2  # between looks at the device's clock
Progress = Callable[[str], None]
Clock = Callable[[], int | None]  # MHz now; None where it is not known
Samples = dict[tuple[int, str], list[float]]


class OutOfMemory(RunFailed):
    """There is not enough memory even for a single layer. samples: what was measured before, "<layer>/<kind>" → µs."""

    def __init__(self, text: str, samples: dict[str, list[float]]) -> None:
        super().__init__(text)
        self.samples = samples


@dataclass
class Timed:
    """Measured times. samples: (layer, kind) → µs on the device, kinds F, B, W, BW, X, U; host: the same on the host. whole:
    µs of every round with B and W. idle: share of the time in which this process did not run (CPU). alone: layers ran one at
    a time. copies: of each layer that took turns (the minimum, if layers ran alone). clocks: the device's during timing,
    MHz.
    eager: times of eager passes if `samples` are of captured ones; uncaptured: (layer, kind) → why it is not captured."""

    samples: Samples
    host: Samples
    whole: list[float] = field(default_factory=list)
    idle: float = 0.0
    alone: bool = False
    copies: int = MAX_COPIES
    clocks: list[int] = field(default_factory=list)
    eager: Samples = field(default_factory=dict)
    uncaptured: dict[tuple[int, str], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """How times are measured. seconds: at most. cache: the device's, bytes (0: passes may find their data there). clock:
    reads the device's. spread: the mesh that layers are sharded over; None: there is none. parts: how the backward of layers
    is split. capture: time passes as CUDA graphs too."""

    device: torch.device
    seconds: float
    cache: int = 0
    clock: Clock = lambda: None
    spread: Spread | None = None
    parts: Parts = BY_LAYERS
    capture: bool = False

    def agreed(self, value: bool) -> bool:
        """The decision of all ranks that measure together."""
        return value if self.spread is None else self.spread.agreed(value)


@dataclass(frozen=True, eq=False)
class Measuring:
    """What is timed: these layers of a model, in order as a rank would run them."""

    model: Model
    through: Flow
    bench: Bench
    layers: Sequence[int]
    progress: Progress = lambda text: None

    @property
    def words(self) -> str:
        """The layers, for messages."""
        return f"{len(self.layers)} layers" if len(self.layers) > 1 else place(self.model, self.layers[0])

    def copies(self) -> list[list[Stage]]:
        """The layers as stages (see `rotated`)."""
        bench = self.bench
        return rotated(self.model, self.layers, self.through.inputs, bench.device, bench.cache, bench.spread, bench.parts)

    def by_themselves(self) -> list[Measuring]:
        """Each layer by itself, if memory does not suffice for all. Time is shared, and nothing is captured."""
        bench = replace(self.bench, seconds=self.bench.seconds / len(self.layers), capture=False)
        return [replace(self, layers=(i,), bench=bench) for i in self.layers]

    def failure(self, timer: PassTimer) -> str:
        """The pass that failed, for messages."""
        return f"model '{self.model.name}': {timer.at[1]} of {place(self.model, timer.at[0])}"


class Part:
    """What a feature measures beside whole layers, which adds nothing by default. samples, facts: as in a profile. fields:
    of `Profile`. notes: warnings. sent: bytes that its collectives send, if they are to be measured."""

    with_sides = True  # goes with side inputs

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}
        self.facts: dict[str, Any] = {}
        self.fields: dict[str, Any] = {}
        self.notes: list[str] = []
        self.sent: tuple[int, int] | None = None

    def before(self, what: Measuring) -> None:
        """Measure one layer of each kind before layers are timed, to fail early."""

    def after(self, what: Measuring) -> None:
        """Measure the same after layers."""

    def on_layers(self, layers: tuple[Layer, ...], kinds: Sequence[int]) -> tuple[Layer, ...]:
        """The layers, as measured whole, with its costs. kinds: for each the number of an equal one that was measured."""
        return layers

    def together(self, ranks: int, collectives: dict[str, list[float]]) -> None:
        """Take collectives measured between this many ranks: kind → samples, µs."""


def _settled(samples: Samples) -> bool:
    """Whether every kind of pass that matters (1 % of all time) is known to SETTLED_SPREAD."""
    total = sum(median(times) for times in samples.values())
    return all(median_error(times) <= SETTLED_SPREAD or median(times) < 0.01 * total for times in samples.values())


def layer_of(model: Model, i: int, samples: Mapping[str, list[float]], sizes: dict[str, Any], parameters: int) -> Layer:
    """Layer i with the medians of these samples. parameters: bytes of them."""
    times: dict[str, Any] = {kind: median(samples[kind]) for kind in TIMED_KINDS}
    U = median(samples["U"]) if samples.get("U") else 0.0
    return Layer(name=model.layer_names[i], **times, U=U, parameter_bytes=parameters, **sizes)


def time_layers(what: Measuring, make: Callable[..., object]) -> tuple[Timed, list[Stage]]:
    """Times of the layers, and one of their copies as stages. If memory does not suffice for that, layers run one at a time,
    and no stages are returned. make: creates an optimizer of parameters. Raises BadInput naming the pass and the layer that
    fail, OutOfMemory if not even one layer fits."""
    timed, timer = Timed({}, {}), PassTimer(what.bench.device)
    try:
        return timed, _time(timed, what, timer, make)
    except Exception as error:
        if not is_out_of_memory(error) or what.bench.spread is not None:
            raise BadInput(f"{what.failure(timer)}: {one_line(error)}") from error
    timed, timer = Timed({}, {}, alone=True), PassTimer(what.bench.device)
    for alone_one in what.by_themselves():
        timer.at = alone_one.layers[0], "building"
        try:
            _time(timed, alone_one, timer, make)
        except Exception as error:
            if not is_out_of_memory(error):
                raise BadInput(f"{what.failure(timer)}: {one_line(error)}") from error
            names, (i, kind) = what.model.layer_names, timer.at
            done = {f"{names[j]}/{ran}": row for (j, ran), row in timed.samples.items() if j != i}
            where = f"out of memory: {kind} of {place(what.model, i)}, by itself"
            raise OutOfMemory(f"model '{what.model.name}': {where}", done) from None
    return timed, []


def _time(timed: Timed, what: Measuring, timer: PassTimer, make: Callable[..., object]) -> list[Stage]:
    """One copy of the layers, all of which ran and were updated. timed: is extended."""
    sets, bench = what.copies(), what.bench
    feed = alone(what.model, what.layers[0], what.through, bench.device)
    _run(timed, sets, feed, timer, what)
    if bench.capture:
        what.progress("capturing passes")
        replaying, timed.uncaptured = replayed(sets, feed)
        captured = Timed({}, {})
        _run(captured, replaying, feed, PassTimer(bench.device), what, "captured passes of ")
        keys = captured.samples.keys() - timed.uncaptured.keys()
        timed.eager = {key: timed.samples[key] for key in sorted(keys)}
        timed.samples |= {key: captured.samples[key] for key in keys}
        timed.host |= {key: captured.host[key] for key in keys}
        timed.clocks += captured.clocks
    _keep(timed, updates(sets, make, timer, UPDATES))
    return sets[0]


def _run(timed: Timed, sets: list[list[Any]], feed: Feed, timer: PassTimer, what: Measuring, how: str = "") -> None:
    turns, bench, words = rounds(sets, feed, timer, recompute=True), what.bench, f"{how}{what.words}"
    begin = time.monotonic()
    for done in range(WARM_ROUNDS):
        if done and bench.agreed(time.monotonic() - begin > EXTRA_SECONDS):
            break
        what.progress(f"{words}: warming up, round {done + 1} of {WARM_ROUNDS}")
        next(turns)
    own = Timed({}, {})
    begin, ran, done, looked = time.monotonic(), time.process_time(), 0, 0.0
    while bench.agreed(wanted(done, time.monotonic() - begin, bench.seconds)):
        rows = next(turns)
        _keep(own, rows)
        if any(row[1] == "F" for row in rows):
            timed.whole.append(sum(row[2] for row in rows))
        done += 1
        if time.monotonic() - looked >= CLOCK_SECONDS:
            looked = time.monotonic()
            timed.clocks += [mhz for mhz in [bench.clock()] if mhz is not None]
        what.progress(f"{words}, round {done}, {time.monotonic() - begin:.1f} of {bench.seconds:g} s")
        if done >= 10 * MIN_ROUNDS and done % 10 == 0 and bench.agreed(_settled(own.samples)):
            break
    elapsed = time.monotonic() - begin
    timed.idle = max(timed.idle, 1 - (time.process_time() - ran) / elapsed)
    timed.copies = min(timed.copies, len(sets))
    timed.samples |= own.samples
    timed.host |= own.host


def wanted(done: int, elapsed: float, seconds: float) -> bool:
    """Whether to run another round: for the requested time, and at least MIN_ROUNDS, or one of each turn if those would take
    EXTRA_SECONDS more."""
    return elapsed < seconds or done < (MIN_ROUNDS if elapsed < seconds + EXTRA_SECONDS else len(TURNS))


def _keep(timed: Timed, rows: Sequence[tuple[int, str, float, float]]) -> None:
    for i, kind, device_us, host_us in rows:
        timed.samples.setdefault((i, kind), []).append(device_us)
        timed.host.setdefault((i, kind), []).append(host_us)


def host_times(model: Model, through: Flow, taken: Sequence[int]) -> dict[tuple[int, str], float]:
    """(layer, kind) → minimum µs of host time for a pass: its operations, counted with fake tensors, times the cost of one
    operation on a single number here. (On the meta device one would cost more than the whole pass: torch computes shapes in
    Python there.) Empty if a layer does not run with fake tensors."""
    mode = fake_mode()
    try:
        with mode, quiet():
            counted = passes(stages_of(model, taken), through, batch_of(model, mode))
    except Exception:  # it ran with real tensors, so only fake ones fail
        return {}
    number, timer = torch.ones(()), PassTimer(torch.device("cpu"))
    for _ in range(ADDITIONS):
        timer.run(0, "", torch.add, number, number)
    each = median(us for _, _, us, _ in timer.drain())
    return {(i, kind): each * len(ops) for i, kinds in counted.items() for kind, ops in kinds.items()}
