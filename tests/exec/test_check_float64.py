"""Where float32 gradients differ by more than the limit, float64 says whether the run is wrong or float32 is coarse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from zbsolve.cli.run import _verdict
from zbsolve.exec.check import LIMITS, shake, values
from zbsolve.exec.run.checking import References, compare
from zbsolve.exec.run.job import Options, run_on_one_device
from zbsolve.exec.transport.wires import ALONE

from ..support.exec_tools import a_problem, random_schedule

SINGLE, DOUBLE = torch.float32, torch.float64


def held(away: float, dtype: torch.dtype = SINGLE) -> list[nn.Module]:
    """A layer whose gradient is (1, 0.5) in float64, and `away` from it in its second element."""
    layer = nn.Linear(2, 1, bias=False).to(dtype)
    layer.weight.grad = torch.tensor([[1.0, 0.5 + away]], dtype=dtype)
    return [layer]


def verdict(
    run: float, unsplit: float, exact: Callable[[], Any], dtype: torch.dtype = SINGLE, shaken: Callable[[], Any] = tuple
) -> dict[str, Any]:
    mine, whole = values(dict(enumerate(held(run, dtype)))), held(unsplit, dtype)
    found = compare(ALONE, [(0,)], mine, whole, (1.0, 1.0), references=References(exact, shaken))
    assert found is not None
    return found


def test_a_feature_says_what_gradients_lose_by_it() -> None:
    mine, whole = values(dict(enumerate(held(0.03)))), held(0.0)
    for rounding, passed in ((0.0, False), (0.02, False), (0.04, True)):
        found = compare(ALONE, [(0,)], mine, whole, (1.0, 1.0), references=References(rounding=rounding))
        assert found is not None
        assert found["passed"] == passed


@pytest.mark.parametrize(
    ("run", "unsplit", "passed"),
    [
        (1.4e-6, -1.1e-6, True),  # 2.5e-6 apart, on both sides of float64
        (0.8e-6, -4e-6, True),  # the run is within the limit of float64
        (2.4e-6, -1.1e-6, False),  # more than twice as far
        (1.4e-6, -0.4e-6, False),
        (1e-4, 0.0, False),  # wrong
        (1e-4, 6e-5, False),  # no excuse, however coarse the unsplit model is
        (1.2e-5, -0.9e-5, False),  # within twice, but above 1e-5
    ],
)
def test_float64_judges_float32(run: float, unsplit: float, passed: bool) -> None:
    found = verdict(run, unsplit, lambda: held(0.0, DOUBLE))
    assert found["passed"] == passed
    assert found["worst"] == pytest.approx(abs(run - unsplit), abs=2e-7)
    assert found["limit"] == 1e-6
    line = _verdict(found)
    assert line.startswith(
        f"check: {'right' if passed else 'WRONG'}: largest relative difference {found['worst']:.2e} (layer 0"
    )
    if abs(unsplit) <= 1e-5:
        assert found["from_float64"] == pytest.approx([abs(run), abs(unsplit)], abs=1e-7)
        one, other = found["from_float64"]
        assert line.endswith(f"; from float64 the run is {one:.1e} away, the unsplit model {other:.1e}")
    else:
        assert "float64" not in line


@pytest.mark.parametrize(
    ("run", "moves", "passed"),
    [
        (6e-3, (0.0, 4e-3), True),  # on the other side of a kink, which the second of the references is too
        (6e-3, (1e-6, 2.9e-3), False),  # more than twice what it moves
        (6e-3, (), False),
        (0.06, (0.06, 0.06), False),  # no kink explains so much
    ],
)
def test_a_value_may_differ_by_what_it_moves_beside_a_kink(run: float, moves: tuple[float, ...], passed: bool) -> None:
    asked = list[float]()

    def shaken() -> Iterator[list[nn.Module]]:
        for by in (*moves, 7.0):  # nobody asks for more than explain it
            if asked == list(moves):
                return
            asked.append(by)
            yield held(by)

    found = verdict(run, 0.0, lambda: held(0.0, DOUBLE), shaken=shaken)
    assert found["passed"] == passed
    assert found["worst"] == pytest.approx(run, rel=1e-4)
    assert asked == ([] if run > 0.05 else list(moves))
    if asked:
        assert found["moves"] == pytest.approx(max(moves), rel=1e-3)
        assert f"the unsplit model's own moves by {max(moves):.1e}, beside a kink" in _verdict(found)
    else:
        assert "kink" not in _verdict(found)


def test_weights_move_by_roundings_and_a_relu_at_its_kink_shows_it() -> None:
    layer, x = nn.Linear(16, 1, bias=False), torch.tensor([[1.0, -1.0] * 8])
    nn.init.constant_(layer.weight, 0.3)
    seen = set()
    for seed in range(1, 9):
        before = layer.weight.detach().clone()
        shake([layer], seed)
        moved = layer.weight.detach() / before - 1
        assert 0 < float(moved.abs().max()) <= 3.6e-7
        layer.weight.grad = None
        torch.relu(layer(x)).sum().backward()
        seen.add(float(layer.weight.grad.abs().max()))  # type: ignore[attr-defined]
        with torch.no_grad():
            layer.weight.copy_(before)
    assert seen == {0.0, 1.0}


def test_the_verdict_stays_without_float64() -> None:
    found = verdict(1.4e-6, -1.1e-6, lambda: None)
    assert not found["passed"]
    assert "from_float64" not in found


class Cancels(nn.Module):
    """A layer like attention with a bias in its keys: scores of a query change by one number, softmax by nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.out(torch.softmax(x @ self.key(x).mT, -1) @ x)
        return result


def gradients(dtype: torch.dtype, noise: float = 0.0) -> list[nn.Module]:
    """Of such a layer for one input. noise: added to the gradient of the key's bias."""
    torch.manual_seed(0)
    layer, x = Cancels(), torch.randn(16, 4)
    layer, x = layer.to(dtype), x.to(dtype)
    layer(x).square().sum().backward()
    assert layer.key.bias.grad is not None
    layer.key.bias.grad[0] += noise
    return [layer]


@pytest.mark.parametrize(("share", "passed"), [(0.0, True), (5e-7, True), (3e-6, False)])
def test_a_gradient_that_cancels_is_measured_by_its_layer(share: float, passed: bool) -> None:
    """share: of the layer's largest gradient, what the run's is away from 0."""
    exact, unsplit = gradients(DOUBLE), gradients(SINGLE)
    sizes = [float(p.grad.abs().max()) for p in exact[0].parameters() if p.grad is not None]
    assert max(sizes) > 1e12 * min(sizes)
    noise = share * max(sizes) + 1e-7 * max(sizes)
    run = values(dict(enumerate(gradients(SINGLE, noise))))
    for again, right in ((lambda: exact, passed), (lambda: None, False)):
        found = compare(ALONE, [(0,)], run, unsplit, (1.0, 1.0), references=References(again))
        assert found is not None
        assert found["passed"] == right


@pytest.mark.parametrize(
    ("run", "dtype", "passed"), [(0.5e-6, SINGLE, True), (1e-11, DOUBLE, False), (float("nan"), SINGLE, False)]
)
def test_float64_is_made_only_where_float32_is_in_doubt(run: float, dtype: torch.dtype, passed: bool) -> None:
    def unasked() -> None:
        raise AssertionError("made")

    assert verdict(run, 0.0, unasked, dtype)["passed"] == passed


def test_a_run_is_held_to_its_model_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LIMITS, SINGLE, 1e-10)  # so that another order of microbatches is in doubt
    schedule = random_schedule(a_problem((0, 1), microbatches=5), seed=1)
    found = run_on_one_device(schedule, "mlp-tiny", Options(steps=1, warmup=0, check=True)).facts["check"]
    assert found["worst"] > 1e-10
    run, unsplit = found["from_float64"]
    assert 1e-9 < run < 1e-6
    assert 1e-9 < unsplit < 1e-6
    assert found["worst"] <= 1.01 * (run + unsplit)
    assert found["passed"] == (run <= 2 * unsplit)


NORMS = """
import torch
from torch import nn

class Functional(nn.Module):
    def forward(self, x):
        return nn.functional.rms_norm(x, (x.shape[-1],))

def pipeline():
    layers = [nn.RMSNorm(8), nn.Linear(8, 8), Functional(), nn.Linear(8, 8)]
    return layers, (1e-4 * torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss
"""


def test_a_norms_eps_is_float32s_in_float64_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An RMS norm without eps takes it from the type: of inputs of 1e-4, float64's norm is 3.6 times as large."""
    monkeypatch.setitem(LIMITS, SINGLE, 1e-10)  # so that another order of microbatches is in doubt
    monkeypatch.chdir(tmp_path)
    Path("norms.py").write_text(NORMS)
    schedule = random_schedule(a_problem((0, 1), microbatches=5, layers=4), seed=1)
    found = run_on_one_device(schedule, "norms.py:pipeline", Options(steps=1, warmup=0, check=True)).facts["check"]
    assert found["worst"] > 1e-10
    assert max(found["from_float64"]) < 1e-5
