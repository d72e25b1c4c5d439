"""What happens to the activations that stages keep: where the search decides recompute and offload, they are one choice a
stage. First it tries the same for all stages; then moves change single stages, rows of them, and the microbatches copied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, groupby, product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..build.offload import time_away
from ..build.recompute import ALL, Recompute, recompute_in_words, recomputed_layers
from ..partition.layer import layer_ranges
from ..partition.stage_costs import StageCosts
from ..util.text import rows_of_numbers
from .feature import Choices, Feature, Moves, Named, Now, is_auto
from .offload import FULL, HALF, NO_OFFLOAD, Offload, is_none, known_host, stage_fractions, within_host

ALL_WAYS = 100  # up to this many choices of all stages together, all are tried
BREADTH = 24  # changed steps that are tried before the best of them is taken


class Stage(NamedTuple):
    """What happens to a stage's activations. again: how many first layers are recomputed. away: the share offloaded."""

    again: int = 0
    away: float = 0.0


AWAY = (0.0, 1.0, 0.5)
IN_FLIGHT = (1.25, 2.0)  # factors of the microbatches that a stage holds if nothing waits (see `fewest_again`)


def all_kept(step: Any) -> Any:
    """The step with open fields set to no recompute and no offload."""
    again = () if is_auto(step.recompute) else step.recompute
    return replace(step, recompute=again, offload=NO_OFFLOAD if is_auto(step.offload) else step.offload)


def least_kept(step: Any) -> Any:
    """The step with passes that all choices of its open fields have; without copies if recompute may make them shorter."""
    again = is_auto(step.recompute) and not is_none(step.offload)
    return replace(all_kept(step), offload=NO_OFFLOAD) if again else all_kept(step)


def all_copied(step: Any) -> Any | None:
    """The step with all copies that may be made, if the search decides these alone; else None."""
    return replace(step, offload=FULL) if is_auto(step.offload) and not is_auto(step.recompute) else None


def check_open(step: Any, profile: Any) -> None:
    """Raise BadInput where the search would choose copies, and the profile does not know how long they take."""
    if is_auto(step.offload):
        known_host(profile.host)


def _choices(step: Any) -> list[Named]:
    """The first choices, without mixtures: keep everything, recompute everything, offload everything or half."""
    ways = [("", kept := all_kept(step))]
    if is_auto(step.offload):
        ways += [(f" offload={name}", replace(kept, offload=name)) for name in (FULL, HALF)]
    if is_auto(step.recompute):
        ways.append((f" recompute={ALL}", replace(kept, recompute=ALL)))
    return ways


def stages_of(step: Any, layers: Sequence[int]) -> tuple[Stage, ...]:
    """What happens to each stage's activations; if its microbatches differ, the most. layers: of each stage."""
    count, offload = len(step.routes[0]), step.offload
    again = recomputed_layers(step.recompute, layers)
    if isinstance(offload, str):
        offload = stage_fractions(offload, [sorted(set(ranks)) for ranks in zip(*step.routes, strict=True)])
    away = np.asarray(offload, np.float64).reshape(count, -1).max(axis=1)
    return tuple(Stage(again[stage], float(away[stage])) for stage in range(count))


def with_stages(step: Any, stages: Sequence[Stage], layers: Sequence[int]) -> Named:
    """The step with these choices for its stages, with its name. If the first stage recomputes all of its layers, it does
    not offload: its input is the batch."""
    away = tuple(stage.away if i or stage.again < layers[0] else 0.0 for i, stage in enumerate(stages))
    offload: Offload = NO_OFFLOAD if not any(away) else FULL if set(away) == {1.0} else away
    recompute = recompute_in_words([stage.again for stage in stages], layers)
    return _name(recompute, offload), replace(step, recompute=recompute, offload=offload)


def _name(recompute: Recompute, offload: Offload) -> str:
    """The choices as options of the command line."""
    again = recompute if isinstance(recompute, str) else ",".join(rows_of_numbers([int(stage) for stage in recompute]))
    name = f" recompute={again}" if again else ""
    if isinstance(offload, str):
        return name if offload == NO_OFFLOAD else f"{name} offload={offload}"
    rows = groupby(enumerate(offload), key=lambda item: item[1])
    parts = [(share, rows_of_numbers([stage for stage, _ in row])) for share, row in rows if share]
    return f"{name} offload={','.join(f'{row}:{share:g}' for share, row_parts in parts for row in row_parts)}"


def stage_moves(here: Now) -> Iterator[Named]:
    """Steps with other choices for stages: the first stages offload, the next recompute, the last keep everything, if the
    search decides both; one layer more or less of a stage recomputes; the first few stages, the others, or a single one
    change; then, if they are few, all others. Activations of a microbatch live longest on the first stages."""
    step, said, layers = here.step, here.said, here.layers
    held = step.costs(here.profile).memory.held(layers)
    keeps = [any(sizes) for sizes in zip(held["held_until_B"], held["held_until_W"], strict=True)]
    now = tuple(one if kept else one._replace(away=0.0) for one, kept in zip(stages_of(step, layers), keeps, strict=True))
    count = len(now)
    ways = [[stage for stage in _ways(now[i], said, layers[i]) if keeps[i] or not stage.away] for i in range(count)]
    in_parts = is_auto(said.recompute) and step.slices == 1
    changes: dict[tuple[Stage, ...], None] = {}

    def change(first: int, last: int, way: int) -> None:
        changed = (ways[i][way % len(ways[i])] if first <= i < last else now[i] for i in range(count))
        changes[tuple(changed)] = None

    if is_auto(said.recompute) and is_auto(said.offload):  # by how long activations live: offload, recompute, keep
        for away, again in combinations_with_replacement([count * quarter // 4 for quarter in range(5)], 2):
            graded = [Stage(away=1.0)] * away + [Stage(n) for n in layers[away:again]] + [Stage()] * (count - again)
            changes[tuple(stage if keeps[i] or not stage.away else now[i] for i, stage in enumerate(graded))] = None
    if in_parts:
        for at, more in product(range(count), (-1, 1)):
            if 0 <= now[at].again + more <= layers[at]:
                changes |= {(*now[:at], now[at]._replace(again=now[at].again + more), *now[at + 1 :]): None}
    kinds = range(max(map(len, ways)))
    for cut, way in product(dict.fromkeys(count * quarter // 4 for quarter in (2, 1, 3, 4)), kinds):
        change(0, cut, way)
        change(cut, count, way)
    for at, way in product(range(count), kinds):
        change(at, at + 1, way)
    every = [
        dict.fromkeys([*some, *map(Stage, range(n + 1) if in_parts else ())]) for some, n in zip(ways, layers, strict=True)
    ]
    for each in (ways, every):
        if prod(map(len, each)) <= ALL_WAYS:
            changes |= dict.fromkeys(product(*each))
    changes.pop(now, None)
    return (with_stages(step, stages, layers) for stages in changes)


def with_fewest(now: Now) -> Iterator[Named]:
    """For a step that recomputes everything: the one where as few layers of each stage do as may fit, some but not all."""
    step, layers = now.step, now.layers
    if not (is_auto(now.said.recompute) and step.recompute == ALL and layers and step.slices == 1):
        return
    costs = step.costs(now.profile)
    for again in dict.fromkeys(fewest_again(costs, layers, flight) for flight in IN_FLIGHT) if costs.limit else ():
        if any(again) and again != layers:
            name, fewest = with_stages(step, [Stage(n) for n in again], layers)
            yield now.name.replace(f" recompute={ALL}", name), fewest


def fewest_again(costs: StageCosts, layers: Sequence[int], flight: float) -> tuple[int, ...]:
    """How few layers of each stage, the first ones, may recompute for its rank's memory; all where fewer do not suffice.
    flight: a stage is assumed to hold this times the microbatches that start while one goes from its F to the end and back,
    if nothing waits. Of a rank's stages, the one whose next layer frees the most bytes for its time is next."""
    memory, ranges, room = costs.memory, layer_ranges(layers), np.array(costs.limit)
    work = np.array([sum(costs.times[i] for i in here) for here in ranges]) * costs.factors
    ahead = np.cumsum(work[::-1])[::-1] / (costs.shares @ work).max()
    held = np.minimum(costs.microbatches, np.ceil(flight * ahead - 1e-9))
    again = [0] * len(ranges)

    def kept(stage: int, n: int) -> float:
        here = ranges[stage]
        taken = costs.layers[here.start - 1].output_bytes if n and stage else 0
        return float(held[stage] * min(taken + memory.kept_beside(here, n), memory.kept_beside(here, 0)))

    def worth(stage: int) -> float:
        layer = costs.layers[ranges[stage][again[stage]]]
        return (kept(stage, again[stage]) - kept(stage, again[stage] + 1)) / max(1.0, layer.X or layer.F)

    while True:
        made = [
            float(memory.after_f(here.start, here.start + n)) if n else 0.0 for here, n in zip(ranges, again, strict=True)
        ]
        need = np.array(memory.of_ranks(layers, costs.routes, again)).sum(axis=0)
        need = need + (costs.shares > 0) @ [kept(stage, n) for stage, n in enumerate(again)]
        need = need + ((costs.shares > 0) * np.array(made)).max(axis=1)
        more = False
        for rank in np.flatnonzero(need > room):
            able = [stage for stage in np.flatnonzero(costs.shares[rank]).tolist() if again[stage] < layers[stage]]
            if able:
                again[max(able, key=worth)] += 1
                more = True
        if not more:
            return tuple(again)


def copy_moves(now: Now) -> Iterator[Named]:
    """Steps that do not offload some microbatches, those that would be away for the shortest time: a half, a quarter or an
    eighth of all copies, or of one stage's."""
    step, schedule = now.step, now.schedule
    if schedule is None or step.slices != 1:
        return
    shares = np.array([each_stage.away for each_stage in stages_of(step, schedule.problem.layers)])
    away = time_away(schedule)[: len(shares)]  # without shards of a vocabulary, which copy nothing
    for stage in (None, *np.flatnonzero(np.isfinite(away).any(axis=1)).tolist()):
        distances = away if stage is None else np.where(np.arange(len(away))[:, None] == stage, away, np.inf)
        order = np.argsort(distances, axis=None, kind="stable")[: int(np.isfinite(distances).sum())]
        for part in (2, 4, 8):
            stay = np.isinf(away).ravel()
            stay[order[: len(order) // part]] = True
            table = np.where(stay.reshape(away.shape), 0.0, shares[:, None])
            if len(order) >= part and table.any():
                counts, m = (table > 0).sum(axis=1), len(away[0])
                rows = [f"{i}:{shares[i]:g}{f'({n} of {m})' * (n < m)}" for i, n in enumerate(counts.tolist()) if n]
                again = _name(step.recompute, NO_OFFLOAD)
                yield f"{again} offload={','.join(rows)}", replace(step, offload=tuple(map(tuple, table.tolist())))


def _ways(now: Stage, said: Any, layers: int) -> list[Stage]:
    """The choices for a stage of `layers` layers that `said` leaves to the search."""
    if is_auto(said.recompute) and is_auto(said.offload):
        return [*(Stage(away=share) for share in AWAY), Stage(layers)]
    if is_auto(said.recompute):
        return [Stage(0, now.away), Stage(layers, now.away)]
    return [Stage(now.again, away) for away in AWAY]


BOTH = ("recompute", "offload")
KEEPING = Feature(
    "kept activations",
    build=within_host,
    choices=Choices(BOTH, _choices, with_fewest),
    moves=(Moves("stages", BOTH, stage_moves, BREADTH), Moves("copies", ("offload",), copy_moves)),
)
