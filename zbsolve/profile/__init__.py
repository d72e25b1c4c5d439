"""Measured costs of a model: profiles, the changes between two of them, and a run as a profile."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from ..features.vocabulary import ShardCosts as ShardCosts
    from ..features.vocabulary import ShardPasses as ShardPasses
    from ..features.vocabulary import VocabularyCosts as VocabularyCosts
    from .given import given_profile as given_profile
    from .measured_run import from_trace as from_trace

__getattr__, __dir__ = handing_on(__name__)
