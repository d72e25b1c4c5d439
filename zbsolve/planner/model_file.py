"""A model in a plan's file: its sizes, or its profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import msgspec

from ..profile.profile import Profile
from ..util.files import checked
from .layer_costs import Model
from .profiled_model import ProfiledModel
from .shape import Shape


class ProfilesForm(msgspec.Struct, forbid_unknown_fields=True):
    """A model by profiles in a file."""

    profiles: list[dict[str, Any]]


def model_to_json(model: Model) -> dict[str, Any]:
    """The fields of a model in a file."""
    if isinstance(model, Shape):
        return asdict(model)
    return {"profiles": [one.to_json() for one in model.profiles]}


def model_from_json(body: dict[str, Any], where: str) -> Model:
    """The model that `model_to_json` gave. Raises BadInput naming `where` and the field."""
    if "profiles" not in body:
        return checked(body, Shape, where)
    rows = checked(body, ProfilesForm, where).profiles
    names = [f"{where}: profiles[{i}]" for i in range(len(rows))]
    return ProfiledModel.of([Profile.from_json(one, name) for one, name in zip(rows, names, strict=True)], names)
