"""A model as people say it, and in a plan's file: its sizes, or its profiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from ..profile.profile import Profile
from ..util.errors import BadInput
from ..util.files import checked
from .costs.layer_costs import Model
from .profiled_model import ProfiledModel
from .shape import SHAPES, Shape, shape_by_name


class ProfilesForm(msgspec.Struct, forbid_unknown_fields=True):
    """A model by profiles in a file. Older versions said nothing of gradients, and counted those of 16 bits."""

    profiles: list[dict[str, Any]]
    gradients: Literal[2, 4] = 2


def model_of(said: Sequence[str], elsewhere: Callable[[str], Model] = shape_by_name) -> Model:
    """A published model by its name, or one by profiles in files. elsewhere: finds one of another name. Raises BadInput."""
    files = [name for name in said if name == "-" or name.endswith((".json", ".json.gz")) or Path(name).is_file()]
    if files:
        if len(files) < len(said):
            other = next(name for name in said if name not in files)
            raise BadInput(f"model '{other[:60]}': beside profiles ({files[0]}): give one model, or profiles of one model")
        return ProfiledModel.of([Profile.load(path) for path in files], files)
    if len(said) > 1:
        raise BadInput(f"model: {', '.join(said)[:80]}: name one, or profiles of one")
    return shape_by_name(said[0]) if said[0].partition("@")[0] in SHAPES else elsewhere(said[0])


def model_to_json(model: Model) -> dict[str, Any]:
    """The fields of a model in a file."""
    if isinstance(model, Shape):
        return asdict(model)
    return {"profiles": [profile.to_json() for profile in model.profiles], "gradients": model.gradients}


def model_from_json(body: dict[str, Any], where: str) -> Model:
    """The model that `model_to_json` gave. Raises BadInput naming `where` and the field."""
    if "profiles" not in body:
        return checked(body, Shape, where)
    form = checked(body, ProfilesForm, where)
    rows = form.profiles
    names = [f"{where}: profiles[{i}]" for i in range(len(rows))]
    profiled_model = ProfiledModel.of([Profile.from_json(one, name) for one, name in zip(rows, names, strict=True)], names)
    return replace(profiled_model, gradients=form.gradients)
