"""Plans of a given layout, without a search over layouts."""

from __future__ import annotations

from zbsolve import preset, solve
from zbsolve.planner import CLUSTERS, Layout, Shape, layout_profile
from zbsolve.planner.candidate import Candidate, behind_of, step_of
from zbsolve.planner.choice import Choice

A100 = CLUSTERS["a100"]
MEMORY = 16 << 30


def chosen(shape: Shape, layout: Layout, order: str | None = None, *, fused: bool = True, memory: int = MEMORY) -> Choice:
    """A plan of that layout with a named order, or else a short search's."""
    profile, step = layout_profile(shape, layout, A100), step_of(layout, memory, fused=fused)
    problem = step.problem(profile)
    schedule = preset(order, problem) if order else solve(problem, effort=0.1)
    best = Candidate(layout, step, profile, schedule, behind_of(step, profile, schedule.problem, layout, A100))
    return Choice(shape, A100, layout.dp * layout.count * layout.size, memory, best)
