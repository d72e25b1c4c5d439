"""The command `partition`: which layers go to which stage."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .cli_tools import counted, print_json
from .errors import BadInput

if TYPE_CHECKING:
    from .assign import Job, Split
    from .profile import Profile


def partition_options(parser: argparse.ArgumentParser) -> None:
    """Options of `zbsolve partition`."""
    parser.add_argument("profile", help="profile.json, or - for standard input")
    parser.add_argument("--ranks", type=int, required=True, help="with --devices-per-node: all devices")
    parser.add_argument("--microbatches", type=int, help="default: four times the ranks")
    parser.add_argument("--placement", default="single", help="single, loop, vee, mirror, or ranks such as 0,2,1,3")
    parser.add_argument(
        "--memory", help="all that a rank has, such as 40GiB; default: the device's, as profiled (a CPU: no limit)"
    )
    parser.add_argument("--fused", action="store_true", help="one backward pass in place of B and W")
    parser.add_argument("--devices-per-node", type=int, metavar="N", help="stages on submeshes: 1, 2, 4 … N, or whole nodes")
    parser.add_argument("--scaling", metavar="D:E,…", help="efficiency of a stage on D devices: 2:0.95,4:0.9")
    parser.add_argument("--json", action="store_true", help="all partitions as JSON on standard output")
    parser.add_argument("-o", "--output", help="partition.json for solve --partition, or - for standard output")


def partition(options: argparse.Namespace) -> int:
    """Alpa's partition beside the equal one that people use; write it."""
    from .assign import NAMES, partition_of, split
    from .partition_file import Partition, check_scaling
    from .placement import describe
    from .profile import Profile

    profile = Profile.load(options.profile)
    count = 4 * options.ranks if options.microbatches is None else options.microbatches
    job = job_of(profile, options.ranks, count, options.placement, options.memory, options.fused)
    scaling = None
    if options.scaling is not None:
        if options.devices_per_node is None:
            raise BadInput("scaling: it is for stages on several devices; say --devices-per-node")
        pairs = [part.partition(":") for part in options.scaling.split(",")]
        scaling = check_scaling({d.strip(): e for d, _, e in pairs}, "scaling")
    if options.devices_per_node is not None:
        from .assign_mesh import mesh_splits

        splits: tuple[Split, ...] = mesh_splits(job, options.devices_per_node, scaling)
    else:
        splits = tuple(split(job, name, partition_of(job, name)) for name in NAMES)
    best = next(one for one in splits if one.name == "alpa")
    if options.output:
        placement = "single" if options.devices_per_node else "/".join(map(describe, job.routes))
        Partition(profile.model, placement, best.layers, best.devices, scaling).save(options.output)
    if options.json:
        rows = [{what: getattr(one, what) for what in one.__dataclass_fields__} for one in splits]
        print_json({"source": profile.source, "microbatches": count, "limit": job.limit, "partitions": rows})
    elif options.output != "-":
        print(table(job, splits), stages_table(job, best, options.devices_per_node), sep="\n")
    return 0


def job_of(profile: Profile, ranks: int, microbatches: int, placement: str, memory: str | None, fused: bool) -> Job:
    """What is partitioned, from the command line. Raises BadInput."""
    from .assign import Job
    from .placement import parse_routes
    from .profile import parse_bytes

    if ranks < 1:
        raise BadInput(f"ranks: at least 1 is needed, got {ranks}")
    if microbatches < 1:
        raise BadInput(f"microbatches: at least 1 is needed, got {microbatches}")
    limit = profile.capacity if memory is None else parse_bytes(memory)
    return Job(profile, parse_routes(placement, ranks), microbatches, limit, fused)


def chosen(profile: Profile, text: str, options: argparse.Namespace) -> tuple[Profile, tuple[int, ...]]:
    """What `solve --partition` names: equal, balanced, alpa, memory, layers a stage such as 5,5,6,4, or a file. Gives the
    profile (one rank a submesh where stages have several devices) and the layers of each stage. Raises BadInput."""
    from .assign import NAMES, partition_of

    if text in (*NAMES, "F+B"):
        job = job_of(profile, options.ranks, options.microbatches, options.placement, options.memory, options.fused)
        return profile, partition_of(job, text)
    if text.endswith(".json") or text == "-":
        return _from_file(profile, text, options)
    return profile, counts_in(text)


def counts_in(text: str) -> tuple[int, ...]:
    """Layers a stage from `5,5,6,4`. Raises BadInput."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise BadInput(
            f"partition '{text}': not auto, equal, balanced, F+B, alpa, memory, layers such as 5,5,6,4, or a .json file"
        )
    return tuple(map(int, parts))


def _from_file(profile: Profile, path: str, options: argparse.Namespace) -> tuple[Profile, tuple[int, ...]]:
    from .assign_mesh import spread
    from .partition_file import Partition
    from .placement import parse_routes

    found = Partition.load(path)
    if sum(found.layers) != len(profile.layers):
        raise BadInput(f"{path}: field 'layers' adds up to {sum(found.layers)}; the profile has {len(profile.layers)}")
    if parse_routes(found.placement, options.ranks) != parse_routes(options.placement, options.ranks):
        raise BadInput(f"{path}: it is for placement '{found.placement}', not '{options.placement}'")
    stages = len(parse_routes(options.placement, options.ranks)[0])
    if len(found.layers) != stages:
        raise BadInput(f"{path}: it has {len(found.layers)} stages, not {stages} (on submeshes, each stage is a rank)")
    return spread(profile, found.layers, found.devices, found.scaling), found.layers


def table(job: Job, splits: tuple[Split, ...]) -> str:
    """Every partition's estimate, its gain over the equal one, and whether it fits."""
    base = next(one for one in splits if one.name == "equal").estimate
    rows = [("partition", "estimate µs", "against equal", "dearest stage µs", "most bytes", "  layers a stage")]
    for one in splits:
        over = job.limit is not None and max(one.need) > job.limit
        rows.append(
            (
                one.name,
                f"{one.estimate:,.0f}",
                f"{one.estimate / base - 1:+.2%}",
                f"{max(one.times):,.1f}",
                f"{max(one.need):,}{'!' if over else ' '}",
                "  " + _runs(one),
            )
        )
    kind = "with parameters, states and min(m, stages left) microbatches" if job.single else "with one microbatch"
    if max(max(one.devices) for one in splits) > 1:
        rows[0] = (*rows[0][:-1], "  layers a stage|its devices")
    lines = [*_aligned(rows), f"estimate: Σ t + (m − 1) · max t for m = {job.microbatches}; bytes: {kind}"]
    if any(job.all_to_alls):
        lines.append("all-to-alls are in that sum, and in the maximum where a rank's take longer than its work")
    if any(job.limit is not None and max(one.need) > job.limit for one in splits):
        lines.append(f"!: more than the {job.limit:,} bytes that a rank has")
    if job.profile.source != "measured":
        lines.append(f"the profile is {job.profile.source}, not measured")
    return "\n".join(lines) + "\n"


def _runs(split: Split) -> str:
    """`5 4×6 5`; with submeshes `9|2`: nine layers on two devices."""
    if max(split.devices) == 1:
        return counted(split.layers)
    return counted([f"{n}|{d}" for n, d in zip(split.layers, split.devices, strict=True)])


def stages_table(job: Job, split: Split, per_node: int | None) -> str:
    """Which layers each stage holds, where it is, how long it takes."""
    names, at = [layer.name for layer in job.profile.layers], 0
    if per_node is None:
        where = ["/".join(str(route[s]) for route in job.routes) for s in range(job.stages)]
    else:
        from .assign_mesh import places

        where = list(places(split.devices, per_node))
    rows: list[tuple[str, ...]] = [
        ("stage", "rank" if per_node is None else "submesh", "µs", "all-to-alls µs", "layers", "")
    ]
    for stage, count in enumerate(split.layers):
        last = f" … {names[at + count - 1]}" if count > 1 else ""
        times = (f"{one[stage]:,.1f}" for one in (split.times, split.all_to_alls))
        rows.append((str(stage), where[stage], *times, str(count), f" {names[at]}{last}"))
        at += count
    if not any(job.all_to_alls):
        rows = [(*row[:3], *row[4:]) for row in rows]
    return f"{split.name}:\n" + "\n".join(_aligned(rows))


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """First column and last to the left, the others to the right, two blanks between."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True)), row[-1]])
        for row in rows
    ]
