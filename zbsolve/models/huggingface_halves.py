"""Hugging Face encoder-decoders by config class, such as `hf:T5Config{"num_layers": 4}@length=512`: the layers of both
halves (encoder and decoder) in one sequence. Side inputs (see `docs/side-inputs.md`) carry what later layers need: the
encoder's output, the decoder's tokens, and outputs of layers beside hidden states, such as T5's position bias.

To find them, each half's own forward runs once with probes in place of its layers. A probe records the arguments of its
layer and runs the layer on the meta device; this shows which arguments other layers have made, and which are constant.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..util.errors import BadInput
from .huggingface_given import Answer, Given, Held, Note, Noted, Sample
from .losses import CrossEntropy
from .model import Model, Place, seeded
from .published_models import random_tokens, typed

MEMORY, WORDS = "memory", "words"  # the encoder's output; the decoder's tokens
HALVES = "encoder", "decoder"
COUNTS = ("num_hidden_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")  # as configs call them
SKIPPED = ("encoder_layerdrop", "decoder_layerdrop", "layerdrop")


@dataclass(frozen=True)
class Called:
    """How a half calls a layer. given: its constant arguments. takes: number of a leaf in its arguments → side input. gives:
    number of a leaf in its output → side input; complete when all layers have run."""

    layer: nn.Module
    given: Any
    takes: dict[int, str] = field(default_factory=dict)
    gives: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Half:
    """One half of a model on the meta device. place: name of its list of layers. behind: its modules after these."""

    stack: Any
    place: str
    layers: tuple[Called, ...]
    behind: tuple[nn.Module, ...]


class _Probe(nn.Module):
    """Replaces a layer during `_Walk`."""

    def __init__(self, walk: _Walk, layer: nn.Module) -> None:
        super().__init__()
        self.call = partial(walk.layer, layer)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As the layer's, of zeros."""
        return self.call(x, args, kwargs)


class _Walk:
    """A half's forward with probes. made: id of a tensor → (number of the layer that made it, leaf of its output), or None
    for the memory (the encoder's output)."""

    def __init__(self, half: str, memory: Tensor | None) -> None:
        self.half, self.called, self.behind = half, list[Called](), list[nn.Module]()
        self.row: Any = None
        self.kept: list[Any] = [memory]  # keeps tensors alive, so that ids stay unique
        self.made: dict[int, tuple[int, int] | None] = {} if memory is None else {id(memory): None}

    def layer(self, layer: nn.Module, x: Tensor, args: Any, kwargs: Any) -> Any:
        """The layer's output: new tensors of the right shapes, and its inputs where it only passes them on."""
        if self.called and x is not self.row:
            raise BadInput(f"hf: something is done between {self.half} layers {len(self.called) - 1} and {len(self.called)}")
        call = Called(layer, (args, kwargs))
        leaves, form = tree_flatten(call.given)
        names = inspect.signature(layer.forward).bind(x, *args, **kwargs).arguments
        for n, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and id(leaf) in self.made:
                self._take(call, n, leaf, next((name for name, value in names.items() if value is leaf), f"value{n}"))
        constant = [None if n in call.takes else leaf for n, leaf in enumerate(leaves)]
        self.called.append(Called(layer, tree_unflatten(constant, form), call.takes, call.gives))
        real = dict[int, Any]()

        def there(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            like = leaf.detach().to("meta").requires_grad_(leaf.requires_grad)
            real[id(like)] = leaf
            self.kept += [leaf, like]
            return like

        results, form = tree_flatten(_on_meta(layer)(*tree_map(there, (x, *args)), **tree_map(there, kwargs)))
        for n, leaf in enumerate(results):
            if isinstance(leaf, Tensor):
                new = torch.zeros(leaf.shape, dtype=leaf.dtype, device="cpu", requires_grad=leaf.requires_grad)
                results[n] = real.get(id(leaf), new)
                if n and results[n] is new:
                    self.made[id(new)] = len(self.called) - 1, n
        self.row = results[0]
        self.kept += results
        return tree_unflatten(results, form)

    def _take(self, call: Called, n: int, leaf: Tensor, name: str) -> None:
        source = self.made[id(leaf)]
        if source is None:
            call.takes[n] = MEMORY
            return
        giver, place = source
        if name.endswith("position_bias") and not leaf.requires_grad:
            call.takes[n] = ""  # zeros, which each layer makes for itself: none is cheaper than a message
            return
        call.takes[n] = f"{self.half}.{name}" + (f".{giver}" if giver else "")
        self.called[giver].gives[place] = call.takes[n]

    def module(self, module: nn.Module, args: Any, y: Any) -> None:
        """A module of the half has run."""
        if self.called:
            if not args or args[0] is not self.row or not isinstance(y, Tensor):
                raise BadInput(f"hf: after its layers the {self.half} does more than {type(module).__name__} of them")
            self.behind.append(module)
            self.row = y


def _half(shell: Any, half: str, sample: Sample, memory: Tensor | None) -> tuple[Half, Tensor]:
    """A half, and its output. shell: the model on the meta device. memory: the encoder's output, for the decoder."""
    stack = getattr(shell, f"get_{half}")()
    lists = [(name, child) for name, child in stack.named_children() if isinstance(child, nn.ModuleList) and len(child)]
    if stack is shell or len(lists) != 1:
        raise BadInput(f"hf: the {half} of {type(shell).__name__} is no row of layers")
    (place, layers), walk = lists[0], _Walk(half, memory)
    tokens = stack.get_input_embeddings()
    probes = nn.ModuleList(_Probe(walk, layer) for layer in layers)
    bare = copied(stack, {id(layers): probes, id(tokens): nn.Identity()}, apart=True)
    originals = {name: module for name, module in stack.named_children() if module not in (layers, tokens)}
    for name, module in originals.items():
        getattr(bare, name).register_forward_hook(lambda _, args, y, child=module: walk.module(child, args, y))
    _made(bare, shell)
    x = torch.zeros(sample.batch, sample.length, tokens.embedding_dim, dtype=sample.dtype)
    further = {} if memory is None else {"encoder_hidden_states": memory}
    y = tree_leaves(bare(inputs_embeds=x, **further)[0])[0]
    if len(walk.called) != len(layers) or y is not walk.row:
        raise BadInput(f"hf: the {half} of {type(shell).__name__} does more than its layers one after the other")
    return Half(stack, place, tuple(walk.called), tuple(walk.behind)), y


def copied(module: Any, instead: dict[int, Any], apart: bool = False) -> Any:
    """A copy in which some modules are replaced: id → replacement. Configs are shared, since layers compare them. So are
    meta tensors, which `_made` replaces. Of a model that is not on the meta device, modules with nothing to replace inside
    are shared too (not if `apart`): what its owner changes in them later holds for the layers."""
    parts = [*module.modules()]
    leaves = [leaf for part in parts for _, leaf in _own(part)]
    stay = [part.config for part in parts if hasattr(part, "config")] + leaves
    if not apart and not any(leaf.is_meta for leaf in leaves):
        stay += [part for part in parts if instead.keys().isdisjoint(map(id, part.modules()))]
    return copy.deepcopy(module, {id(kept): kept for kept in stay} | instead)


def _on_meta(layer: nn.Module) -> nn.Module:
    """A copy of the layer whose tensors are on the meta device. All its parameters need a gradient, also where the model is
    frozen: so outputs made of parameters are told from zeros."""
    leaves = [leaf for part in layer.modules() for _, leaf in _own(part)]
    like = {id(leaf): leaf.to("meta").detach().requires_grad_(leaf.is_floating_point()) for leaf in leaves}
    result: nn.Module = copied(layer, like, apart=True)
    return result


def _made(module: Any, shell: Any) -> Any:
    """Replace a module's meta tensors by real ones, initialised as the library does it."""
    begun = [part for part in module.modules() if any(leaf.is_meta for _, leaf in _own(part))]
    for part in begun:
        for name, leaf in _own(part):
            new = torch.empty(leaf.shape, dtype=leaf.dtype)  # `to_empty` fails in a fake tensor mode
            setattr(part, name, nn.Parameter(new) if isinstance(leaf, nn.Parameter) else new)
    with torch.no_grad():
        for part in reversed([*module.modules()]) if begun else ():
            getattr(part, "reset_parameters", lambda: None)()
            with suppress(AttributeError):  # for an embedding that belongs to another layer
                shell._init_weights(part)
    return module


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


class Layer(Held):
    """A layer of a half, called with the arguments that the half gives it."""

    def __init__(self, called: Called, shell: Any, batch: int) -> None:
        along = ((),) * len(tree_leaves(called.given))
        super().__init__(_made(copied(called.layer, {}), shell), Given(called.given, along, batch))
        self.sides = {n: name for n, name in called.takes.items() if name}
        self.takes, self.gives = tuple(self.sides.values()), tuple(called.gives.values())
        self.places = tuple(called.gives)

    def forward(self, x: Tensor, *sides: Any) -> Any:
        """(batch, length, width) → the same shape, followed by the side inputs that the layer gives."""
        leaves = tree_leaves(self.call(x, dict(zip(self.sides, sides, strict=True))))
        return (leaves[0], *(leaves[n] for n in self.places)) if self.gives else leaves[0]


class Begin(nn.Module):
    """Token numbers → input of the first layer of a half: the half's own forward up to there. The encoder's also takes the
    decoder's tokens and gives them as a side input."""

    def __init__(self, half: Half, shell: Any, first: bool) -> None:
        super().__init__()
        if first:
            self.gives = WORDS
        instead = {id(module): nn.Identity() for module in half.behind if any(True for _ in module.parameters())}
        layers = half.stack.get_submodule(half.place)
        self.base = _made(copied(half.stack, {id(layers): nn.ModuleList([Note({})]), **instead}), shell)
        self.first = first

    def forward(self, ids: Any) -> Any:
        """(batch, length) → (batch, length, width)."""
        ids, *words = ids if self.first else (ids,)
        try:
            self.base(input_ids=ids)
        except Noted as found:
            *_, x = found.args
        return (x, *words) if words else x


class Encoded(nn.Module):
    """The end of the encoder: its output becomes the side input `memory` of all decoder layers, and the decoder's tokens
    become the value that is passed from layer to layer."""

    takes, gives = WORDS, MEMORY

    def __init__(self, half: Half, shell: Any) -> None:
        super().__init__()
        self.behind = _made(nn.Sequential(*(copied(module, {}) for module in half.behind)), shell)

    def forward(self, x: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        return words, self.behind(x)


class _Ended(nn.Module):
    """Replaces the decoder."""

    def __init__(self, behind: nn.Module) -> None:
        super().__init__()
        self.behind = behind

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> Answer:
        """Run the decoder's modules after its layers."""
        return Answer(self.behind(inputs_embeds))


class Head(nn.Module):
    """Output of the last layer → logits: the model's own forward without the layers of both halves."""

    def __init__(self, halves: tuple[Half, Half], shell: Any) -> None:
        super().__init__()
        ended = _Ended(nn.Sequential(*(copied(module, {}) for module in halves[1].behind)))
        tables = {id(module): nn.Identity() for module in shell.modules() if isinstance(module, nn.Embedding)}
        self.whole = _made(copied(shell, {**tables, id(halves[0].stack): nn.Identity(), id(halves[1].stack): ended}), shell)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) → (batch, length, vocabulary)."""
        return self.whole(encoder_outputs=(x,), decoder_inputs_embeds=x, use_cache=False).logits


Rows = list[tuple[str, Callable[[], nn.Module]]]


def halves_model(spec: str, seed: int, config: Any, sample: Sample) -> Model:
    """The model of a config of an encoder-decoder. Both halves are as long as the sample. Raises BadInput."""
    from transformers import AutoModelForSeq2SeqLM

    build: Any = AutoModelForSeq2SeqLM.from_config
    with torch.device("meta"):
        shell = typed(partial(build, config), sample.dtype)
    rows, both = halves_of(shell, sample, sample)
    return Model(
        spec,
        tuple(seeded(seed, i, partial(typed, builder, sample.dtype)) for i, (_, builder) in enumerate(rows)),
        tuple(name for name, _ in rows),
        partial(_words, seed, int(config.vocab_size), sample),
        CrossEntropy(),
        _tied(shell, both),
    )


def halves_of(shell: Any, first: Sample, second: Sample) -> tuple[Rows, tuple[Half, Half]]:
    """(name, builder) of each layer, and both halves. shell: the model, on the meta device or not; layers share its real
    parameters. first, second: what the encoder and the decoder get. Raises BadInput."""
    skipped = [name for name in SKIPPED if getattr(shell.config, name, 0)]
    if skipped:
        raise BadInput(f"hf: {skipped[0]} leaves layers out at random: set it to 0")
    with torch.random.fork_rng(devices=[]):
        encoder, memory = _half(shell, HALVES[0], first, None)
        decoder, _ = _half(shell, HALVES[1], second, memory)
    rows: Rows = [("embedding", partial(Begin, encoder, shell, True))]
    rows += [(f"encoder{i}", partial(Layer, called, shell, first.batch)) for i, called in enumerate(encoder.layers)]
    rows += [("encoder_end", partial(Encoded, encoder, shell)), ("decoder_embedding", partial(Begin, decoder, shell, False))]
    rows += [(f"decoder{i}", partial(Layer, called, shell, second.batch)) for i, called in enumerate(decoder.layers)]
    return [*rows, ("head", partial(Head, (encoder, decoder), shell))], (encoder, decoder)


def _tied(shell: Any, halves: tuple[Half, Half]) -> tuple[tuple[Place, ...], ...]:
    """Groups of places that hold one parameter: among both halves' embeddings and the output layer."""
    count = len(halves[0].layers)
    tables = [half.stack.get_input_embeddings() for half in halves]
    output = shell.get_output_embeddings()
    paths = [f"base.{weight_path(half.stack, table)}" for half, table in zip(halves, tables, strict=True)]
    paths.append(f"whole.{weight_path(shell, output)}")
    places = zip((0, count + 2, count + len(halves[1].layers) + 3), paths, strict=True)
    groups = dict[int, list[Place]]()
    for owner, place in zip((*tables, output), places, strict=True):
        groups.setdefault(id(owner.weight), []).append(place)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def weight_path(root: nn.Module, wanted: nn.Module) -> str:
    """The name of the weight of module `wanted` in `root`."""
    return str(next(name for name, module in root.named_modules(remove_duplicate=False) if module is wanted)) + ".weight"


def _words(seed: int, vocabulary: int, sample: Sample, microbatch: int, step: int) -> Any:
    """((encoder's tokens, decoder's tokens), targets); targets are the decoder's tokens shifted by one."""
    ids = np.random.default_rng((seed, step, microbatch, 1)).integers(0, vocabulary, (sample.batch, sample.length))
    words, targets = random_tokens(seed, vocabulary, sample.batch, sample.length, microbatch, step)
    return (torch.from_numpy(ids), words), targets
