"""`with_links_of`: a cluster whose links are those that a profile measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...layer import Link
from ...profile.collectives import ALL_REDUCE, CollectiveRow, collective_rows
from ...profile.profile import Profile
from ...util.errors import BadInput
from .cluster import Cluster


def with_links_of(profile: Profile, cluster: Cluster, where: str = "profile") -> Cluster:
    """A cluster with the links that a profile's all-reduces tell.

    profile: the largest group inside a node and the largest one beyond it count.
    cluster: keeps its own link of a kind where there is no such group.
    where: what errors call the profile.

    An all-reduce of S bytes between n ranks is a ring: latency + 2 (n − 1) / n · S over the bandwidth (`layer_times`). Where
    groups reach beyond a node, messages have the bandwidth of the profile's slowest pair of neighbours, which is between
    nodes. Raises BadInput where no all-reduce was measured.
    """
    rows = [one for one in collective_rows(profile, where) if one.kind == ALL_REDUCE and one.ranks > 1]
    if not rows:
        raise BadInput(f"{where}: facts: 'collectives' has no {ALL_REDUCE} between several ranks")
    inside, between = ([one for one in rows if (one.nodes == 1) == same] for same in (True, False))
    found, said = cluster, []
    if inside:
        found = replace(found, inside=_link(inside))
        said.append(f"inside nodes ({max(one.ranks for one in inside)} ranks)")
    if between:
        found = replace(found, between=_link(between), messages=profile.link.bytes_per_us)
        said.append(f"between nodes ({max(one.ranks for one in between)} ranks)")
    return replace(found, error=None, source=f"estimated: links {' and '.join(said)} measured; else {cluster.source}")


def _link(rows: Sequence[CollectiveRow]) -> Link:
    """Of the largest group."""
    row = max(rows, key=lambda one: one.ranks)
    return Link(row.latency, 2 * (row.ranks - 1) / row.ranks * row.bytes_per_us)
