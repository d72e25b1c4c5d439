"""The executor's times on CPUs: compared with torch's own pipeline runtime, for a message, and for a barrier at the end of a
step. Ranks are processes with one thread each, on gloo; compared runs take turns in the same processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.support.exec_ranks import on_ranks
from zbsolve import Problem, Schedule, pipeline
from zbsolve.exec import Pipeline, PostValidated
from zbsolve.exec.base.program import Message
from zbsolve.exec.emulate import Times
from zbsolve.exec.run.host import keep_freed_memory
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.wires import CPU, Wires
from zbsolve.models.presets import Block
from zbsolve.problem.placement import parse
from zbsolve.systems import preset

from .harness import Results, listed, rows_of, table

LIMIT = 600.0  # seconds for all that ranks do

# --- Beside torch's runtime ---

# torch's schedule: placement, fused backward
CASES = {"1F1B": ("single", True), "InterleavedZeroBubble": ("loop", False), "ZBVZeroBubble": ("vee", False)}
MICROBATCHES, WARM, STEPS = 16, 3, 5  # STEPS in a round
RUNTIMES = ("plain", "torch", "zbsolve")


@table(lambda model, **_: "runtime" if len(model) > 1 else f"runtime-{model[0]}")
def runtime(model: tuple[Literal["tiny", "gpt"], ...] = ("tiny", "gpt"), ranks: int = 2, rounds: int = 8) -> Results:
    """The executor compared with torch's own pipeline runtime: same model, ranks and order of work. tiny: one small layer a
    stage, whose work takes less than starting it; gpt: 8 blocks of a small GPT. `step`: wall time of a step, ms. `host`: CPU
    time of the rank's own thread in `step()` for a pass (F, B, W or BW), µs; `cpu`: of all threads of the process. `plain`:
    the same forwards and backwards in autograd alone, without a runtime; `beyond`: a runtime's time beyond that."""
    found = on_ranks(ranks, "benchmarks.executor:runtimes_on", [list(model), rounds], LIMIT)
    rows = listed(_medians(name, case, [one[name][case] for one in found]) for name in model for case in CASES)
    return {"ranks": ranks, "microbatches": MICROBATCHES, "steps": rounds * STEPS, "rows": rows, "samples": found}


def _medians(model: str, case: str, ranks: list[Results]) -> Results:
    """Medians over steps, the mean over ranks."""
    row: Results = {"model": model, "schedule": case}
    for name in RUNTIMES:
        step = max(median(sample[0] for sample in rank[name]) for rank in ranks) / 1000
        host, cpu = (
            round(sum(median(sample[i] for sample in rank[name]) / rank["passes"] for rank in ranks) / len(ranks), 1)
            for i in (1, 2)
        )
        row[name] = {"step_ms": round(step, 3), "host_us": host, "cpu_us": cpu}
        row[name]["beyond_us"] = round(host - row["plain"]["host_us"], 1)
    return row


def runtimes_on(rank: int, given: tuple[list[str], int]) -> Results:
    """What each rank runs: samples of one step, µs of wall time, of the own thread, of all threads."""
    models, rounds = given
    return {model: {case: _all_in_turn(case, model, rank, rounds) for case in CASES} for model in models}


def _all_in_turn(case: str, model: str, rank: int, rounds: int) -> Results:
    spot = parse(CASES[case][0], dist.get_world_size())
    runtime, theirs = _torch_step(case, model, rank, spot)
    schedule, ours = _our_step(case, model, runtime, spot)
    steps = dict(zip(RUNTIMES, (_plain_step(model, rank, spot), theirs, ours), strict=True))
    found: Results = {"passes": len(schedule.order[f"compute:{rank}"]), **{name: [] for name in steps}}
    for i in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier()
            for _ in range(WARM if i == 0 else STEPS):
                wall, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
                step()
                after = time.perf_counter() - wall, time.thread_time() - own, time.process_time() - cpu
                if i:
                    found[name].append([round(1e6 * x) for x in after])
    return found


def layers(model: str, stages: int) -> list[nn.Module]:
    """One layer a stage (tiny), or 8 blocks of a small GPT divided among stages."""
    torch.manual_seed(0)
    if model == "tiny":
        return [nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(stages)]
    return [nn.Sequential(*(Block(192, 6) for _ in range(8 // stages))) for _ in range(stages)]


def batch(model: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of one step."""
    shape = (4 * MICROBATCHES, 64) if model == "tiny" else (2 * MICROBATCHES, 128, 192)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def _torch_step(case: str, model: str, rank: int, spot: tuple[int, ...]) -> tuple[Any, Callable[[], Any]]:
    """torch's schedule and one step of it."""
    from torch.distributed.pipelining import PipelineStage, schedules

    each = layers(model, len(spot))
    stages = [PipelineStage(each[s], s, len(spot), torch.device("cpu")) for s, home in enumerate(spot) if home == rank]
    kind, given = getattr(schedules, f"Schedule{case}"), stages[0] if case == "1F1B" else stages
    runtime = kind(given, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    inputs, targets = batch(model)
    first, last = any(s.is_first for s in stages), any(s.is_last for s in stages)
    given, how = [inputs] if first else [], {"target": targets if last else None}
    return runtime, lambda: runtime.step(*given, **how, losses=[] if last else None)


def _our_step(case: str, model: str, runtime: Any, spot: tuple[int, ...]) -> tuple[Schedule, Callable[[], Any]]:
    """The same order in the executor."""
    fused = CASES[case][1]
    times: dict[str, Any] = {"BW": 20} if fused else {"B": 10, "W": 10}
    problem = pipeline(10, **times, placement=spot, microbatches=MICROBATCHES, layers=(1,) * len(spot))
    schedule = preset("1f1b", problem) if fused else order_of(runtime, problem)
    runner = Pipeline(layers(model, len(spot)), schedule, loss=nn.functional.mse_loss, timeout=60)
    inputs, targets = batch(model)
    return schedule, lambda: runner.step(inputs, targets)


def order_of(runtime: Any, problem: Problem) -> Schedule:
    """torch's own order of work as a schedule: its I is a B here, its B a B and a W."""
    kinds = {"F": "F", "I": "B", "W": "W", "B": "BW"}
    order = {}
    for rank, actions in runtime.pipeline_order.items():
        order[f"compute:{rank}"] = tuple(
            f"{one.stage_index}{kind}{one.microbatch_index}"
            for one in actions
            if one is not None
            for kind in kinds.get(one.computation_type.value, "")
        )
    return Schedule(problem, order)


def _plain_step(model: str, rank: int, spot: tuple[int, ...]) -> Callable[[], Any]:
    """This rank's forwards and backwards, without a runtime."""
    own = [layer for layer, home in zip(layers(model, len(spot)), spot, strict=True) if home == rank]
    x = batch(model)[0].chunk(MICROBATCHES)[0].requires_grad_()
    gradient = torch.ones_like(x)

    def step() -> None:
        for _ in range(MICROBATCHES):
            for layer in own:
                layer(x).backward(gradient)
                x.grad = None

    return step


# --- Messages ---

SIZES = (1 << 10, 1 << 14, 1 << 18, 1 << 20, 1 << 22, 1 << 24, 1 << 26)
WARM_TURNS, TURNS, BURST = 5, 20, 8


@table()
def messages(rounds: int = 5) -> Results:
    """The executor's messages between two ranks of one machine, through shared memory, which both map, and through gloo.
    `there`: from before the send until the receiver has it, one message at a time, µs; `host`: CPU time of the sending and
    the receiving thread for a message (send, post, take); `cpu`: of all threads of both processes. `stream`: bytes a second
    of BURST messages sent at once, from the first send to the last one taken, GB/s."""
    found = on_ranks(2, "benchmarks.executor:both_ways", rounds, LIMIT)

    def row(size: int) -> Results:
        row: Results = {"bytes": size}
        for name in found[0]:
            ends = [one[name][str(size)] for one in found]
            there, host, cpu = ([median(turn[i] for turn in end["turns"]) for end in ends] for i in range(3))
            speed = round(BURST * size / median(ends[0]["burst"]) / 1e9, 3)
            host_us, cpu_us = (round(sum(both) / 2, 1) for both in (host, cpu))
            row[name] = {"there_us": round(there[0], 1), "host_us": host_us, "cpu_us": cpu_us, "stream_gb_s": speed}
        return row

    return {"turns": rounds * TURNS, "burst": BURST, "rows": listed(map(row, SIZES)), "samples": found}


def both_ways(rank: int, rounds: int) -> Results:
    """What each rank runs: the samples of every way and size."""
    keep_freed_memory()
    plain = Wires.of()
    ways = {"gloo": plain, "memory": plain.paired(dict.fromkeys(((0, 1), (1, 0)), WARM_TURNS + TURNS))}
    assert len(ways["memory"].pairs) == 2, "these two processes cannot share memory"
    found: Results = {name: {str(size): {"turns": [], "burst": []} for size in SIZES} for name in ways}
    for _ in range(rounds):
        for size in SIZES:
            for name, wires in ways.items():
                found[name][str(size)]["turns"] += _back_and_forth(wires, size)
                found[name][str(size)]["burst"].append(_at_once(wires, size))
    return found


def _links(wires: Wires, size: int, count: int) -> tuple[Mailbox, list[Message], list[Message]]:
    """What this rank sends, and what it takes: this many messages of one size."""
    both = [
        [Message(f"{source}.{i}", f"{source}.{i}", source, 1 - source, source, 0, False) for i in range(count)]
        for source in (wires.rank, 1 - wires.rank)
    ]
    found = Mailbox(wires, {1 - wires.rank: tuple(both[1])}, CPU, 60)
    found.begin({0: size})
    return found, *both


def _back_and_forth(wires: Wires, size: int) -> list[list[float]]:
    """Half a round trip, CPU time of this thread and of this process for one message, µs."""
    box, sent, taken = _links(wires, size, WARM_TURNS + TURNS)
    body, found = torch.ones(size // 4), []
    for out, back in zip(sent, taken, strict=True):
        box.post(back)
        wall, own, cpu = time.perf_counter(), time.thread_time(), time.process_time()
        if wires.rank == 0:
            box.send(out, body)
            box.take(back)
        else:
            box.take(back)
            box.send(out, body)
        after = (time.perf_counter() - wall) / 2, time.thread_time() - own, time.process_time() - cpu
        found.append([round(1e6 * x, 1) for x in after])
    box.flush()
    return found[WARM_TURNS:]


def _at_once(wires: Wires, size: int) -> float:
    """From rank 0 to rank 1: seconds on rank 0 until rank 1 confirms that it has all; the second of two times."""
    body = torch.ones(size // 4)
    for _ in range(2):
        box, sent, taken = _links(wires, size, BURST)
        wires.control.barrier().wait()
        began = time.perf_counter()
        for out, back in zip(sent, taken, strict=True):
            if wires.rank == 0:
                box.send(out, body)
            else:
                box.take(back)
        box.flush()
        wires.control.barrier().wait()
    return time.perf_counter() - began


# --- A barrier at the end ---

RANKS, COUNT, PASS_TIME, LINK_TIME = 4, 8, 8_000, 100  # COUNT of microbatches; µs


@table()
def barrier(steps: int = 12, rounds: int = 3) -> Results:
    """The time of the global gradient norm before the optimizer, and after it: ZB-H2 on 4 emulated devices (passes of 8 ms,
    so that other work of this machine hardly matters). One loop clips as usual: all ranks exchange norms, then step. The
    other is `PostValidated`. Both are compared with the prediction: makespan with a barrier, span without."""
    found, timeline = on_ranks(RANKS, "benchmarks.executor:both_loops", [steps, rounds], LIMIT)[0], _zb_h2().timeline()

    def row(name: str, predicted: float) -> Results:
        ends = [one[name][WARM - 1 :] for one in found]
        samples = [round(1e6 * (b - a)) for late in ends for a, b in zip(late, late[1:], strict=False)]
        return {"predicted_us": int(predicted), "median_us": median(samples), "samples_us": samples}

    both = (("barrier", timeline.makespan), ("validated", timeline.span))
    return rows_of((name, row(name, predicted)) for name, predicted in both)


def both_loops(rank: int, given: tuple[int, int]) -> list[dict[str, list[float]]]:
    """What every rank runs: both loops in turn, round by round; when each optimizer step ended, s."""
    steps, rounds = given
    return [{name: _loop(name == "validated", steps) for name in ("barrier", "validated")} for _ in range(rounds)]


def _zb_h2() -> Schedule:
    options = {"microbatches": COUNT, "comm": LINK_TIME, "layers": [1] * RANKS, "objective": "span"}
    return preset("zb-h2", pipeline([PASS_TIME] * RANKS, B=[PASS_TIME] * RANKS, W=[PASS_TIME] * RANKS, **options))


def _loop(validated: bool, steps: int) -> list[float]:
    """When each optimizer step of this rank ended, s. Layers take only their emulated time."""
    schedule, made = _zb_h2(), [nn.Linear(8, 8) for _ in range(RANKS)]
    runner = Pipeline(made, schedule, loss=nn.functional.mse_loss, timeout=60, emulate=Times.of(schedule, "schedule"))
    parameters = list(runner.parameters())
    optimizer = torch.optim.AdamW(parameters)
    ahead = PostValidated(runner, optimizer, max_norm=1e6) if validated else None
    x, ends = torch.randn(2 * COUNT, 8), []
    for _ in range(WARM + steps):
        runner.step(x, x)
        if ahead is not None:
            ahead.step()
            ahead.zero_grad()
        else:
            _clip(parameters, 1e6)
            optimizer.step()
            optimizer.zero_grad()
        ends.append(time.monotonic())
    if ahead is not None:
        ahead.finish()
    return ends


def _clip(parameters: list[nn.Parameter], max_norm: float) -> None:
    """By the norm over all ranks."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = torch.stack(torch._foreach_norm(gradients)).square().sum()
    dist.all_reduce(total)
    torch._foreach_mul_(gradients, min(1.0, max_norm / (float(total.sqrt()) + 1e-6)))
