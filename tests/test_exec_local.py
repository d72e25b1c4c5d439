"""Messages between processes of one machine through memory that both map."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch

from zbsolve.exec import local
from zbsolve.exec.comm import DTYPES
from zbsolve.exec.local import FIRST, FREE, LARGE, LEAST, PARTS, PLACE, UNSAID, Inlet, Outlet, part, room
from zbsolve.exec.wires import BROKE, reason

from .exec_ranks import on_ranks

SOON, LONG = timedelta(milliseconds=30), timedelta(seconds=20)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    jobs = {"elsewhere": [1], "leaks": 100, "gone": None}
    found = on_ranks(2, "tests.exec_jobs_local:several", list(jobs.items()))
    return {name: [one[i] for one in found] for i, name in enumerate(jobs)}


@pytest.fixture
def ends() -> Iterator[tuple[Outlet, Inlet]]:
    """Both in this process."""
    outlet = Outlet(500)
    inlet = Inlet(outlet.offer, SOON)
    assert outlet.agreed(True) is outlet
    yield outlet, inlet
    outlet.close()
    inlet.close()


def test_messages_are_those_of_gloo_bit_by_bit() -> None:
    """Three ranks, all pairs, random shapes and types, taken in random orders."""
    jobs = [("messages", True), ("messages", False)]
    for here, gloo in on_ranks(3, "tests.exec_jobs_local:several", jobs):
        assert here["digest"] == gloo["digest"]
        assert here["right"] == gloo["right"] == 4 * 2 * 40
        assert (here["carriers"], gloo["carriers"]) == (4, 0)


def test_where_one_end_cannot_both_use_gloo_and_gradients_have_the_same_bits(two: dict[str, list[Any]]) -> None:
    for rank in two["elsewhere"]:
        assert len({one["digest"] for one in rank}) == 1
        assert rank[0]["carriers"] == rank[0]["open"] == 0
        assert rank[2]["carriers"] == 2
    assert [one[1]["carriers"] for one in two["elsewhere"]] == [1, 1]  # rank 0 can open what rank 1 offers


def test_nothing_stays_open_or_mapped(two: dict[str, list[Any]]) -> None:
    for rank in two["leaks"]:
        before, after_two, after_all, gone = rank["counts"]
        assert rank["carriers"] == 2
        assert before[1] == 0
        assert after_two[1] == 2
        assert after_all == after_two
        assert gone == before


def test_who_breaks_off_is_heard_though_a_child_holds_the_pipe(two: dict[str, list[Any]]) -> None:
    assert 0 < two["gone"][1]["seconds"] < 10


def test_any_size_and_order(ends: tuple[Outlet, Inlet]) -> None:
    """The sender far ahead or not at all; receives waited for in any order; places serve again."""
    outlet, inlet = ends
    rng, numbers = random.Random(1), torch.Generator().manual_seed(1)
    ahead: list[torch.Tensor] = []
    asked: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for i in range(2000):
        if rng.random() < 0.5 and len(ahead) < 40:
            shape = [rng.choice((0, 1, 5, 1000)), rng.choice((1, 7, 40))] if i % 50 else [rng.randint(1, 300_000)]
            ahead.append(torch.randn(shape, generator=numbers, dtype=torch.float64).to(DTYPES[i % len(DTYPES)]))
            outlet.send([ahead[-1]], 1, 0)
        elif ahead:
            buffer = torch.empty_like(ahead[0])
            asked.append((inlet.recv([buffer], 0, 0), buffer, ahead.pop(0)))
        if asked and rng.random() < 0.5:
            work, buffer, right = asked.pop(rng.randrange(len(asked)))
            work.wait(LONG)
            work.wait(LONG)  # a second time, as one may
            assert torch.equal(buffer, right)
    size = os.fstat(outlet._files[0].fileno()).st_size
    assert FIRST < size < 256 << 20  # 2,000 messages of up to 2,400,000 bytes, 40 at once


def test_places_serve_again(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    body, buffer = torch.arange(5000.0), torch.empty(5000)
    for i in range(100):
        outlet.send([body + i], 1, 0)
        inlet.recv([buffer], 0, 0).wait(LONG)
        assert buffer[0] == i
    assert len(outlet._rooms) == 1
    small, buffer = torch.arange(100.0), torch.empty(100)
    for _ in range(1000):
        outlet.send([small], 1, 0)
        inlet.recv([buffer], 0, 0).wait(LONG)
    assert len(outlet._rooms) < 1 + 2 * UNSAID / small.nbytes


def test_each_tag_keeps_its_own_order(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    buffers = [torch.empty(1) for _ in range(4)]
    for tag, value in ((7, 1.0), (0, 2.0), (7, 3.0), (0, 4.0)):
        outlet.send([torch.tensor([value])], 1, tag)
    asked = [inlet.recv([buffer], 0, tag) for buffer, tag in zip(buffers, (0, 7, 0, 7), strict=True)]
    for i in (2, 3, 0, 1):
        asked[i].wait(LONG)
    assert [float(buffer) for buffer in buffers] == [2, 1, 4, 3]


def test_errors_are_in_the_words_of_gloo(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    asked = [inlet.recv([buffer], 0, 0) for buffer in (torch.empty(1), torch.empty(1))]
    with pytest.raises(TimeoutError) as late:
        asked[0].wait(SOON)
    assert reason(late.value) == "nothing for 0.03 s"
    outlet.send([torch.ones(1)], 1, 0)
    outlet.close()
    with pytest.raises(ConnectionError) as broken:
        asked[1].wait(LONG)
    assert reason(broken.value) == BROKE
    asked[0].wait(LONG)  # what came before is there
    with pytest.raises(ValueError, match="closed file"):
        outlet.send([torch.ones(1)], 1, 0)


def test_what_came_before_a_break_off_is_taken_first(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    outlet.send([torch.ones(1)], 1, 0)
    outlet.break_off()
    one, other = torch.zeros(1), torch.zeros(1)
    inlet.recv([one], 0, 0).wait(LONG)
    assert float(one) == 1
    with pytest.raises(ConnectionError) as broken:
        inlet.recv([other], 0, 0).wait(LONG)
    assert reason(broken.value) == BROKE


def test_a_receiver_that_is_gone_is_heard(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    inlet.break_off()
    with pytest.raises(BrokenPipeError) as broken:
        outlet.send([torch.ones(1)], 1, 0)
    assert reason(broken.value) == BROKE


def test_other_bytes_than_expected_are_an_error_and_no_spoilt_memory(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    outlet.send([torch.ones(3)], 1, 0)
    buffer = torch.zeros(2)
    with pytest.raises(RuntimeError, match="12 bytes came in place of 8"):
        inlet.recv([buffer], 0, 0).wait(LONG)
    assert buffer.tolist() == [0, 0]


def test_no_wait_is_without_an_end(ends: tuple[Outlet, Inlet]) -> None:
    """As long as the inlet's own where none is given; also where that is longer than a poll can be."""
    outlet, inlet = ends
    buffer = torch.zeros(3)
    taking = inlet.recv([buffer], 0, 0)
    with pytest.raises(TimeoutError, match="Timed out waiting 30ms"):
        taking.wait()
    late = Timer(0.05, lambda: outlet.send([torch.ones(3)], 1, 0))
    late.start()
    taking.wait(timedelta(days=365))
    late.join(20)
    assert buffer.tolist() == [1, 1, 1]


def test_pipes_hold_what_steps_send() -> None:
    outlet = Outlet(1500)
    inlet = Inlet(outlet.offer, SOON)
    outlet.agreed(True)
    for _ in range(local.STEPS * local.EACH * 1500):
        assert outlet._places.write(PLACE.pack(0, 0, 0)) == PLACE.size
    inlet.close()
    outlet.close()
    assert Outlet.made(1 << 40) is None  # no pipe holds that


def test_no_offer_from_systems_without_such_files() -> None:
    with patch.object(os, "memfd_create", side_effect=OSError):
        assert Outlet.made(1) is None
    before = len(os.listdir("/proc/self/fd"))
    with patch.object(os, "pipe", side_effect=OSError):
        assert Outlet.made(1) is None
    assert Inlet.of(b"", SOON) is None
    outlet = Outlet(1)
    offer = outlet.offer
    assert outlet.agreed(False) is None
    assert Inlet.of(offer, SOON) is None  # closed by now
    assert len(os.listdir("/proc/self/fd")) == before


def test_places_that_the_pipe_cannot_say_are_said_later(ends: tuple[Outlet, Inlet]) -> None:
    outlet, inlet = ends
    body, buffer = torch.zeros(UNSAID // 4), torch.empty(UNSAID // 4)
    for _ in range(3):
        outlet.send([body], 1, 0)
    while inlet._freed.write(bytes(FREE.size)) is not None:
        pass
    for _ in range(2):
        inlet.recv([buffer], 0, 0).wait(LONG)
    assert len(inlet._emptied) == 2 * FREE.size
    while outlet._freed.read(1 << 16):
        pass
    inlet.recv([buffer], 0, 0).wait(LONG)
    assert inlet._emptied == b""
    outlet._look()
    assert len(outlet._free[room(UNSAID)]) == 3


def test_parts_make_a_whole() -> None:
    for size in (LARGE, LARGE + 1, LARGE + 8, 3 * LARGE - 64, 7 * LARGE + 100):
        assert part(size) % LEAST == 0
        assert size / PARTS <= part(size) < size / PARTS + LEAST
    assert (part(0), part(LARGE - 1)) == (0, LARGE - 1)


def test_rooms() -> None:
    assert [room(size) for size in (0, 1, LEAST, LEAST + 1, 4096, 4097)] == [LEAST, LEAST, LEAST, 2 * LEAST, 4096, 8192]
