"""What `import zbsolve.exec.torchtitan` does to torchtitan, of which a stand-in is here. The package itself trains with it
in `tests/interchange/test_torchtitan_package.py`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from zbsolve import BadInput

from ..support.exports import modules

OURS, STAGES = "zbsolve.exec.torchtitan", "torchtitan.distributed.pipeline_parallel"


def build(*, rows: dict[int, list[str | None]] | None) -> Any:
    return SimpleNamespace() if rows is None else SimpleNamespace(pipeline_order=rows)


def titan_stages() -> dict[str, Any]:
    """The stand-in of torchtitan's module. (The import of torch's takes a second.)"""
    from torch.distributed.pipelining import PipelineStage

    return {STAGES: {"PipelineStage": PipelineStage, "_build_pipeline_schedule": build}}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one, and our module as if nobody had imported it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.delitem(sys.modules, OURS, raising=False)
    yield
    sys.modules.pop(OURS, None)
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_stages_made_after_the_import_are_split() -> None:
    with modules(titan_stages()):
        titan = import_module(STAGES)
        before = titan.PipelineStage(nn.Linear(3, 3), 0, 1, torch.device("cpu"))
        import_module(OURS)
        made = titan.PipelineStage(nn.Linear(3, 3), 0, 1, device=torch.device("cpu"))
        hooks = titan.PipelineStage, titan._build_pipeline_schedule
        import_module(OURS).install()
        assert hooks == (titan.PipelineStage, titan._build_pipeline_schedule)
    assert isinstance(made, titan_stages()[STAGES]["PipelineStage"])
    assert made.dw_builder is not None
    assert before.dw_builder is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("rows", "warned"),
    [({0: ["0F0", "0I0", None, "0W0"]}, False), ({0: ["0F0", "0B0", "(0F1;1B0)OVERLAP_F_B"]}, True), (None, True)],
)
def test_a_schedule_without_w_is_told(rows: dict[int, list[str | None]] | None, warned: bool) -> None:
    with modules(titan_stages()):
        import_module(OURS)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            import_module(STAGES)._build_pipeline_schedule(rows=rows)
    line = "schedule: no W in it, so zbsolve.exec.torchtitan has no backward to split"
    assert [str(one.message) for one in said] == [line] * warned


@pytest.mark.usefixtures("alone")
def test_another_torchtitan_is_refused() -> None:
    with (
        modules({STAGES: {"_build_pipeline_schedule": build}}),
        pytest.raises(BadInput, match=r"^torchtitan\.distributed\.pipeline_parallel: no PipelineStage in this torchtitan"),
    ):
        import_module(OURS)


@pytest.mark.usefixtures("alone")
def test_without_torchtitan_python_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    with pytest.raises(ModuleNotFoundError, match="torchtitan"):
        import_module(OURS)
