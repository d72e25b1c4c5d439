"""Links that messages share: what a profile says of them, as passes of its step."""

from __future__ import annotations

from typing import Any

from ..build.links import with_links
from ..kinds import LINKS as NAME
from ..layer import RANK
from ..problem import Problem
from .feature import Feature


def _build(problem: Problem, staged: Any) -> Problem:
    """Messages between sites on their links, and others on cards or between pairs, as the profile's links say.

    Sums of gradients, gathers and reductions occupy their rank's card where the link of the group is the pipeline's, or says
    that it is shared too.
    """
    link, sites = staged.profile.link, staged.profile.site_link
    if sites is not None:
        problem = with_links(problem, sites.shared, round(sites.latency))
    if not link.shared:
        return problem
    return with_links(problem, link.shared, round(link.latency), collectives=link.shared == RANK == staged.group.shared)


LINKS = Feature(NAME, build=_build)
