"""Messages between processes of one machine through memory that both map."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from datetime import timedelta
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch

from zbsolve.exec.transport import shared_memory as local
from zbsolve.exec.transport.format import PLAIN as DTYPES
from zbsolve.exec.transport.shared_memory import (
    FIRST_SIZE,
    FREED,
    LARGE_BYTES,
    MIN_SLOT,
    PARTS,
    SLOT,
    UNREPORTED_BYTES,
    ShmReceiver,
    ShmSender,
    part_size,
    slot_size,
)
from zbsolve.exec.transport.wires import BROKE, reason

from ..support.exec_ranks import jobs_on, on_ranks

SOON, LONG = timedelta(milliseconds=30), timedelta(seconds=300)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return jobs_on(2, "tests.support.exec_jobs_local", {"elsewhere": [1], "leaks": 100, "gone": None})


@pytest.fixture
def ends() -> Iterator[tuple[ShmSender, ShmReceiver]]:
    """Both in this process."""
    sender = ShmSender(500)
    receiver = ShmReceiver(sender.offer, SOON)
    assert sender.agreed(True) is sender
    yield sender, receiver
    sender.close()
    receiver.close()


@pytest.mark.slow
def test_messages_are_those_of_gloo_bit_by_bit() -> None:
    """Three ranks, all pairs, random shapes and types, taken in random orders."""
    jobs = [("messages", True), ("messages", False)]
    for here, gloo in on_ranks(3, "tests.support.exec_jobs_local", jobs):
        assert here["digest"] == gloo["digest"]
        assert here["right"] == gloo["right"] == 4 * 2 * 40
        assert (here["carriers"], gloo["carriers"]) == (4, 0)


@pytest.mark.slow
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
    assert two["gone"] == [False, True]


def test_any_size_and_order(ends: tuple[ShmSender, ShmReceiver]) -> None:
    """The sender far ahead or not at all; receives waited for in any order; slots serve again."""
    sender, receiver = ends
    rng, numbers = random.Random(1), torch.Generator().manual_seed(1)
    ahead: list[torch.Tensor] = []
    asked: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for i in range(2000):
        if rng.random() < 0.5 and len(ahead) < 40:
            shape = [rng.choice((0, 1, 5, 1000)), rng.choice((1, 7, 40))] if i % 50 else [rng.randint(1, 300_000)]
            ahead.append(torch.randn(shape, generator=numbers, dtype=torch.float64).to(DTYPES[i % len(DTYPES)]))
            sender.send([ahead[-1]], 1, 0)
        elif ahead:
            buffer = torch.empty_like(ahead[0])
            asked.append((receiver.recv([buffer], 0, 0), buffer, ahead.pop(0)))
        if asked and rng.random() < 0.5:
            work, buffer, right = asked.pop(rng.randrange(len(asked)))
            work.wait(LONG)
            work.wait(LONG)  # a second time, as one may
            assert torch.equal(buffer, right)
    size = os.fstat(sender._files[0].fileno()).st_size
    assert FIRST_SIZE < size < 256 << 20  # 2,000 messages of up to 2,400,000 bytes, 40 at once


def test_slots_serve_again(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    body, buffer = torch.arange(5000.0), torch.empty(5000)
    for i in range(100):
        sender.send([body + i], 1, 0)
        receiver.recv([buffer], 0, 0).wait(LONG)
        assert buffer[0] == i
    assert len(sender._sizes) == 1
    small, buffer = torch.arange(100.0), torch.empty(100)
    for _ in range(1000):
        sender.send([small], 1, 0)
        receiver.recv([buffer], 0, 0).wait(LONG)
    assert len(sender._sizes) < 1 + 2 * UNREPORTED_BYTES / small.nbytes


def test_each_tag_keeps_its_own_order(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    buffers = [torch.empty(1) for _ in range(4)]
    for tag, value in ((7, 1.0), (0, 2.0), (7, 3.0), (0, 4.0)):
        sender.send([torch.tensor([value])], 1, tag)
    asked = [receiver.recv([buffer], 0, tag) for buffer, tag in zip(buffers, (0, 7, 0, 7), strict=True)]
    for i in (2, 3, 0, 1):
        asked[i].wait(LONG)
    assert [float(buffer) for buffer in buffers] == [2, 1, 4, 3]


def test_errors_are_in_the_words_of_gloo(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    asked = [receiver.recv([buffer], 0, 0) for buffer in (torch.empty(1), torch.empty(1))]
    with pytest.raises(TimeoutError) as late:
        asked[0].wait(SOON)
    assert reason(late.value) == "nothing for 0.03 s"
    sender.send([torch.ones(1)], 1, 0)
    sender.close()
    with pytest.raises(ConnectionError) as broken:
        asked[1].wait(LONG)
    assert reason(broken.value) == BROKE
    asked[0].wait(LONG)  # what came before is there
    with pytest.raises(ValueError, match="closed file"):
        sender.send([torch.ones(1)], 1, 0)


def test_what_came_before_a_break_off_is_taken_first(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    sender.send([torch.ones(1)], 1, 0)
    sender.break_off()
    one, other = torch.zeros(1), torch.zeros(1)
    receiver.recv([one], 0, 0).wait(LONG)
    assert float(one) == 1
    with pytest.raises(ConnectionError) as broken:
        receiver.recv([other], 0, 0).wait(LONG)
    assert reason(broken.value) == BROKE


def test_a_receiver_that_is_gone_is_heard(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    receiver.break_off()
    with pytest.raises(BrokenPipeError) as broken:
        sender.send([torch.ones(1)], 1, 0)
    assert reason(broken.value) == BROKE


def test_other_bytes_than_expected_are_an_error_and_no_spoilt_memory(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    sender.send([torch.ones(3)], 1, 0)
    buffer = torch.zeros(2)
    with pytest.raises(RuntimeError, match="12 bytes came in place of 8"):
        receiver.recv([buffer], 0, 0).wait(LONG)
    assert buffer.tolist() == [0, 0]


def test_no_wait_is_without_an_end(ends: tuple[ShmSender, ShmReceiver]) -> None:
    """As long as the receiver's own where none is given; also where that is longer than a poll can be."""
    sender, receiver = ends
    buffer = torch.zeros(3)
    work = receiver.recv([buffer], 0, 0)
    with pytest.raises(TimeoutError, match="Timed out waiting 30ms"):
        work.wait()
    late = Timer(0.05, lambda: sender.send([torch.ones(3)], 1, 0))
    late.start()
    work.wait(timedelta(days=365))
    late.join(300)
    assert buffer.tolist() == [1, 1, 1]


def test_pipes_hold_what_steps_send() -> None:
    sender = ShmSender(1500)
    receiver = ShmReceiver(sender.offer, SOON)
    sender.agreed(True)
    for _ in range(local.STEPS * local.WORDS * 1500):
        assert sender._slots.write(SLOT.pack(0, 0, 0)) == SLOT.size
    receiver.close()
    sender.close()
    assert ShmSender.opened(1 << 40) is None  # no pipe holds that


def test_no_offer_from_systems_without_such_files() -> None:
    with patch.object(os, "memfd_create", side_effect=OSError):
        assert ShmSender.opened(1) is None
    gc.collect()  # what other tests left closes nothing meanwhile
    before = len(os.listdir("/proc/self/fd"))
    with patch.object(os, "pipe", side_effect=OSError):
        assert ShmSender.opened(1) is None
    assert ShmReceiver.of(b"", SOON) is None
    sender = ShmSender(1)
    offer = sender.offer
    assert sender.agreed(False) is None
    assert ShmReceiver.of(offer, SOON) is None  # closed by now
    assert len(os.listdir("/proc/self/fd")) == before


def test_slots_that_the_pipe_cannot_name_are_named_later(ends: tuple[ShmSender, ShmReceiver]) -> None:
    sender, receiver = ends
    body, buffer = torch.zeros(UNREPORTED_BYTES // 4), torch.empty(UNREPORTED_BYTES // 4)
    for _ in range(3):
        sender.send([body], 1, 0)
    while receiver._freed.write(bytes(FREED.size)) is not None:
        pass
    for _ in range(2):
        receiver.recv([buffer], 0, 0).wait(LONG)
    assert len(receiver._emptied) == 2 * FREED.size
    while sender._freed.read(1 << 16):
        pass
    receiver.recv([buffer], 0, 0).wait(LONG)
    assert receiver._emptied == b""
    sender._collect_freed()
    assert len(sender._free[slot_size(UNREPORTED_BYTES)]) == 3


def test_parts_make_a_whole() -> None:
    for size in (LARGE_BYTES, LARGE_BYTES + 1, LARGE_BYTES + 8, 3 * LARGE_BYTES - 64, 7 * LARGE_BYTES + 100):
        assert part_size(size) % MIN_SLOT == 0
        assert size / PARTS <= part_size(size) < size / PARTS + MIN_SLOT
    assert (part_size(0), part_size(LARGE_BYTES - 1)) == (0, LARGE_BYTES - 1)


def test_slot_sizes() -> None:
    assert [slot_size(size) for size in (0, 1, MIN_SLOT, MIN_SLOT + 1, 4096, 4097)] == [
        MIN_SLOT,
        MIN_SLOT,
        MIN_SLOT,
        2 * MIN_SLOT,
        4096,
        8192,
    ]
