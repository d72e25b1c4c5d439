"""From a running job's trace to a profile, so that its schedule can be solved again with the cluster's real times."""

from __future__ import annotations

from dataclasses import fields, replace
from statistics import median_low
from typing import Any, NamedTuple

import numpy as np

from ..features.lengths import MESSAGES_ALIKE
from ..features.table import FEATURES
from ..kinds import LINKS as SHARED
from ..partition.layer import Layer, Link, layer_ranges
from ..problem import Problem
from ..schedule.timeline import Floats
from ..schedule.trace import Trace
from ..util.columns import weighted_median
from ..util.errors import BadInput
from .doubtful import model_said_by
from .lengths import factors_of, lengths_of
from .profile import Profile

ALIKE = 0.05  # ranks that differ by less than this from the middle one count as equal
Samples = dict[tuple[int, str], list[float]]  # µs, by layer and kind
LINKS, FROM_STEPS = "links", "medians of the run's own steps"  # a fact of runs whose problem has the measured messages
WITH = {"BW": ("B", "W"), "B": ("BW",), "W": ("BW",), "X": ("F",)}  # times of kinds that did not run change with these


def from_trace(trace: Trace, base: Profile | None = None) -> Profile:
    """The profile of a run's layers, ranks and messages: its own problem, built from the result, has the medians that the
    run measured, up to rounding.

    The time of a stage's pass is divided among its layers as in `base`. (Without base: evenly; messages and all-to-alls are
    those of the run's problem, and bytes are unknown, 0.) If the ratio of a rank's measured passes to `base` differs by 5 %
    from the middle rank's, it counts as a slower or faster device (`rank_factors`); all other changes go to the layers.
    Times of kinds that did not run change in proportion to related ones (BW with B and W, X with F). Message times are
    scaled by those for which an idle rank waited. If the problem's microbatches differ, those of the median step get factors
    (`factors_of`), and times and samples are those of a microbatch with factor 1. Slow-downs of passes by each other (in the
    base or the problem) are removed from the times, and kept in `slowdowns`. What features make of their own passes is in
    `Feature.of_run`. Raises BadInput, also where a feature's run says nothing of layers.
    """
    problem, layers = trace.problem, base
    for feature in FEATURES:
        if why := feature.of_run.lacks(problem, base):
            raise BadInput(f"trace: {why}")
        layers = feature.of_run.layers(layers, problem)
    if base is not None and base.slowdowns:
        trace = replace(trace, problem=replace(problem, slowdowns=base.slowdowns))
    profile = ran = _of_layers(trace, layers)
    for feature in FEATURES:
        profile = feature.of_run.timed(profile, base, lambda kind: _median(ran, trace, kind), problem)
    return profile


def _of_layers(trace: Trace, base: Profile | None) -> Profile:
    """`from_trace` for the layers on stages."""
    problem = trace.problem
    groups = _groups(problem)
    layers = _layers(problem, base, groups)
    times, lengths = trace.computed(), lengths_of(trace)
    lasting = () if problem.alike else factors_of(trace, lengths)
    factor = (lengths.each if lasting else np.ones_like(lengths.each))[:, problem.passes.microbatch * problem.in_microbatch]
    kinds = tuple(dict.fromkeys(group.kind for group in groups))
    ratio = _rank_ratios(problem, groups, layers, lengths.base if lasting else lengths.usual)
    middle = median_low(ratio)
    factors = [value / middle if abs(value / middle - 1) >= ALIKE else 1.0 for value in ratio]
    samples, weights = Samples(), Samples()
    for stage in range(len(problem.layers)):
        for kind in kinds:
            rows = [group for group in groups if (group.stage, group.kind) == (stage, kind)]
            if not rows:
                continue
            own = np.concatenate([(times / factor)[:, row.rows].ravel() / factors[row.rank] for row in rows])
            weight = np.concatenate([factor[:, row.rows].ravel() for row in rows]).tolist()
            numbers = _layers_run(problem, stage, kind)
            shares = _shares([getattr(layers[i], kind) for i in numbers])
            for i, share in zip(numbers, shares, strict=True):
                samples[i, kind], weights[i, kind] = (own * share).tolist(), weight
    scale, heard = _link_scale(trace)
    new = tuple(replace(_retimed(i, c, samples, weights), message=c.message * scale) for i, c in enumerate(layers))
    facts: dict[str, Any] = {
        "steps": len(trace.steps),
        "rank_ratios": [round(value / middle, 6) for value in ratio],
        "link_scale": scale,
        "messages_heard": heard,
        "bytes_from": "nowhere: a base profile was not given" if base is None else f"{base.source} profile of {base.model}",
        "run": {key: value for key, value in trace.facts.items() if isinstance(value, str | int | float)},
    }
    if lasting:
        facts[MESSAGES_ALIKE] = True
    known = base or Profile("", model_said_by(problem.source) or "trace", layers, Link(0.0, 1.0), 0.0, None, {}, {})
    scaled = replace(
        known.link,
        latency=known.link.latency * scale,
        bytes_per_us=known.link.bytes_per_us / scale,
        blocking=_blocking(trace, base),
    )
    return replace(
        known,
        source=_source(trace, base),
        layers=new,
        link=scaled,
        facts=facts,
        samples={f"{layers[i].name}/{kind}": row for (i, kind), row in samples.items()},
        rank_factors=tuple(factors) if any(f != 1.0 for f in factors) else (),
        microbatch_factors=lasting,
        slowdowns=trace.problem.slowdowns,
    )


def _blocking(trace: Trace, base: Profile | None) -> bool:
    """Do messages occupy their sender? As the run showed, or as the base says for the schedule that it was made for."""
    if base is not None and trace.facts.get(LINKS) != FROM_STEPS:
        return base.link.blocking
    return bool(trace.problem.sending.any())


def _source(trace: Trace, base: Profile | None) -> str:
    """The profile's source: "measured" only if the run's times are, and the base's."""
    if "emulated" in trace.facts:
        return "estimated: an emulated run"
    before = trace.problem.source if base is None else base.source
    if before.startswith("measured"):
        return "measured"
    if base is None:
        return f"estimated: by a run of a schedule whose times were {before.partition(':')[0] or 'given'}"
    return f"{base.source}, retimed by a run"


class _Group(NamedTuple):
    """Passes of one kind and stage on one rank: rows of the problem's table."""

    rank: int
    stage: int
    kind: str
    rows: Any


def _groups(problem: Problem) -> list[_Group]:
    """All groups of passes that compute layers."""
    known = {field.name for field in fields(Layer)}
    groups = []
    for rows in problem.lanes:
        p, first = problem.passes, int(rows[0])
        streams = p.stream_sets[p.streams[first]]
        if p.kind_names[first] in known - {"U"} and any(stream.startswith("compute:") for stream in streams):
            groups.append(_Group(int(p.rank[first]), int(p.stage[first]), p.kind_names[first], rows))
    return groups


def _layers(problem: Problem, base: Profile | None, groups: list[_Group]) -> tuple[Layer, ...]:
    """The base's layers; without a base, layers that share their stage's predicted times evenly."""
    stages = problem.model_stages
    if len(problem.layers) != stages or min(problem.layers) < 1:
        raise BadInput("trace: its problem does not say how many layers each stage holds (field 'layers')")
    if base is not None:
        if len(base.layers) != sum(problem.layers):
            raise BadInput(f"trace: of {sum(problem.layers)} layers, but the base profile has {len(base.layers)}")
        return base.layers
    times = {(g.stage, g.kind): float((problem.passes.duration - problem.sending)[g.rows].mean()) for g in groups}
    sent, messages = _all_to_alls(problem, stages), _messages(problem, stages)
    nothing: dict[str, Any] = dict.fromkeys(("held_until_B", "held_until_W", "parameter_bytes", "output_bytes"), 0)

    def layer(s: int, i: int, n: int) -> Layer:
        F, B, W, BW = (times.get((s, kind), 0.0) / n for kind in ("F", "B", "W", "BW"))
        # A kind that did not run is assumed to take as long as the one that did: a fused backward as B and W.
        return Layer(f"stage{s}.layer{i}", F, B, W, BW or B + W, **nothing, all_to_all=sent[s] / n, message=messages[s])

    return tuple(layer(s, i, n) for s, n in enumerate(problem.layers) for i in range(n))


def _all_to_alls(problem: Problem, stages: int) -> list[float]:
    """µs of an all-to-all for each stage: the mean of those after F and after the backward, as a layer has one for both."""
    p = problem.passes
    total = np.zeros(stages)
    for kind in ("AF", "AB"):
        rows = problem.rows(kind)
        total += np.bincount(p.stage[rows], p.duration[rows], stages) / problem.microbatches
    return (total / 2).tolist()


def _messages(problem: Problem, stages: int) -> list[float]:
    """µs of the message after each stage, the mean of both directions; if none is between ranks, the longest one's."""
    p, e = problem.passes, problem.edges
    apart = (p.rank[e.before] != p.rank[e.after]) & e.carrying("activation", "gradient")
    behind = np.minimum(p.stage[e.before], p.stage[e.after])[apart]
    count = np.bincount(behind, minlength=stages)
    means = np.bincount(behind, (e.lag + e.sent)[apart], stages) / np.maximum(count, 1)
    return np.where(count > 0, means, means.max(initial=0.0)).tolist()


def _rank_ratios(problem: Problem, groups: list[_Group], layers: tuple[Layer, ...], usual: Floats) -> list[float]:
    """For each rank, the measured time of all its passes divided by that of the layers. usual: the usual µs of each pass by
    its kind and stage, shape (passes,)."""
    measured, stated = np.zeros(problem.ranks), np.zeros(problem.ranks)
    for group in groups:
        measured[group.rank] += float(usual[group.rows].sum())
        stated[group.rank] += len(group.rows) * sum(
            getattr(layers[i], group.kind) for i in _layers_run(problem, group.stage, group.kind)
        )
    for rank in np.flatnonzero((measured <= 0) | (stated <= 0)):
        raise BadInput(f"trace: rank {rank} ran {measured[rank]:.0f} µs where its layers say {stated[rank]:.0f}: no ratio")
    return (measured / stated).tolist()


def _layers_run(problem: Problem, stage: int, kind: str) -> range:
    """The layers that a stage's passes of a kind run: for X those that are recomputed."""
    numbers = layer_ranges(problem.layers)[stage]
    return numbers[: problem.recomputed[stage]] if kind == "X" and problem.recomputed else numbers


def _shares(times: list[float]) -> list[float]:
    whole = sum(times)
    return [time / whole for time in times] if whole else [1 / len(times)] * len(times)


def _retimed(i: int, layer: Layer, samples: Samples, weights: Samples) -> Layer:
    """The layer with its measured times; times of kinds that did not run are changed in proportion."""
    new: dict[str, Any] = {kind: weighted_median(row, weights[of, kind]) for (of, kind), row in samples.items() if of == i}
    for kind, partners in WITH.items():
        if (i, kind) not in samples and all((i, partner) in samples for partner in partners):
            before = sum(getattr(layer, partner) for partner in partners)
            new[kind] = getattr(layer, kind) * (sum(new[partner] for partner in partners) / before if before else 1.0)
    parts = {
        "attention_F": "F",
        "attention_B": "B" if layer.B else "BW",
        **{f"fixed_{kind}": kind for kind in ("F", "B", "W", "BW")},
    }
    for name, kind in parts.items():
        if known := getattr(layer, name):  # keep its share of the pass
            new[name] = known * new.get(kind, getattr(layer, kind)) / getattr(layer, kind)
    return replace(layer, **new)


def _link_scale(trace: Trace) -> tuple[float, int]:
    """By which factor messages took longer than predicted (1 if none was measured), in the median over predicted µs, since a
    busy machine makes some much later than a link does; and the number of measured messages."""
    lag = trace.problem.edges.lag
    pairs = [(us / lag[row], lag[row]) for row, delays in heard_messages(trace).items() for us in delays]
    return (float(weighted_median(*np.array(pairs).T)), len(pairs)) if pairs else (1.0, 0)


def heard_messages(trace: Trace) -> dict[int, Floats]:
    """Edge → µs of its message in the steps in which its receiver was idle since before it was sent (other messages may have
    waited there). Empty where the predicted times are the run's own, or messages share links."""
    problem = trace.problem
    if trace.facts.get(LINKS) == FROM_STEPS or problem.has(SHARED):
        return {}
    edges, rank = problem.edges, problem.passes.rank
    rows = np.flatnonzero((rank[edges.before] != rank[edges.after]) & (edges.lag > 0))
    rows = rows[np.bincount(edges.after[rows])[edges.after[rows]] == 1]  # of several, the arrival of each is not known
    sender, receiver, delays = edges.before[rows], edges.after[rows], dict[int, list[float]]()
    for number, step in enumerate(trace.steps):
        ready = trace.ready[number]
        idle_since = np.minimum(ready, step.start) - trace.waits(number)
        good = (idle_since[receiver] <= step.end[sender]) & (ready[receiver] > step.end[sender])
        for row, took in zip(rows[good].tolist(), (ready[receiver] - step.end[sender])[good].tolist(), strict=True):
            delays.setdefault(row, []).append(took)
    return {row: np.array(us) for row, us in delays.items()}


def _median(profile: Profile, trace: Trace, kind: str) -> float:
    """The median of a kind of pass, µs, for a rank and a microbatch with factor 1. profile: the run's, for factors."""
    p, rows = trace.problem.passes, trace.problem.rows(kind)
    each = lengths_of(trace).each if profile.microbatch_factors else np.ones((len(trace.steps), trace.problem.microbatches))
    weights = each[:, p.microbatch[rows]]
    slow = np.asarray(profile.rank_factors or (1.0,) * trace.problem.ranks)[p.rank[rows]]
    return float(weighted_median((trace.computed()[:, rows] / weights / slow).ravel(), weights.ravel()))
