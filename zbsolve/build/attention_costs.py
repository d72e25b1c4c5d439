"""What attention takes that one rank makes for another, and what travels for it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from ..tables import Ints
from ..util.errors import BadInput
from .numbers import Numbers, whole_numbers


class AttentionExchange(NamedTuple):
    """What causal attention costs of even slices, one number or one a stage where nothing else is said.

    forward, backward: µs of the attention of a slice's queries to the keys of one earlier slice, in F and in B or BW. To the
        slice's own keys it takes half of that.
    query_bytes: of a slice's queries, and as many of the attention's output and of either's gradient.
    key_bytes: of a slice's keys and values together, and of their gradients.
    statistic_bytes: of the logarithms of its softmax's denominators.
    latency: µs of a message, for all layers of the stage together.
    bytes_per_us: of a link.
    before: the share of a forward's other work that comes before its attention; in the backward it comes behind.
    blocks: into how many blocks a slice is cut; whole blocks are handed over.
    """

    forward: Numbers
    backward: Numbers
    query_bytes: Numbers = 0
    key_bytes: Numbers = 0
    statistic_bytes: Numbers = 0
    latency: Numbers = 0
    bytes_per_us: float = 1e12
    before: float = 0.25
    blocks: int = 8

    def checked(self, stages: int) -> AttentionExchange:
        """The same with whole numbers, one a stage. Raises BadInput."""
        if not isinstance(self.blocks, int | np.integer) or isinstance(self.blocks, bool) or self.blocks < 1:
            raise BadInput(f"attention exchange: blocks: at least 1 is needed, got {self.blocks}")
        if not 0 <= self.before <= 1:
            raise BadInput(f"attention exchange: before: {self.before} is no share from 0 to 1")
        if not self.bytes_per_us > 0:
            raise BadInput(f"attention exchange: bytes_per_us: {self.bytes_per_us} is not above 0")
        whole: dict[str, Any] = {}
        for name, value in self._asdict().items():
            if name not in ("bytes_per_us", "before", "blocks"):
                whole[name] = whole_numbers(value, f"attention exchange: {name}", stages)
        return self._replace(**whole)

    def message(self, stage: Ints, size: Ints) -> Ints:
        """µs of messages of `size` bytes, shape (messages,), of stages."""
        return np.asarray(np.asarray(self.latency)[stage] + np.ceil(size / self.bytes_per_us).astype(np.int64))


class Parts(NamedTuple):
    """Passes in three parts, µs each, shape (passes,): before their attention, attention, and behind it. key_time: µs of
    attention to one block of keys; blocks: how many of them are of earlier slices, and can be handed over."""

    before: Ints
    attention: Ints
    behind: Ints
    key_time: Any
    blocks: Ints


def attending(problem: Problem) -> Ints:
    """The rows of the passes that attention is part of, forwards and backwards."""
    return problem.rows("F", "B", "BW")


def parts_of(problem: Problem, costs: AttentionExchange, rows: Ints) -> Parts:
    """The parts of these forwards and backwards. Raises BadInput where attention takes longer than a whole pass."""
    p = problem.passes
    forward = p.are("F")[rows]
    unit = np.where(forward, np.asarray(costs.forward)[p.stage[rows]], np.asarray(costs.backward)[p.stage[rows]])
    earlier = p.slice[rows]
    attention = (2 * earlier + 1) * unit // 2
    plain = p.duration[rows] - problem.sending[rows] - attention
    if len(plain) and plain.min() < 0:
        at = int(plain.argmin())
        name, time = problem.names[rows[at]], p.duration[rows[at]]
        raise BadInput(f"attention exchange: pass {name}: its attention takes {attention[at]} µs, and all of it {time} µs")
    share = np.where(forward, costs.before, 1 - costs.before)
    before = np.floor(plain * share).astype(np.int64)
    return Parts(before, attention, p.duration[rows] - before - attention, unit / costs.blocks, earlier * costs.blocks)


def queries_travel(queries: Any, keys: Any, statistics: Any, earlier: Any, backward: Any) -> Any:
    """Whether fewer bytes travel when a helper gets all of a slice's queries and some blocks of keys, than when it gets some
    of the queries and the keys of all earlier slices.

    With a part f of a slice's attention to `earlier` slices handed over, queries, outputs and statistics Q and keys and
    values K of a slice, the first is Q + f·earlier·K and the second f·Q + earlier·K; their difference is
    (1 − f)(Q − earlier·K). So it is the first wherever earlier·K ≥ Q, however much is handed over. Forwards, Q is queries,
    output and statistics; backwards queries, output, its gradient, statistics and the queries' gradient, and keys go both
    ways. queries, keys, statistics: bytes of a slice, as in `AttentionExchange`; all in one shape.
    """
    sent = np.where(backward, 4 * np.asarray(queries), 2 * np.asarray(queries)) + statistics
    return np.asarray(earlier) * keys * np.where(backward, 2, 1) >= sent


def traffic(costs: AttentionExchange, stage: Ints, earlier: Ints, blocks: Any, backward: Any) -> tuple[Ints, Ints]:
    """Bytes to the rank that helps and back from it, for so many blocks of slices that have `earlier` ones before, shape
    (passes,) each: the cheaper way of the two (see `queries_travel`)."""
    sizes = costs.query_bytes, costs.key_bytes, costs.statistic_bytes
    queries, keys, statistics = (np.asarray(size)[stage] for size in sizes)
    part = np.asarray(blocks) / np.maximum(1, earlier * costs.blocks)
    whole = queries_travel(queries, keys, statistics, earlier, backward)
    some, all_keys = np.where(whole, 1.0, part), np.where(whole, part, 1.0) * earlier * keys
    forth = some * np.where(backward, 3 * queries + statistics, queries) + all_keys
    back = some * np.where(backward, queries, queries + statistics) + np.where(backward, all_keys, 0)
    return np.ceil(forth).astype(np.int64), np.ceil(back).astype(np.int64)
