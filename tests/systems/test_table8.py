"""Zero Bubble Pipeline Parallelism (arXiv 2401.10241), Table 8: bubble rates of the V shape's setting, to four digits.

Times are of one of two chunks a rank, µs; single placements have both in one stage. ZB-H2 and ZB-V are rates of the span.
"""

from __future__ import annotations

import pytest

from zbsolve import pipeline, verify
from zbsolve.ilp.bounds.closed_forms import closed_form
from zbsolve.problem.placement import loop, single, vee
from zbsolve.systems import preset

from ..support.published import HIDDEN

# model, p, m, F, B, W, communication, then the printed 1F1B, 1F1B-I, ZB-H1, ZB-H2, ZB-V
TABLE_8 = [
    ("6.2B", 16, 48, 14407, 14380, 9676, 1610, 0.2668, 0.1499, 0.1536, 0.0823, 0.0697),
    ("6.2B", 16, 64, 14412, 14393, 9688, 1621, 0.2206, 0.1169, 0.1198, 0.063, 0.0533),
    ("6.2B", 16, 128, 14316, 14306, 9639, 1619, 0.139, 0.0621, 0.0637, 0.0325, 0.0274),
    ("14.6B", 24, 72, 6763, 6969, 5251, 755, 0.2699, 0.1519, 0.1439, 0.0628, 0.0638),
    ("14.6B", 24, 96, 6783, 6984, 5259, 758, 0.2229, 0.1184, 0.1121, 0.048, 0.0483),
    ("14.6B", 24, 192, 6785, 6990, 5260, 770, 0.1403, 0.063, 0.0595, 0.0247, 0.025),
    ("28.3B", 32, 96, 9458, 9748, 7288, 879, 0.2676, 0.1509, 0.1429, 0.0629, 0.0593),
    ("28.3B", 32, 128, 9469, 9744, 7306, 892, 0.2204, 0.1177, 0.1111, 0.0478, 0.0451),
    ("28.3B", 32, 256, 9447, 9644, 7193, 887, 0.1362, 0.0626, 0.0593, 0.0251, 0.0236),
]
pytestmark = pytest.mark.parametrize("row", TABLE_8, ids=lambda row: f"{row[0]}-m{row[2]}")


def rate(name: str, problem, *, span: bool = False) -> float:
    schedule = preset(name, problem)
    assert verify(problem, schedule) == ()
    timeline = schedule.timeline()
    return 1 - problem.work / (timeline.span if span else timeline.makespan)


def test_one_stage_a_rank(row):
    _, p, m, F, B, W, comm, one_f_one_b, _, h1, h2, _ = row
    fused = pipeline(2 * F, BW=2 * (B + W), placement=single(p), microbatches=m, comm=comm)
    split = pipeline(2 * F, 2 * B, 2 * W, placement=single(p), microbatches=m, comm=comm)
    assert round(rate("1f1b", fused), 4) == one_f_one_b
    assert round(rate("zb-h1", split), 4) == h1
    assert round(rate("zb-h2", split, span=True), 4) == h2


def test_interleaved_is_longer_than_printed(row):
    """The printed column drops the dependency from the last rank's chunk to the first rank's next one for all but the first
    microbatch of a group. With every dependency the rate is 3 to 4 % higher."""
    _, p, m, F, B, W, comm, _, interleaved, *_ = row
    found = rate("interleaved", pipeline(F, BW=B + W, placement=loop(p), microbatches=m, comm=comm))
    assert 1.02 < found / interleaved < 1.04


# Of ZB-V's column: our order's rate, and the bound of any schedule that holds p microbatches (appendix G's bytes).
ZB_V = {
    ("6.2B", 48): (0.0712, 0.0697),
    ("6.2B", 64): (0.0545, 0.0533),
    ("6.2B", 128): (0.0280, 0.0274),
    ("14.6B", 72): (0.0623, 0.0596),
    ("14.6B", 96): (0.0476, 0.0455),
    ("14.6B", 192): (0.0246, 0.0235),
    ("28.3B", 96): (0.0582, 0.0556),
    ("28.3B", 128): (0.0444, 0.0425),
    ("28.3B", 256): (0.0229, 0.0221),
}


@pytest.mark.slow
def test_zb_v_differs_from_the_printed_rates(row):
    """The order here is the one drawn in section 6, whatever the times; the printed rates are of orders that the authors'
    heuristic made at these times. For the 6.2B model it reached the bound itself, which the drawn order misses (its ramp
    down waits twice for a message a microbatch; putting W off, or the other chunk first, changes nothing or makes it
    worse). For the others the drawn order is the shorter one."""
    model, p, m, F, B, W, comm, *_, printed = row
    hidden, heads = HIDDEN[model]
    full, late = 34 * hidden + 5 * heads * 1024, 32 * hidden
    held = {"held_until_B": full - late, "held_until_W": late, "capacity": 2 * p * full}
    problem = pipeline(F, B, W, placement=vee(p), microbatches=m, comm=comm, objective="span", **held)
    ours, least = ZB_V[model, m]
    assert round(rate("zb-v", problem, span=True), 4) == ours
    assert round(1 - problem.work / closed_form(problem).value, 4) == least
    assert (printed == least) if model == "6.2B" else (least < ours < printed)
