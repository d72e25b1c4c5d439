"""`zbsolve numbers`: a profile from numbers that somebody gives."""

from __future__ import annotations

import argparse
import sys

from ..profile.given import HOST, NUMBERS, given_profile, stage_columns
from ..profile.rounding import rounding_note
from ..util.errors import BadInput
from .tools import print_json


def options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("--ranks", type=int, required=True, help="of the pipeline")
    parser.add_argument("--chunks", type=int, default=1, help="stages a rank")
    stage = parser.add_argument_group(
        "numbers of one stage, for one microbatch",
        "Each is one value for all stages, values with commas between them (one a stage), or @FILE.csv (its column of that "
        "name). Units: ns us ms s; B KB MB GB KiB MiB GiB. Without a unit: µs, bytes.",
    )
    for name, number in NUMBERS.items():
        stage.add_argument(f"--{name}", help=number.help)
    stage.add_argument("--stages", metavar="FILE.csv", help="all of these, a column each, and a column 'name'")
    rank = parser.add_argument_group("numbers of a rank")
    rank.add_argument("--memory", help="all that a rank has, such as 60GiB (default: no limit)")
    rank.add_argument(
        "--states",
        type=float,
        help="bytes of parameters, gradients and optimizer state for each byte of --parameters: 4 for Adam all in one type, "
        "8 for Adam beside parameters of 16 bits",
    )
    rank.add_argument("--latency", help="of a message, where --message-bytes and --bandwidth say its time")
    rank.add_argument(
        "--bandwidth", help="of the link between two ranks, such as 50GB/s or 400Gbit/s; without a unit: bytes a µs"
    )
    rank.add_argument("--shard-latency", help="of a gather in a data-parallel group over which parameters are sharded")
    rank.add_argument("--shard-bandwidth", help="of its link (default: the pipeline's link)")
    for name, text in HOST.items():
        rank.add_argument(f"--host-{name}", help=text, type=int if name in ("ranks", "bus") else str)
    rank.add_argument("--blocking", action="store_true", help="a rank computes nothing while it sends a message")
    rank.add_argument("--rank-factors", metavar="1,1,1.3,…", help="how much longer each rank takes than its stages say")
    parser.add_argument("--model", default="numbers", help="its name, for titles")
    parser.add_argument("--json", action="store_true", help="a summary as JSON on standard output; the profile goes to -o")
    parser.add_argument("-o", "--output", required=True, help="profile.json, or - for standard output")


def command(options: argparse.Namespace) -> int:
    """Write the profile that the numbers make."""
    from ..show.profile_meaning import imbalance, rank_work, rank_work_lines
    from ..show.profile_report import profile_as_text

    for name in ("ranks", "chunks"):
        if getattr(options, name) < 1:
            raise BadInput(f"--{name} {getattr(options, name)}: at least 1 is needed")
    names = ("memory", "states", "latency", "bandwidth", "blocking", "shard_latency", "shard_bandwidth")
    rank = {name: getattr(options, name) for name in names}
    rank |= {f"host_{name}": getattr(options, f"host_{name}".replace("-", "_")) for name in HOST}
    profile = given_profile(
        options.ranks * options.chunks,
        _said(options),
        model=options.model,
        facts={"ranks": options.ranks, "chunks": options.chunks},
        rank_factors=_factors(options),
        **rank,
    )
    profile.save(options.output)
    if options.json:
        total = {kind: sum(getattr(layer, kind) for layer in profile.layers) for kind in ("F", "B", "W", "BW")}
        ranks = {place: {"us": us, "imbalance": imbalance(us)} for place, us in rank_work(profile, options.ranks).items()}
        print_json(
            {
                "model": profile.model,
                "source": profile.source,
                "layers": len(profile.layers),
                "total": total,
                "rank_work": ranks,
            }
        )
    elif options.output != "-":
        print(profile_as_text(profile), end="")
        print("\n".join(rank_work_lines(profile, options.ranks)))
    if note := rounding_note(profile, [1] * len(profile.layers)):
        print(f"zbsolve numbers: {note}", file=sys.stderr)
    return 0


def _said(options: argparse.Namespace) -> dict[str, str | list[str]]:
    """What is given of stages, by option or by column. Raises BadInput where both say the same."""
    given = vars(options)
    said: dict[str, str | list[str]] = {
        name: text for name in NUMBERS if (text := given[name.replace("-", "_")]) is not None
    }
    columns = stage_columns(options.stages) if options.stages else {}
    for name in columns.keys() & said.keys():
        raise BadInput(f"--{name} {said[name]}: {options.stages} has a column '{name}' too")
    wanted = options.ranks * options.chunks
    for cells in columns.values():
        if len(cells) != wanted:
            raise BadInput(f"{options.stages}: {len(cells)} rows for {wanted} stages")
    return {**said, **columns}


def _factors(options: argparse.Namespace) -> list[float]:
    """How much longer each rank takes. Raises BadInput."""
    if options.rank_factors is None:
        return []
    try:
        factors = [float(part) for part in options.rank_factors.split(",")]
    except ValueError:
        factors = []
    if len(factors) != options.ranks or not all(0 < one < float("inf") for one in factors):
        raise BadInput(f"--rank-factors {options.rank_factors}: {options.ranks} numbers above 0 are needed, such as 1,1.3")
    return factors
