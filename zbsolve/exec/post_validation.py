"""Optimizer steps that wait for no other rank: post-validation (arXiv 2401.10241, section 4). The global gradient norm and
the check for NaN and inf need all ranks. Here a rank steps by what it knows, and gets the rest in the next step."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Event, Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from ..util.errors import BadInput, LostRank, RunFailed
from .ahead import Ahead, Cut
from .base.torch_private import scale_all, tree_leaves, version_of
from .base.values import local
from .loop.gradients import clip_factor, norm_power
from .pipeline import Pipeline
from .transport.wires import TOTAL, Wires, reason
from .updates import as_one

NO_LIMIT = timedelta(days=365)  # for the thread, which ends with its rank; the rank itself has a timeout


class NormChain:
    """One sum over the ranks, such as the squared norm of all gradients; every rank makes one for each step. A thread
    receives the sum of the ranks before this one in `order`, adds this rank's number once that is known, and sends the
    result on. The last rank sends the total to all."""

    def __init__(self, wires: Wires, order: Sequence[int]) -> None:
        self._wires, self._order = wires, tuple(order)
        self._before: float | None = None
        self._mine = self._whole = 0.0
        self._given, self._done = Event(), Event()
        self._error = ""
        Thread(target=self._work, daemon=True).start()

    def give(self, number: float) -> float:
        """Set this rank's number. Never waits. Returns the sum up to this rank, or the number alone until that is known."""
        self._mine = number
        self._given.set()
        return number if self._before is None else self._before + number

    def wait(self, timeout: float) -> float:
        """Wait `timeout` seconds for the total, summed in `order`: the same bits on every rank. Raises LostRank."""
        error = self._error if self._done.wait(timeout) else f"nothing for {timeout:g} s"
        if error:
            place = self._order.index(self._wires.rank)
            peer = self._order[place - 1 if place and self._before is None else -1]
            raise LostRank(f"waiting for the gradients' norm from rank {peer}: {error}", peer)
        return self._whole

    def _work(self) -> None:
        order, place = self._order, self._order.index(self._wires.rank)
        try:
            before = self._receive(order[place - 1]) if place else 0.0
            self._before = before
            self._given.wait()
            total = before + self._mine
            if place + 1 < len(order):
                self._send(total, order[place + 1])
                total = self._receive(order[-1])
            else:
                for other in order[:-1]:
                    self._send(total, other)
            self._whole = total
        except Exception as error:
            self._error = reason(error)
        self._done.set()

    def _send(self, value: float, destination: int) -> None:
        self._wires.send(torch.tensor([value], dtype=torch.float64), destination, TOTAL).wait(NO_LIMIT)

    def _receive(self, source: int) -> float:
        cell = torch.zeros(1, dtype=torch.float64)
        self._wires.receive(cell, source, TOTAL).wait(NO_LIMIT)
        return float(cell)


@dataclass(frozen=True)
class Validated:
    """The result of one step, once all ranks' gradients were known. norm: their global 2-norm, every parameter counted once.
    clipped, skipped: was the step? amended: this rank had stepped, and undid that."""

    norm: float
    clipped: bool
    skipped: bool
    amended: bool


class PostValidated(Optimizer):
    """An optimizer of a pipeline's parameters whose step does not wait for the other ranks (arXiv 2401.10241, section 4).

    pipeline: every rank of it makes one, right after the pipeline.
    optimizer: a torch optimizer whose `step` needs no closure, or a list of them (Muon beside AdamW); None on a rank that
        trains nothing. This object has its groups, state and defaults, so learning rate schedules and gradient scalers take
        this one. What they change after a step counts from the next step on, even if the step is repeated.
    max_norm: gradients of a larger global norm are scaled to it, as `torch.nn.utils.clip_grad_norm_` does.
    skip_nonfinite: skip a step where any gradient is NaN or inf.

    `step` decides by the norm of the ranks that end the step before this one, by the schedule's times. If that is too large
    already, it does nothing yet. Else it steps, and keeps a copy of the state before. The next `Pipeline.step` runs its
    first forwards, up to this rank's first backward, and then waits for the norm of all ranks. If the step should have been
    another one, every rank undoes it, makes the right one, and repeats the forwards. So all steps have the bits of a
    synchronous clip and step, and without clipping nothing is repeated.

    Until then parameters are provisional: call `finish` before reading them (`state_dict` of pipeline and optimizer do).
    Gradients are kept until then, too; clear them by `zero_grad` here. Ranks that hold the same parameter wait for the sum
    of its gradients, and ranks with the same place in the pipelines of a mesh for each other's norm. `last` is the result of
    the last validated step, `copied_bytes` the size of its copies. Raises BadInput.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        optimizer: Optimizer | Sequence[Optimizer] | None,
        *,
        max_norm: float | None = None,
        skip_nonfinite: bool = True,
    ) -> None:
        if max_norm is None and not skip_nonfinite:
            raise BadInput("PostValidated: neither max_norm nor skip_nonfinite: there is nothing to validate")
        if max_norm is not None and not max_norm > 0:
            raise BadInput(f"PostValidated: max_norm {max_norm} must be positive")
        if pipeline.view.part is not None:
            raise BadInput("PostValidated: it looks at all ranks' programs, and of a file of rounds each rank has its own")
        if not optimizer:
            if any(p.requires_grad for p in pipeline.parameters()):
                raise BadInput(f"PostValidated: rank {pipeline.rank} trains parameters, so it needs an optimizer, not None")
            optimizer = SGD([torch.empty(0)], lr=0.0)  # an empty tensor, as torch refuses an empty list
        optimizer = as_one(optimizer, "PostValidated")
        self.optimizer = optimizer
        self.max_norm, self.skip_nonfinite = max_norm, skip_nonfinite
        self.last: Validated | None = None
        self.copied_bytes = 0
        self.defaults = optimizer.defaults
        self._share()
        optimizer.register_load_state_dict_post_hook(self._share)
        self.__setstate__({})  # makes the hooks of an optimizer; __init__ would replace groups and state
        self._pipeline = pipeline
        timeline, homes = pipeline.schedule.timeline(), pipeline.schedule.problem.passes.rank
        ends = [int(timeline.end[homes == rank].max(initial=0)) for rank in range(pipeline.wires.size)]
        self._order = sorted(range(len(ends)), key=ends.__getitem__)  # in which ranks end a step, as predicted
        self._chain: NormChain | None = None
        self._snapshot: OptimizerSnapshot | None = None
        self._gradients: list[tuple[Tensor, int]] = []
        self._stepped = self._again = False
        self._clear: bool | None = None
        pipeline.run_ahead(Ahead(Cut.of(pipeline.programs, pipeline.rank), self, pipeline.module))

    def _share(self, _: Optimizer | None = None) -> None:
        """Use the inner optimizer's groups and state; loading replaces them."""
        self.param_groups, self.state = self.optimizer.param_groups, self.optimizer.state

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Make a provisional step, which waits for no rank, except as the class says. Raises RunFailed, BadInput."""
        if closure is not None:
            raise BadInput("PostValidated: a step with a closure would run the model by itself")
        if self._snapshot is not None:
            self.finish()
        self._pipeline.wait_gradients()
        power = norm_power(self._pipeline, 2)
        self.begin()
        assert self._chain is not None
        known = self._chain.give(power)
        self._gradients = [(g, version_of(g)) for g in self._present()]
        self._snapshot, self.copied_bytes = OptimizerSnapshot(self.optimizer), 0
        self._stepped = self._stands(known)
        if self._stepped:
            self.copied_bytes = self._snapshot.keep()
            self._snapshot.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients once the step is validated."""
        if self._snapshot is None:
            self._pipeline.module.zero_grad(set_to_none)
        else:
            self._clear = set_to_none

    def finish(self) -> None:
        """Wait for all ranks' gradients, and correct the last step if needed. Call it at the end of training, and before
        parameters are read or evaluated. Every rank must have called `step`. Raises RunFailed."""
        if self._snapshot is not None:
            self._validate(self._snapshot)
            with self._pipeline.peers.telling("the optimizer's step"):
                self._pipeline.mailbox.flush()

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, validated. Raises RunFailed."""
        self.finish()
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the optimizer's state. Raises RunFailed."""
        self.finish()
        self.optimizer.load_state_dict(state)

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Add a group to the optimizer. Raises RunFailed."""
        self.finish()
        self.optimizer.add_param_group(group)

    def begin(self) -> bool:
        """A step of the pipeline begins. Must the optimizer's last update be validated in it, or is it known to be wrong?"""
        if self._snapshot is None and self._chain is None:
            self._chain = NormChain(self._pipeline.wires, self._order)
        return self._snapshot is not None or self._again

    def stands(self) -> bool:
        """Validate, inside the next step: did the first forwards run with the right parameters, on every rank?"""
        if self._snapshot is not None:
            self._validate(self._snapshot)
            self.begin()
        again, self._again = self._again, False
        return not again

    def _validate(self, snapshot: OptimizerSnapshot) -> None:
        assert self._chain is not None
        now, peers = self._present(), self._pipeline.peers
        with peers.telling("the optimizer's step"):
            whole = self._chain.wait(peers.timeout.total_seconds())
            if [(id(g), version_of(g)) for g in now] != [(id(g), version) for g, version in self._gradients]:
                raise RunFailed("gradients were changed before they were validated: clear them by PostValidated.zero_grad")
        stands, skip = self._stands(whole), self.skip_nonfinite and not math.isfinite(whole)
        if not stands:
            if not skip:
                scale_all(now, self._scale(whole))
            snapshot.amend(again=not skip)
            self._again = True
        clipped = not stands and not skip
        self.last = Validated(math.sqrt(whole), clipped, skip, self._stepped and not stands)
        self._snapshot, self._chain, self._gradients = None, None, []
        if self._clear is not None:
            self._pipeline.module.zero_grad(self._clear)
            self._clear = None

    def _stands(self, norm2: float) -> bool:
        """Is a plain step right with this squared norm? If it is wrong for some of the ranks, it is for all."""
        if self.skip_nonfinite and not math.isfinite(norm2):
            return False
        return self.max_norm is None or self._scale(norm2) == 1

    def _scale(self, norm2: float) -> float:
        """The factor that clips gradients of this squared norm."""
        assert self.max_norm is not None
        return clip_factor(math.sqrt(norm2), self.max_norm)

    def _present(self) -> list[Tensor]:
        return [local(p.grad) for p in self._pipeline.parameters() if p.grad is not None]


class OptimizerSnapshot:
    """An optimizer as it was before a step: its hyperparameters and, after `keep`, its parameters and state."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._then = self._left = _hyperparameters(optimizer)
        self._parameters: dict[nn.Parameter, Tensor] = {}
        self._keys: list[Any] = []
        self._state: list[Any] | None = None

    def keep(self) -> int:
        """Copy parameters and state. Returns the bytes: with Adam three times the parameters, with plain SGD once."""
        optimizer = self._optimizer
        self._parameters = {p: p.detach().clone() for group in optimizer.param_groups for p in group["params"]}
        self._keys = list(optimizer.state)
        # In the copy, the state refers to the same parameters, and tensors that shared memory still share it.
        same = {id(p): p for p in self._parameters}
        self._state = copy.deepcopy([optimizer.state[key] for key in self._keys], same)
        tensors = [leaf for leaf in tree_leaves(self._state) if isinstance(leaf, Tensor)]
        return sum(t.nbytes for t in (*self._parameters.values(), *tensors))

    def step(self) -> None:
        """Make the optimizer's step. Later changes of hyperparameters are the user's."""
        self._optimizer.step()
        self._left = _hyperparameters(self._optimizer)

    @torch.no_grad()
    def amend(self, again: bool) -> None:
        """Undo the step, if it was made. again: step once more, with the hyperparameters of then; changes since (by a
        learning rate schedule) are restored afterwards. Call it once: the copies become the state."""
        optimizer = self._optimizer
        if self._state is not None:
            for parameter, values in self._parameters.items():
                parameter.copy_(values)
            optimizer.state.clear()
            optimizer.state.update(zip(self._keys, self._state, strict=True))
        now, left = _hyperparameters(optimizer), self._left
        for group, then in zip(optimizer.param_groups, self._then, strict=True):
            group.update(then)
        if again:
            optimizer.step()
        for group, present, after in zip(optimizer.param_groups, now, left, strict=True):
            group.update({name: value for name, value in present.items() if not _equal(value, after.get(name))})


def _hyperparameters(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [{name: copy.deepcopy(value) for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return torch.equal(a, b)
    return bool(a == b)
