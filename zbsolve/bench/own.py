"""Problems of one's own for `zbsolve bench`: from files and folders, beside the suites."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..problem import Problem
from ..profile.profile import Profile
from ..step import Step
from ..util.errors import BadInput
from ..util.files import document_kind
from .suites import SUITES, suite

KINDS = ("profile", "problem", "schedule")  # documents that a problem can be made of
ENDINGS = ("*.json", "*.json.gz")


def problems_of(what: Mapping[str, Mapping[str, Any]]) -> dict[str, Problem]:
    """Name → problem, of suites by name, files, and folders with files: problems, schedules (their problem), and profiles,
    with a `Step` of the fields that `what` gives. What else lies in a folder is left out. Raises BadInput, Infeasible."""
    found: dict[str, Problem] = {}
    for one, step in what.items():
        if one in SUITES and not Path(one).exists():
            found |= suite(one)
            continue
        for path in _files(one):
            name, problem = _problem(path, step)
            found[str(path) if name in found else name] = problem
    return found


def _files(what: str) -> list[Path]:
    """The files that are meant. Raises BadInput for none."""
    path = Path(what)
    if not path.is_dir():
        if not path.exists():
            raise BadInput(f"'{what}' is no suite ({', '.join(SUITES)}), and no file or folder")
        return [path]
    inside = sorted(file for ending in ENDINGS for file in path.glob(ending))
    usable = [file for file in inside if document_kind(file) in KINDS]
    if not usable:
        raise BadInput(f"{what}: no {', '.join(KINDS[:-1])} or {KINDS[-1]} in this folder ({' '.join(ENDINGS)})")
    return usable


def _problem(path: Path, step: Mapping[str, Any]) -> tuple[str, Problem]:
    """A name that says what it is, and the problem. Raises BadInput, Infeasible."""
    name, kind = path.name.split(".json")[0], document_kind(path)
    if kind not in KINDS:
        raise BadInput(f"{path}: holds {f'a {kind}' if kind else 'no zbsolve document'}, not a {' or a '.join(KINDS)}")
    if kind != "profile":
        return name, Problem.load(path)
    missing = next((one for one in ("ranks", "microbatches") if one not in step), None)
    if missing is not None:
        raise BadInput(f"{path}: holds a profile, and {missing} of its step are not said: {path}@ranks=4,microbatches=8")
    asked = Step(**step)
    if asked.auto:
        raise BadInput("placement and partition: bench solves one problem a profile: name them instead of auto")
    return f"{name} {asked.title} p{asked.ranks} m{asked.microbatches}", asked.problem(Profile.load(path))
