"""Optimizer steps that wait for no other rank."""

from typing import TYPE_CHECKING

from ...util.lazy import handing_on

if TYPE_CHECKING:
    from .post_validation import PostValidated as PostValidated

__getattr__, __dir__ = handing_on(__name__, {"post_validation": "PostValidated"})
