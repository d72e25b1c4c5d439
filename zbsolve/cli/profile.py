"""`zbsolve profile`: measure a model, or make a profile from files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ..exec.choices import DEVICES, SPLITS, as_line, choose, described, device_of, local_place
from ..exec.run.host import set_environment
from ..features.sizes import of_sizes
from ..profile.lengths import stalls_of
from ..profile.measured_run import FROM_STEPS, LINKS
from ..profile.measured_run import from_trace as profile_of
from ..profile.profile import Profile
from ..profile.slow import slow_parts
from ..show.profile_report import profile_as_text
from ..util.errors import BadInput, RunFailed
from ..util.files import write_document
from ..util.text import plural
from .tools import need_torch, progress_line, searching, tell, word_and_number

MOST_SLOW, TRAFFIC = 5, "traffic"  # lines about slow passes; the word of --beside for message traffic
if TYPE_CHECKING:
    import torch


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "model",
        nargs="*",
        metavar="MODEL",
        help="a preset (gpt-tiny, llama3-8b@layers=4,length=512), your own as module:function or file.py:function, or a "
        'Hugging Face config as hf:LlamaConfig{"num_hidden_layers": 4}@length=512; or profile.json … of one model, each '
        "with other sequences a microbatch, for solve's --sizes",
    )
    parser.add_argument(
        "--from-trace",
        metavar="TRACE",
        help="a profile from a run: a trace.json, or another engine's: a torch profiler trace, or a folder with one a rank; "
        "a folder of pp_rank_N.json (Primus, Megatron); a StragglerAnalysis parquet. MODEL is then left out, or a "
        "profile.json that divides times among layers and has their bytes",
    )
    parser.add_argument(
        "--estimate",
        metavar="DEVICE",
        help="run nothing: a roofline for a100, h100, h200, b200 or mi300x, marked as an estimate",
    )
    parser.add_argument(
        "--optimizer-states",
        help="adam, adam-mixed, adam-mixed-float-gradients or sgd; default: Adam, mixed if parameters have 16 bits",
    )
    _device_options(parser)
    parser.add_argument("--split", choices=SPLITS, default="layers", help="how the backward is split, as run's --split")
    parser.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        help="seconds to time passes at most, but always a few rounds; with --from-trace: to search for a better step, 0: "
        "not at all",
    )
    parser.add_argument(
        "--slices",
        default="1",
        metavar="N|4,2,1,1",
        help="also time the passes of this number of even slices of a sequence, or of slices of these lengths in "
        "proportion, for solve's --slices",
    )
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,…",
        default="",
        help="torchrun's ranks, the outermost dimension first, such as tp=2 or pp=2,tp=2; over all but pp and dp the model "
        "file's parallelize(stage, mesh) spreads the layers, and times and bytes of one rank are measured; with --estimate "
        "tp=8: each rank of the pipeline has 8 devices",
    )
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches")
    parser.add_argument("--json", action="store_true", help="a summary as JSON on standard output; the profile goes to -o")
    parser.add_argument("-o", "--output", help="profile.json, or - for standard output")


def _device_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--beside",
        metavar="WHAT",
        default="",
        help="work beside the passes: 3: three processes that train the same model, as other ranks here would; "
        "traffic: also time how passes and messages between processes (on a GPU computing and copies to the host) slow each "
        "other, which solve counts; traffic,3: both",
    )
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default="auto",
        help="cuda: each of torchrun's ranks here takes its own GPU; or cpu; auto: cuda if there are as many GPUs",
    )
    parser.add_argument("--share-gpus", action="store_true", help="torchrun's ranks take the GPUs in turn")
    parser.add_argument("--capture", action="store_true", help="on a GPU: times of passes as CUDA graphs replay them")


def command(options: argparse.Namespace) -> int:
    """Measure a model and write its profile, or make a profile from a run or from several profiles."""
    several = options.model
    options.model = several[0] if several else None
    if len(several) > 1:
        return _of_sizes(options, several)
    if options.from_trace is not None:
        return from_trace(options)
    if options.model is None:
        raise BadInput("name MODEL, or --from-trace TRACE")
    if options.model.endswith((".json", ".json.gz")):
        raise BadInput(f"{options.model}: a file, and MODEL is a model to measure; solve, show and compare read a profile")
    if options.output is None:
        raise BadInput("say where to write it: -o profile.json")
    return _measure(options)


def _of_sizes(options: argparse.Namespace, paths: Sequence[str]) -> int:
    """Make one profile from profiles of the same model with several sizes of microbatches."""
    for path in paths:
        if not path.endswith((".json", ".json.gz")):
            raise BadInput(f"{path}: one MODEL is measured at a time; several are profile.json … of one model")
    if options.from_trace is not None or options.output is None:
        raise BadInput("several profiles make one: leave out --from-trace, and say where to write it: -o profile.json")
    merged = of_sizes([Profile.load(path) for path in paths], paths)
    sizes = ", ".join(map(str, merged.facts["sizes"]))
    line = f"sizes: {sizes} sequences a microbatch; passes lie within {merged.facts['off_line']:.1%} of their lines\n"
    tell(options, lambda: merged.facts, lambda: profile_as_text(merged) + line, lambda: merged.save(options.output))
    return 0


def _measure(options: argparse.Namespace) -> int:
    need_torch()
    with redirect_stdout(sys.stderr):  # what the model prints; standard output may be the profile itself
        if options.estimate:
            from profiler import estimate

            if options.slices != "1":
                raise BadInput("--slices: are measured; an estimate is of any: say them to solve")
            how = {"optimizer_states": options.optimizer_states, "tensor_ranks": _tensor_ranks(options.mesh)}
            profile = estimate(options.model, options.estimate, seed=options.seed, **how)
        else:
            measured = _measured(options)
            if measured is None:
                return 0
            profile = measured
    progress_line("")
    total = {kind: sum(getattr(layer, kind) for layer in profile.layers) for kind in ("F", "B", "W", "BW")}
    link = {"latency": profile.link.latency, "bytes_per_us": profile.link.bytes_per_us}
    host = {} if profile.host is None else {"host_link": asdict(profile.host)}
    body = {"model": profile.model, "source": profile.source, "layers": len(profile.layers), "total": total, "link": link}
    rows: Any = profile.facts.get("splits", []) if options.split.startswith("auto") else []
    device = "" if options.estimate else f"device: {profile.facts['device']}\n"
    text = device + profile_as_text(profile) + "".join(f"split: {line}\n" for line in map(as_line, rows))
    for beside in dict.fromkeys(slowdown.beside for slowdown in profile.slowdowns):
        slower = [f"{slowdown.kind} {slowdown.factor:.3f}" for slowdown in profile.slowdowns if slowdown.beside == beside]
        text += f"beside {beside} these take longer, by these factors: {', '.join(slower)}\n"
    tell(options, lambda: body | host | profile.facts, lambda: text, lambda: profile.save(options.output))
    return 0


def _tensor_ranks(mesh: str) -> int:
    """The tensor-parallel ranks of --mesh, for an estimate. Raises BadInput for other dimensions than tp."""
    from ..exec.mesh import named_sizes

    sizes = named_sizes(mesh) if mesh else {}
    if set(sizes) - {"tp"}:
        raise BadInput(f"--mesh '{mesh}': an estimate knows tp alone, the devices of a rank of the pipeline: such as tp=8")
    return sizes.get("tp", 1)


def _measured(options: argparse.Namespace) -> Profile | None:
    """The measured profile. Under torchrun rank 0 measures the model, and all ranks measure their links; the others return
    None. If memory runs out, samples measured until then are written to a file next to the output."""
    from profiler import measure
    from profiler.links import survey
    from profiler.measurement import join, take_part
    from profiler.stage_rounds import joined
    from profiler.timing import OutOfMemory

    traffic, processes = word_and_number(options.beside, TRAFFIC, "--beside")
    timeout, device = options.seconds + 600, _device(options)
    spread = joined(options.mesh, timeout, device) if options.mesh else None
    how = {name: getattr(options, name) for name in ("seed", "seconds", "optimizer_states")} | {"device": str(device)}
    if spread is not None and spread.beside:
        if spread.measures:
            take_part(options.model, spread, **how)
        return None
    if spread is not None and not spread.measures:
        survey(timeout, device, spread.mesh.group)
        return None
    if spread is None and not join(timeout, device):
        return None
    try:
        return measure(
            options.model,
            busy_processes=processes,
            traffic=traffic,
            split=options.split,
            progress=progress_line,
            spread=spread,
            slices=options.slices,
            capture=options.capture,
            **how,
        )
    except OutOfMemory as error:
        kept = ""
        if options.output != "-" and error.samples:
            path = f"{options.output}.partial"
            write_document(path, "samples", {"model": options.model, "failed": str(error), "samples": error.samples})
            kept = f"; what was measured before is in {path}"
        raise RunFailed(f"{error}{kept}") from None


def _device(options: argparse.Namespace) -> torch.device:
    """The device that this process measures on. Raises BadInput."""
    import torch

    set_environment(options.device, options.share_gpus)
    rank, ranks = local_place()
    kind = choose(options.device, ranks, options.share_gpus)
    device = device_of(kind, rank, options.share_gpus)
    if kind == "cuda":
        torch.cuda.set_device(device)
    progress_line(f"device: {described(device)}")
    return device


def from_trace(options: argparse.Namespace) -> int:
    """Make a profile from a run's trace, and print how short its step could be."""
    from ..interchange.traces.reading import read_trace
    from ..search.today import today_of
    from ..show.run_text import run_in_words, stage_times, today_as_text, today_line

    if options.seconds < 0:
        raise BadInput(f"--seconds {options.seconds:g}: from 0 up; 0: no search")
    base = None if options.model is None else Profile.load(options.model)
    trace = read_trace(options.from_trace)
    profile, stalls, slow = profile_of(trace, base), stalls_of(trace), slow_parts(trace)
    with searching("profile", "auto" if options.seconds else "none") as (search, pressed):
        today = today_of(trace, seconds=options.seconds, seed=options.seed, progress=search.show, stop=pressed)
    body = {"model": profile.model, "source": profile.source, "rank_factors": profile.rank_factors, **profile.facts}
    body |= {"blocking": trace.facts.get("blocking"), "microbatch_factors": profile.microbatch_factors}
    body |= {"stages": stage_times(trace), "stalls": [stall.to_json() for stall in stalls]}
    body |= {"slow": [slow_part.to_json() for slow_part in slow]}
    body |= {"today": today.to_json() | {"line": today_line(today)}}
    slowest = "".join(f"{slow_part}\n" for slow_part in slow[:MOST_SLOW])
    ranks = _ranks_in_words(profile, told=base is not None or trace.facts.get(LINKS) != FROM_STEPS)
    text = f"{run_in_words(trace, stalls)}{slowest}{ranks}\n{today_as_text(today)}"
    tell(options, lambda: body, lambda: text, *[partial(profile.save, options.output)] * bool(options.output))
    return 0


def _ranks_in_words(profile: Profile, told: bool) -> str:
    """The profile's source, and slow ranks. told: these are known; without a base profile they may have long stages."""
    steps = f"{profile.source}: {plural(layer=len(profile.layers))} from {plural(step=profile.facts['steps'])}"
    if not told:
        return f"{steps}; only a base profile tells if a rank is slow or its stages are long (profile BASE --from-trace)"
    ratios, scale = " ".join(f"{fact:.3f}" for fact in profile.facts["rank_ratios"]), profile.facts["link_scale"]
    ratios += f"; messages take {scale:.2f} times as long as its schedule says" * (profile.facts["messages_heard"] > 0)
    slow = [f"rank {rank} takes {f:.2f} times as long" for rank, f in enumerate(profile.rank_factors) if f != 1]
    return f"{steps}; ranks {ratios}\n{'; '.join(slow) if slow else 'all ranks are alike'}"
