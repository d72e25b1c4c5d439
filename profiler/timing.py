"""How long passes take: rounds until medians are known well enough or time is up, and what disturbed them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

import torch

from zbsolve.errors import BadInput
from zbsolve.exec.failure import RunFailed, one_line
from zbsolve.exec.stage import Stage
from zbsolve.profile_rows import spread

from .flow import Flow, fake_mode, place, quiet
from .models import Model
from .operations import passes
from .rounds import MOST_COPIES, TURNS, Feed, Watch, alone, batches, rotated, rounds, stages_of, updates

KINDS = ("F", "B", "W", "BW", "X")
LEAST = 9  # rounds, however little time is given
WARM = 6
PATIENCE = 20.0  # seconds over what was given: where rounds are longer, fewer are enough
UPDATES = 5
SPREAD = 0.01  # of a median: good enough to stop
CLOCK_EVERY = 0.2  # seconds between looks at the device's clock
Progress = Callable[[str], None]
Clock = Callable[[], int | None]  # MHz now; None where it is not known
Samples = dict[tuple[int, str], list[float]]


class OutOfMemory(RunFailed):
    """There was not enough memory for a layer even by itself. `samples`: what was measured before, "<layer>/<kind>" → µs."""

    def __init__(self, text: str, samples: dict[str, list[float]]) -> None:
        super().__init__(text)
        self.samples = samples


@dataclass
class Timed:
    """samples: (layer, kind) → µs on the device, kinds F, B, W, BW, X, U; host: the same on the host; whole: µs of every
    round with B and W; idle: part of the time in which this process did not run (CPU); alone: layers ran one at a time;
    copies: of each layer that took turns (the fewest, where layers ran alone); clocks: the device's, MHz, meanwhile."""

    samples: Samples
    host: Samples
    whole: list[float] = field(default_factory=list)
    idle: float = 0.0
    alone: bool = False
    copies: int = MOST_COPIES
    clocks: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Bench:
    """What times are taken on, and how long: the device, its cache in bytes (0: passes may find what they need there), its
    clock, and seconds at most."""

    device: torch.device
    seconds: float
    cache: int = 0
    clock: Clock = lambda: None


def is_out_of_memory(error: BaseException) -> bool:
    """Torch's CPU allocator raises a plain RuntimeError."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))


def _settled(samples: Samples) -> bool:
    """Every kind of pass that matters (1 % of all) is known to SPREAD."""
    total = sum(median(times) for times in samples.values())
    return all(spread(times) <= SPREAD or median(times) < 0.01 * total for times in samples.values())


def time_layers(
    model: Model, through: Flow, taken: Sequence[int], bench: Bench, make: Callable[..., object], progress: Progress
) -> tuple[Timed, list[Stage]]:
    """Times of the layers `taken`, one after the other as a rank would run them; one at a time where memory does not
    suffice for that. Raises BadInput naming the pass and the layer that fail, OutOfMemory where not even one layer fits."""
    timed = Timed({}, {})
    watch = Watch(bench.device)
    try:
        sets = rotated(model, taken, through.inputs, bench.device, bench.cache)
        _run(timed, sets, batches(model, bench.device), watch, bench, progress, f"{len(taken)} layers")
        _keep(timed, updates(sets, make, watch, UPDATES))
        return timed, sets[0]
    except Exception as error:
        if not is_out_of_memory(error):
            text = f"model '{model.name}': {watch.at[1]} of {place(model, watch.at[0])}: {one_line(error)}"
            raise BadInput(text) from error
    return _one_by_one(model, through, taken, bench, make, progress)


def _one_by_one(
    model: Model, through: Flow, taken: Sequence[int], bench: Bench, make: Callable[..., object], progress: Progress
) -> tuple[Timed, list[Stage]]:
    timed, watch = Timed({}, {}, alone=True), Watch(bench.device)
    sets: list[list[Stage]] = []
    share = replace(bench, seconds=bench.seconds / len(taken))
    for i in taken:
        watch.at = i, "building"
        try:
            sets = rotated(model, [i], through.inputs, bench.device, bench.cache)
            feed = alone(model, i, through.inputs[i], bench.device)
            _run(timed, sets, feed, watch, share, progress, place(model, i))
            _keep(timed, updates(sets, make, watch, UPDATES))
        except Exception as error:
            where = f"{watch.at[1]} of {place(model, i)}"
            if not is_out_of_memory(error):
                raise BadInput(f"model '{model.name}': {where}: {one_line(error)}") from error
            done = {f"{model.layer_names[j]}/{kind}": row for (j, kind), row in timed.samples.items() if j != i}
            raise OutOfMemory(f"model '{model.name}': out of memory: {where}, by itself", done) from None
        sets.clear()
    return timed, []


def _run(
    timed: Timed, sets: list[list[Stage]], feed: Feed, watch: Watch, bench: Bench, progress: Progress, what: str
) -> None:
    turns = rounds(sets, feed, watch, recompute=True)
    begin = time.monotonic()
    for done in range(WARM):
        if done and time.monotonic() - begin > PATIENCE:
            break
        progress(f"{what}: warming up, round {done + 1} of {WARM}")
        next(turns)
    mine: Samples = {}
    begin, ran, done, looked = time.monotonic(), time.process_time(), 0, 0.0
    while wanted(done, time.monotonic() - begin, bench.seconds):
        rows = next(turns)
        for i, kind, device_us, host_us in rows:
            mine.setdefault((i, kind), []).append(device_us)
            timed.host.setdefault((i, kind), []).append(host_us)
        if any(row[1] == "F" for row in rows):
            timed.whole.append(sum(row[2] for row in rows))
        done += 1
        if time.monotonic() - looked >= CLOCK_EVERY:
            looked = time.monotonic()
            timed.clocks += [mhz for mhz in [bench.clock()] if mhz is not None]
        progress(f"{what}, round {done}, {time.monotonic() - begin:.1f} of {bench.seconds:g} s")
        if done >= 10 * LEAST and done % 10 == 0 and _settled(mine):
            break
    elapsed = time.monotonic() - begin
    timed.idle = max(timed.idle, 1 - (time.process_time() - ran) / elapsed)
    timed.copies = min(timed.copies, len(sets))
    timed.samples |= mine


def wanted(done: int, elapsed: float, seconds: float) -> bool:
    """Whether there is to be another round: for as long as was asked; LEAST in any case, or one of each turn where that
    would try the patience of whoever waits."""
    return elapsed < seconds or done < (LEAST if elapsed < seconds + PATIENCE else len(TURNS))


def _keep(timed: Timed, rows: Sequence[tuple[int, str, float, float]]) -> None:
    for i, kind, device_us, host_us in rows:
        timed.samples.setdefault((i, kind), []).append(device_us)
        timed.host.setdefault((i, kind), []).append(host_us)


def host_times(model: Model, through: Flow, taken: Sequence[int]) -> dict[tuple[int, str], float]:
    """µs that the host spends on passes at the least: their operations, counted under fake tensors, times what one costs
    here on a single number. (On the meta device it would be more than the whole pass: torch computes shapes in Python
    there.) Empty where a layer does not run under fake tensors."""
    mode = fake_mode()
    try:
        with mode, quiet():
            x, target = model.batch(0, 0)
            counted = passes(stages_of(model, taken), through, (mode.from_tensor(x), mode.from_tensor(target)))
    except Exception:  # it ran with real ones: what fails here is about fake ones
        return {}
    each = _operation()
    return {(i, kind): each * len(ops) for i, kinds in counted.items() for kind, ops in kinds.items()}


def _operation(times: int = 2000) -> float:
    """Median µs of adding two numbers."""
    one = torch.ones(())
    rows = []
    for _ in range(times):
        start = time.monotonic_ns()
        torch.add(one, one)
        rows.append((time.monotonic_ns() - start) / 1000)
    return median(rows)
