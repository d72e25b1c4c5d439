"""`zbsolve run`: run a schedule on torch.distributed ranks (torchrun's, or local processes), and measure it."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ..exec.choices import DEVICES, RUN_SPLITS, as_line
from ..problem import Problem
from ..profile.doubtful import other_model
from ..schedule.trace import SLACK, Trace
from ..util.errors import BadInput
from ..util.text import exact_bytes, format_bytes, format_times, parse_bytes, plural
from .tools import need_torch, tell, word_and_number

NAN = "nan"  # the default of --watch: check for NaN and inf


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("schedule", help="schedule.json")
    parser.add_argument("--model", required=True, help="a preset (gpt-tiny), module:function or file.py:function")
    _where(parser)
    parser.add_argument(
        "--emulate",
        metavar="TIMES",
        help="every rank behaves like a device: passes and messages take the times of a profile.json, or of the "
        "schedule's own problem (the word schedule)",
    )
    parser.add_argument("--steps", type=int, default=5, help="training steps that are timed")
    parser.add_argument("--warmup", type=int, default=2, help="training steps before")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument(
        "--split",
        choices=RUN_SPLITS,
        default="layers",
        help="how the backward is split: in the layers, by each layer's graph, by graphs that inductor compiles, or (auto) "
        "as measured faster for each layer; :least keeps less between F and B, auto:inductor also tries to compile, "
        "and :slack lets ranks of one machine's CPUs run later W while they wait",
    )
    parser.add_argument(
        "--optimizer",
        choices=("sgd", "adamw"),
        default="sgd",
        help="torch's, with its defaults; a function optimizer(parameters) in the model's file replaces it",
    )
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare loss and gradients with the unsplit model (weights, if a step updates them)",
    )
    parser.add_argument(
        "--memory-limit",
        metavar="BYTES",
        help="the most activations of each rank, such as 40MiB: a pass that needs more fails (steps are slower)",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        const=NAN,
        default="",
        metavar="WHAT",
        help="nan (or nothing): stop at the first pass that makes a NaN or inf, and name it; 100: every 100 timed steps "
        "report what is slow and its cost, solve again beside the run, and switch to a shorter order; nan,100: both",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=300.0,
        help="the most seconds for a pass or its message, and for ranks to start and build the model",
    )
    parser.add_argument("--json", action="store_true", help="the numbers as JSON on standard output")
    parser.add_argument("-o", "--output", help="trace.json")


def _where(parser: argparse.ArgumentParser) -> None:
    """Options that say where ranks run."""
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,…",
        default="",
        help="the mesh of ranks, its outermost dimension first, such as pp=2,tp=2,dp=2: pp is the schedule's, and the "
        "innermost if it is left out; dp are pipelines side by side, each with its part of the batch; over others the "
        "model file's parallelize(stage, mesh) spreads each stage",
    )
    parser.add_argument("--local", action="store_true", help="start one process a rank here (without: torchrun does)")
    parser.add_argument(
        "--device", choices=DEVICES, default="auto", help="of the ranks; auto: cuda if each rank here has a GPU, else cpu"
    )
    parser.add_argument(
        "--share-gpus", action="store_true", help="ranks share the GPUs of this machine, to try a schedule with few GPUs"
    )
    parser.add_argument(
        "--capture", action="store_true", help="each rank's step as one CUDA graph: no pass waits for the host to launch it"
    )
    parser.add_argument(
        "--one-device",
        nargs="?",
        const="cpu",
        choices=("cpu",),
        help="all ranks in this process, in turns on the CPU; on one GPU: --local --share-gpus",
    )


def command(options: argparse.Namespace) -> int:
    """Run a schedule and write its trace."""
    need_torch()
    from ..exec.reports import RunNumbers
    from ..exec.run.job import Options
    from ..exec.run.launch import REPORT_SECONDS, run
    from ..exec.run.torchrun import torchrun_environment
    from ..show.comparison import switch_lines

    place = torchrun_environment()
    try:
        chosen = {what: getattr(options, what) for what in Options.__dataclass_fields__ if hasattr(options, what)}
        chosen |= {"whole_trace": options.output is not None, "start_timeout": options.timeout}
        chosen["watch"], chosen["look"] = word_and_number(options.watch, NAN, "--watch")
        if options.memory_limit is not None:
            chosen["memory_limit"] = parse_bytes(options.memory_limit, "--memory-limit")
        one_device = options.one_device is not None
        ran = run(options.schedule, options.model, Options(**chosen), local=options.local, one_device=one_device)
    except BadInput:
        if place is not None and place[0] > 0 and not options.local:
            time.sleep(REPORT_SECONDS)  # rank 0 needs time to print the error: torchrun stops all ranks when one exits
            return 2
        raise
    if ran is None:
        return 0
    predicted, trace = ran
    check = trace.facts.get("check")
    numbers = trace if isinstance(trace, RunNumbers) else RunNumbers.of(trace)
    body = {name: getattr(numbers, name) for name in ("makespan", "span", "losses", "peaks")} | numbers.facts
    crowded = options.local and not options.one_device and not options.emulate
    saves = [partial(trace.save, options.output)] * bool(options.output)
    later = switch_lines(trace) if isinstance(trace, Trace) else []
    later += [] if options.emulate else [*unlike_lengths(predicted.step), *gpus_not_used(options, numbers.facts)]
    tell(options, lambda: body, lambda: [*_lines(predicted, numbers, crowded), *later], *saves)
    return 1 if check is not None and not check["passed"] else 0


def unlike_lengths(problem: Problem) -> list[str]:
    """A line if some of the schedule's microbatches are longer, as `--lengths` makes them."""
    rows = problem.rows("F")
    times = np.bincount(problem.passes.microbatch[rows], problem.passes.duration[rows])
    if problem.sizes or len(problem.routes) > 1 or times.min() == times.max():
        return []
    most, least = (f"number {k} {times[k]:,.0f} µs" for k in (times.argmax(), times.argmin()))
    unlike = f"the schedule's microbatches have unlike lengths (F of {most}, of {least})"
    return [f"{unlike}: a model with equal ones runs other work"]


def gpus_not_used(options: argparse.Namespace, facts: dict[str, Any]) -> list[str]:
    """A line if --device auto took the CPU although torch sees GPUs, such as under torchrun --virtual-local-rank."""
    from torch.cuda import device_count

    if options.device != "auto" or options.one_device or facts.get("on", "cpu") != "cpu" or not device_count():
        return []
    have = plural(GPU=device_count())
    return [f"WARNING: this ran on the CPU: torch sees {have}, fewer than this machine's ranks; --share-gpus uses these"]


def _lines(predicted: Any, trace: Any, crowded: bool) -> Iterator[str]:
    """The lines of a run's report. crowded: ranks may have to share cores."""
    from ..models.presets import STAND_IN
    from ..util.machine import cores

    mesh, problem = trace.facts.get("mesh", {}), predicted.step
    yield f"device: {trace.facts.get('on', trace.facts.get('device', 'cpu'))}"
    times = math.prod(mesh.values()) // problem.ranks if mesh else 1
    pipelines = f"{times} times " if times > 1 else ""
    # Rounded to whole µs, so that `compare` prints the same number.
    measured, expected = format_times(round(trace.makespan), predicted.makespan)
    yield (
        f"{plural(step=trace.steps)} on {pipelines}{plural(rank=problem.ranks)}: makespan {measured} "
        f"(median step; predicted {expected}), loss {trace.losses[0]:.4f} → {trace.losses[-1]:.4f}"
    )
    emulated, check = trace.facts.get("emulated"), trace.facts.get("check")
    same = emulated is None or problem.source.endswith(f": {trace.facts['model']}")  # otherwise a stand-in runs
    beside = f" (predicted {', '.join(map(format_bytes, trace.facts['predicted_peaks']))})" if same else ""
    yield f"peak activations and messages, rank by rank: {', '.join(map(format_bytes, trace.peaks))}{beside}"
    if "host_peaks" in trace.facts:
        peaks, other = (", ".join(map(format_bytes, trace.facts[f"{what}host_peaks"])) for what in ("", "predicted_"))
        yield f"peak in host memory, rank by rank: {peaks}" + (f" (predicted {other})" if same else "")
    sent = [whole - own for whole, own in zip(trace.facts["predicted_peaks"], predicted.peaks, strict=True)]
    for rank, room in enumerate(problem.capacity or ()):
        if trace.peaks[rank] > room + sent[rank]:  # the capacity does not count messages
            held, has = exact_bytes(trace.peaks[rank]), exact_bytes(room)
            yield f"WARNING: rank {rank} held {held} of activations; its capacity is {has}"
    alone = any(len(problem.stage_ranks[problem.passes.stage[row]]) == 1 for row in problem.rows("C"))
    if alone and trace.facts.get("replicas", 1) <= 1 and emulated is None:
        yield "the schedule sums gradients over replicas (passes C), and this run has none: they take no time (--mesh dp=N)"
    yield from filter(None, [_other_split(problem.source, trace.facts["split"])])
    stand_in = emulated is not None or STAND_IN.fullmatch(trace.facts["model"])
    if not stand_in and (line := other_model(problem.source, trace.facts["model"])):
        yield line
    if trace.facts["split"].startswith("auto"):
        yield from (f"split: {line}" for line in map(as_line, trace.facts.get("splits", [])))
    yield from _of_gpu(trace.facts)
    if "streams" in trace.facts:
        yield f"one device ({trace.facts['streams']})"
    if emulated is not None:
        yield (
            f"emulated ({emulated['times']}): of {emulated['passes']} passes the real work of {emulated['late']} came late, "
            f"by {emulated['worst_late_us']:.0f} µs at worst; {emulated['waited']} times the device had to wait for it"
        )
    if check is not None:
        yield from filter(None, [_verdict(check), _of_rows(check.get("loss_of_rows"))])
    if crowded and (ranks := math.prod(mesh.values())) > (have := cores()):  # the most common reason for a wrong prediction
        yield (
            f"WARNING: {ranks} ranks share {plural(core=have)}: they take turns, so what was measured says little "
            "about the prediction (--emulate gives each rank a device's times)"
        )


def _of_rows(counts: dict[str, Any] | None) -> str:
    """A line if the loss is a sum over rows and no mean, or a warning if rows have different weights in it; or ""."""
    if counts is None:
        return ""
    if counts["uneven"] > 1:
        times = f"{counts['uneven']:.3g}" if counts["uneven"] < 1000 else "many"
        return (
            f"WARNING: in the loss a row counts up to {times} times as much by what rows are beside it (a mean that leaves "
            "out padding?): the loss of a step depends on how the batch is split"
        )
    if counts["add_up"]:
        return "the loss of rows is the sum of theirs: that of a step is the batch's, divided by the number of microbatches"
    return ""


def _of_gpu(facts: dict[str, Any]) -> list[str]:
    """Lines about a run on GPUs: peak memory of the allocator, captured graphs, and whether ranks shared a GPU."""
    if not facts.get("on", "cpu").startswith("cuda"):
        return []
    lines = []
    if "device_peaks" in facts:
        peaks = ", ".join(map(format_bytes, facts["device_peaks"]))
        lines.append(f"peak of a step by the GPU's allocator, rank by rank: {peaks}")
    lines += facts.get("captured", [])
    if facts.get("gpu_is") == "shared in turns":
        lines.append("WARNING: ranks share a GPU and take turns, so times say little (MPS lets them compute at once)")
    return lines


def _other_split(source: str, split: str) -> str:
    """A warning if the schedule's times were measured with another split of B and W than this run's; or ""."""
    match = re.match(r"measured(?: with split ([\w:]+))?: ", source)
    split = split.removesuffix(SLACK)
    measured = (match[1] or "layers") if match else split
    return "" if measured == split else f"WARNING: the profile was measured with split {measured}, this run has {split}"


def _verdict(check: dict[str, Any]) -> str:
    """The result of the check in one line; without a number if a value was not finite."""
    from ..exec.check import NOT_A_NUMBER

    over = f"over {check['tensors']} {check.get('compared', 'gradient')}s and the loss"
    if not check["passed"] and not check["limit"] < check["worst"] < NOT_A_NUMBER:
        return f"check: WRONG: no finite number: {check['where']} ({over})"
    verdict, limit = "right" if check["passed"] else "WRONG", f"{check['limit']:.0e}"
    line = f"check: {verdict}: largest relative difference {check['worst']:.2e} ({check['where']}, limit {limit}) {over}"
    if "from_float64" in check:
        run, unsplit = check["from_float64"]
        line += f"; from float64 the run is {run:.1e} away, the unsplit model {unsplit:.1e}"
    if "moves" in check:
        line += f"; with weights rounded otherwise the unsplit model's own moves by {check['moves']:.1e}, beside a kink"
    return line
