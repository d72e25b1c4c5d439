"""The options of a step: adding them to a command, and reading them."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ..features.feature import Field
from ..profile.step import NAMED, STEP_FIELDS
from ..util.errors import BadInput
from .tools import profile_from

if TYPE_CHECKING:
    from ..problem import Problem
    from ..profile.profile import Profile
    from ..profile.step import Step

AUTO = {
    "help": f"{NAMED}, ranks such as 0,2,1,3, or auto: the best of single, loop, loop4, vee (default: single, but for a "
    "named schedule its own)"
}


def _declared(field: Field) -> dict[str, Any]:
    """Arguments of `add_argument` for a step's field. They have no default, so that readers see which options were given."""
    known = {"help": field.words.replace("%", "%%")}
    if field.kind is bool:
        return {**known, "action": argparse.BooleanOptionalAction}
    more = {"metavar": field.metavar, "choices": field.choices, "type": field.kind if field.kind is not str else None}
    return {**known, **{name: value for name, value in more.items() if value is not None}}


FIELDS = {field.name: field for field in STEP_FIELDS}
OPTIONS: dict[str, dict[str, Any]] = {name: _declared(field) for name, field in FIELDS.items()}


def add_step_options(parser: argparse.ArgumentParser, *names: str, **changed: dict[str, Any]) -> None:
    """Add these options of a step. changed: option → arguments of `add_argument` that differ in this command."""
    for name in names:
        parser.add_argument(FIELDS[name].option, **{**OPTIONS[name], **changed.get(name, {})})


def step_from(options: argparse.Namespace, **defaults: Any) -> Step:
    """The step from the options; fields that were not given are from `defaults`, or else `Step`'s. Raises BadInput."""
    from ..profile.step import Step

    words = {**defaults, **step_words(options, *OPTIONS)}
    for name in ("ranks", "microbatches"):
        if name not in words:
            raise BadInput(f"--{name}: is needed with a profile")
    bare = Step(**{name: value for name, value in words.items() if name != "partition"})
    return bare if options.partition is None and bare.own_partition else Step(**words)


def step_words(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Field → value of the step's fields in `names` that were given as options. Raises BadInput."""
    words = _said(options, *names)
    return {name: FIELDS[name].read(value) if isinstance(value, str) else value for name, value in words.items()}


def step_or_problem(options: argparse.Namespace, **defaults: Any) -> tuple[Profile, Step] | Problem:
    """What is to be solved: a profile and the step from the options (see `step_from`), or the file's problem, which may be
    that of a schedule. Raises BadInput, also where options contradict the problem."""
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


def _option(name: str, value: Any) -> str:
    """An option and its value as written on the command line."""
    option = FIELDS[name].option
    return option if value is True else option.replace("--", "--no-", 1) if value is False else f"{option} {value}"


def _said(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _check_agree(options: argparse.Namespace, problem: Problem, where: str) -> None:
    """Raise BadInput where an option contradicts the problem of a file. where: begins the message."""
    for name, value in _said(options, *OPTIONS).items():
        field = FIELDS[name]
        if what := field.fixed:
            raise BadInput(f"{_option(name, value)}: {where}, and its problem says what {what}: leave it out")
        has, wanted = field.told(problem), field.read(value) if isinstance(value, str) else value
        has = field.meant(bool(has) if field.kind is bool else has, problem)
        wanted = field.meant(getattr(wanted, "layers", wanted), problem)
        if has != wanted:
            raise BadInput(f"{_option(name, value)}: {where} with {name} {has}: leave the option out, or name a profile")
