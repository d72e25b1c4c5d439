"""What a step leaves open, and what is tried for it: a step with open fields → named steps without.

The first of each list is the simplest. Which layers lie on which stage needs the profile, and stays open here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations_with_replacement, groupby, product
from math import prod
from typing import NamedTuple

import numpy as np

from ..build.offload import time_away
from ..build.recompute import Recompute, recompute_in_words, recomputed_layers
from ..features.cuts import EVEN_WORK, MAX_SLICES, Slices
from ..features.feature import AUTO, is_auto
from ..features.lengths import choices as orders_of_microbatches
from ..features.offload import FULL, HALF, NO_OFFLOAD, Offload, fractions_by_name, half_fractions
from ..features.sharded_vocabulary import BARRIERS, LAST, LAST_PARTITION, REDISTRIBUTE, VOCABULARIES
from ..layer import layer_ranges
from ..partition.file import Partition
from ..partition.stage_costs import StageCosts
from ..placement import parse
from ..schedule import Schedule
from ..step import Step
from ..util.errors import BadInput
from ..util.text import rows_of_numbers

PLACEMENTS = ("single", "loop", "loop4", "vee")
GATHERS = (1, 2, 4, 8)
MAX_SLICED = 20_000  # forwards of a step that is tried in slices
EVEN, EXCHANGE = "even", "exchange"  # kinds of slices, beside those of equal work

ALL_WAYS = 100  # so few choices of all stages are all looked at

Named = tuple[str, Step]


class Stage(NamedTuple):
    """What becomes of a stage's activations: of how many of its layers, the first ones, a pass makes them again, and which
    part lies in host memory."""

    again: int = 0
    away: float = 0.0


AWAY = (0.0, 1.0, 0.5)
IN_FLIGHT = (1.25, 2.0)  # times as many microbatches as a stage holds where nothing waits (see `fewest_again`)


def closed_steps(step: Step) -> list[tuple[str, str, Step]]:
    """Every step that is tried first: its placement (with gathers, the vocabulary's place and slices), what else was chosen,
    and the step. Raises BadInput where no placement has as many stages as the partition says."""
    placed = [
        (f"{place}{gathers}{where}{sliced}", one)
        for place, before in _placements(step)
        for gathers, gathered in _gathers(before, step.gathers)
        for where, vocabulary in vocabularies(gathered)
        for sliced, one in _slices(vocabulary)
    ]
    return [
        (place, f"{order}{kept}", one)
        for place, before in placed
        for order, ordered in orders_of_microbatches(before)
        for kept, one in _kept(ordered, step)
    ]


def _placements(step: Step) -> list[Named]:
    if step.placement != AUTO:
        return [(step.title, step)]
    wanted = list(PLACEMENTS if step.ranks > 1 else PLACEMENTS[:1])
    if not isinstance(step.partition, str):
        stages = len(step.partition.layers if isinstance(step.partition, Partition) else step.partition or ())
        wanted = [one for one in wanted if len(parse(one, step.ranks)) == stages]
        if not wanted:
            raise BadInput(f"layers: no placement of {step.ranks} ranks that is tried has {stages} stages")
    return [(one, replace(step, placement=one)) for one in wanted]


def _gathers(step: Step, said: object) -> list[Named]:
    if said != AUTO:
        return [("", step)]
    most = step.microbatches // len(step.routes)
    counts = [one for one in GATHERS if one == 1 or (one <= most and step.shards > 1)]
    return [(f" gathers={count}", replace(step, gathers=count)) for count in counts]


def vocabularies(step: Step) -> list[Named]:
    """Where output layer, loss and embedding are, if that is open. What a partition that is given makes of "last" and
    "redistribute" is one choice; one rank has no shards."""
    if not is_auto(step.vocabulary):
        return [("", step)]
    names = [one for one in VOCABULARIES if one != (REDISTRIBUTE if step.partition == LAST_PARTITION else LAST)]
    names = [name for name in names if step.ranks > 1 or name not in BARRIERS]
    found = [(f" vocabulary={name}", replace(step, vocabulary=name)) for name in names]
    if isinstance(step.partition, str | None) and step.partition != LAST_PARTITION:
        found.insert(0, (f" vocabulary={LAST}", replace(step, vocabulary=LAST, partition=LAST_PARTITION)))
    return found


def _slices(step: Step) -> list[Named]:
    """Numbers of slices, each twice the one before, up to 2p: with so many SlimPipe (arXiv 2504.14519) holds half a
    microbatch beside the one that it needs; `climb.try_more` goes on from there."""
    if not is_auto(step.slices):
        return [("", step)]
    counts = [2]
    while 2 * counts[-1] <= 2 * step.ranks:
        counts.append(2 * counts[-1])
    several = [(count, kind) for kind in kinds_of_slices(step) for count in counts if count <= most_slices(step)]
    return [in_slices(step, 1, EVEN), *(in_slices(step, one, kind) for one, kind in several if step.shards == 1)]


def kinds_of_slices(step: Step) -> tuple[str, ...]:
    """Which kinds of slices are tried: even ones, with attention for other ranks too where that is asked for, and slices
    that take as long as each other, as Seq1F1B has them (arXiv 2406.03488, section 3.3), where they go with the step's other
    choices."""
    uneven = step.offload == NO_OFFLOAD and step.vocabulary not in BARRIERS
    return (EVEN, *[EXCHANGE] * step.attention_exchange, *[EVEN_WORK] * uneven)


def in_slices(step: Step, count: int, kind: str) -> Named:
    """The step in so many slices of a kind, and its name."""
    slices: Slices = f"{count}:{EVEN_WORK}" if kind == EVEN_WORK and count > 1 else count
    sliced = replace(step.in_slices(slices), attention_exchange=kind == EXCHANGE and count > 1)
    return f" slices={slices}{f' {EXCHANGE}' if sliced.attention_exchange else ''}", sliced


def most_slices(step: Step) -> int:
    """In how many slices a step is tried at most."""
    return min(MAX_SLICES, MAX_SLICED // (len(step.routes[0]) * step.microbatches))


def _kept(step: Step, said: Step) -> list[Named]:
    """What stages keep, by names: nothing is changed, all is recomputed, offloaded fully or by half. Nothing is mixed yet
    (see `stage_moves`)."""
    again = () if is_auto(said.recompute) else step.recompute
    away = NO_OFFLOAD if is_auto(said.offload) else step.offload
    found = [("", replace(step, recompute=again, offload=away))]
    if is_auto(said.offload):
        found += [(f" offload={name}", replace(step, recompute=again, offload=name)) for name in (FULL, HALF)]
    if is_auto(said.recompute):
        found.append((" recompute=all", replace(step, recompute="all", offload=away)))
    return found


def stages_of(step: Step, layers: Sequence[int]) -> tuple[Stage, ...]:
    """What becomes of each stage's activations; of microbatches that differ the most. layers: of each stage."""
    count, offload = len(step.routes[0]), step.offload
    again = recomputed_layers(step.recompute, layers)
    if isinstance(offload, str) and offload.strip() == HALF:
        away = half_fractions([sorted(set(ranks)) for ranks in zip(*step.routes, strict=True)])
    else:
        away = fractions_by_name(offload, count) if isinstance(offload, str) else np.asarray(offload, np.float64)
    away = np.asarray(away).reshape(count, -1).max(axis=1)
    return tuple(Stage(again[one], float(away[one])) for one in range(count))


def with_stages(step: Step, stages: Sequence[Stage], layers: Sequence[int]) -> Named:
    """The step with this of its stages, and its name. Of a first stage that recomputes whole nothing is offloaded: its input
    is the batch."""
    away = tuple(one.away if i or one.again < layers[0] else 0.0 for i, one in enumerate(stages))
    offload: Offload = NO_OFFLOAD if not any(away) else FULL if set(away) == {1.0} else away
    recompute = recompute_in_words([one.again for one in stages], layers)
    return _name(recompute, offload), replace(step, recompute=recompute, offload=offload)


def _name(recompute: Recompute, offload: Offload) -> str:
    """As one writes it on the command line."""
    again = recompute if isinstance(recompute, str) else ",".join(rows_of_numbers([int(one) for one in recompute]))
    name = f" recompute={again}" if again else ""
    if isinstance(offload, str):
        return name if offload == NO_OFFLOAD else f"{name} offload={offload}"
    rows = groupby(enumerate(offload), key=lambda one: one[1])
    parts = [(share, rows_of_numbers([stage for stage, _ in row])) for share, row in rows if share]
    return f"{name} offload={','.join(f'{row}:{share:g}' for share, row_parts in parts for row in row_parts)}"


def stage_moves(step: Step, said: Step, costs: StageCosts, layers: Sequence[int]) -> Iterator[Named]:
    """Steps where the first stages are offloaded, the next recompute and the last keep all, where both are open; where one
    layer more or less of a stage recomputes; where the first so many stages, or the others, or a single one changes; then,
    where there are few, all others. A microbatch's activations live longest on the first stages. layers: of each stage."""
    held = costs.memory.held(layers)
    keeps = [any(sizes) for sizes in zip(held["held_until_B"], held["held_until_W"], strict=True)]
    now, count = stages_of(step, layers), len(keeps)
    ways = [[one for one in _ways(now[i], said, layers[i]) if keeps[i] or not one.away] for i in range(count)]
    in_parts = is_auto(said.recompute) and step.slices == 1
    found: dict[tuple[Stage, ...], None] = {}

    def change(first: int, last: int, way: int) -> None:
        changed = (ways[i][way % len(ways[i])] if first <= i < last else now[i] for i in range(count))
        found[tuple(changed)] = None

    if is_auto(said.recompute) and is_auto(said.offload):  # by how long activations live: out, made again, kept
        for away, again in combinations_with_replacement([count * quarter // 4 for quarter in range(5)], 2):
            graded = [Stage(away=1.0)] * away + [Stage(n) for n in layers[away:again]] + [Stage()] * (count - again)
            found[tuple(one if keeps[i] or not one.away else now[i] for i, one in enumerate(graded))] = None
    if in_parts:
        for at, more in product(range(count), (-1, 1)):
            if 0 <= now[at].again + more <= layers[at]:
                found[(*now[:at], now[at]._replace(again=now[at].again + more), *now[at + 1 :])] = None
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
            found |= dict.fromkeys(product(*each))
    found.pop(now, None)
    return (with_stages(step, one, layers) for one in found)


def with_fewest(step: Step, costs: StageCosts, layers: Sequence[int]) -> Iterator[Named]:
    """The step where as few layers of each stage recompute as may fit the memory, where these are some and not all."""
    if costs.limit and step.slices == 1:
        for again in dict.fromkeys(fewest_again(costs, layers, flight) for flight in IN_FLIGHT):
            if any(again) and again != tuple(layers):
                yield with_stages(step, [Stage(n) for n in again], layers)


def fewest_again(costs: StageCosts, layers: Sequence[int], flight: float) -> tuple[int, ...]:
    """How few layers of each stage, the first ones, may recompute for its rank's memory; all of them where no fewer do.
    flight: a stage is taken to hold so many times the microbatches that begin while one goes from its F to the end and back,
    where nothing waits. Of a rank's stages those come first whose next layer saves most bytes in its time."""
    memory, ranges, room = costs.memory, layer_ranges(layers), np.array(costs.limit)
    work = np.array([sum(costs.times[i] for i in here) for here in ranges]) * costs.factors
    ahead = np.cumsum(work[::-1])[::-1] / (costs.shares @ work).max()
    held = np.minimum(costs.microbatches, np.ceil(flight * ahead - 1e-9))
    again = [0] * len(ranges)

    def kept(stage: int, n: int) -> float:
        here = ranges[stage]
        given = costs.layers[here.start - 1].output_bytes if n and stage else 0
        return float(held[stage] * min(given + memory.kept_beside(here, n), memory.kept_beside(here, 0)))

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


def copy_moves(step: Step, schedule: Schedule) -> Iterator[Named]:
    """Steps without the copies of some microbatches, those that are away for the shortest time: a half, a quarter or an
    eighth of all copies, or of one stage's."""
    shares = np.array([one.away for one in stages_of(step, schedule.problem.layers)])
    away = time_away(schedule)[: len(shares)]  # shards of a vocabulary, behind the model's stages, copy nothing
    for stage in (None, *np.flatnonzero(np.isfinite(away).any(axis=1)).tolist()):
        distances = away if stage is None else np.where(np.arange(len(away))[:, None] == stage, away, np.inf)
        order = np.argsort(distances, axis=None, kind="stable")[: int(np.isfinite(distances).sum())]
        for part in (2, 4, 8):
            stay = np.isinf(away).ravel()
            stay[order[: len(order) // part]] = True
            table = np.where(stay.reshape(away.shape), 0.0, shares[:, None])
            if len(order) >= part and table.any():
                counts = (table > 0).sum(axis=1)
                rows = [f"{i}:{shares[i]:g}{_of(n, len(away[0]))}" for i, n in enumerate(counts.tolist()) if n]
                again = _name(step.recompute, NO_OFFLOAD)
                yield f"{again} offload={','.join(rows)}", replace(step, offload=tuple(map(tuple, table.tolist())))


def _of(part: int, all_of_them: int) -> str:
    return "" if part == all_of_them else f"({part} of {all_of_them})"


def _ways(now: Stage, said: Step, layers: int) -> list[Stage]:
    """What may become of a stage of so many layers, where `said` leaves it open."""
    if is_auto(said.recompute) and is_auto(said.offload):
        return [*(Stage(away=one) for one in AWAY), Stage(layers)]
    if is_auto(said.recompute):
        return [Stage(0, now.away), Stage(layers, now.away)]
    return [Stage(now.again, away) for away in AWAY]
