"""Placements: stage → rank.

`single`: one stage a rank. `loop`: chunk k of rank r is stage k·p + r (interleaved, arXiv 2104.04473). `vee`: down the ranks
and up again (arXiv 2405.15362). Any other placement is a tuple with a rank for each stage.

Routes are placements that microbatches take in turn: microbatch i follows route i modulo their number. `mirror` is two
routes, down the ranks and up (arXiv 2107.06925), so every stage lives on two ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ..util.errors import BadInput

Spot = Sequence[int] | Sequence[Sequence[int]]
NAMES = ("single", "loop", "vee")
RANK, PAIR = "rank", "pair"  # values of `Link.shared`, beside sites such as 4+4
MAX_STAGES = 100_000  # of all routes together


def sites_in(shared: str) -> tuple[int, ...]:
    """How many ranks each site has, from words such as "4+4" (see `Link.shared`). Raises BadInput."""
    if not re.fullmatch(r"[1-9]\d{0,5}(\+[1-9]\d{0,5})+", shared):
        raise BadInput(f"shared '{shared[:40]}': rank, pair, or sites by their ranks such as 4+4")
    return tuple(map(int, shared.split("+")))


def single(ranks: int) -> tuple[int, ...]:
    """Stage s on rank s."""
    return tuple(range(ranks))


def loop(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Stage k·ranks + r on rank r, `chunks` stages a rank."""
    return tuple(range(ranks)) * chunks


def vee(ranks: int, chunks: int = 2) -> tuple[int, ...]:
    """Down the ranks, up again, and so on: stages r and 2·ranks − 1 − r on rank r for two chunks."""
    down = tuple(range(ranks))
    return tuple(rank for chunk in range(chunks) for rank in (down if chunk % 2 == 0 else down[::-1]))


def parse(text: str, ranks: int | None = None) -> tuple[int, ...]:
    """`single`, `loop`, `loop4` (four chunks), `vee`, or `0,2,1,3`. Raises BadInput."""
    shape = text.strip().rstrip("0123456789")
    if shape in NAMES:
        digits = text.strip()[len(shape) :]
        if ranks is None:
            raise BadInput(f"placement '{text}' needs the number of ranks")
        if shape == "single" and digits:
            raise BadInput(f"placement '{text}': 'single' takes no number of chunks")
        chunks = _count(digits, 1 if shape == "single" else 2)
        if chunks < 1:
            raise BadInput(f"placement '{text}': at least one chunk a rank")
        _within(shape, ranks, chunks)
        return single(ranks) if shape == "single" else loop(ranks, chunks) if shape == "loop" else vee(ranks, chunks)
    try:
        return check([int(part) for part in text.split(",")], ranks)
    except ValueError:
        others = "not single, loop, vee, mirror, ranks such as 0,2,1,3, or (for solve) auto"
        raise BadInput(f"placement '{text}': {others}") from None


def mirror(ranks: int, pairs: int = 1) -> tuple[tuple[int, ...], ...]:
    """Two routes for each of `pairs` (arXiv 2107.06925, section 3.6): pair i goes down from rank i·ranks/pairs, and the same
    way in reverse. Raises BadInput where `ranks` is not a multiple of 2·pairs."""
    if pairs < 1 or ranks % (2 * pairs):
        raise BadInput(f"placement mirror: {ranks} ranks are no multiple of {2 * pairs}, twice its pairs of pipelines")
    _within("mirror", ranks, 2 * pairs)
    downs = [tuple((stage + i * (ranks // pairs)) % ranks for stage in range(ranks)) for i in range(pairs)]
    return tuple(route for down in downs for route in (down, down[::-1]))


def parse_routes(text: str, ranks: int) -> tuple[tuple[int, ...], ...]:
    """`mirror` (`mirror2`: two pairs), or placements as `parse` reads them, joined by `/`. Raises BadInput."""
    if re.fullmatch(r"mirror\d*", text.strip()):
        return mirror(ranks, _count(text.strip()[6:], 1))
    return check_routes([parse(part, ranks) for part in text.split("/")], ranks)


def routes_of(placement: str | Spot, ranks: int) -> tuple[tuple[int, ...], ...]:
    """The routes of a placement, given by name or as tuples, on so many ranks. Raises BadInput."""
    if ranks < 1:
        raise BadInput(f"ranks: at least 1 is needed, got {ranks}")
    return parse_routes(placement, ranks) if isinstance(placement, str) else check_routes(placement, ranks)


def check_routes(placement: Spot, ranks: int | None = None) -> tuple[tuple[int, ...], ...]:
    """The routes of one placement, or of several. Raises BadInput if one is invalid, or if stages or ranks differ."""
    is_route = len(placement) == 0 or not isinstance(placement[0], Sequence)
    result = tuple(check(route, ranks) for route in ([placement] if is_route else placement))  # type: ignore[arg-type]
    if len({(len(route), max(route)) for route in result}) > 1:
        raise BadInput("placement: all routes must have as many stages, on the same ranks")
    return result


def _count(digits: str, default: int) -> int:
    """The number behind a placement's name. Twelve digits are enough: such a number is refused as too large."""
    return int(digits[:12] or default)


def _within(shape: str, ranks: int, times: int) -> None:
    """Raise BadInput where a named placement would have more stages than zbsolve handles, before it is made."""
    if ranks * times > MAX_STAGES:
        stages = f"{ranks * times} stages" if times == 1 else f"{ranks * times} stages ({times} a rank)"
        raise BadInput(f"ranks: {ranks} of placement '{shape}' make {stages}, more than zbsolve handles ({MAX_STAGES})")


def check(placement: Sequence[int], ranks: int | None = None) -> tuple[int, ...]:
    """The placement as a tuple. Raises BadInput for a negative rank, a rank without a stage, or a wrong number of ranks."""
    result = tuple(int(rank) for rank in placement)
    if not result:
        raise BadInput("placement: empty; name a rank for every stage")
    if min(result) < 0:
        raise BadInput(f"placement: rank {min(result)} is negative")
    used = set(result)
    hole = next((rank for rank in range(max(result)) if rank not in used), None)
    if hole is not None:
        raise BadInput(f"placement: no stage on rank {hole} (a hole between ranks 0 and {max(result)})")
    if ranks is not None and max(result) + 1 != ranks:
        raise BadInput(f"placement: names {max(result) + 1} ranks, but there are {ranks}")
    return result


def describe(placement: Sequence[int]) -> str:
    """The shortest name that `parse` reads back: `single`, `loop`, `loop4`, `vee`, `vee4` or the list."""
    result = tuple(placement)
    ranks = max(result) + 1
    if result == single(ranks):
        return "single"
    if len(result) % ranks == 0:
        chunks = len(result) // ranks
        for name, make in (("loop", loop), ("vee", vee)):
            if result == make(ranks, chunks):
                return name if chunks == 2 else f"{name}{chunks}"
    return ",".join(map(str, result))
