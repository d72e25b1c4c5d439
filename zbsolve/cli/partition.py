"""`zbsolve partition`: which layers go to which stage."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput
from .step_options import add_step_options, step_from
from .tools import print_json, profile_from

if TYPE_CHECKING:
    from ..partition.by_name import Partitioned


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    default = {"help": "of a step (default: four times the ranks)"}
    devices = {"help": "with --devices-per-node: all devices"}
    said: dict[str, dict[str, Any]] = {
        "ranks": devices,
        "microbatches": default,
        "vocabulary": {"choices": ("sharded", "two-barriers")},
    }
    add_step_options(parser, "ranks", "microbatches", "placement", "memory", "fused", "vocabulary", **said)
    parser.add_argument("--devices-per-node", type=int, metavar="N", help="stages on submeshes: 1, 2, 4 … N, or whole nodes")
    parser.add_argument("--scaling", metavar="D:E,…", help="efficiency of a stage on D devices: 2:0.95,4:0.9")
    parser.add_argument("--json", action="store_true", help="all partitions as JSON on standard output")
    parser.add_argument("-o", "--output", help="partition.json for solve --partition, or - for standard output")


def command(options: argparse.Namespace) -> int:
    """Alpa's partition beside the equal one that people use; write it."""
    from ..partition.by_name import NAMES, partition_by_name, partitioned
    from ..partition.file import Partition, check_scaling
    from ..placement import describe
    from ..show.partition_text import partitions_as_text, stages_as_text

    profile = profile_from(options.profile, "partition")
    step = step_from(options, microbatches=4 * max(1, options.ranks or 1))
    costs, scaling = step.costs(profile), None
    if options.scaling is not None:
        if options.devices_per_node is None:
            raise BadInput("scaling: it is for stages on several devices; say --devices-per-node")
        pairs = [part.partition(":") for part in options.scaling.split(",")]
        scaling = check_scaling({d.strip(): e for d, _, e in pairs}, "scaling")
    if options.devices_per_node is not None:
        if step.vocabulary is not None:
            raise BadInput("--vocabulary: stages on submeshes (--devices-per-node) have their vocabulary on the last one")
        from ..partition.meshes import mesh_partitions

        found: tuple[Partitioned, ...] = mesh_partitions(costs, options.devices_per_node, scaling)
    else:
        found = tuple(partitioned(costs, name, partition_by_name(costs, name)) for name in NAMES)
    best = next(one for one in found if one.name == "alpa")
    if options.output:
        placement = "single" if options.devices_per_node else "/".join(map(describe, step.routes))
        Partition(profile.model, placement, best.layers, best.devices, scaling).save(options.output)
    if options.json:
        rows = [{what: getattr(one, what) for what in one.__dataclass_fields__} for one in found]
        limit = costs.limit[0] if costs.limit and len(set(costs.limit)) == 1 else costs.limit
        print_json({"source": profile.source, "microbatches": step.microbatches, "limit": limit, "partitions": rows})
    elif options.output != "-":
        text = partitions_as_text(costs, found, profile.source)
        print(text, stages_as_text(costs, best, options.devices_per_node), sep="\n", end="")
    return 0
