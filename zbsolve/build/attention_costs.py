"""The costs of attention that one rank computes for another: times, bytes and messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..problem import Problem
from ..problem.tables import Ints
from ..util.errors import BadInput
from .numbers import Numbers, whole_numbers


class AttentionExchange(NamedTuple):
    """The costs of causal attention between even slices, one number or one a stage unless stated otherwise.

    forward, backward: µs of the attention of a slice's queries to the keys of one earlier slice, in F and in B or BW. To the
        slice's own keys it takes half of that.
    query_bytes: of a slice's queries; the attention's output and the gradients of both have as many.
    key_bytes: of a slice's keys and values together; their gradients have as many.
    statistic_bytes: of the log-sum-exp of its scores.
    latency: µs of a message, for all layers of the stage together.
    bytes_per_us: of a link.
    before: the share of a forward's other work that comes before its attention; in the backward it comes after.
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
        """The same with integers, one for each stage. Raises BadInput."""
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
        """µs of messages with `size` bytes of these stages, shape (messages,)."""
        return np.asarray(np.asarray(self.latency)[stage] + np.ceil(size / self.bytes_per_us).astype(np.int64))


class Parts(NamedTuple):
    """Passes in three parts, µs each, shape (passes,): before their attention, the attention, and after it. key_time: µs of
    attention to one block of keys; blocks: how many blocks belong to earlier slices, and can be handed over."""

    before: Ints
    attention: Ints
    behind: Ints
    key_time: Any
    blocks: Ints


def attending(problem: Problem) -> Ints:
    """The rows of passes with attention: forwards and backwards."""
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
    """Are fewer bytes sent if a helper gets all of a slice's queries and some blocks of keys, than if it gets some of the
    queries and the keys of all earlier slices?

    Let f be the share of a slice's attention to `earlier` slices that is handed over, Q the bytes of queries, outputs and
    statistics, and K those of a slice's keys and values. The first way sends Q + f·earlier·K, the second f·Q + earlier·K.
    The difference is (1 − f)(Q − earlier·K), so the first is better wherever earlier·K ≥ Q, for any f. In a forward Q has
    queries, output and statistics; in a backward queries, output, its gradient, statistics and the queries' gradient, and
    keys are sent both ways. queries, keys, statistics: bytes of a slice, as in `AttentionExchange`; all of the same shape.
    """
    sent = np.where(backward, 4 * np.asarray(queries), 2 * np.asarray(queries)) + statistics
    return np.asarray(earlier) * keys * np.where(backward, 2, 1) >= sent


def traffic(costs: AttentionExchange, stage: Ints, earlier: Ints, blocks: Any, backward: Any) -> tuple[Ints, Ints]:
    """Bytes to the helping rank and back, shape (passes,) each, for `blocks` blocks of slices with `earlier` ones before
    them, by the cheaper of the two ways (see `queries_travel`)."""
    sizes = costs.query_bytes, costs.key_bytes, costs.statistic_bytes
    queries, keys, statistics = (np.asarray(size)[stage] for size in sizes)
    part = np.asarray(blocks) / np.maximum(1, earlier * costs.blocks)
    all_queries = queries_travel(queries, keys, statistics, earlier, backward)
    query_share, all_keys = np.where(all_queries, 1.0, part), np.where(all_queries, part, 1.0) * earlier * keys
    forth = query_share * np.where(backward, 3 * queries + statistics, queries) + all_keys
    back = query_share * np.where(backward, queries, queries + statistics) + np.where(backward, all_keys, 0)
    return np.ceil(forth).astype(np.int64), np.ceil(back).astype(np.int64)
