"""The options that say what a step is: one function adds them to a command, one reads them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..step import Step

NAMED = "single, loop (loop4: 4 stages a rank), vee, mirror"
PARTITIONS = (
    "equal, balanced, F+B, alpa, memory, layers a stage such as 5,5,6,4, a partition.json, or auto: the best of all named "
    "ones and of single layers moved from there"
)
AUTO = {"help": f"{NAMED}, ranks such as 0,2,1,3, or auto: the best of single, loop, loop4, vee"}
OPTIONS: dict[str, dict[str, Any]] = {
    "ranks": {"type": int, "required": True, "help": "of the pipeline"},
    "microbatches": {"type": int, "required": True, "help": "of a step"},
    "placement": {"default": "single", "help": f"{NAMED}, or ranks such as 0,2,1,3"},
    "partition": {"default": "balanced", "help": PARTITIONS},
    "memory": {"help": "all that a rank has, such as 40GiB; default: the device's, as profiled (a CPU: no limit)"},
    "objective": {
        "choices": ("makespan", "span"),
        "default": "makespan",
        "help": "a step when ranks wait for each other at its end, or when they do not",
    },
    "fused": {"action": "store_true", "help": "one backward pass in place of B and W, as 1F1B is run today"},
    "recompute": {
        "default": "",
        "metavar": "STAGES",
        "help": "all, or 0,2: stages that drop activations after F, for a pass X",
    },
}


def add_step_options(parser: argparse.ArgumentParser, *names: str, **changed: dict[str, Any]) -> None:
    """The profile, and of a step's options those named (all without). changed: what is different about one here."""
    parser.add_argument("profile", help="profile.json, or - for standard input")
    add_some_step_options(parser, *(names or OPTIONS), **changed)


def add_some_step_options(parser: argparse.ArgumentParser, *names: str, **changed: dict[str, Any]) -> None:
    """Of a step's options those named. changed: what is different about one here."""
    for name in names:
        parser.add_argument(f"--{name}", **{**OPTIONS[name], **changed.get(name, {})})


def step_from(options: argparse.Namespace) -> Step:
    """The step that the options say; what a command has no option for is as `Step` has it. Raises BadInput."""
    from ..step import Step

    return Step(**step_words(options, *OPTIONS))


def step_words(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """What the options say of a step's fields with these names, as `Step` takes them. Raises BadInput."""
    from ..partition.file import parse_partition

    said = {name: getattr(options, name) for name in names if hasattr(options, name)}
    if said.get("partition") is not None:
        said["partition"] = parse_partition(said["partition"])
    return said
