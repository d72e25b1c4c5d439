"""An estimated profile: a roofline over the operations that the executor's passes dispatch, for a named device.

Nothing is run and nothing is allocated: layers of any size, under fake tensors. The profile's `source` says
"estimated: …", and so does every problem, schedule and picture made from it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from zbsolve.errors import BadInput
from zbsolve.exec.failure import one_line
from zbsolve.layer import Layer
from zbsolve.profile import Link, Profile

from .alike import chosen
from .devices import ASSUMED, ATTENTION_SHARE, KERNEL_US, LATENCY_US, LINK_SHARE, MATRIX_SHARE, MEMORY_SHARE, Device, device
from .flow import DATA_DEPENDENT, fake_mode, flow, load_fake, naming, place, quiet
from .memory import Held, held
from .models import Model
from .operations import Passes, passes
from .rounds import stages_of
from .states import State, state_of
from .work import Op, total


def estimate(spec: str, on: str, *, seed: int = 0, states: str | None = None) -> Profile:
    """The model called `spec` on the device called `on` (see `profiler.devices`).

    states: how parameters are kept and updated (see `profiler.states`); None: Adam, mixed where parameters have 16 bits.
    Raises BadInput, also for layers that need numbers to run.
    """
    target = device(on)
    mode = fake_mode()
    model = load_fake(spec, seed, mode)
    try:
        through = flow(model, real=False)
        taken, kinds = chosen(through.prints, through.inputs, through.output, 1)
        with mode, quiet():
            stages = stages_of(model, taken)
            batch = mode.from_tensor(model.batch(0, 0)[0]), mode.from_tensor(model.batch(0, 0)[1])
            work: dict[int, Passes] = {}
            for stage in stages:
                with naming(f"model '{spec}': {place(model, stage.first)} cannot be estimated"):
                    work |= passes([stage], through, batch)
            memory = dict(zip(taken, held(model, stages), strict=True))
    except DATA_DEPENDENT as error:
        raise BadInput(f"model '{spec}': its layers read numbers, so it cannot be estimated: {error}") from None
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"model '{spec}': it cannot be estimated: {one_line(error)}") from error
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
        tied=through.tied,
    )


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
