"""An estimated profile: a roofline model applied to the operations that the executor's passes dispatch, for a named device.

Nothing runs and nothing is allocated: layers of any size are examined with fake tensors. The profile's `source` says
"estimated: …", and so does every problem, schedule and picture made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, gcd
from typing import Any

import torch
from torch import nn

from zbsolve.exec.base.torch_private import FAKE_REFUSALS, FakeTensorMode
from zbsolve.features.cuts import SEQUENCE
from zbsolve.features.slices import SIZES
from zbsolve.features.vocabulary import VocabularyCosts
from zbsolve.models.by_name import sized
from zbsolve.models.model import Model
from zbsolve.partition.layer import Layer, Link, without_backwards
from zbsolve.planner.profiled_model import SEQUENCE_PARALLEL, TENSOR_RANKS
from zbsolve.profile.profile import Profile
from zbsolve.util.errors import BadInput, one_line

from .dataflow import Flow, batch_of, chosen, fake_mode, flow, load_fake, microbatch_facts, naming, place, quiet
from .devices import (
    ATTENTION_SHARE,
    KERNEL_US,
    LATENCY_US,
    LINK_SHARE,
    MEMORY_SHARE,
    SCATTERED_SHARE,
    Device,
    assumed,
    device,
    host_link,
    matrix_share,
)
from .memory import LayerMemory, costs_of, held
from .operation_costs import FusedNorms, Op, OptimizerState, PassOps, passes, passes_of, state_of, total
from .stage_rounds import stages_of
from .vocabulary_cut import cut_of
from .vocabulary_times import Clock, counted_shard, counted_table, held_by_shard, vocabulary_costs

HEADS = "heads"  # number of query heads, their greatest common divisor over layers with causal attention; 0: none
SHARED = None, {"no_vocabulary": "tensor ranks share the vocabulary already"}


@dataclass(frozen=True)
class _Look:
    """What fake tensors show of a model. taken: layers examined; alike: for each layer the first of them that equals it.
    work, memory: of the layers taken."""

    through: Flow
    taken: tuple[int, ...]
    alike: tuple[int, ...]
    work: dict[int, PassOps]
    memory: dict[int, LayerMemory]
    parameters: list[nn.Parameter]


def estimate(
    spec: str, on: str, *, seed: int = 0, optimizer_states: str | None = None, tensor_ranks: int = 1, shards: bool = True
) -> Profile:
    """The model called `spec` on the device called `on` (see `profiler.devices`).

    optimizer_states: how parameters are stored and updated (see the module of that name); None: Adam, with mixed precision
    if parameters have 16 bits. tensor_ranks: devices per pipeline rank (see `over_tensor_ranks`). shards: whether to
    estimate those of the vocabulary. Raises BadInput, also for layers that need real values to run.
    """
    target, mode = device(on), fake_mode()
    model = load_fake(spec, seed, mode)
    look = _looked_at(model, mode)
    state = state_of(optimizer_states, look.parameters)
    sizes = costs_of([look.memory[first] for first in look.alike])
    layers = tuple(
        _layer(model, i, look.work[first], sizes[i], look.through.parameter_bytes[i], state, target)
        for i, first in enumerate(look.alike)
    )
    layers = look.through.with_sides(without_backwards(layers, look.through.untrained))
    sequence = sequence_fact(look.work.values())
    if not sequence:
        layers = tuple(replace(layer, attention_F=0.0, attention_B=0.0, kv_bytes=0, kv_gradient_bytes=0) for layer in layers)
    heads = {HEADS: gcd(*(op.heads for work in look.work.values() for op in work["F"] if op.heads))}
    source = f"estimated: {target.name} roofline"
    layer_of = partial(_layer, model, state=state, on=target)
    alone = shards and tensor_ranks == 1
    vocabulary, unknown = _vocabulary(model, look.through, mode, source, layer_of, target) if alone else SHARED
    profile = Profile(
        source,
        spec,
        layers,
        Link(LATENCY_US, target.link * 1e3 * LINK_SHARE),
        state.factor,
        int(target.memory * 1e9),
        {
            "device": target.name,
            "device_source": target.source,
            "assumed": assumed(target),
            "states": state.name,
            "torch": torch.__version__,
            "flops": {model.layer_names[i]: {kind: total(ops) for kind, ops in look.work[i].items()} for i in look.taken},
            "kernels": {model.layer_names[i]: {kind: len(ops) for kind, ops in look.work[i].items()} for i in look.taken},
            "measured_layers": [],
            **microbatch_facts(look.through, 1),
            **sequence,
            **heads,
            **unknown,
        },
        {},
        tied=look.through.tied,
        host=host_link(target),
        vocabulary=vocabulary,
    )
    return over_tensor_ranks(profile, tensor_ranks, target)


def estimates(spec: str, on: str, sequences: Iterable[int], most: int) -> list[Profile]:
    """The estimates that a plan needs for a model without a formula: with each of these numbers of sequences per microbatch
    (its own if its name cannot say it), and with every possible number of tensor ranks up to `most`. Raises BadInput."""
    profiles = [estimate(name, on, shards=False) for name in dict.fromkeys(sized(spec, number) for number in sequences)]
    target, known = device(on), any(layer.attention_F for layer in profiles[0].layers)
    whole = gcd(profiles[0].facts[HEADS], target.node[0]) if known else 1
    ranks = [number for number in range(1, min(whole, most) + 1) if whole % number == 0]
    return [over_tensor_ranks(profile, number, target) for profile in profiles for number in ranks]


def _looked_at(model: Model, mode: FakeTensorMode) -> _Look:
    """Examine one layer of each kind with fake tensors. Raises BadInput."""
    try:
        with naming(f"model '{model.name}': it cannot be estimated"):
            through = flow(model, real=False)
            taken, kinds = chosen(through.prints, through.inputs, through.output, 1)
            with mode, quiet(), FusedNorms():
                stages = stages_of(model, taken)
                batch = batch_of(model, mode)
                work: dict[int, PassOps] = {}
                for stage in stages:
                    with naming(f"model '{model.name}': {place(model, stage.first)} cannot be estimated"):
                        work |= passes([stage], through, batch)
                memory = dict(zip(taken, held(model, stages), strict=True))
    except FAKE_REFUSALS as error:
        why = "its layers read values, and an estimate has none: measure it"
        raise BadInput(f"model '{model.name}': {why} ({error})") from None
    return _Look(through, taken, kinds, work, memory, [p for stage in stages for p in stage.parameters()])


def _vocabulary(
    model: Model, through: Flow, mode: FakeTensorMode, source: str, layer: Callable[..., Layer], on: Device
) -> tuple[VocabularyCosts | None, dict[str, str]]:
    """The costs of a sharded vocabulary; else why they are unknown, as a fact. layer: builds a Layer from its number,
    operations, sizes and bytes of parameters."""

    def times(ops: PassOps) -> dict[str, float]:
        return {name: round(time_us(row, on), 3) for name, row in ops.items()}

    try:
        with mode, quiet(), FusedNorms():
            cut = cut_of(model, through, batch_of(model, mode))
            clock = Clock(
                lambda ranks, barriers: times(counted_shard(cut, ranks, barriers)),
                partial(held_by_shard, cut),
                lambda ranks: times(counted_table(cut, ranks)),
                lambda rest, sizes: layer(
                    rest.number, passes_of(rest.stage, rest.given, cut.labels), sizes, rest.parameter_bytes
                ),
            )
            return vocabulary_costs(source, cut, clock), {}
    except Exception as error:  # the model runs even if its vocabulary cannot be examined
        return None, {"no_vocabulary": str(error) if isinstance(error, BadInput) else one_line(error)}


def sequence_fact(layers: Iterable[PassOps]) -> dict[str, int]:
    """The number of tokens per sequence, as a fact, if all attention is causal and over all of them; else nothing."""
    lengths = {op.tokens for work in layers for op in work["F"] if op.kind == "attention"}
    return {SEQUENCE: lengths.pop()} if len(lengths) == 1 and 0 not in lengths else {}


def time_us(ops: Sequence[Op], on: Device) -> float:
    """µs of operations one after the other. Each takes the maximum of its compute and memory time, an attention their sum:
    it has few blocks, and the first and the last of them wait for memory."""
    return sum(_op_us(op, on) for op in ops)


def _op_us(op: Op, on: Device) -> float:
    memory = op.bytes / (on.bandwidth * (SCATTERED_SHARE if op.scattered else MEMORY_SHARE) * 1e3)
    peak, launches = on.half if op.half else on.single, KERNEL_US * (op.kernels - 1)
    if op.kind == "attention":
        return launches + max(KERNEL_US, memory + op.flops / (peak * ATTENTION_SHARE * 1e6))
    return launches + max(KERNEL_US, memory, op.flops / (peak * matrix_share(on) * 1e6))


def _gathered(forward: Sequence[Op]) -> int:
    """Bytes of the gradients of keys and values, accumulated in float32; 0 if these are float32 themselves."""
    halves = sum(op.keys for op in forward if op.half)
    return sum(op.keys for op in forward) + halves if halves else 0


def _layer(
    model: Model, i: int, work: PassOps, sizes: dict[str, Any], parameters: int, state: OptimizerState, on: Device
) -> Layer:
    times: dict[str, Any] = {kind: round(time_us(ops, on), 3) for kind, ops in work.items()}
    attention = {kind: round(time_us([op for op in work[kind] if op.tokens], on), 3) for kind in ("F", "B")}
    return Layer(
        name=model.layer_names[i],
        **times,
        X=times["F"],
        parameter_bytes=parameters,
        **sizes,
        U=round(state.traffic * (parameters - sizes["frozen_bytes"]) / (on.bandwidth * MEMORY_SHARE * 1e3), 3),
        attention_F=attention["F"],
        attention_B=attention["B"],
        kv_bytes=sum(op.keys for op in work["F"]),
        kv_gradient_bytes=_gathered(work["F"]),
    )


# All-gathers and reduce-scatters of hidden states (sequence parallelism): a block has two sharded regions, attention and
# MLP, each with one of both in F and in B; W gathers its inputs again. Other layers with parameters have one region.
BLOCK = {"F": 4, "B": 4, "W": 2, "BW": 6, "X": 4}
OTHER = {"F": 1, "B": 1, "W": 1, "BW": 2, "X": 1}


def over_tensor_ranks(profile: Profile, ranks: int, on: Device) -> Profile:
    """The profile of one device, converted for pipeline ranks of `ranks` tensor-parallel devices in one node each.

    Times, parameters, what layers keep and messages (each device sends its part) are divided; each pass also gathers and
    scatters hidden states, at the links' usual share of the peak, without overlap. A gathered input takes memory during the
    pass. If ranks fill a node, messages use its network. Raises BadInput for more devices than a node has, and if no layer
    has causal attention, which identifies blocks.
    """
    if ranks == 1:
        return profile
    node = on.node[0]
    if node % ranks:
        raise BadInput(f"--mesh: tp is {ranks}, and a node of {on.name} has {node} devices, which it must divide")
    if not any(layer.attention_F for layer in profile.layers):
        raise BadInput("--mesh: the estimate knows no causal attention, so not what tensor ranks send each other")
    if profile.facts[HEADS] % ranks:
        raise BadInput(f"--mesh: tp is {ranks}, and attention has {profile.facts[HEADS]} heads, which it must divide")
    link, host = Link(LATENCY_US, on.link * 1e3 * LINK_SHARE), profile.host
    if host is not None:  # a rank's devices copy their parts at once, each into its part of the node's memory
        host = replace(host, ranks=node // ranks, memory=None if host.memory is None else host.memory // ranks)
    inputs = [profile.layers[0], *profile.layers[:-1]]
    layers = [_part(layer, before.output_bytes, ranks, link) for layer, before in zip(profile.layers, inputs, strict=True)]
    return replace(
        profile,
        source=f"{profile.source}, {ranks} tensor ranks",
        layers=tuple(layers),
        link=profile.link if ranks < node else Link(LATENCY_US, on.network * 1e3 * LINK_SHARE),
        facts={**profile.facts, TENSOR_RANKS: ranks, SEQUENCE_PARALLEL: True},
        tied=tuple((ceil(size / ranks), group) for size, group in profile.tied),
        host=host,
    )


def _part(layer: Layer, input_bytes: int, ranks: int, link: Link) -> Layer:
    """A device's part of a layer whose input has `input_bytes` bytes."""
    hidden = max(input_bytes, layer.output_bytes)
    turn = link.time(hidden * (ranks - 1) / ranks)
    turns = BLOCK if layer.attention_F else OTHER if layer.parameter_bytes else {}
    times = {kind: getattr(layer, kind) / ranks + turn * turns.get(kind, 0) * bool(getattr(layer, kind)) for kind in OTHER}
    sizes = {
        name: ceil(getattr(layer, name) / ranks)
        for name in (*SIZES, "parameter_bytes", "frozen_bytes", "kv_bytes", "kv_gradient_bytes")
    }
    sizes["transient"] += hidden if turns else 0
    parts = {name: getattr(layer, name) / ranks for name in ("U", "attention_F", "attention_B")}
    return replace(layer, **{name: round(time, 3) for name, time in (times | parts).items()}, **sizes)
