"""What goes from layer to layer, found without computing: shapes, types, and whether gradients come back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zbsolve.exec.torch_private import FAKE_REFUSALS, FakeTensorMode, fake_log
from zbsolve.exec.transport.failure import one_line
from zbsolve.layer import Tied
from zbsolve.models.by_name import load
from zbsolve.models.model import Model
from zbsolve.util.errors import BadInput

from .alike import fingerprint


@dataclass(frozen=True)
class Boundary:
    """A tensor between layers."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Its size: the message between two ranks."""
        count = 1
        for size in self.shape:
            count *= size
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass(frozen=True)
class Flow:
    """What flows through a model. inputs: what goes into each layer. output: what leaves the last one. prints: a fingerprint
    of each layer. parameter_bytes: of each layer, trained or not. tied: bytes of each parameter that several layers hold,
    and the numbers of those layers."""

    inputs: tuple[Boundary, ...]
    output: Boundary
    prints: tuple[Hashable, ...]
    parameter_bytes: tuple[int, ...]
    tied: Tied = ()


def fake_mode() -> FakeTensorMode:
    """Under it, tensors have shapes and types but no numbers: a model of any size, on any machine."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def load_fake(spec: str, seed: int, mode: FakeTensorMode) -> Model:
    """The model called `spec`, to be built under `mode`. A user's own function runs under it too, so that its layers take no
    memory. Raises BadInput."""
    if ":" in spec and not spec.startswith("hf:"):
        with mode:
            return load(spec, seed)
    return load(spec, seed)


def flow(model: Model, real: bool = True) -> Flow:
    """What flows through `model`, in fake tensors; with real ones where that fails and `real` allows them. Some layers read
    numbers (Python branches on data), and some kernels do what torch's rules for fake tensors do not know.

    Raises BadInput naming the layer where its forward or backward fails, its output does not fit the next one, no gradient
    comes back, or nothing is trained; without `real` also one of FAKE_REFUSALS.
    """
    try:
        mode = fake_mode()
        with mode, quiet():
            return _flow(model, mode)
    except (BadInput, *FAKE_REFUSALS):
        if not real:
            raise
    return _flow(model, None)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own traceback of what fails out of the log: the error that is raised says it in a line."""
    logger = fake_log()
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def _flow(model: Model, mode: FakeTensorMode | None) -> Flow:
    """Layer by layer, so that real tensors need no more memory than the largest layer."""
    x, target = model.batch(0, 0)
    if mode is not None:
        x, target = mode.from_tensor(x), mode.from_tensor(target)
    inputs: list[Boundary] = []
    prints, sizes, tied = [], [], []
    trained, count = False, len(model.layers)
    for i in range(count):
        layer = model.build([i])[0]
        prints.append(fingerprint(layer))
        sizes.append(_bytes(layer))
        for group in model.tied:
            holders = tuple(dict.fromkeys(place[0] for place in group))
            if i == holders[0] and len(holders) > 1:
                tied.append((layer.get_parameter(group[0][1]).nbytes, holders))
        inputs.append(Boundary(tuple(x.shape), x.dtype))
        y = _forward(model, i, layer, x.detach(), trained)
        trained = trained or any(p.requires_grad for p in layer.parameters())
        x = y.detach()
    if not trained:
        raise BadInput(f"model '{model.name}': none of its {count} layers has a parameter that is trained")
    output = Boundary(tuple(x.shape), x.dtype)
    _check_loss(model, x, target)
    return Flow(tuple(inputs), output, tuple(prints), tuple(sizes), tuple(tied))


def place(model: Model, i: int) -> str:
    """`layer 3 (block2)`, for messages."""
    return f"layer {i} ({model.layer_names[i]})"


def _forward(model: Model, i: int, layer: nn.Module, x: Tensor, needed: bool) -> Tensor:
    """The layer's output. Where gradients are `needed` in front of the layer, they must come back through it."""
    head = f"model '{model.name}': {place(model, i)}"
    came = f"the {_words(x)} that layer {i - 1} gives" if i else f"the sample, {_words(x)}"
    if needed and x.is_floating_point():
        x.requires_grad_()
    with naming(f"{head} fails on {came}"):
        y: Any = layer(x)
    if not isinstance(y, Tensor) or not y.is_floating_point():
        raise BadInput(f"{head} gives {_words(y)}, not one floating-point tensor")
    back: Sequence[Tensor | None] = [None]
    wanted = [t for t in (x, *layer.parameters()) if t.requires_grad]
    if y.requires_grad and wanted:
        with naming(f"{head}: its backward fails"):
            back = torch.autograd.grad(y.sum(), wanted, allow_unused=True)
    if needed and (back[0] is None or not x.requires_grad):
        raise BadInput(f"{head} lets no gradient back to the layers before it")
    return y


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn what fails inside into BadInput, in one line that begins with `what`; FAKE_REFUSALS stay what they are."""
    try:
        yield
    except (BadInput, *FAKE_REFUSALS):
        raise
    except Exception as error:
        raise BadInput(f"{what}: {one_line(error)}") from error


def _check_loss(model: Model, x: Tensor, target: Tensor) -> None:
    with naming(f"model '{model.name}': its loss fails on {_words(x)}"):
        loss: Any = model.loss(x.requires_grad_(), target)
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise BadInput(f"model '{model.name}': its loss gives {_words(loss)}, not a tensor of one number")
    if not loss.requires_grad:
        raise BadInput(f"model '{model.name}': its loss lets no gradient back")


def _bytes(layer: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in layer.parameters())


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return str(Boundary(tuple(value.shape), value.dtype))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
