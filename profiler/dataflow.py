"""What flows between layers, found without computing: structure, shapes, types, and which tensors need a gradient; and which
layers are equal, so that it suffices to measure one of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from zbsolve.exec.backward.layer_split import entered
from zbsolve.exec.backward.replay import as_written
from zbsolve.exec.base.torch_private import (
    FAKE_REFUSALS,
    FakeTensor,
    FakeTensorMode,
    fake_log,
    storage_key,
    tree_map,
    without_modes,
)
from zbsolve.exec.base.values import CONSTANTS, bytes_of, checked, constant, detached, local, tensors_of, trained
from zbsolve.exec.graphs.sharing import Keys, tensor_key
from zbsolve.exec.transport.format import Format, TensorFormat
from zbsolve.features.lengths import MICROBATCH, SEQUENCES
from zbsolve.models.by_name import load
from zbsolve.models.losses import auxiliary_losses, without_metrics
from zbsolve.models.model import Model
from zbsolve.models.sides import Carried, called, names_of, row_of
from zbsolve.partition.layer import INPUTS, TARGETS, Given, Layer, Tied, side_values
from zbsolve.planner.profiled_model import TENSOR_RANKS, TOKENS
from zbsolve.util.errors import BadInput, one_line, prefixed

# Hugging Face numbers its layers, and training computes nothing from that; and a forward that was put in a layer's place.
NOT_SETTINGS = ("layer_idx", "layer_id", "forward")


def fingerprint(layer: nn.Module) -> Hashable:
    """Equal for layers of the same classes, shapes, types and settings, whatever values their tensors hold. Anything other
    than plain data and tensors is compared by identity. So equal layers may have unequal fingerprints, but never the other
    way round."""
    return Keys(NOT_SETTINGS, _identity).of(layer)


def _identity(value: Any) -> Hashable:
    if isinstance(value, Tensor):
        return tensor_key(value)
    return (type(value), value if isinstance(value, Hashable) else _Itself(value))


class _Itself:
    """Equal only to itself. It keeps the object alive, since its id could otherwise be reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def chosen(
    prints: Sequence[Hashable], inputs: Sequence[Hashable], output: Hashable, copies: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Which layers to measure, and for every layer the first one that equals it.

    prints: a fingerprint each. inputs: the input of each (shape, type); output: of the last. At most `copies` of each kind
    are taken. The first layer (it has no input gradient) and the last (it has the loss) equal no other. The layers taken
    must form a chain: where the output of one does not match the input of the next, all layers are taken.
    """
    first: dict[Hashable, int] = {}
    count: dict[int, int] = {}
    kinds, taken = [], []
    outputs = [*inputs[1:], output]
    ends = [(i == 0, i == len(prints) - 1) for i in range(len(prints))]
    for i, key in enumerate(zip(prints, inputs, outputs, ends, strict=True)):
        kind = first.setdefault(key, i)
        kinds.append(kind)
        count[kind] = count.get(kind, 0) + 1
        if count[kind] <= copies:
            taken.append(i)
    if any(outputs[a] != inputs[b] for a, b in zip(taken, taken[1:], strict=False)):
        taken = list(range(len(prints)))
    return tuple(taken), tuple(kinds)


@dataclass(frozen=True)
class Flow:
    """What flows through a model. inputs: each layer's input, as message formats. output: of the last layer. prints: a
    fingerprint per layer. parameter_bytes: of each layer, trained or not. tied: bytes of each parameter that several layers
    share, and the numbers of those layers. untrained: number of leading layers that train nothing, so that they need no
    gradient. gives, takes: the side inputs of each layer; those that it takes map name → format. begins: whether each layer
    starts from the batch."""

    inputs: tuple[Format, ...]
    output: Format
    prints: tuple[Hashable, ...]
    parameter_bytes: tuple[int, ...]
    tied: Tied = ()
    untrained: int = 0
    gives: tuple[tuple[Given, ...], ...] = ()
    takes: tuple[dict[str, Format], ...] = ()
    begins: tuple[bool, ...] = ()

    @property
    def sides(self) -> bool:
        """Whether there are side inputs, or layers that start from the batch."""
        return any((*self.gives, *self.takes))

    def example(self, i: int, make: Callable[..., Tensor], device: torch.device | None = None) -> Any:
        """A value for layer i's input (see `example`)."""
        row = example(self.inputs[i], make, device)
        sides = {name: example(form, make, device) for name, form in self.takes[i].items()}
        return Carried(row, sides) if sides else row

    def with_sides(self, layers: Sequence[Layer]) -> tuple[Layer, ...]:
        """The layers' costs, extended by the side inputs that they give and take."""
        costs = []
        for layer, gives, takes, begins in zip(layers, self.gives, self.takes, self.begins, strict=True):
            names = tuple(name for name in takes if not begins or name != INPUTS)
            costs.append(replace(layer, gives=gives, takes=names, begins=begins))
        return tuple(costs)


def microbatch_facts(through: Flow, tensor_ranks: int) -> dict[str, Any]:
    """A profile's facts on its microbatch, used for plans with other sizes: sequences (first dimension of the first input),
    tokens per sequence (second dimension, if the input is integer), and devices that share each layer."""
    tensors = through.inputs[0].tensors
    shape = tuple(tensors[0].shape) if tensors else ()
    tokens = shape[1] if len(shape) == 2 and not tensors[0].dtype.is_floating_point else 0
    sizes = {SEQUENCES: shape[0], TOKENS: tokens} if shape else {}
    return {MICROBATCH: sizes, TENSOR_RANKS: tensor_ranks}


def fake_mode() -> FakeTensorMode:
    """In this mode tensors have shapes and types but no values: for a model of any size, on any machine."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def convertible() -> Iterator[None]:
    """Inside, modules with fake tensors may be converted (`to`, `double`). torch swaps their parameters then. Where it
    refuses that, because memos of fake tensors refer to a tensor weakly, the tensor's data are replaced."""
    swap = torch.utils.swap_tensors

    def replaced(parameter: Tensor, other: Tensor) -> None:
        try:
            swap(parameter, other)  # type: ignore[no-untyped-call]
        except RuntimeError:
            parameter.data = other.data

    torch.utils.swap_tensors = replaced
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap


def load_fake(spec: str, seed: int, mode: FakeTensorMode) -> Model:
    """The model called `spec`, to be built under `mode`. A user's own function also runs under it, so that its layers take
    no memory. Raises BadInput."""
    if ":" in spec and not spec.startswith("hf:"):
        try:
            with mode, convertible():
                return load(spec, seed)
        except BadInput as error:
            if error.__cause__ is None:  # it is not the user's function that failed
                raise
            why = f"an estimate builds it without real tensors, and that fails: measure it ({one_line(error.__cause__)})"
            raise BadInput(f"model '{spec}': {why}") from error
    return load(spec, seed)


def flow(model: Model, real: bool = True) -> Flow:
    """What flows through `model`, found with fake tensors; with real ones if that fails and `real` allows it. Some layers
    read values (Python branches on data), and torch has no fake-tensor rule for some kernels.

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
    """For fake tensors: torch.compile is disabled inside the block, since compiled kernels would read memory that does not
    exist. And torch's own traceback of a failure is kept out of the log: the raised error says it in one line."""
    logger = fake_log()
    before = logger.disabled
    logger.disabled = True
    try:
        with as_written():
            yield
    finally:
        logger.disabled = before


def _flow(model: Model, mode: FakeTensorMode | None) -> Flow:
    """Layer by layer, so that real tensors need only the largest layer's memory; of equal fake layers one runs."""
    x, target = batch_of(model, mode)
    x, inputs, known = constant(x), list[Format](), dict[Hashable, Any]()
    prints, sizes, tied, untrained, count = [], [], [], 0, len(model.layers)
    gives, takes, begun = list[tuple[Given, ...]](), list[dict[str, Format]](), list[bool]()
    sides: dict[str, Any] = {INPUTS: x, TARGETS: target}
    for i in range(count):
        layer = model.build([i])[0]
        prints.append(fingerprint(layer))
        sizes.append(sum(p.numel() * p.element_size() for p in layer.parameters()))
        for group in model.tied:
            holders = tuple(dict.fromkeys(place[0] for place in group))
            if i == holders[0] and len(holders) > 1:
                tied.append((layer.get_parameter(group[0][1]).nbytes, holders))
        given, taken, begins = names_of(layer, i)
        begun.append(begins and i > 0)
        if begun[i]:
            x, taken = None, (INPUTS, *taken)
        if any(name not in sides for name in taken):
            _check_sides(model)
        inputs.append(Format.of(x))
        takes.append({name: Format.of(sides[name]) for name in taken})
        key = prints[i], inputs[i], tuple(takes[i].items())
        x = Carried(x, {name: sides[name] for name in taken}) if taken else x
        y, held = known[key] if mode is not None and key in known else _forward(model, i, layer, x)
        known |= {key: (y, held)} if mode is not None else {}
        sides |= {name: y.sides[name] for name in given}
        gives.append(tuple(Given(name, bytes_of(y.sides[name]), bool(trained(y.sides[name])), held[name]) for name in given))
        x = row_of(y)
        untrained += untrained == i and not any(p.requires_grad for p in layer.parameters())
    if untrained == count:
        raise BadInput(f"model '{model.name}': none of its {count} layers has a parameter that is trained")
    output = Format.of(x)
    if len(sides) > len((INPUTS, TARGETS)) or any(begun):
        _check_sides(model)
    _check_loss(model, x, target)
    ends = tuple(gives), tuple(takes), tuple(begun)
    return Flow(tuple(inputs), output, tuple(prints), tuple(sizes), tuple(tied), untrained, *ends)


def _check_sides(model: Model) -> None:
    """Raise BadInput where the side inputs that layers give and take do not match."""
    with prefixed(f"model '{model.name}'"):
        side_values([names_of(model.build([i])[0], i) for i in range(len(model.layers))])


def batch_of(model: Model, mode: FakeTensorMode | None = None, device: torch.device | None = None) -> tuple[Any, Any]:
    """Inputs and targets of the model's first microbatch: as fake tensors of `mode`, or moved to `device`."""

    def there(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        with nullcontext() if mode is None else mode:
            like = torch.empty(leaf.shape, dtype=leaf.dtype)  # operations would see a real one as different memory each time
            return like if isinstance(like, FakeTensor) else leaf.to(device)

    with without_modes():  # the user's own function may read values, as a DataLoader does
        x, target = model.batch(0, 0)
    return tree_map(there, x), tree_map(there, target)


def example(form: Format, make: Callable[..., Tensor], device: torch.device | None = None) -> Any:
    """A value of this format. make(shape, device=…): creates floating-point tensors; integers and booleans are 0, a valid
    index into any table."""

    def made(leaf: TensorFormat) -> Tensor:
        if not leaf.dtype.is_floating_point:
            return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
        return make(leaf.shape, device=device).to(leaf.dtype).requires_grad_(leaf.trained)

    return form.filled([made(leaf) for leaf in form.tensors])


def place(model: Model, i: int) -> str:
    """`layer 3 (block2)`, for messages."""
    return f"layer {i} ({model.layer_names[i]})"


class Saving:
    """The storages saved by autograd graphs while these are alive; what a forward drops does not count."""

    def __init__(self) -> None:
        self._all = WeakSet[partial[Tensor]]()

    def watched(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which saved tensors are tracked."""

        def pack(tensor: Tensor) -> partial[Tensor]:
            self._all.add(kept := partial(lambda value: value, tensor))
            return kept

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept())

    def keys(self) -> set[int]:
        """The storages that are saved now."""
        return {storage_key(local(kept())) for kept in self._all}


def _forward(model: Model, i: int, layer: nn.Module, x: Any) -> tuple[Any, dict[str, int]]:
    """The layer's output, detached; and for each side input that it gives the bytes that it saves in any case. If gradients
    are needed before the layer, they must flow back through it."""
    head = f"model '{model.name}': {place(model, i)}"
    came = f"the {words(x)} that layer {i - 1} gives" if i else f"the sample, {words(x)}"
    entering = trained(x)
    saved, gives = Saving(), names_of(layer, i).gives
    watched = saved.watched() if gives else nullcontext()
    with naming(f"{head} fails on {came}"), auxiliary_losses() as extra, watched:
        y: Any = called(layer, entered(x))
    keys = saved.keys() | {storage_key(local(one)) for one in tensors_of(getattr(x, "sides", ()) if i else x)}
    kept = {name: [one for one in tensors_of(y.sides[name]) if storage_key(local(one)) in keys] for name in gives}
    try:
        checked(y, i)
        for part in y if isinstance(y, Carried) else (y,):
            Format.of(part)
    except BadInput as error:
        raise BadInput(f"{head} gives {words(y)}: {str(error).removeprefix(f'the output of layer {i} ')}") from None
    wanted = [*entering, *(p for p in layer.parameters() if p.requires_grad)]
    roots, back = trained((y, extra.total)), list[Tensor | None]()
    if roots and wanted:
        with naming(f"{head}: its backward fails"):
            back = list(torch.autograd.grad([root.abs().sum() for root in roots], wanted, allow_unused=True))
    if entering and all(gradient is None for gradient in back[: len(entering)]):
        raise BadInput(f"{head} lets no gradient back to the layers before it")
    return detached(y), {name: bytes_of(tensors) for name, tensors in kept.items()}


@contextmanager
def naming(what: str) -> Iterator[None]:
    """Turn errors inside into BadInput, in one line that begins with `what`; FAKE_REFUSALS pass unchanged."""
    try:
        yield
    except (BadInput, *FAKE_REFUSALS):
        raise
    except Exception as error:
        raise BadInput(f"{what}: {one_line(error)}") from error


def _check_loss(model: Model, x: Any, target: Any) -> None:
    with naming(f"model '{model.name}': its loss fails on {words(x)}"):
        loss: Any = without_metrics(model.loss(x, target))
    if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
        raise BadInput(f"model '{model.name}': its loss gives {words(loss)}, no tensor of one number, nor that and a dict")
    if not loss.requires_grad:
        raise BadInput(f"model '{model.name}': its loss lets no gradient back")


def words(value: Any) -> str:
    """`float32 (4, 8)`, or a description of any other value, for messages."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {words(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(words, value))})"
    return repr(value) if isinstance(value, CONSTANTS) and not isinstance(value, str) else f"a {type(value).__name__}"
