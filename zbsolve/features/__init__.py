"""Features of a training step: what it may have beside its plain passes, each as one value."""

from typing import TYPE_CHECKING

from ..util.lazy import handing_on

if TYPE_CHECKING:
    from .vocabulary import ShardCosts as ShardCosts
    from .vocabulary import ShardPasses as ShardPasses
    from .vocabulary import VocabularyCosts as VocabularyCosts

__getattr__, __dir__ = handing_on(__name__)
