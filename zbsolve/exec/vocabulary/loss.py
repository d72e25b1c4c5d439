"""What a model must declare so that its vocabulary can be sharded: where its weights are, and what its loss is.

The last layer is an nn.Linear, an nn.Sequential that ends with one, or a module with a method

    def output_layer(self) -> tuple[str, float]:
        return "output", 30.0  # the name of its nn.Linear inside it, and the soft cap behind that (0.0: none)

Nothing else may come after the nn.Linear; everything before it is the module's own. If the embedding is sharded too, the
first layer is an nn.Embedding, an nn.Sequential that begins with one, or a module with a method

    def token_embedding(self) -> tuple[str, float]:
        return "token", 1.0  # the name of its nn.Embedding inside it, and the factor of its vectors

It calls the nn.Embedding once, with the tokens that it is given; everything after it is the module's own.

The loss is a `CrossEntropy`, torch's `cross_entropy` or an nn.CrossEntropyLoss of it, as it is or by functools.partial.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.nn import functional

from ...models.losses import CrossEntropy
from ...util.errors import BadInput
from ..base.torch_private import children_of

KNOWN = "a sharded vocabulary knows zbsolve.exec.CrossEntropy, torch's cross_entropy and CrossEntropyLoss"


def recognised(layer: nn.Module, loss: object, number: int) -> tuple[str, CrossEntropy]:
    """The path of the output layer inside the model's last layer ("": the layer itself), and the loss of its logits with the
    soft cap. number: of the last layer. Raises BadInput for a layer or a loss that a sharded vocabulary does not know."""
    kind, where = kind_of(loss), f"layer {number}: {type(layer).__name__}"
    name, stated = _place(layer, nn.Linear, -1, "output_layer", where)
    _inside(layer, name, nn.Linear, where)
    cap = stated or 0.0
    if cap and kind.soft_cap:
        raise BadInput(f"{where} has a soft cap ({cap:g}), and the loss too: say it once")
    return name, replace(kind, soft_cap=cap) if cap else kind


def embedding_of(layer: nn.Module, number: int) -> tuple[str, float]:
    """The path of the embedding inside the model's first layer ("": the layer itself), and the factor of its vectors.
    number: of the first layer. Raises BadInput for a layer that a sharded vocabulary does not know."""
    where = f"layer {number}: {type(layer).__name__}"
    name, stated = _place(layer, nn.Embedding, 0, "token_embedding", where)
    embedding, scale = _inside(layer, name, nn.Embedding, where, stated is not None), 1.0 if stated is None else stated
    if type(embedding) is nn.Embedding and scale != 1:
        what = f"'{name}' is a plain nn.Embedding, which multiplies vectors by 1, not by {scale:g}"
        raise BadInput(f"{where}: {what}; what follows it stays the layer's own")
    for option in ("max_norm", "scale_grad_by_freq", "sparse"):
        if getattr(embedding, option):
            raise BadInput(f"{where}: a sharded embedding knows no {option}")
    return name, scale


def kind_of(loss: object) -> CrossEntropy:
    """A loss as a `CrossEntropy`. Raises BadInput for one that a sharded vocabulary does not know."""
    if loss is None:
        raise BadInput("loss: none is given, and a sharded vocabulary needs one on every rank")
    if isinstance(loss, partial):
        inner: Any = loss.func
        if loss.args or (loss.keywords and inner is not functional.cross_entropy):
            raise BadInput(f"loss: functools.partial of {_called(inner)} with arguments: {KNOWN}")
        return _of_options(loss.keywords) if loss.keywords else kind_of(inner)
    if isinstance(loss, CrossEntropy):
        return loss
    if loss is functional.cross_entropy:
        return CrossEntropy()
    if type(loss) is nn.CrossEntropyLoss:
        return _of_options(
            {name: getattr(loss, name) for name in ("weight", "reduction", "ignore_index", "label_smoothing")}
        )
    raise BadInput(f"loss: {_called(loss)}: {KNOWN}")


def _of_options(options: Mapping[str, Any]) -> CrossEntropy:
    """torch's cross entropy with these options. Raises BadInput."""
    if options.get("weight") is not None:
        raise BadInput("loss: cross_entropy with a weight of each class: a sharded vocabulary knows none")
    if options.get("reduction", "mean") != "mean":
        raise BadInput(f"loss: cross_entropy with reduction '{options['reduction']}': a loss is a mean")
    known = {"ignore_index", "label_smoothing"}
    unknown = sorted(name for name in options.keys() - known - {"weight", "reduction"} if options[name] is not None)
    if unknown:
        raise BadInput(f"loss: cross_entropy with {unknown[0]}: {KNOWN}")
    return CrossEntropy(**{name: options[name] for name in known & options.keys()})


def _place(layer: nn.Module, wanted: type, at: int, method: str, where: str) -> tuple[str, float | None]:
    """The name of the wanted module inside a layer: the layer itself, entry `at` of a Sequential, or the answer of its
    method `method`, with a number. Raises BadInput."""
    if type(layer) is wanted:
        return "", None
    if type(layer) is nn.Sequential and len(layer):
        return list(children_of(layer))[at], None
    ask: Callable[[], tuple[str, float]] | None = getattr(layer, method, None)
    if ask is None:
        what = f"nn.{wanted.__name__}, and has no method {method} that names one: a sharded vocabulary needs that"
        raise BadInput(f"{where} is no {what}")
    return ask()


def _inside(layer: nn.Module, name: str, wanted: type[nn.Module], where: str, derived: bool = False) -> Any:
    """The module called `name`. derived: a subclass is allowed. Raises BadInput where it is not of class `wanted`, or where
    its weight is computed."""
    try:
        module = layer.get_submodule(name)
    except AttributeError:
        raise BadInput(f"{where} has no '{name}'") from None
    known = isinstance(module, wanted) if derived else type(module) is wanted
    if not known or not isinstance(module.weight, nn.Parameter):
        raise BadInput(f"{where}: '{name}' is {type(module).__name__}, no nn.{wanted.__name__}")
    return module


def _called(loss: object) -> str:
    name = getattr(loss, "__qualname__", None) or type(loss).__qualname__
    module = getattr(loss, "__module__", "")
    return f"{module}.{name}" if module else name
