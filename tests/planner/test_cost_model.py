"""The planner's cost model: fitted on measured steps, held against others, and as an ordinary profile."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import zbsolve
from benchmarks.harness import RESULTS, kept
from benchmarks.planner import WORST_MEAN, WORST_RATIO, korthikanti, recompute_ratios, rows_in
from zbsolve.planner import CLUSTERS, SHAPES, Cluster, Layout, Shape, fit, layout_profile, predict
from zbsolve.planner.costs.layer_formulas import (
    after_pipeline,
    block_bytes,
    block_times,
    exchange,
    exchange_pass,
    message,
    state_bytes,
)
from zbsolve.planner.fitting import errors
from zbsolve.planner.layout import FULL, NONE, SELECTIVE, VEE, table_of
from zbsolve.show.plan_report import honest_line
from zbsolve.util.errors import BadInput

GPT3 = Shape.gpt(12_288, 96, 96)
A100 = CLUSTERS["a100"]
LLAMA = Shape("llama", 80, 8192, 64, 8, 128, 28_672, 8192, 128_256, gated=True, fused=True)


@cache
def fitted() -> Cluster:
    """On the 41 steps."""
    return fit(rows_in("vtrain-fit.csv"))


@pytest.mark.slow
def test_the_constants_fit_the_41_steps() -> None:
    """Physical values: the cluster has 800 Gbit/s a node; products reach what 2401.10241, Table 9 has (251 of 312)."""
    cluster, rows = fitted(), rows_in("vtrain-fit.csv")
    assert len(rows) == 41
    found = np.abs(errors(predict(rows, cluster), rows))
    assert found[:26].mean() < 0.07  # 3.6B
    assert found[26:].mean() < 0.07  # 18.4B
    assert cluster.between.bytes_per_us == pytest.approx(100e3, rel=0.1)
    assert 0.7 < cluster.efficiency < 0.8
    assert cluster.source.startswith("fitted: 41 measured steps")
    assert cluster.error == pytest.approx(found.mean())
    assert f"their measured error is {found.mean():.1%} in the mean" in honest_line(SHAPES["gpt-3.6b"], cluster)
    assert "their error was not measured" in honest_line(SHAPES["gpt-3.6b"], CLUSTERS["h100"])


def test_table_5_of_korthikanti() -> None:
    """2205.05198, Table 5: eight steps of another cluster, framework and schedule, which no constant has seen."""
    rows = korthikanti()
    assert [row["step_s"] for row in rows] == ["1.42", "1.1", "18.13", "13.75", "49.05", "37.83", "94.42", "71.49"]
    found = np.abs(errors(predict(rows, fitted()), rows))
    assert found.mean() <= WORST_MEAN
    ratios = recompute_ratios(fitted())
    assert {name: true for name, (true, _) in ratios.items()} == {
        "22B": 1.2909,
        "175B": 1.3185,
        "530B": 1.2966,
        "1T": 1.3207,
    }
    assert max(abs(said / true - 1) for true, said in ratios.values()) <= WORST_RATIO


def test_the_data_sheets_error_is_that_of_table_5() -> None:
    found = errors(predict(korthikanti(), A100), korthikanti())
    assert np.mean(np.abs(found)) == pytest.approx(A100.error, abs=5e-4)
    assert (round(min(found), 2), round(max(found), 2)) == (0.07, 0.17)
    assert "7 to 17 % longer" in A100.source


def test_priors_hold_what_no_row_says() -> None:
    """One row on one device says nothing of links: they stay at the data sheet's. A row far off moves little (Huber)."""
    row = {**rows_in("vtrain-fit.csv")[0], "dp": "1", "gpus": "1", "global_batch": "8"}
    truth = {**row, "step_ms": str(predict([row], A100)[0])}
    one = fit([truth])
    assert one.between.bytes_per_us == pytest.approx(A100.between.bytes_per_us, rel=1e-3)
    assert predict([row], one)[0] == pytest.approx(float(truth["step_ms"]), rel=1e-3)
    several = [
        {**truth, "global_batch": str(8 * n), "step_ms": str(predict([{**row, "global_batch": 8 * n}], A100)[0])}
        for n in range(1, 6)
    ]
    several[2]["step_ms"] = str(3 * float(several[2]["step_ms"]))
    assert predict([row], fit(several))[0] == pytest.approx(float(truth["step_ms"]), rel=0.1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tp": ""}, "row 1: column 'tp' is missing"),
        ({"dp": "x"}, "row 1: column 'dp' is 'x', no number above 0"),
        ({"hidden": "-5"}, "row 1: column 'hidden' is '-5', no number above 0"),
        ({"pp": "31"}, "row 1: column 'layers': 30 do not make 31 stages"),
        ({"dp": "512"}, "row 1: column 'global_batch': 512 make no microbatch of 8 on 512 replicas"),
        ({"recompute": "some"}, "row 1: column 'recompute' 'some': one of none, selective, full"),
    ],
)
def test_a_row_that_cannot_be_is_named(change: dict[str, str], said: str) -> None:
    row = rows_in("vtrain-fit.csv")[0]
    with pytest.raises(BadInput) as error:
        predict([{**row, **change}], A100)
    assert str(error.value) == said
    with pytest.raises(BadInput, match="at least one measured step"):
        fit([])


def test_korthikanti_bytes() -> None:
    """2205.05198, Table 2: bytes of a layer's activations, in units of s b h; 5 a s / h is 80 for GPT-3."""
    unit, scores = 2048 * 12_288, 80
    assert 5 * GPT3.scores / GPT3.hidden == scores

    def kept(**fields: int) -> float:
        held = block_bytes(GPT3, Layout(**fields))
        return float((held.until_b + held.until_w) / unit)

    assert kept() == 34 + scores  # no parallelism
    assert kept(tp=8) == 10 + 24 / 8 + scores / 8
    assert kept(tp=8, sequence=1) == (34 + scores) / 8
    assert kept(tp=8, recompute=SELECTIVE) == 10 + 24 / 8
    assert kept(tp=8, sequence=1, recompute=SELECTIVE) == 34 / 8
    assert kept(tp=8, recompute=FULL) == 2
    held = block_bytes(GPT3, Layout())
    assert (held.until_w + held.from_b) / unit == 32  # 2401.10241, section 2.1: between B and W
    assert block_bytes(GPT3, Layout(recompute=FULL)).transient / unit == 34 + scores


def test_states_by_zero() -> None:
    """1910.02054, section 5, with gradients of 32 bits: 18 bytes a parameter; optimizer, gradients, weights sharded."""
    found = [float(state_bytes(Layout(dp=4, zero=zero))) for zero in range(4)]
    assert found == [18, 6 + 12 / 4, 2 + 16 / 4, 18 / 4]


def test_zero_moves_more() -> None:
    """1910.02054, section 7: stages 1 and 2 move as much as none once a step, 3 half as much again, here each microbatch."""
    layouts = [Layout(dp=4, tp=2, zero=zero) for zero in range(4)]
    behind = [float(exchange(1e9, one, A100)) for one in layouts]
    passes = [float(block_times(GPT3, one, A100).work) for one in layouts]
    turn = behind[0] / 2
    assert behind == pytest.approx([2 * turn, 2 * turn, turn, 0])
    inside = turn * GPT3.matrices / 2 / 1e9
    assert np.array(passes) - passes[0] == pytest.approx([0, 0, inside, 3 * inside])
    hidden = replace(A100, overlap=1.0, contention=3.0)
    assert float(exchange(1e9, layouts[1], hidden)) == 0
    # As a pass of the graph nothing is hidden before, and messages of several pipeline ranks share the links.
    for layout, all_of_it in zip(layouts, behind, strict=True):
        longer = float(exchange_pass(1e9, layout._replace(pp=2), hidden))
        assert [longer, float(exchange_pass(1e9, layout, hidden))] == pytest.approx([3 * all_of_it, all_of_it])


def test_a_table_of_layouts_is_each_of_them() -> None:
    """Formulas over columns are those of single layouts."""
    rows = [
        Layout(dp, tp, pp, 2, VEE, 2, 8, recompute, int(tp > 1), zero)
        for dp, tp, pp, recompute, zero in [
            (1, 1, 4, NONE, 0),
            (2, 8, 4, FULL, 1),
            (4, 16, 1, SELECTIVE, 3),
            (2, 2, 2, FULL, 2),
        ]
    ]
    table = table_of(rows)
    for function in (block_times, message):
        columns = np.stack(np.broadcast_arrays(*np.atleast_2d(function(GPT3, table, A100))))
        singles = np.stack([np.atleast_1d(function(GPT3, one, A100)) for one in rows], axis=1)
        assert columns == pytest.approx(singles.reshape(columns.shape))
    assert exchange_pass(1e9, table, A100) == pytest.approx([float(exchange_pass(1e9, one, A100)) for one in rows])
    assert after_pipeline(1e9, table, A100) == pytest.approx([float(after_pipeline(1e9, one, A100)) for one in rows])
    assert table.row(1) == rows[1]


@pytest.mark.parametrize("recompute", [NONE, SELECTIVE, FULL])
def test_a_layout_is_an_ordinary_profile(recompute: int) -> None:
    """Step and solve go on from it; memory and times are those of the formulas."""
    layout = Layout(2, 4, 4, 1, 0, 1, 8, recompute, 1, 1)
    profile = layout_profile(GPT3, layout, replace(A100, memory=10**12))
    problem = zbsolve.Step(4, layout.count, layout.spot, fused=True).problem(profile)
    schedule = zbsolve.solve(problem, method="1f1b")
    assert zbsolve.verify(problem, schedule) == ()
    assert sum(problem.layers) == GPT3.layers + 2
    work = GPT3.layers * np.rint(block_times(GPT3, layout, A100)).sum()
    assert sum(one.F + one.BW for one in profile.layers[1:-1]) == work
    assert profile.source.startswith("estimated: ")
    parameters = sum(one.parameter_bytes for one in profile.layers) * layout.tp / 2
    assert parameters == pytest.approx(GPT3.parameters + GPT3.table, rel=1e-6)  # both tables, once where a rank has both
    assert profile.tied
    peak = schedule.timeline().peak_bytes[0]
    blocks = problem.layers[0] - 1
    held = block_bytes(GPT3, layout)
    assert peak == pytest.approx(4 * blocks * float(held.until_b + held.until_w), rel=1e-6)  # 1F1B: p microbatches


def test_other_blocks_follow_the_same_account() -> None:
    """Llama 3 70B (2407.21783, Table 3): its parameters; FLOPs a token are 6 a parameter and attention's."""
    assert LLAMA.parameters == pytest.approx(70.55e9, rel=2e-3)
    attention = 12 * LLAMA.layers * LLAMA.sequence * LLAMA.query_width
    used = LLAMA.parameters - LLAMA.table
    assert LLAMA.flops(1) / LLAMA.sequence == pytest.approx(6 * used + attention)
    assert GPT3.parameters == pytest.approx(175e9, rel=5e-3)
    with pytest.raises(BadInput, match="model x: kv_heads is 0"):
        replace(LLAMA, name="x", kv_heads=0)


def test_the_kept_result_is_what_the_page_says() -> None:
    found, spaces = kept(RESULTS / "plan.json"), kept(RESULTS / "plan_spaces.json")
    page = (RESULTS.parents[1] / "docs/notes/plan.md").read_text(encoding="utf-8")
    assert f"{100 * found['table 5']['mean error']:.1f} % off in the mean" in page
    for row in spaces["rows"].values():
        assert f"within {100 * row['gap']:.2f} %" in page
    assert Cluster.from_json(found["cluster"]).efficiency == pytest.approx(fitted().efficiency, rel=1e-3)
