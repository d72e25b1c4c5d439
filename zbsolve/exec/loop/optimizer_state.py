"""An optimizer's state by the names that parameters have in the whole model, so that it moves with them to other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

Names = Mapping[nn.Parameter, list[str]]  # a parameter that is tied has several
Entries = dict[tuple[str, str], Any]  # (parameter's name, entry of its state) → value


def kinds_of(state_holder: Any) -> list[str]:
    """The names of an object's class and of those that it derives from, its own first. An optimizer that wraps another one
    and has its state (`PostValidated`) is of the inner one's kinds."""
    inner = getattr(state_holder, "optimizer", None)
    if isinstance(state_holder, Optimizer) and isinstance(inner, Optimizer):
        return kinds_of(inner)
    return [one.__name__ for one in type(state_holder).__mro__ if one is not object]


def related(mine: Sequence[str], theirs: Sequence[str]) -> bool:
    """Does one of two classes, given by `kinds_of`, derive from the other? Then one's state serves the other."""
    return mine[0] in theirs or theirs[0] in mine


def names_of(module: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Parameter → its names in the whole model."""
    found: dict[nn.Parameter, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, []).append(name)
    return found


def entries_of(optimizer: Optimizer, names: Names) -> Entries:
    """The state of each parameter, under all its names."""
    found: Entries = {}
    for parameter, name in ((p, name) for p, known in names.items() for name in known):
        for entry, value in optimizer.state.get(parameter, {}).items():
            found[name, entry] = value
    return found


def options_of(optimizer: Optimizer, names: Names) -> dict[str, dict[str, Any]]:
    """Parameter's name → the options of its group (learning rate, …)."""
    return {
        name: {option: value for option, value in group.items() if option != "params"}
        for group in optimizer.param_groups
        for parameter in group["params"]
        for name in names.get(parameter, ())
    }


def restore(optimizer: Optimizer, names: Names, entries: Entries, options: Mapping[str, dict[str, Any]]) -> None:
    """Give `optimizer` the state of its parameters. A group takes the options of its first parameter."""
    groups, number = [], 0
    for group in optimizer.param_groups:
        known = [names[parameter][0] for parameter in group["params"] if parameter in names]
        own = {option: value for option, value in group.items() if option != "params"}
        count = len(group["params"])
        groups.append((options.get(known[0], own) if known else own) | {"params": list(range(number, number + count))})
        number += count
    optimizer.load_state_dict({"state": {}, "param_groups": groups})
    by_name: dict[str, dict[str, Any]] = {}
    for (name, entry), value in entries.items():
        by_name.setdefault(name, {})[entry] = value.clone() if isinstance(value, Tensor) else value
    for parameter, (name, *_) in names.items():  # load_state_dict would give it the type of its parameter
        if name in by_name:
            optimizer.state[parameter] = by_name[name]
