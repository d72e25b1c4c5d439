"""The options that say what a step is, and the file that they are about: added to a command, and read."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput
from .tools import profile_from

if TYPE_CHECKING:
    from ..problem import Problem
    from ..profile.profile import Profile
    from ..step import Step

NAMED = "single, loop (loop4: 4 stages a rank), vee, mirror"
PARTITIONS = (
    "equal, balanced, F+B, alpa, memory, layers a stage such as 5,5,6,4 or 5 4×6 5, Megatron's layout such as "
    "Et*3|(t*4|)*6L, a partition.json, or auto: the best of all named ones and of single layers moved from there (default: "
    "balanced)"
)
AUTO = {
    "help": f"{NAMED}, ranks such as 0,2,1,3, or auto: the best of single, loop, loop4, vee (default: single, but for a "
    "named schedule its own)"
}
# No default here: whoever reads them tells what was said from what was not.
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks": {"type": int, "help": "of the pipeline"},
    "microbatches": {"type": int, "help": "of a step"},
    "placement": {"help": f"{NAMED}, or ranks such as 0,2,1,3 (default: single)"},
    "partition": {"help": PARTITIONS},
    "memory": {
        "help": "all that a rank has, such as 40GiB, or one number a rank, such as 16GB,16GB,8GB (default: the device's, as "
        "profiled; a CPU: no limit)"
    },
    "objective": {
        "choices": ("makespan", "span"),
        "help": "a step when ranks wait for each other at its end, or when they do not (default: makespan)",
    },
    "fused": {
        "action": argparse.BooleanOptionalAction,
        "help": "one backward pass in place of B and W, or both (default: both, but for a named schedule as it is known: "
        "one pass for 1f1b)",
    },
    "recompute": {
        "metavar": "STAGES",
        "help": "all, or 0,4-7: stages that drop activations after F, for a pass X; auto: as the search decides",
    },
    "offload": {
        "metavar": "WHAT",
        "help": "full, half, or a fraction a stage such as 0:0.5,1-3:1: activations that go to host memory after F and come "
        "back before the backward; auto: as the search decides (default: none)",
    },
    "vocabulary": {
        "choices": ("last", "redistribute", "sharded", "two-barriers", "auto"),
        "help": "output layer, loss and embedding: last: on the last and first stage, as many layers on each; redistribute: "
        "there, with layers moved; sharded: on all ranks; two-barriers: the same with two barriers a microbatch; auto: the "
        "best of these (default: as --partition says)",
    },
    "slices": {
        "metavar": "N",
        "help": "each sequence is cut into N even slices; 8:even-work: each takes as long; 4,2,1,1: so long; auto: the best "
        "of 1, 2, 4, … up to twice the ranks, more while they save 0.1 %%, and numbers between (default: 1)",
    },
    "attention_exchange": {
        "action": argparse.BooleanOptionalAction,
        "help": "with even --slices: ranks that would wait make attention for those with late slices (default: no)",
    },
    "shards": {
        "type": int,
        "metavar": "N",
        "help": "parameters are sharded over N ranks of a data-parallel group (FSDP) and gathered in the step (default: 1)",
    },
    "gathers": {
        "metavar": "TIMES",
        "help": "with --shards: how often a step's forwards gather a stage's parameters, a number or one a stage such as "
        "1,2,2,1, or auto: the best of 1, 2, 4, 8 (default: 1, and they stay until the stage's last backward)",
    },
    "replicas": {
        "type": int,
        "metavar": "N",
        "help": "N pipelines side by side (data parallelism): the sum of each stage's gradients over them is a pass C "
        "(default: 1)",
    },
    "blocking": {
        "action": argparse.BooleanOptionalAction,
        "help": "a rank computes nothing while it sends a message (default: as the profile's link says)",
    },
}
# What a problem does not say as an option does.
FIXED = {
    "memory": "ranks have for activations",
    "shards": "is gathered",
    "gathers": "is gathered",
    "replicas": "is summed over replicas",
    "offload": "is offloaded",
    "vocabulary": "is sharded",
    "slices": "is sliced",
    "attention_exchange": "is handed from rank to rank",
}
PROFILE = {"help": "profile.json, or - for standard input"}
PROFILE_OR_SCHEDULE = {
    "help": "profile.json; or a schedule.json or problem.json, whose problem is solved anew, so that only the search has "
    "options; - for standard input"
}


def add_step_options(
    parser: argparse.ArgumentParser, *names: str, file: dict[str, Any] = PROFILE, **changed: dict[str, Any]
) -> None:
    """The file, and of a step's options those named (all without). changed: what is different about one here."""
    parser.add_argument("profile", **file)
    add_some_step_options(parser, *(names or OPTIONS), **changed)


def add_some_step_options(parser: argparse.ArgumentParser, *names: str, **changed: dict[str, Any]) -> None:
    """Of a step's options those named. changed: what is different about one here."""
    for name in names:
        parser.add_argument(f"--{_dashed(name)}", **{**OPTIONS[name], **changed.get(name, {})})


def step_from(options: argparse.Namespace, **defaults: Any) -> Step:
    """The step that the options say; what they do not say is as in `defaults`, else as `Step` has it. Raises BadInput."""
    from ..step import Step

    words = {**defaults, **step_words(options, *OPTIONS)}
    if words.get("vocabulary") == "last" and options.partition is None:
        words.pop("partition", None)
    for name in ("ranks", "microbatches"):
        if name not in words:
            raise BadInput(f"--{name}: is needed with a profile")
    return Step(**words)


def step_words(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What was said of a step's fields with these names, as `Step` takes them. Raises BadInput."""
    from ..partition.file import parse_partition

    words = _said(options, *names)
    if "partition" in words:
        words["partition"] = parse_partition(words["partition"])
    if words.get("gathers", "auto") != "auto":
        words["gathers"] = _gathers(words["gathers"])
    return words


def _gathers(said: str) -> int | tuple[int, ...]:
    """A number of gathers, or one a stage. Raises BadInput."""
    try:
        counts = tuple(int(part) for part in said.split(","))
    except ValueError:
        raise BadInput(f"--gathers {said[:40]}: auto, a number, or one a stage such as 1,2,2,1") from None
    return counts[0] if len(counts) == 1 else counts


def step_or_problem(options: argparse.Namespace, **defaults: Any) -> tuple[Profile, Step] | Problem:
    """What the file and the options give to solve: a profile and its step (see `step_from`), or a problem, which may be a
    schedule's. Raises BadInput, also where options contradict the problem."""
    from ..problem import Problem
    from ..schedule import Schedule
    from ..util.files import read_one_of

    kind, body = read_one_of(options.profile, ("profile", "schedule", "problem", "plan"))
    if kind == "plan":
        kind, body = "schedule", body.get("schedule", {})
    if kind == "profile":
        return profile_from(options.profile, options.name, body), step_from(options, **defaults)
    if kind == "problem":
        problem = Problem.from_json(body, options.profile)
    else:
        problem = Schedule.from_json(body, options.profile).problem
    _check_agree(options, problem, f"{options.profile} holds a {kind}")
    return problem


def check_useful(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise BadInput, with `why`, where a step's option with one of these names was given."""
    for name, said in _said(options, *names).items():
        raise BadInput(f"{_option(name, said)}: is of no use here: {why}")


def _option(name: str, said: Any) -> str:
    """An option as one writes it."""
    return f"--{'' if said else 'no-'}{_dashed(name)}" if isinstance(said, bool) else f"--{_dashed(name)} {said}"


def _dashed(name: str) -> str:
    return name.replace("_", "-")


def _said(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _check_agree(options: argparse.Namespace, problem: Problem, where: str) -> None:
    """Raise BadInput where an option says something else than the problem of a file, which is `where`."""
    for name, said in _said(options, *OPTIONS).items():
        if what := FIXED.get(name):
            raise BadInput(f"{_option(name, said)}: {where}, and its problem says what {what}: leave it out")
        has, wanted = _both(name, said, problem)
        if has != wanted:
            raise BadInput(f"{_option(name, said)}: {where} with {name} {has}: leave the option out, or name a profile")


def _both(name: str, said: Any, problem: Problem) -> tuple[Any, Any]:
    """What the problem has of an option, and what was said, alike where they agree."""
    from ..build.recompute import recomputed_stages
    from ..build.vocabulary import model_routes, model_stages
    from ..partition.file import parse_partition
    from ..placement import describe, routes_of

    if name == "placement":
        wanted = said if said == "auto" else "/".join(map(describe, routes_of(said, problem.ranks)))
        return "/".join(map(describe, model_routes(problem))), wanted
    if name == "partition":
        layers = parse_partition(said)
        return problem.layers, getattr(layers, "layers", layers)
    if name == "fused":
        return "BW" in problem.passes.kinds, said
    if name == "blocking":
        return bool(problem.sending.any()), said
    if name == "recompute":
        again = {problem.passes[i].stage for i in problem.rows("X")}
        return sorted(again), recomputed_stages(said, model_stages(problem)).tolist()
    return getattr(problem, name), said
