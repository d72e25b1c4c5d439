"""What a feature is: all that a step may have beside its plain passes is one value of this kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..problem import Problem
from ..util.errors import BadInput

AUTO = "auto"  # said of a field that is left to the search
DIVIDING = "take a number that divides the sequence"  # where slices are to be even
YES = "yes"  # as one writes that a field of kind bool holds, where it is no option
NOT_OPEN = object()  # `closed` of a field that is never left open

Named = tuple[str, Any]  # what was chosen, as one writes it behind a placement; and the step with it


class Open:
    """Said of a field that is left to the search, with what is known of it: a dataclass of its own."""


def is_auto(value: object) -> bool:
    """Whether a field is left to the search."""
    return isinstance(value, Open) or (isinstance(value, str) and value == AUTO)


def left_open(step: Any, fields: Sequence[str]) -> bool:
    """Whether one of these fields of a step is left to the search."""
    return any(is_auto(getattr(step, name)) for name in fields)


@dataclass(frozen=True)
class Field:
    """One field of `Step`, which is the option of the same name on the command line.

    name: of the field; the option has - in place of _.
    default: where nothing is said.
    words: what the option's help and the docs say.
    metavar, choices, kind: of the option; kind bool: `--name` and `--no-name`; kind int: 1 at least.
    read: what was written → the value; raises BadInput.
    closed: the simplest value, where the field may be left to the search ("auto"); or a function of the step that gives it.
    told: of a problem: the value that its passes have, None where they do not say it.
    untold: what passes of the feature do not say, where they do not say the value.
    fixed: words for what of a problem the option would change, where a problem's file cannot be held against it.
    offered: values as one writes them, beside the default, that a page lets people choose from.
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
    untold: str = ""
    fixed: str = ""
    offered: tuple[str, ...] = ()

    def parse(self, text: str) -> Any:
        """The value that was written, as the command line takes it. Raises BadInput."""
        return text == YES if self.kind is bool else int(text) if self.kind is int else self.read(text)

    @property
    def option(self) -> str:
        """As one writes it: `--attention-exchange`."""
        return f"--{self.name.replace('_', '-')}"


@dataclass(frozen=True)
class Now:
    """A step of a race, from which others are tried.

    step, said: it, and what somebody said, with fields left open. name: what was chosen for it. layers: of each stage; ():
    it could not be built. schedule: the best so far, or None.
    """

    step: Any
    said: Any
    profile: Any
    name: str
    layers: tuple[int, ...]
    schedule: Any = None


@dataclass(frozen=True)
class Ladder:
    """How many parts of a kind: a number that is doubled for as long as that saves time, and then tried in between.

    name: of the field. kinds: the step now and as it was said → the kinds that are tried, with words. at: a step, a number
    and a kind → that step. of: a step → its number and kind. most: a step, a profile → parts at most.
    """

    name: str
    kinds: Callable[[Any, Any], Mapping[str, str]]
    at: Callable[[Any, int, str], Named]
    of: Callable[[Any], tuple[int, str]]
    most: Callable[[Any, Any], int]


@dataclass(frozen=True)
class Choices:
    """What is tried first where `fields` are left open.

    first: a step → those with the fields chosen, the simplest first.
    further: the same where only the layers of stages tell, of a step that `first` gave.
    apart: whether passes differ between them: then a bound in closed form rules some out.
    compared: whether each is looked at even so.
    """

    fields: tuple[str, ...]
    first: Callable[[Any], Sequence[Named]]
    further: Callable[[Now], Iterable[Named]] = lambda now: ()
    ladder: Ladder | None = None
    apart: bool = True
    compared: bool = False


@dataclass(frozen=True)
class Moves:
    """One way to change a step where `fields` are left open, one change at a time: `near` gives the steps beside one; of the
    first `breadth` the best is taken, of others the first that is better."""

    name: str
    fields: tuple[str, ...]
    near: Callable[[Now], Iterable[Named]]
    breadth: int = 1


class Apart(NamedTuple):
    """Two conditions (see `table.CONDITIONS`) that do not go together, and why."""

    one: str
    other: str
    why: str
    error: type[BadInput] = BadInput


@dataclass(frozen=True)
class Feature:
    """A feature of a training step.

    name: as its kinds' rows have it (`kinds.Kind.feature`), and the table of what goes with what.
    fields: what `Step` has of it.
    check: raises BadInput for values of a step that make no sense, whatever the profile.
    build: a problem and the step's stages (see `staged.Staged`) → the problem with the feature, as the step says it; the
    problem itself where the step has not the feature. Prices come from the stages' profile. Raises BadInput, Infeasible.
    model: a profile and a step → the profile as this step runs it.
    choices, moves: what a search tries where fields are left open. A choice that no move changes belongs to the place.
    holds: name of a condition → whether what was seen (see `table.Seen`) has it; {}: `name`, where a field is not as by
    default. apart: what such conditions do not go with.
    partition: the partition of a step with it that names none; "": as of any other. note: of a step and a profile: what the
    profile does not know of it, in a line; or "". beside: what other features' fields are beside the simplest values of its
    own.
    """

    name: str
    fields: tuple[Field, ...] = ()
    check: Callable[[Any], None] = lambda step: None
    build: Callable[[Problem, Any], Problem] = lambda problem, staged: problem
    model: Callable[[Any, Any], Any] = lambda profile, step: profile
    choices: Choices | None = None
    moves: tuple[Moves, ...] = ()
    holds: Mapping[str, Callable[[Any], bool]] = field(default_factory=dict)
    apart: tuple[Apart, ...] = ()
    partition: Callable[[Any], str] = lambda step: ""
    note: Callable[[Any, Any], str] = lambda step, profile: ""
    beside: Mapping[str, Any] = field(default_factory=dict)

    def closed(self, step: Any) -> Mapping[str, Any]:
        """The simplest values of its fields that a step leaves open, and what others have beside these; by name."""
        still = [row for row in self.fields if is_auto(getattr(step, row.name))]
        values = {row.name: row.closed(step) if callable(row.closed) else row.closed for row in still}
        return {**values, **self.beside} if values else values

    @property
    def conditions(self) -> Mapping[str, Callable[[Any], bool]]:
        """`holds`, or what it stands for."""
        if self.holds or not self.fields:
            return self.holds
        return {self.name: lambda seen: any(getattr(seen.step, row.name) != row.default for row in self.fields)}
