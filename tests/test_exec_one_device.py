"""Several ranks on one device: streams, partitions, and whole steps on streams that take turns."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from zbsolve import BadInput
from zbsolve.exec.failure import RunFailed
from zbsolve.exec.partitions import Partitions, share, split
from zbsolve.exec.streams import Turns


def test_turns_keep_the_order_of_a_stream_and_wait_for_others() -> None:
    done: list[str] = []
    streams = Turns(2, pick=max)  # always the last stream that can go on
    streams.begin()
    first = streams.launch(0, lambda: done.append("a"))
    streams.launch(0, lambda: done.append("b"))
    waiting = streams.launch(1, lambda: done.append("c"), after=[first])
    streams.launch(1, lambda: done.append("d"))
    assert not done  # nothing runs before finish
    streams.finish()
    assert done == ["a", "c", "d", "b"]
    assert 0 <= streams.span(first)[0] <= streams.span(first)[1] <= streams.span(waiting)[0]


def test_streams_that_wait_for_each_other_are_found() -> None:
    streams, other = Turns(2), Turns(1)
    streams.launch(1, lambda: None, after=[other.launch(0, lambda: None)])
    with pytest.raises(RunFailed, match=r"ranks \[1\] wait"):
        streams.finish()


@pytest.mark.parametrize(
    ("sms", "ranks", "least", "multiple", "size"),
    [(132, 2, 8, 8, 64), (132, 4, 8, 8, 32), (132, 8, 8, 8, 16), (108, 4, 4, 2, 26), (132, 16, 8, 8, 8)],
)
def test_parts_of_a_device(sms: int, ranks: int, least: int, multiple: int, size: int) -> None:
    assert share(sms, ranks, least, multiple) == size


def test_too_many_parts() -> None:
    with pytest.raises(BadInput, match="20 SMs do not make 4 parts of at least 8"):
        share(20, 4, 8, 8)


class Driver:
    """Stands in for cuda.bindings.driver: keeps the calls; `refuses` names one that fails."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="sm")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __init__(self, refuses: str = "", **sm: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.refuses = refuses
        self.whole = SimpleNamespace(sm=SimpleNamespace(smCount=132, **sm))

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            if name == self.refuses:
                return (999,)
            if name == "cuDevSmResourceSplitByCount":
                groups, _, _, size = arguments
                return 0, [SimpleNamespace(sm=SimpleNamespace(smCount=size)) for _ in range(groups)], groups, None
            made = {"cuInit": (), "cuDeviceGetDevResource": (self.whole,)}
            return 0, *made.get(name, (len(self.calls),))

        return call


@pytest.mark.parametrize("sm", [{}, {"minSmPartitionSize": 8, "smCoscheduledAlignment": 8}])
def test_the_device_is_split_once(sm: dict[str, int]) -> None:
    driver = Driver(**sm)
    contexts, handles, sms = split(driver, ranks=4, device=0, major=9)
    assert sms == (32,) * 4
    assert len(set(contexts)) == len(set(handles)) == 4
    assert [call[0] for call in driver.calls].count("cuDevSmResourceSplitByCount") == 1
    created = [call[1] for call in driver.calls if call[0] == "cuGreenCtxStreamCreate"]
    assert created == contexts


def test_what_the_driver_refuses_is_said() -> None:
    with pytest.raises(RunFailed, match="cuGreenCtxCreate: 999"):
        split(Driver(refuses="cuGreenCtxCreate"), ranks=2, device=0, major=9)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")
def test_without_a_device_it_is_said() -> None:
    with pytest.raises(BadInput, match="torch sees no CUDA device"):
        Partitions(2)
