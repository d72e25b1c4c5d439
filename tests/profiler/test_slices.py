"""Slices that are timed: what is measured, the lines through it, and steps that are made from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from profiler.dataflow import flow
from profiler.slices import KINDS, SliceTimes, fitted, time_slices
from profiler.timing import Bench, Measuring
from zbsolve import BadInput, Profile, Schedule
from zbsolve.cli import main
from zbsolve.exec.slices.cutting import Cutting
from zbsolve.features.slices import layer_errors_note, slice_times, stage_errors_note
from zbsolve.layer import Layer
from zbsolve.models.presets import GptSizes, gpt
from zbsolve.show.profile_report import profile_as_text
from zbsolve.show.profile_rows import overheads_line

pytestmark = pytest.mark.usefixtures("one_thread")
EVEN, UNEVEN = (16, 16, 16, 16), (32, 8, 8, 16)
LAYER = Layer("block", 1000, 1600, 640, 2400, 4096, 4096, 100, 64)
ATTENTION = {"attention_F": 320.0, "attention_B": 640.0}
BENCH = Bench(torch.device("cpu"), 0.01)


def measured(lengths: tuple[int, ...], lines: dict[str, tuple[float, float]], attention: bool = True) -> SliceTimes:
    """Samples that make these lines: what each slice takes beyond its part, and more for each slice before it."""
    known = ATTENTION if attention else {}
    whole, rows = replace(LAYER, **known), {name: [one, one + 1, one - 1] for name, one in known.items()}  # type: ignore[arg-type]
    cuts = SliceTimes(lengths, {}, {}).cuts
    for kind, (first, later) in lines.items():
        parts = slice_times([whole], kind, cuts)
        rows |= {f"{kind}/{j}": [part + first + later * j] * 3 for j, part in enumerate(parts)}
    return SliceTimes(lengths, {0: rows}, {0: (512, 1024) if attention else (0, 0)})


def profile_of(layer: Layer) -> Profile:
    head = Layer("head", 100, 100, 0, 200, 8, 0, 4, 0)
    return replace(Profile.from_json({"layers": [{"F": 1, "B": 1, "W": 1}]}), layers=(layer, head), facts={"sequence": 64})


LINES = {"F": (30.0, 5.0), "B": (40.0, 0.0), "W": (20.0, 0.0), "BW": (50.0, 10.0)}


@pytest.mark.parametrize("lengths", [EVEN, UNEVEN])
def test_a_step_in_slices_takes_what_was_measured(lengths: tuple[int, ...], tmp_path: Path) -> None:
    """The line goes through a file, and into the problem."""
    found = fitted([LAYER], measured(lengths, LINES), [0])
    layer = found.layers[0]
    assert (layer.attention_F, layer.attention_B, layer.kv_bytes, layer.kv_gradient_bytes) == (320, 640, 512, 1024)
    assert found.notes == []
    assert max(found.errors["block"].values()) < 1e-9
    profile_of(layer).save(tmp_path / "p.json")
    profile = Profile.load(tmp_path / "p.json")
    assert profile.layers[0] == layer
    for fused in (False, True):
        problem = profile.problem(2, 1, slices=lengths, fused=fused)
        for kind in ("F", "BW") if fused else ("F", "B", "W"):
            times = [problem.passes[problem.index[f"0{kind}0.{j}" if j else f"0{kind}0"]].duration for j in range(4)]
            parts = slice_times([replace(layer, slice_extra=None)], kind, SliceTimes(lengths, {}, {}).cuts)
            assert times == [part + round(LINES[kind][0] + LINES[kind][1] * j) for j, part in enumerate(parts)]


def test_other_slices_take_what_a_slice_costs_whatever_its_length() -> None:
    """Above 0 it is of each slice; below 0 of its length."""
    (layer,) = fitted([LAYER], measured(EVEN, LINES | {"W": (-20.0, 0.0)}), [0]).layers
    cuts = tuple(i / 8 for i in range(9))
    bare = replace(layer, slice_extra=None)
    more = {kind: sum(slice_times([layer], kind, cuts)) - sum(slice_times([bare], kind, cuts)) for kind in ("F", "B", "W")}
    assert more == {"F": 8 * 30 + 5 * 28, "B": 8 * 40, "W": -80}
    assert sum(slice_times([layer], "X", cuts)) == sum(slice_times([layer], "F", cuts))


def test_times_that_fall_from_slice_to_slice_are_noted_and_taken_as_constant() -> None:
    """Attention's part grows by 40 µs from F to F, so a line of −60 falls by 20 of some 200."""
    found = fitted([LAYER], measured(EVEN, LINES | {"F": (40.0, -60.0), "B": (40.0, -60.0)}), [0])
    (layer,) = found.layers
    times = slice_times([layer], "F", (0, 0.25, 0.5, 0.75, 1))
    assert max(times) - min(times) <= 1
    assert abs(sum(times) - (1000 + 4 * 40 - 60 * 6)) <= 4
    (note,) = found.notes
    assert note == "slices: block: F falls by 30% to the last slice: taken as constant"
    assert found.errors["block"]["F"] == pytest.approx(30 / 200, abs=0.01)
    assert found.errors["block"]["B"] < 0.01  # 80 µs of attention's are more than 60


def test_noise_gives_no_slice_less_than_no_time_and_no_attention_more_than_all(tmp_path: Path) -> None:
    """Times of 1, 1, 1 and 900 µs have a line that begins below 0; attention by itself took longer than F."""
    noisy = measured(EVEN, LINES)
    rows = noisy.samples[0] | {f"BW/{j}": [one] * 3 for j, one in enumerate((1.0, 1.0, 1.0, 900.0))}
    found = fitted([LAYER], replace(noisy, samples={0: rows | {"attention_F": [1200.0]}}), [0])
    (layer,) = found.layers
    assert layer.attention_F == LAYER.F
    assert "slices: block: attention_F was 1,200 µs by itself, more than the 1,000 µs of the whole pass" in found.notes[0]
    taken = slice_times([layer], "BW", (0, 0.25, 0.5, 0.75, 1))
    assert taken[0] == 0 < taken[1] < taken[2] < taken[3] < 900
    profile_of(layer).save(tmp_path / "p.json")
    assert Profile.load(tmp_path / "p.json").layers[0] == layer


def test_overheads_that_dominate_are_said() -> None:
    """F and BW of 1,000 and 2,400 µs; four slices take 30 and 50 µs more each, or 1,000."""
    few, many = (
        profile_of(fitted([LAYER], measured(EVEN, LINES | {"F": (first, 0.0), "BW": (50.0, 0.0)}), [0]).layers[0])
        for first in (30.0, 1000.0)
    )
    said = [overheads_line(replace(one, facts={"slices": {"lengths": list(EVEN)}})) for one in (few, many)]
    whole = 3400 + 300
    assert said[0].startswith(f"a sequence takes {(whole + 320) / whole:.2f} times as long in 4 slices as whole")
    assert f"; {320 / (whole + 320):.0%} of that is what each slice takes whatever its length" in said[0]
    assert "dominate" not in said[0]
    assert "these overheads dominate" in said[1]
    assert overheads_line(profile_of(LAYER)) == ""


def test_lines_that_slices_lie_far_from_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """F of a slice of some 300 µs was timed 120 µs from its line: `profile` names the layer, `solve` the stage, `--fused`
    or not; below a tenth of a slice nobody says anything."""
    near, far = (measured(EVEN, LINES) for _ in range(2))
    near.samples[0]["F/1"], far.samples[0]["F/1"] = [one + 10 for one in near.samples[0]["F/1"]], [400.0] * 3
    path = str(tmp_path / "p.json")
    for times, told in ((near, False), (far, True)):
        found = fitted([LAYER], times, [0])
        assert (found.errors["block"]["F"] > 0.1) == told
        profile = replace(profile_of(found.layers[0]), facts=found.facts(times))
        profile.save(path)
        line = "WARNING: slices: F of layer 'block' was timed up to "
        assert (line in profile_as_text(profile)) == told
        assert main(["solve", path, "--ranks", "2", "--microbatches", "2", "--slices", "4", "--effort", "0.01"]) == 0
        assert ("slices: F of stage 0 was timed up to " in (said := capsys.readouterr().err)) == told
        assert said.endswith("take fewer, longer slices\n") == told
    assert layer_errors_note(profile_of(LAYER)) == stage_errors_note(profile_of(LAYER), (1, 1), True) == ""
    tiny = replace(profile, layers=(profile.layers[0], Layer("head", 1e6, 1e6, 0, 2e6, 8, 0, 4, 0)))
    assert layer_errors_note(tiny) == ""


def test_a_layer_without_attention_has_one_time_for_all_slices() -> None:
    lines = dict.fromkeys(KINDS, (7.0, 3.0))
    (layer,) = fitted([LAYER], measured(EVEN, lines, attention=False), [0]).layers
    assert (layer.attention_F, layer.kv_bytes) == (0, 0)
    assert len(set(slice_times([layer], "F", (0, 0.25, 0.5, 0.75, 1)))) == 1


def test_what_is_timed_of_a_model() -> None:
    """Of seven slices five, each in all passes; attention by itself where there is some."""
    model = gpt("small", 0, GptSizes(width=8, blocks=1, heads=2, batch=2, length=14))
    times = time_slices(Measuring(model, flow(model), BENCH, (0, 1, 2)), Cutting(7))
    wanted = {f"{kind}/{j}" for kind in KINDS for j in (0, 2, 3, 4, 6)}
    assert times.lengths == (2,) * 7
    assert set(times.samples[0]) == set(times.samples[2]) == wanted
    assert set(times.samples[1]) == wanted | set(ATTENTION)
    assert times.kv_bytes == {0: (0, 0), 1: (2 * 2 * 14 * 8 * 4,) * 2, 2: (0, 0)}
    assert all(len(row) >= 5 and min(row) > 0 for rows in times.samples.values() for row in rows.values())


MODELS = """
import torch
from torch import nn
from torch.nn import functional
from zbsolve.exec import CrossEntropy, sliced_attention

class Attention(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.how, self.mix = how, nn.Linear(8, 8)
    def forward(self, x):
        q = self.mix(x).unflatten(-1, (2, 4)).transpose(1, 2)
        if self.how == "none":
            return self.mix(x)
        if self.how == "sliced":
            y = sliced_attention(q, q, q, is_causal=True)
        else:
            y = functional.scaled_dot_product_attention(q, q, q, is_causal=self.how == "causal")
        return x + y.transpose(1, 2).flatten(2)

def model(how):
    x = torch.randint(5, (2, 12))
    return [nn.Embedding(5, 8), Attention(how), nn.Linear(8, 5)], (x, x), CrossEntropy()
def sliced():
    return model("sliced")
def causal():
    return model("causal")
def both_ways():
    return model("both ways")
def none():
    return model("none")
"""


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "sliced_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    return "sliced_models.py"


@pytest.mark.usefixtures("one_link")
def test_a_measured_profile_is_solved_in_slices(models: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["profile", f"{models}:sliced", "--slices", "3", "--seconds", "0.01", "-o", "p.json"]
    assert main(arguments) == 0
    said = capsys.readouterr().out
    assert "in 3 slices" in said
    profile = Profile.load("p.json")
    assert profile.facts["sequence"] == 12
    assert profile.facts["slices"]["lengths"] == [4, 4, 4]
    assert profile.layers[1].kv_bytes == 2 * 2 * 12 * 8 * 4
    assert 0 < profile.layers[1].attention_F <= profile.layers[1].F
    assert (
        main(["solve", "p.json", "--ranks", "2", "--microbatches", "2", "--slices", "3", "--effort", "0.01", "-o", "s.json"])
        == 0
    )
    problem = Schedule.load("s.json").problem
    layers: Any = profile.layers[: problem.layers[0]]
    wanted = slice_times(layers, "F", (0, 1 / 3, 2 / 3, 1))
    assert [problem.passes[problem.index[name]].duration for name in ("0F0", "0F0.1", "0F0.2")] == wanted


@pytest.mark.parametrize(
    ("name", "how", "line"),
    [
        ("sliced", ["--slices", "13"], "slices: 13 slices of a sequence of 12 tokens: each needs one"),
        ("sliced", ["--slices", "0"], "slices: at least 1 is needed, got 0"),
        ("sliced", ["--slices", "some"], "slices 'some': a number such as 8"),
        ("sliced", ["--slices", "4:even-work"], "measure even ones, or give lengths"),
        ("sliced", ["--slices", "4", "--split", "graph"], "are measured with --split layers and without --mesh"),
        ("sliced", ["--slices", "4", "--estimate", "h100"], "--slices: are measured; an estimate is of any"),
        ("causal", ["--slices", "4"], "slices: layer 1 (Attention): its output in slices differs"),
        ("both_ways", ["--slices", "4"], "slices: layer 1 (Attention): its output in slices differs"),
        ("none", ["--slices", "4"], "has no causal attention that calls zbsolve.exec.sliced_attention"),
    ],
)
def test_what_cannot_be_timed_in_slices_is_said_in_a_line(
    name: str, how: list[str], line: str, models: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", f"{models}:{name}", *how, "--seconds", "0.01", "-o", "p.json"]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert line in said
    assert not Path("p.json").exists()


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"number": 1}, r"p: layers\[0\]: slice_extra: field 'number' is 1: at least 2"),
        ({"number": 4, "F": [1e300, 0]}, r"p: layers\[0\]\.slice_extra: field 'F'\[0\] is 1e\+300"),
        ({"number": 4, "F": [1]}, "field 'F' is"),
        ({"number": 4, "F": [0, -1]}, r"p: layers\[0\]: slice_extra: field 'F': slice 3 of 4 would take -2\.25 µs"),
        ({"number": 4, "B": [-2, 0]}, r"slice_extra: field 'B': slice 0 of 4 would take -1 µs"),
        ({"number": 4, "X": [1, 2]}, "'X'"),
    ],
)
def test_a_file_that_says_nonsense_of_slices_is_refused(extra: dict[str, Any], line: str) -> None:
    with pytest.raises(BadInput, match=line):
        Profile.from_json({"layers": [{"F": 3, "B": 4, "W": 1, "slice_extra": extra}]}, "p")
