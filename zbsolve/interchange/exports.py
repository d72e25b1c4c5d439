"""`export`: a schedule as a file for another engine. If the engine cannot run it, an error says why, and how long the best
order takes that it can run. Also the kinds of layers, for engines whose files name them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from ..planner.engines import ENDINGS, Target, target
from ..problem import Problem
from ..schedule import Schedule
from ..util.errors import BadInput
from ..util.files import ending_of

if TYPE_CHECKING:
    from ..long_steps.repeated import RepeatedSchedule
    from ..planner.candidate import Choice

LETTERS = "EtmL-"  # embedding, transformer layer, multi-token prediction, loss; "-": part of a neighbouring layer
# Passes of a data-parallel group: a kind, and the words of the note that they are left out.
GROUP_NOTES = (
    ("C", "C", "sum gradients over replicas", "sums them"),
    ("RS", "AG and RS", "gather parameters and reduce gradients", "does both"),
)


@dataclass(frozen=True)
class Options:
    """Options of an export. path: the file's name, for notes. or_best: if the engine cannot run the schedule, write the best
    order that it can run. defer_recv: for torch's `defer_pp_recv=True`. layers: for Megatron and torchtitan, the kind of
    each layer of the profile. plan: the plan that the schedule belongs to, for targets that take a whole layout."""

    path: str = "FILE"
    or_best: bool = False
    defer_recv: bool = False
    layers: str | None = None
    plan: Choice | None = None

    @property
    def json(self) -> bool:
        """Whether the file is to be JSON where an engine has both."""
        return ending_of(self.path) == ENDINGS["JSON"]


@dataclass(frozen=True)
class Export:
    """A file for another engine. text: its content. notes: what its user must know, a line each. facts: the same for
    programs. rows: each rank's line in the engine's words, for `--json` without a file."""

    text: str
    notes: tuple[str, ...]
    facts: dict[str, Any]
    rows: list[Any] = field(default_factory=list)


@dataclass(frozen=True)
class LongExport:
    """The file of a repeated schedule. made: the export without its text. lines: its text, a line a rank, made when read."""

    made: Export
    lines: Iterator[str]


def export_long(long: RepeatedSchedule, to: str, options: Options) -> LongExport | None:
    """Export a repeated schedule to the target `to` rank by rank; None for a target that needs all passes at once. Raises as
    `export`, but Refused for an order that the target cannot express: no other order is searched."""
    engine = target(to)
    if not engine.by_rank:
        return None
    return _module(target("torch-csv")).write_long(long, engine, options, _module(engine).described)


def export(schedule: Schedule, to: str, options: Options | None = None) -> Export:
    """Export a schedule to another engine.

    schedule: the schedule to write. Passes of a data-parallel group are left out, and a note says so.
    to: the target's name.
    options: None: the defaults.

    Raises BadInput, naming the pass, if the target cannot express the schedule, with the cost of the best order that it can;
    Deadlock if its ranks would wait forever.
    """
    from .order import group_passes

    engine, options = target(to), options or Options()
    if engine.needs_plan and options.plan is None:
        raise BadInput(f"schedule: {engine.engine}'s file is a whole layout: give the plan.json that zbsolve plan -o writes")
    made = _made(schedule, engine, options, _module(engine))
    kinds = {schedule.problem.passes[row].kind for row in group_passes(schedule.problem).tolist()}
    notes = (
        f"passes {named}, which {does}, are left out: {engine.engine} {by_itself} by itself"
        for (kind, named, does, by_itself) in GROUP_NOTES
        if kind in kinds
    )
    return replace(made, notes=(*made.notes, *notes))


def _module(engine: Target) -> Any:
    """The module that writes a target's files."""
    return import_module(f".{engine.name.replace('-', '_')}", __package__)


def _made(schedule: Schedule, engine: Target, options: Options, module: Any) -> Export:
    """The export by the target's module, or of another order or plan in its place. Raises as `export`."""
    from .order import Refused

    try:
        made: Export = module.write(schedule, options)
    except Refused as error:
        return _instead(schedule, engine, options, module, error)
    return _with_layers_note(made, schedule, engine)


def _with_layers_note(made: Export, schedule: Schedule, engine: Target) -> Export:
    """The export, with a note if the layers may not be the model's: a layer of given numbers is often a whole stage."""
    problem = schedule.problem
    if not (engine.has_layers and problem.layers and problem.source.startswith("given")):
        return made
    note = (
        f"the profile's numbers were given: the file counts its {sum(problem.layers)} layers, and a layer made by zbsolve "
        f"numbers is a whole stage. If so, set the layers of {engine.engine}'s stages yourself"
    )
    return replace(made, notes=(*made.notes, note))


def _instead(schedule: Schedule, engine: Target, options: Options, module: Any, error: BadInput) -> Export:
    """With `or_best`, the export of the best plan or order that the engine can run. Otherwise raises BadInput with its
    cost."""
    from .alternatives import best_order, best_planned, cost_of_step, why_none
    from .order import without_group_passes

    if engine.has_plan and options.plan is not None:
        choice = best_planned(options.plan, engine.name)
        if choice is None:
            raise BadInput(f"{error}; no plan of its space was found that {engine.engine} can run") from None
        title, other, what = choice.best.layout.title, choice.best.schedule, "another plan is written"
        cost = f"the best plan found that it can run, {title}, {cost_of_step(choice.best.value, options.plan)}"
        options = replace(options, plan=choice)
    else:
        own, orders = without_group_passes(schedule), getattr(module, "orders", None)
        best = best_order(own, engine, orders, getattr(module, "step_time", None))
        if best is None:
            why = why_none(own, engine, orders)
            raise BadInput(f"{error}; no order was found that {engine.engine} can run on this problem{why}") from None
        title, other, what = best.title, best.schedule, "another order is written than the schedule's"
        cost = f"the best order found that it can run, {title}, {best.cost(own, engine.engine)}"
    if not options.or_best:
        raise BadInput(f"{error}; {cost}: --or-best writes it") from None
    made: Export = module.write(other, options)
    made = replace(made, notes=(f"{what}. {error}", cost, *made.notes), facts={**made.facts, "instead": title})
    return _with_layers_note(made, other, engine)


def layer_letters(problem: Problem, asked: str | None, engine: str) -> str:
    """The kind of each layer of the profile, one of LETTERS. asked: in Megatron's notation, `E,t*30,L`; None: an embedding,
    transformer layers and a loss. Raises BadInput."""
    count = sum(problem.layers)
    if not count:
        raise BadInput(f"schedule: it does not say how many layers its stages have, which {engine} needs")
    if asked is None:
        if count < 2:
            raise BadInput(f"schedule: {count} layer is too few for an embedding and a loss; say what it is with --layers")
        return "E" + "t" * (count - 2) + "L"
    plain = asked.replace(",", "").replace(" ", "")
    if not re.fullmatch(rf"([{LETTERS}](\*\d{{1,6}})?)+", plain):
        raise BadInput(f"layers '{asked[:40]}': write E, t, m, L or - for each layer, such as E,t*30,L")
    letters = "".join(kind * int(times or 1) for kind, times in re.findall(r"(.)(?:\*(\d+))?", plain))
    if len(letters) != count:
        raise BadInput(f"layers '{asked[:40]}': {len(letters)} layers, but the schedule's stages have {count}")
    if not re.fullmatch(r"Et*m*L", letters.replace("-", "")):
        raise BadInput(f"layers '{asked[:40]}': {engine} wants one E first, then t, then m, and one L last")
    return letters


def stage_letters(letters: str, layers: Sequence[int]) -> list[str]:
    """The letters of each stage's layers, without "-"."""
    return [letters[a:b].replace("-", "") for a, b in pairwise((0, *accumulate(layers)))]
