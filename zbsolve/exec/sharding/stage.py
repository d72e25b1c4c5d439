"""A stage whose parameters are sharded: what can be done with them.

FSDP's own hooks stay in its modules, for they cast under mixed precision; but they neither gather nor reduce. A gather is
open until it is released, and as long as one is open the parameters are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, nn

from ..base.dtensors import local
from ..base.part import Around
from ..base.torch_private import fsdp_gathers
from ..transport.failure import LostRank
from ..transport.wires import joined, reason
from .parameters import Parameter
from .reduction import Reduction, stamped


class ShardedStage(Around):
    """The sharded parameters of stage `number`. modules: what FSDP wrapped of it. timeout: to wait for other ranks.

    by_passes: the kinds of work ("gather", "reduce") that passes of the schedule do; whatever they leave out is done here:
    parameters are gathered when a pass first needs them, and then those of `following` too, the stage that the rank uses
    next; what was gathered is released, and gradients are reduced, after the last pass that adds to them.
    """

    def __init__(
        self,
        number: int,
        modules: Sequence[Any],
        parameters: Sequence[Parameter],
        timeout: timedelta,
        by_passes: frozenset[str] = frozenset(),
    ) -> None:
        self.number, self.timeout, self.by_passes = number, timeout, by_passes
        self.parameters = tuple(parameters)
        self.following: ShardedStage | None = None
        self.reduction: Reduction | None = None
        self.beside: Sequence[ShardedStage] = ()  # all of the rank
        self.times: dict[str, list[int]] = {}  # pass of this step → when the parts of its work were done, monotonic ns
        self._modules = tuple(modules)
        self._open, self._handles = 0, list[tuple[Any, Sequence[Any]]]()
        for module in self._modules:
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)

    def gather(self, name: str = "") -> None:
        """Open a gather, of pass `name`. It never waits."""
        self._open += 1
        if self._open > 1:
            return
        times = self.times.setdefault(name, [])
        with self._telling():
            for module in self._modules:
                handle = module.unshard(async_op=True)
                self._handles.append((handle, [stamped(work, times) for work in fsdp_gathers(module)]))

    def weights(self) -> None:
        """Until the parameters are there; gathers them where nobody did. Raises LostRank."""
        for one in self.beside:
            one.tidy()
        if not self._open:
            self.gather()
            self._arrive()
            if self.following is not None and not self.following._open:
                self.following.gather()
        elif self._handles:
            self._arrive()

    def _arrive(self) -> None:
        with self._telling():
            for handle, works in self._handles:
                for work in works:
                    joined(work, self.timeout, local(self.parameters[0].sharded.detach()).device)
                handle.wait()
        self._handles.clear()

    def tidy(self) -> None:
        """Give back the memory of gradients that are reduced already. It never waits. Raises LostRank."""
        if self.reduction is not None:
            with self._telling("gradients"):
                self.reduction.tidy(self.timeout)

    def added(self) -> None:
        """After a pass that adds to gradients."""
        for one in self.parameters:
            one.settle()

    def release(self) -> None:
        """A gather ends. With the last one the memory of the gathered parameters goes."""
        self._open -= 1
        if self._open == 0:
            self._arrive()
            for module in self._modules:
                module.reshard()

    def close(self) -> None:
        """Release what is open."""
        if self._open:
            self._open = 1
            self.release()

    def reduce(self, name: str = "") -> None:
        """Begin to reduce the gradients of all passes so far; the pass is `name`. It never waits."""
        with self._telling("gradients"):
            self.reduction = Reduction(self.parameters, self.times.setdefault(name, []))

    def ended(self, name: str) -> int:
        """When the work of pass `name` was done, monotonic ns; 0 where it had nothing to do. Waits for it. Raises
        LostRank."""
        self._arrive()
        self.reduced()
        return max(self.times.get(name, ()), default=0)

    def done(self) -> None:
        """The last pass that adds to gradients has run: do what no pass of the schedule does."""
        if "reduce" not in self.by_passes:
            self.reduce()
        if "gather" not in self.by_passes:
            self.close()

    def reduced(self) -> None:
        """Until the reduced gradients are in `.grad`. Raises LostRank."""
        if self.reduction is not None:
            with self._telling("gradients"):
                self.reduction.end(self.timeout)
            self.reduction = None

    def tensors(self) -> list[Tensor]:
        """What is there beside shards: gathered parameters, and gradients that are not reduced yet."""
        return [tensor for one in self.parameters for tensor in one.tensors()]

    @property
    def held_bytes(self) -> int:
        """Bytes of the gathered parameters, and of gradients that are not reduced yet, where passes of the schedule say when
        they go."""
        found = 0
        if "gather" in self.by_passes and self._open:
            found += sum(one.gathered_bytes for one in self.parameters)
        if "reduce" in self.by_passes:
            found += sum(one.gradient_bytes for one in self.parameters)
        return found

    def _telling(self, what: str = "parameters") -> _Telling:
        return _Telling(f"{what} of stage {self.number}")


class _Telling:
    """What gloo says of a lost rank, in a line that says of what: raises LostRank."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
            raise LostRank(f"waiting for the {self._what}: {reason(error)}") from error


def trained(parameters: Sequence[Parameter]) -> list[nn.Parameter]:
    """The sharded parameters that are trained, each once."""
    return list({id(one.sharded): one.sharded for one in parameters if one.sharded.requires_grad}.values())
