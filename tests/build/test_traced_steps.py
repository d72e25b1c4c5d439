"""Builders for steps that were traced: memory in microbatches, stages cut in two, a backward cut in half."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from zbsolve import BadInput, Problem, pipeline, preset
from zbsolve.build.joined import with_fused_backward
from zbsolve.build.restage import restaged, with_units_in_flight

from ..support.recorded import with_halved_backward


def fused(**more: object) -> Problem:
    return pipeline([11, 12, 14, 17], BW=[21, 20, 23, 30], microbatches=6, comm=2, **more)  # type: ignore[arg-type]


def test_1f1b_holds_as_many_microbatches_as_it_is_known_for() -> None:
    """Rank r of p holds p − r microbatches, with the backward in one pass or split."""
    whole = preset("1f1b", with_units_in_flight(fused(), 2))
    assert whole.timeline().peak_bytes == (8, 6, 4, 2)
    split = pipeline([11] * 4, [10] * 4, [9] * 4, microbatches=6)
    assert preset("1f1b-split", with_units_in_flight(split, 2)).timeline().peak_bytes == (8, 6, 4, 2)
    mixed = with_fused_backward(split, np.arange(24).reshape(4, 6) % 2 == 0, 19)
    counted = with_units_in_flight(mixed, 2)
    assert counted.taken.sum() == counted.freed.sum() == 2 * 4 * 6


def test_cut_stages_add_up() -> None:
    """Whole µs and bytes: both halves of a stage together are the stage, and joining them gives the step back."""
    step = with_units_in_flight(fused(), 2)
    halves = restaged(step, (0, 1, 2, 3, 3, 2, 1, 0))
    F = [int(halves.passes.duration[halves.rows("F", stage=s)[0]]) for s in range(8)]
    assert F == [5, 6, 6, 6, 7, 7, 8, 9]
    assert halves.taken.sum() == step.taken.sum()
    assert halves.placement == (0, 1, 2, 3, 3, 2, 1, 0)
    assert halves.layers == ()
    assert restaged(halves, (0, 1, 2, 3)).passes.duration.tolist() == step.passes.duration.tolist()
    with pytest.raises(BadInput, match="4 stages do not make 6"):
        restaged(step, (0, 1, 2, 0, 1, 2))


def test_microbatches_that_differ_are_cut_one_by_one() -> None:
    """Times and bytes are tables, a number a microbatch; messages that hold their sender up stay such."""
    lengths = (1.0, 3.0, 0.5, 1.0, 2.0, 1.5)
    step = with_units_in_flight(fused(blocking=True), 2).scaled(lengths, inf)
    halves = restaged(step, (0, 1, 2, 3, 3, 2, 1, 0))
    own = (halves.passes.duration - halves.sending)[halves.rows("F")].reshape(8, 6)
    whole = (step.passes.duration - step.sending)[step.rows("F")].reshape(4, 6)
    assert (own.reshape(4, 2, 6).sum(axis=1) == whole).all()
    assert (halves.taken.sum(), halves.edges.sent.max()) == (step.taken.sum(), 2)
    assert restaged(halves, (0, 1, 2, 3)).passes.duration.tolist() == step.passes.duration.tolist()
    assert with_halved_backward(step).work == step.work
    uneven = pipeline([4, 4], [6, 6], [5, 5], microbatches=2, held_until_W=[[7, 1], [2, 8]])
    assert restaged(uneven, (0, 1)) == uneven


def test_half_a_backward_is_marked_as_an_estimate() -> None:
    step = with_units_in_flight(fused(source="measured: x"), 2)
    split = with_halved_backward(step)
    assert split.passes.kinds == ("F", "B", "W")
    assert split.source == "estimated: B and W are half of BW each, measured: x"
    assert split.work == step.work
    BW = {(one.stage, one.microbatch): one.duration for one in step.passes if one.kind == "BW"}
    halves = {kind: {(one.stage, one.microbatch): one.duration for one in split.passes if one.kind == kind} for kind in "BW"}
    assert all(halves["B"][of] + halves["W"][of] == whole for of, whole in BW.items())
    assert preset("1f1b-split", split).timeline().peak_bytes == (8, 6, 4, 2)
    with pytest.raises(BadInput, match="no step of F and BW alone"):
        with_halved_backward(split)
