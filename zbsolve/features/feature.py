"""What a feature is: all that a step may have beside its plain passes is one value of this kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..problem import Problem

AUTO = "auto"  # said of a field that is left to the search
NOT_OPEN = object()  # `closed` of a field that is never left open


def is_auto(value: object) -> bool:
    """Whether a field is left to the search."""
    return isinstance(value, str) and value == AUTO


@dataclass(frozen=True)
class Field:
    """One field of `Step`, which is the option of the same name on the command line.

    name: of the field; the option has - in place of _.
    default: where nothing is said.
    words: what the option's help and the docs say.
    metavar, choices, kind: of the option; kind bool: `--name` and `--no-name`.
    read: what was written → the value; raises BadInput.
    closed: the simplest value, where the field may be left to the search ("auto").
    told: of a problem: the value that its passes have, None where they do not say it.
    fixed: words for what of a problem the option would change, where a problem's file cannot be held against it.
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
    fixed: str = ""

    @property
    def option(self) -> str:
        """As one writes it: `--attention-exchange`."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def may_be_open(self) -> bool:
        """Whether the field may be "auto"."""
        return self.closed is not NOT_OPEN


@dataclass(frozen=True)
class Feature:
    """A feature of a training step.

    name: as its kinds' rows have it (`kinds.Kind.feature`), and the table of what goes with what.
    fields: what `Step` has of it.
    check: raises BadInput for values of a step that make no sense, whatever the profile.
    build: a problem and the step's stages (see `staged.Staged`) → the problem with the feature, as the step says it; the
    problem itself where the step has not the feature. Prices come from the stages' profile. Raises BadInput, Infeasible.
    model: a profile and a step → the profile as this step runs it.
    """

    name: str
    fields: tuple[Field, ...] = ()
    check: Callable[[Any], None] = lambda step: None
    build: Callable[[Problem, Any], Problem] = lambda problem, staged: problem
    model: Callable[[Any, Any], Any] = lambda profile, step: profile
