"""`Plan`: the result of `plan`, its file, models in files and on the command line, and the check of a plan's file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from ..profile.profile import Profile
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import COUNT, checked, read_one_of, write_document
from ..verifier import verify
from .bounds.layout_rules import NEVER
from .bounds.space_bounds import RULES, SpaceBounds, cheap_bounds, unproven
from .candidate import Candidate, Choice, Unsolved, layout_profile, step_of
from .cluster import Cluster, Positive
from .layout import Layout, rows_of
from .profiled_model import Model, ProfiledModel
from .shape import SHAPES, Shape, shape_by_name
from .solved_space import SAME_US, SolvedSpace, proof_of_schedule
from .space import ALL, FIXABLE, Only, layouts


class ProfilesForm(msgspec.Struct, forbid_unknown_fields=True):
    """A model by profiles in a file. Older files lack `gradients`; their versions counted gradients of 16 bits."""

    profiles: list[dict[str, Any]]
    gradients: Literal[2, 4] = 2


def model_of(names: Sequence[str], elsewhere: Callable[[str], Model] = shape_by_name) -> Model:
    """The published model of one name, or the model of profiles' files. elsewhere: finds others by name. Raises BadInput."""
    files = [name for name in names if name == "-" or name.endswith((".json", ".json.gz")) or Path(name).is_file()]
    if files:
        if len(files) < len(names):
            other = next(name for name in names if name not in files)
            raise BadInput(f"model '{other[:60]}': beside profiles ({files[0]}): give one model, or profiles of one model")
        return ProfiledModel.of([Profile.load(path) for path in files], files)
    if len(names) > 1:
        raise BadInput(f"model: {', '.join(names)[:80]}: name one, or profiles of one")
    return shape_by_name(names[0]) if names[0].partition("@")[0] in SHAPES else elsewhere(names[0])


def model_to_json(model: Model) -> dict[str, Any]:
    """The fields of a model in a file."""
    if isinstance(model, Shape):
        return asdict(model)
    return {"profiles": [profile.to_json() for profile in model.profiles], "gradients": model.gradients}


def model_from_json(body: dict[str, Any], where: str) -> Model:
    """The inverse of `model_to_json`. Raises BadInput naming `where` and the field."""
    if "profiles" not in body:
        return checked(body, Shape, where)
    form = checked(body, ProfilesForm, where)
    profiles = {f"{where}: profiles[{i}]": row for i, row in enumerate(form.profiles)}
    model = ProfiledModel.of([Profile.from_json(row, name) for name, row in profiles.items()], [*profiles])
    return replace(model, gradients=form.gradients)


KIND = "plan"
NEAR = 0.01  # share of a step within which the cost model cannot rank plans
PROOF_SECONDS = 60.0  # the most time for proving the bound of a plan's schedule again
TIME = Annotated[int, msgspec.Meta(ge=NEVER, le=2**50)]  # µs, 35 years: sums over ranks fit 64 bits
ROW = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]  # index of a layout; −1: none


@dataclass(frozen=True, eq=False)
class Plan:
    """The space with its bounds, and the solved candidates, the best first. batch: sequences in a step; memory: bytes of a
    device; only: the limit on the space."""

    shape: Model
    cluster: Cluster
    devices: int
    batch: int
    memory: int
    bounds: SpaceBounds
    candidates: tuple[Candidate, ...]
    only: Only = ALL

    @property
    def best(self) -> Candidate:
        """The candidate with the least step."""
        return self.candidates[0]

    @property
    def near(self) -> tuple[Candidate, ...]:
        """The candidates whose step is within `NEAR` of the best."""
        return tuple(candidate for candidate in self.candidates if candidate.value <= (1 + NEAR) * self.best.value)

    @property
    def bound(self) -> float:
        """A lower bound, µs, on the step of every layout with any partition and schedule."""
        return self.space.bound

    @property
    def gap(self) -> float:
        """(step − bound) / step, over the whole space."""
        return self.space.gap

    @property
    def open(self) -> int:
        """The number of layouts that no bound excludes."""
        return self.space.open

    def number(self, candidate: Candidate) -> int:
        """The index of the candidate's layout in the space."""
        return int(rows_of(self.bounds.layout, candidate.layout)[0])

    def mfu(self, candidate: Candidate) -> float | None:
        """Model FLOPs over the devices' peak FLOPs in the step; see `SolvedSpace.mfu`."""
        return self.space.mfu(candidate.value)

    def tokens(self, candidate: Candidate) -> float:
        """Tokens per second and device; sequences where their tokens are not known."""
        return self.space.tokens(candidate.value)

    @cached_property
    def space(self) -> SolvedSpace:
        """Every layout with its bound, and the steps of those that were solved."""
        row = {layout: i for i, layout in enumerate(zip(*self.bounds.layout, strict=True))}
        solved = {row[candidate.layout]: candidate.value for candidate in self.candidates}
        return SolvedSpace(self.shape, self.cluster, self.devices, self.batch, self.memory, self.bounds, solved, self.only)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a plan file, all of it or nothing. `solve`, `run`, `export` and `show` can read its schedule."""
        best, bounds, solved = self.best, self.bounds, self.space.solved
        write_document(
            path,
            KIND,
            {
                "model": model_to_json(self.shape),
                "cluster": self.cluster.to_json(),
                "devices": self.devices,
                "batch": self.batch,
                "memory": self.memory,
                "engine": self.only.engine,
                "fixed": dict(self.only.fixed),
                "layout": best.layout.numbers,
                "fused": best.step.fused,
                "step": best.value,
                "bound": self.bound,
                "space": {
                    "layouts": {name: column.tolist() for name, column in bounds.layout._asdict().items()},
                    "pipeline": bounds.pipeline.tolist(),
                    "rule": bounds.rule.tolist(),
                    "rules": list(RULES),
                    "by": bounds.by.tolist(),
                    "solved": list(solved),
                    "steps": list(solved.values()),
                },
                "profile": best.profile.to_json(),
                "schedule": best.schedule.to_json(),
            },
        )


class SpaceForm(msgspec.Struct, forbid_unknown_fields=True):
    """A space with its bounds in a file. solved: indices of solved layouts; steps: µs of each of these."""

    layouts: dict[str, list[COUNT]]
    pipeline: list[TIME]
    rule: list[COUNT]
    rules: list[str]
    by: list[ROW]
    solved: list[COUNT]
    steps: list[Positive]


class PlanForm(msgspec.Struct, forbid_unknown_fields=True):
    """A plan in a file."""

    model: dict[str, Any]
    cluster: dict[str, Any]
    devices: COUNT
    batch: COUNT
    memory: COUNT
    layout: dict[str, COUNT]
    fused: bool
    step: float
    bound: float
    space: SpaceForm
    profile: dict[str, Any]
    schedule: dict[str, Any]
    engine: str = ""
    fixed: dict[str, COUNT] = {}


@dataclass(frozen=True, eq=False)
class CheckedPlan:
    """The result of `check_plan`. wrong: a line for each statement of the file that does not follow; step, bound: µs,
    recomputed; proof: why the bound of the schedule's own certificate holds, None where it was not proven again."""

    wrong: tuple[str, ...]
    step: float
    bound: float
    layouts: int
    schedule: Schedule
    proof: str | None


def check_plan(path: str | os.PathLike[str], seconds: float = PROOF_SECONDS, *, search: bool = False) -> CheckedPlan:
    """Recompute what a plan file states without planning: its space, each bound, the profile, schedule, step and gap.

    path: of the plan file.
    seconds: the most time for `search`.
    search: whether the bound of the schedule's own certificate must be proven again, with searches if needed. Otherwise it
        counts as proven only where the layout's bound or closed forms give it.

    Raises BadInput for a damaged file.
    """
    where = str(path)
    form, model, cluster, table = _read(path)
    space = cheap_bounds(model, table, cluster, form.memory)
    stated, wrong = _stated_bounds(form.space, space, where)
    lost = unproven(stated, form.memory)
    wrong += [f"layout {i} ({stated.layout.row(i).title}): its bound does not follow" for i in lost[:3].tolist()]
    wrong += [f"and {len(lost) - 3} further ones"] if len(lost) > 3 else []
    solved = _solved(form.space, where)
    below = [row for row, step in solved.items() if step < stated.step[row] - SAME_US]  # only the best one has a schedule
    wrong += [f"layout {row} ({stated.layout.row(row).title}): its step is below its bound" for row in below[:3]]
    candidate, faults = _candidate(form, model, space.layout, cluster, where)
    if not min(solved.values()) >= candidate.value - SAME_US:
        wrong.append(f"field 'steps' has one of {min(solved.values()):.3f} µs, below the plan's {candidate.value:.3f} µs")
    bound = min(stated.least, candidate.value)
    wrong += faults
    proof, lacks = (None, []) if wrong else proof_of_schedule(candidate, stated, seconds, search)
    wrong += lacks
    for name, file, here in (("step", form.step, candidate.value), ("bound", form.bound, bound)):
        if not abs(file - here) <= SAME_US:  # of no number neither comparison holds
            wrong.append(f"field '{name}' is {file:.3f} µs, but {here:.3f} µs follows")
    return CheckedPlan(tuple(wrong), candidate.value, bound, len(stated.rule), candidate.schedule, proof)


def read_space(path: str | os.PathLike[str]) -> SolvedSpace:
    """The space of a plan file as stated there, unchecked (see `check_plan`). Raises BadInput."""
    where = str(path)
    form, model, cluster, table = _read(path)
    bounds, _ = _stated_bounds(form.space, cheap_bounds(model, table, cluster, form.memory), where)
    if int(bounds.rule.max()) >= len(RULES):
        raise BadInput(f"{where}: space: field 'rule' has {int(bounds.rule.max())}, but there are {len(RULES)} rules")
    solved = _solved(form.space, where)
    return SolvedSpace(model, cluster, form.devices, form.batch, form.memory, bounds, solved, _only(form))


def read_choice(path: str | os.PathLike[str]) -> Choice:
    """The chosen layout of a plan file. Raises BadInput where the file is damaged, or the choice does not verify."""
    where = str(path)
    form, model, cluster, table = _read(path)
    best, wrong = _candidate(form, model, table, cluster, where)
    if wrong:
        raise BadInput(f"{where}: {wrong[0]}")
    return Choice(model, cluster, form.batch, form.memory, best)


def _read(path: str | os.PathLike[str]) -> tuple[PlanForm, Model, Cluster, Layout]:
    """The content of a plan file, its model, its cluster and its space. Raises BadInput where the file is damaged."""
    where = str(path)
    form = checked(read_one_of(path, (KIND,))[1], PlanForm, where)
    if tuple(form.space.rules) != RULES:
        raise BadInput(f"{where}: space: field 'rules' has other rules than this version knows: plan again")
    if unknown := set(form.fixed) - {*FIXABLE}:
        raise BadInput(f"{where}: field 'fixed' has '{min(unknown)[:20]}', no field of a layout")
    cluster = Cluster.from_json(form.cluster, f"{where}: cluster")
    model = model_from_json(form.model, f"{where}: model")
    return form, model, cluster, layouts(model, form.devices, form.batch, cluster, _only(form))


def _only(form: PlanForm) -> Only:
    return Only(form.engine, tuple(form.fixed.items()))


def _solved(form: SpaceForm, where: str) -> dict[int, float]:
    """Index of a solved layout → µs of its step."""
    if len(form.solved) != len(form.steps) or not form.solved:
        raise BadInput(f"{where}: space: fields 'solved' and 'steps' need one step for each layout that was solved")
    if max(form.solved) >= len(form.rule):
        raise BadInput(f"{where}: space: field 'solved' has {max(form.solved)}, but there are {len(form.rule)} layouts")
    return dict(zip(form.solved, form.steps, strict=True))


def _stated_bounds(form: SpaceForm, space: SpaceBounds, where: str) -> tuple[SpaceBounds, list[str]]:
    """The bounds that a file states, on the space enumerated here, and lines on what is wrong with them."""
    count, wrong = len(space.rule), []
    for name in ("pipeline", "rule", "by"):
        if (rows := len(getattr(form, name))) != count:
            raise BadInput(f"{where}: space: field '{name}' has {rows} rows, but there are {count} layouts")
    if form.layouts != {name: column.tolist() for name, column in space.layout._asdict().items()}:
        raise BadInput(f"{where}: space: field 'layouts' is not the space of this model on these devices")
    if form.by != space.by.tolist():
        wrong.append("field 'by' names layouts that do not dominate")
    pipeline, rule = np.array(form.pipeline, np.int64), np.array(form.rule, np.int64)
    return replace(space, pipeline=pipeline, rule=rule), wrong


def _candidate(form: PlanForm, model: Model, space: Layout, cluster: Cluster, where: str) -> tuple[Candidate, list[str]]:
    """The chosen layout with its schedule, and lines on what is wrong with it."""
    if set(form.layout) != set(Layout._fields):
        raise BadInput(f"{where}: field 'layout' needs {', '.join(Layout._fields)}")
    layout, wrong = Layout(**form.layout), []
    if not len(rows_of(space, layout)):
        raise BadInput(f"{where}: field 'layout' is none of the space")
    schedule = Schedule.from_json(form.schedule, f"{where}: schedule")
    profile = layout_profile(model, layout, cluster)
    if Profile.from_json(form.profile, f"{where}: profile") != profile:
        wrong.append("field 'profile' is not what the cost model says of the layout")
    step = step_of(layout, form.memory, schedule.problem.layers, form.fused)
    unsolved = Unsolved.of(model, layout, cluster, step, profile)
    if unsolved.problem != schedule.problem:
        wrong.append("the schedule is of another step than the layout's")
    wrong += [f"schedule: {violation}" for violation in verify(schedule.problem, schedule)]
    return unsolved.solved(schedule), wrong
