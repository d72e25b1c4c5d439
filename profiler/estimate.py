"""An estimated profile: a roofline over the operations that the executor's passes dispatch, for a named device.

Nothing is run and nothing is allocated: layers of any size, under fake tensors. The profile's `source` says
"estimated: …", and so does every problem, schedule and picture made from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from zbsolve.errors import BadInput
from zbsolve.exec.stage import Stage
from zbsolve.profile import Layer, Link, Profile

from .alike import chosen
from .devices import ASSUMED, ATTENTION_SHARE, KERNEL_US, LATENCY_US, LINK_SHARE, MATRIX_SHARE, MEMORY_SHARE, Device, device
from .flow import DATA_DEPENDENT, Flow, fake_mode, flow, load_fake
from .memory import Held, held
from .models import Model
from .rounds import stages_of
from .states import State, state_of
from .work import Op, Work, total

Passes = dict[str, list[Op]]


def estimate(spec: str, on: str, *, seed: int = 0, states: str | None = None) -> Profile:
    """The model called `spec` on the device called `on` (see `profiler.devices`).

    states: how parameters are kept and updated (see `profiler.states`); None: Adam, mixed where parameters have 16 bits.
    Raises BadInput, also for layers that need numbers to run.
    """
    target = device(on)
    mode = fake_mode()
    model = load_fake(spec, seed, mode)
    through = flow(model)
    taken, kinds = chosen(through.prints, through.inputs, through.output, 1)
    try:
        with mode:
            stages = stages_of(model, taken)
            batch = mode.from_tensor(model.batch(0, 0)[0]), mode.from_tensor(model.batch(0, 0)[1])
            work = passes(stages, through, batch, mode)
            memory = dict(zip(taken, held(model, stages), strict=True))
    except DATA_DEPENDENT as error:
        raise BadInput(f"model '{spec}': its layers read numbers, so it cannot be estimated: {error}") from None
    state = state_of(states, [p for stage in stages for p in stage.parameters()])
    first = [next(j for j in taken if kinds[j] == kind) for kind in kinds]
    layers = tuple(
        _layer(model, i, work[first[i]], memory[first[i]], through.parameter_bytes[i], state, target)
        for i in range(len(model.layers))
    )
    return Profile(
        f"estimated: {target.name} roofline",
        spec,
        layers,
        Link(LATENCY_US, target.link * 1e3 * LINK_SHARE),
        state.factor,
        int(target.memory * 1e9),
        {
            "device": target.name,
            "device_source": target.source,
            "assumed": ASSUMED,
            "states": state.name,
            "torch": torch.__version__,
            "flops": {model.layer_names[i]: {kind: total(ops) for kind, ops in work[i].items()} for i in taken},
            "kernels": {model.layer_names[i]: {kind: len(ops) for kind, ops in work[i].items()} for i in taken},
            "measured_layers": [],
        },
        {},
    )


def passes(stages: Sequence[Stage], through: Flow, batch: tuple[Tensor, Tensor], mode: FakeTensorMode) -> dict[int, Passes]:
    """Layer → kind → the operations of that pass, in order, with gradients there to be added to."""
    return {stage.first: _passes(stage, _input(stage.first, through, batch), batch[1]) for stage in stages}


def _input(i: int, through: Flow, batch: tuple[Tensor, Tensor]) -> Tensor:
    if i == 0:
        return batch[0]
    return torch.empty(through.inputs[i].shape, dtype=through.inputs[i].dtype)


def _passes(stage: Stage, x: Tensor, target: Tensor) -> Passes:
    _turn(stage, x, target, split=True)  # makes the gradients that the others add to
    return _turn(stage, x, target, split=False) | _turn(stage, x, target, split=True)


def _turn(stage: Stage, x: Tensor, target: Tensor, *, split: bool) -> Passes:
    """Forward and backward of one microbatch."""
    with Work() as f:
        y = stage.forward(0, x, target, split=split)
    gradient = None if stage.loss is not None else torch.ones_like(y)
    with Work() as b:
        stage.backward(0, gradient)
    if not split:
        return {"F": f.ops, "BW": b.ops}
    with Work() as w:
        stage.weights(0)
    return {"F": f.ops, "B": b.ops, "W": w.ops}


def time_us(ops: Sequence[Op], on: Device) -> float:
    """µs of operations one after the other: each as slow as the slower of its arithmetic and its memory traffic."""
    return sum(_op_us(op, on) for op in ops)


def _op_us(op: Op, on: Device) -> float:
    peak = on.half if op.half else on.single
    share = ATTENTION_SHARE if op.kind == "attention" else MATRIX_SHARE
    return max(KERNEL_US, op.flops / (peak * share * 1e6), op.bytes / (on.bandwidth * MEMORY_SHARE * 1e3))


def _layer(model: Model, i: int, work: Passes, size: Held, parameters: int, state: State, on: Device) -> Layer:
    times = {kind: round(time_us(ops, on), 3) for kind, ops in work.items()}
    return Layer(
        name=model.layer_names[i],
        F=times["F"],
        B=times["B"],
        W=times["W"],
        BW=times["BW"],
        parameter_bytes=parameters,
        **size.costs(),
        X=times["F"],
        U=round(state.traffic * parameters / (on.bandwidth * MEMORY_SHARE * 1e3), 3),
    )
