"""The schedules that `zbsolve compare` names: files, other engines' files, the literature's, and the best one found."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..util.errors import BadInput, ZbsolveError
from .step_options import check_useful, step_words
from .tools import profile_from, search_limits, searching, tell_other_model

if TYPE_CHECKING:
    from ..interchange.foreign_order import ForeignOrder
    from ..profile.profile import Profile
    from ..schedule import Schedule
    from ..step import Step

BEST = "best"
FILES = (".json", ".csv", ".txt", ".gz")  # a word that ends so is meant as a file
IMPORTED = ("memory", "objective", "recompute")  # options that say something of another engine's order
TIMED = ("memory", "replicas")  # those that say something of a schedule's file where a profile times it
Named = list[tuple[str, "Schedule"]]
Absent = list[tuple[str, str]]


@dataclass
class Contenders:
    """What makes schedules of names: `profile` with what was said of a step (`words`), or else the problem of the first
    schedule's file. `limits`: how long to search for the best."""

    profile: Profile | None
    words: dict[str, Any]
    limits: dict[str, Any]
    files: dict[str, Schedule | ForeignOrder]

    @classmethod
    def of(cls, options: argparse.Namespace, step: Sequence[str]) -> Contenders:
        """As a command's options say. Raises BadInput."""
        profile = profile_from(options.profile, "compare") if options.profile else None
        files = {what: _read(what) for what in options.what if not _is_name(what)}
        if files and (profile is None or len(files) == len(set(options.what))):  # no schedule of a profile's step is made
            check_useful(options, *_useless(profile is not None, files.values(), step))
        words = {"placement": "auto", "partition": "balanced", **step_words(options, *step)}
        return cls(profile, words, search_limits(options), files)

    def schedules(self, what: Sequence[str]) -> tuple[Named, Absent]:
        """Each with its name and a certificate, and those that cannot be with the reason. Raises BadInput for what cannot be
        read at all."""
        found, absent = Named(), Absent()
        for name in what:
            try:
                schedule = self._schedule(name)
                found.append((name, schedule))
            except ZbsolveError as error:
                absent.append((name, str(error).removeprefix(f"{name}: ")))
        return found, absent

    def note(self, what: Sequence[str]) -> str:
        """What a reader must know of the best one where there is no profile, or ""."""
        if BEST not in what or self.profile is not None:
            return ""
        path, _ = self._first()
        return (
            f"{BEST} is of {path}'s problem: its stages, placement and backward (BW, or B and W). With --profile it also "
            "tries others"
        )

    def _schedule(self, name: str) -> Schedule:
        from ..schedule import Schedule

        if name == BEST:
            return self._best()
        if name not in self.files:
            return self._of_the_literature(name)
        given = self.files[name]
        return self._timed(given) if isinstance(given, Schedule) else self._imported(given)

    def _timed(self, schedule: Schedule) -> Schedule:
        """A file's order on the profile's times; on its own where there is no profile. Raises BadInput where it does not
        hold there, or the profile has no times for it."""
        from ..search.order_on_profile import timed_again

        if self.profile is None:
            return _proven(schedule)
        tell_other_model(schedule, self.profile, "compare")
        for name in ("microbatches", "ranks"):
            if (has := getattr(schedule.problem, name)) != (said := self.words.get(name, has)):
                raise BadInput(f"a step of {has} {name}, not {said}: not the same work")
        words = {name: self.words[name] for name in TIMED if name in self.words}
        return _proven(timed_again(schedule, self.profile, **words))

    def _imported(self, order: ForeignOrder) -> Schedule:
        """Another engine's order on the profile's times. Raises BadInput for the first thing that does not hold."""
        from ..interchange.importing import import_schedule
        from ..search.certify import certified

        if self.profile is None:
            raise BadInput("it says no times: add --profile profile.json")
        kept = {name: self.words[name] for name in IMPORTED if self.words.get(name, "auto") != "auto"}
        found = import_schedule(order, self.profile, partition=self._one_partition(), **kept)
        if found.violations:
            raise BadInput(found.told()[0])
        return certified(found.schedule, found.solver)

    def _of_the_literature(self, name: str) -> Schedule:
        """A named schedule, on its own placement and with its own backward where there is a profile."""
        from ..search.solver import solve
        from ..systems.steps import check_backward, step_for
        from ..systems.table import system

        if self.profile is None:
            path, first = self._first()
            check_backward(name, first.problem, path)
            return solve(first.problem, method=name)
        step = replace(self._step().closed, placement=system(name).placement, partition=self._one_partition())
        return solve(step_for(name, self.profile, step).problem(self.profile), method=name)

    def _best(self) -> Schedule:
        """The best that is found in the time."""
        from ..search.auto import solve_auto
        from ..search.solver import solve

        with searching("compare") as (search, pressed):
            if self.profile is None:
                return solve(self._first()[1].problem, progress=lambda state: search.show(BEST, state), **self.limits)
            step = self._step()
            if not step.auto:
                problem = step.problem(self.profile)
                return solve(problem, progress=lambda state: search.show(BEST, state), **self.limits)
            return solve_auto(self.profile, step, progress=search.show, stop=pressed, **self.limits)[0]

    def _step(self) -> Step:
        """What was said of the step; ranks and microbatches as in the first file where they were not said."""
        from ..step import Step

        words = dict(self.words)
        for name in ("ranks", "microbatches"):
            if name not in words:
                first = next(iter(self.files.values()), None)
                if first is None:
                    raise BadInput(f"--{name}: is needed where no file says it")
                words[name] = getattr(getattr(first, "problem", first), name)
        return Step(**words)

    def _one_partition(self) -> Any:
        """The partition of all but the best, which alone tries several (of what stages keep, see `Step.closed`)."""
        said = self.words["partition"]
        return "balanced" if said == "auto" else said

    def _first(self) -> tuple[str, Schedule]:
        """The first schedule among the files and its path; its problem counts where there is no profile."""
        from ..schedule import Schedule

        first = next(((path, one) for path, one in self.files.items() if isinstance(one, Schedule)), None)
        if first is None:
            raise BadInput("it has no times: add --profile profile.json")
        return first


def _useless(profiled: bool, files: Iterable[Schedule | ForeignOrder], names: Sequence[str]) -> tuple[Sequence[str], str]:
    """Options of a step that say nothing of these files, and why."""
    from ..schedule import Schedule

    if all(isinstance(one, Schedule) for one in files):
        why = "a schedule's file says what its step is"
        if profiled:
            return [name for name in names if name not in TIMED], why
        return names, f"{why}, and names take the first file's step without --profile"
    if not profiled:
        return names, "it goes with --profile"
    return [name for name in names if name not in (*IMPORTED, "partition")], "another engine's file says it"


def _is_name(what: str) -> bool:
    """Whether a word names a schedule, and not a file."""
    from ..systems.table import is_named

    return (what == BEST or is_named(what)) and not Path(what).exists()


def _read(path: str) -> Schedule | ForeignOrder:
    """A schedule, that of a run, or another engine's order. Raises BadInput, also for what is neither a file nor a name."""
    from ..interchange.reading import read_order
    from ..interchange.traces.reading import others_trace
    from ..long_steps.files import load_unrolled
    from ..systems.table import PRESETS
    from ..trace import Trace
    from ..util.files import document_kind

    if path != "-" and not Path(path).exists() and not path.endswith(FILES):
        raise BadInput(f"'{path}': neither a file nor a name (names: {', '.join((BEST, *PRESETS))})")
    foreign = others_trace(path)
    if foreign is not None:
        return foreign.planned()
    kind = document_kind(path)
    if kind == "trace":
        return Trace.load(path).planned()
    return load_unrolled(path) if kind is not None or path == "-" else read_order(path)


def _proven(schedule: Schedule) -> Schedule:
    """The schedule with a certificate: its own, or a quick one. Raises BadInput where it does not hold."""
    from ..schedule import GIVEN
    from ..search.certify import certified
    from ..verifier import verify

    if schedule.certificate is None:
        return certified(schedule, GIVEN)
    violations = verify(schedule.problem, schedule)
    if violations:
        raise BadInput(str(violations[0]))
    return schedule
