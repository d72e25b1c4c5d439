"""Links that several messages share: passes for messages in a profile's step."""

from __future__ import annotations

from typing import Any

from ..build.links import with_cards, with_links
from ..kinds import LINKS as NAME
from ..partition.layer import NO_LINK
from ..problem import Problem
from ..problem.placement import RANK
from .feature import Feature, OfRun, needs_base


def _build(problem: Problem, staged: Any) -> Problem:
    """Add passes for messages between sites, and for those on network cards or between pairs, as the profile's links say."""
    link, sites = staged.profile.link, staged.profile.site_link
    if sites is not None:
        problem = with_links(problem, sites.shared, round(sites.latency))
    return with_links(problem, link.shared, round(link.latency)) if link.shared else problem


def group_note(what: str, profile: Any) -> str:
    """A line where a data-parallel group sends what the words say, and the profile does not know its link; or ""."""
    if profile.shard_link is not None:
        return ""
    if profile.link == NO_LINK:
        return f"{what} take no time: the profile knows no link (give its field 'shard_link')"
    return f"{what} go over the pipeline's link: the profile has none of the group (field 'shard_link')"


SENDER, SHARE, SITES = "messages that occupy their sender", "links that messages share", "a link between sites"
LINKS = Feature(
    NAME,
    build=_build,
    of_run=OfRun(needs_base(lambda problem: problem.has(NAME), "its messages share links", "what each takes of them")),
    holds={
        SENDER: lambda seen: seen.profile is not None and seen.profile.link.blocking,
        SHARE: lambda seen: seen.profile is not None and bool(seen.profile.link.shared),
        SITES: lambda seen: seen.profile is not None and seen.profile.site_link is not None,
    },
)
CARDS = Feature(  # gradient sums and gathers on the cards of messages, where their group's link is shared by those of a rank
    "cards", build=lambda step, on: with_cards(step) if on.profile.link.shared == RANK == on.group.shared else step
)
