"""`Feature`: everything that a step may have in addition to its plain passes is one value of this class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..problem import Problem

AUTO = "auto"  # value of a field that the search decides
YES = "yes"  # the text for True of a field of kind bool, outside of the command line
NOT_OPEN = object()  # `closed` of a field that the search cannot decide

Named = tuple[str, Any]  # (its name: what was chosen, as in options; a step)


class Open:
    """Base of values of a field that the search decides, with further data in a dataclass."""


def is_auto(value: object) -> bool:
    """Does the search decide this field?"""
    return isinstance(value, Open) or (isinstance(value, str) and value == AUTO)


def left_open(step: Any, fields: Sequence[str]) -> bool:
    """Does the search decide one of these fields of a step?"""
    return any(is_auto(getattr(step, name)) for name in fields)


@dataclass(frozen=True)
class Field:
    """One field of `Step`, which is the option of the same name on the command line.

    name: of the field; the option has - in place of _.
    default: the value without the option.
    words: the text in the option's help and in the docs.
    metavar, choices, kind: of the option; kind bool: `--name` and `--no-name`; kind int: 1 at least, or the default.
    read: the option's text → the value; raises BadInput.
    closed: the simplest value, if the search may decide the field ("auto"); or a function step → this value.
    told: problem → the value that its passes show; None where they do not show it.
    meant: (value, problem) → what the value means there, to compare it with the problem's.
    untold: what the feature's passes do not show, in words, where that is the value.
    fixed: for fields that a problem's file does not show: what of the problem the option would change, in words.
    offered: further values, as text, that a page lets users choose from.
    """

    name: str
    default: Any
    words: str
    metavar: str | None = None
    choices: tuple[str, ...] | None = None
    kind: type = str
    read: Callable[[str], Any] = lambda text: text
    closed: Any = NOT_OPEN
    told: Callable[[Problem], Any] = lambda problem: None
    meant: Callable[[Any, Problem], Any] = lambda value, problem: value
    untold: str = ""
    fixed: str = ""
    offered: tuple[str, ...] = ()

    def parse(self, text: str) -> Any:
        """The value for a text on the command line. Raises BadInput."""
        return text == YES if self.kind is bool else int(text) if self.kind is int else self.read(text)

    @property
    def option(self) -> str:
        """The option's name, such as `--attention-exchange`."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Now:
    """A step in a race, from which further steps are tried.

    step: without open fields; said: as the user gave it, with fields for the search to decide. name: of the choices in
    `step`. layers: of each stage; () if the step could not be built. schedule: the best one so far, or None.
    """

    step: Any
    said: Any
    profile: Any
    name: str
    layers: tuple[int, ...]
    schedule: Any = None


@dataclass(frozen=True)
class Ladder:
    """How many parts of a kind, such as slices: a number that is doubled while that saves time; then numbers between are
    tried.

    name: of the field. kinds: (the step now, the user's step) → the kinds that are tried, with words. at: (step, number,
    kind) → that step. of: step → (its number, its kind). most: (step, profile) → the largest number.
    """

    name: str
    kinds: Callable[[Any, Any], Mapping[str, str]]
    at: Callable[[Any, int, str], Named]
    of: Callable[[Any], tuple[int, str]]
    most: Callable[[Any, Any], int]


@dataclass(frozen=True)
class Choices:
    """What is tried first where the search decides `fields`.

    first: step → steps with these fields chosen, the simplest first.
    further: more such steps for one that `first` gave, if they depend on the layers of its stages.
    apart: do passes differ between the choices? Then a bound in closed form can rule some out.
    compared: try each choice even then.
    """

    fields: tuple[str, ...]
    first: Callable[[Any], Sequence[Named]]
    further: Callable[[Now], Iterable[Named]] = lambda now: ()
    ladder: Ladder | None = None
    apart: bool = True
    compared: bool = False


@dataclass(frozen=True)
class Moves:
    """One kind of small changes of a step where the search decides `fields`. near: the steps one change away. Of the first
    `breadth` of them the best is taken; of later ones, the first that is better."""

    name: str
    fields: tuple[str, ...]
    near: Callable[[Now], Iterable[Named]]
    breadth: int = 1


@dataclass(frozen=True)
class OfRun:
    """What a measured run of a step with the feature says of a profile. problem: the run's; base: the profile that says
    what its problem does not, or None.

    lacks: (problem, base) → what is missing, so that the run says nothing of layers; or "".
    layers: (base, problem) → the profile of what ran as stages.
    timed: (that profile with the run's times, base, kind of pass → its median µs, problem) → it with the feature's costs.
    """

    lacks: Callable[[Problem, Any], str] = lambda problem, base: ""
    layers: Callable[[Any, Problem], Any] = lambda base, problem: base
    timed: Callable[[Any, Any, Callable[[str], float], Problem], Any] = lambda profile, base, us, problem: profile


def needs_base(ran: Callable[[Problem], bool], what: str, says: str) -> Callable[[Problem, Any], str]:
    """`OfRun.lacks` of a feature whose run needs a base profile, which `says` what it lacks. ran: did the feature run?"""
    return lambda problem, base: f"{what}: a base profile is needed, which says {says}" * (base is None and ran(problem))


@dataclass(frozen=True)
class Feature:
    """A feature of a training step.

    name: as in the rows of its kinds (`kinds.Kind.feature`), and in the table of what excludes what.
    fields: its fields of `Step`.
    check: raises BadInput for values of a step that make no sense with any profile.
    build: (problem, the step's stages, see `staged.Staged`) → the problem with the feature as the step has it, with prices
    from the stages' profile; the same problem if the step does not have it. Raises BadInput, Infeasible.
    model: (profile, step) → the profile as this step uses it.
    choices, moves: what a search tries where it decides fields. A choice that no move changes belongs to the place.
    holds: condition → function of a `table.Seen`: does the step fulfil it? {}: the condition `name`, fulfilled if a field
    is not at its default.
    partition: step → the partition that the feature brings, for a step that names none; or "".
    note: (step, profile) → a line on what the profile does not know of the feature; or "".
    doubt: profile → a line on what is doubtful in the feature's costs there; or "".
    unsure: (profile, problem) → a line on what is doubtful in a solved step's times by that profile; or "".
    lines, facts: problem → what the report of `solve` says of the feature there: sentences, and fields in JSON.
    beside: field of another feature → its value beside the simplest values of this one's fields.
    usual: 1F1B, with which other schedules are compared, is of a step with it too.
    of_run: what a measured run says of its costs.
    """

    name: str
    fields: tuple[Field, ...] = ()
    check: Callable[[Any], None] = lambda step: None
    build: Callable[[Problem, Any], Problem] = lambda problem, staged: problem
    model: Callable[[Any, Any], Any] = lambda profile, step: profile
    choices: Choices | None = None
    moves: tuple[Moves, ...] = ()
    holds: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    partition: Callable[[Any], str] = lambda step: ""
    note: Callable[[Any, Any], str] = lambda step, profile: ""
    doubt: Callable[[Any], str] = lambda profile: ""
    unsure: Callable[[Any, Problem], str] = lambda profile, problem: ""
    lines: Callable[[Problem], Sequence[str]] = lambda problem: ()
    facts: Callable[[Problem], Mapping[str, Any]] = lambda problem: {}
    beside: Mapping[str, Any] = field(default_factory=dict)
    usual: bool = True
    of_run: OfRun = OfRun()

    def closed(self, step: Any) -> Mapping[str, Any]:
        """The simplest values of its fields that a step leaves open, and what others have beside these; by name."""
        still = [row for row in self.fields if is_auto(getattr(step, row.name))]
        values = {row.name: row.closed(step) if callable(row.closed) else row.closed for row in still}
        return {**values, **self.beside} if values else values

    @property
    def conditions(self) -> Mapping[str, Callable[[Any], bool]]:
        """`holds`, or its default."""
        if self.holds or not self.fields:
            return self.holds
        return {self.name: lambda seen: any(getattr(seen.step, row.name) != row.default for row in self.fields)}
