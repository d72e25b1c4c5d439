"""Messages between processes of one machine through memory that both map."""

from __future__ import annotations

import gc
import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from threading import Timer
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from zbsolve.exec import Pipeline
from zbsolve.exec.base.program import Message
from zbsolve.exec.transport import shared_memory as local
from zbsolve.exec.transport.format import PLAIN as DTYPES
from zbsolve.exec.transport.mailbox import Mailbox
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
from zbsolve.exec.transport.wires import BROKE, CPU, Wires, reason

from ..support.exec_ranks import LIMIT, jobs_on, on_ranks
from ..support.exec_tools import a_problem, random_schedule, toy

RANKS, MICROBATCHES = 3, 40


def _messages(source: int, destination: int) -> list[Message]:
    names = [f"{source}{destination}.{i}" for i in range(MICROBATCHES)]
    return [Message(name, name, source, destination, 10 * source + destination, i, False) for i, name in enumerate(names)]


def _body(message: Message, step: int) -> Tensor:
    """Any shape and type, some of them empty, some not contiguous: each end knows what comes."""
    rng = random.Random(f"{message.before} {step % 2}")
    shape = [rng.choice((0, 1, 3, 17, 64, 200)) for _ in range(rng.randint(0, 3))]
    numbers = torch.Generator().manual_seed(rng.randrange(1 << 30))
    body = torch.randn(shape, generator=numbers, dtype=torch.float64).to(rng.choice(DTYPES))
    return body.transpose(0, -1) if shape and rng.random() < 0.5 else body


def messages(rank: int, paired: bool) -> dict[str, Any]:
    """Each rank sends to each other one; what comes is posted and taken in an order of its own, in four steps of two
    kinds. A digest of all that came, and how many carriers there are."""
    pairs = [(a, b) for a in range(RANKS) for b in range(RANKS) if a != b]
    wires = Wires.of()
    wires = wires.paired(dict.fromkeys(pairs, MICROBATCHES)) if paired else wires
    incoming = {a: tuple(_messages(a, b)) for a, b in pairs if b == rank}
    mailbox, found, right = Mailbox(wires, incoming, CPU, LIMIT), hashlib.sha256(), 0
    for step in range(4):
        rng = random.Random(100 * step + rank)
        mailbox.begin({i: 2 * i + step % 2 for i in range(MICROBATCHES)})
        todo = [(m, mailbox.send) for a, b in pairs if a == rank for m in _messages(a, b)]
        rng.shuffle(todo)
        for message, send in sorted(todo, key=lambda one: one[0].part):
            send(message, _body(message, step))
        came = [m for sent in incoming.values() for m in sent]
        rng.shuffle(came)
        for message in came:
            if rng.random() < 0.5:
                mailbox.post(rng.choice([m for m in came if m.source == message.source]))
            tensor, _ = mailbox.take(message)
            expected = _body(message, step)
            right += tensor.dtype == expected.dtype and torch.equal(tensor, expected)
            found.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        mailbox.flush()
    wires.close()
    return {"digest": found.hexdigest(), "right": right, "carriers": len(wires.pairs)}


def _trained(steps: int) -> tuple[Pipeline, str]:
    """Some steps with two stages a rank; a digest of the gradients."""
    schedule = random_schedule(a_problem((0, 1, 1, 0), 3, layers=4), 1)
    runner = Pipeline(toy, schedule, loss=nn.functional.mse_loss)
    for step in range(steps):
        x = torch.linspace(-1, 1, 24).reshape(6, 4) + step
        runner.step(x, x.flip(0))
    bits = b"".join(p.grad.numpy().tobytes() for p in runner.parameters() if p.grad is not None)
    return runner, hashlib.sha256(bits).hexdigest()


def leaks(rank: int, steps: int) -> dict[str, Any]:
    """Descriptors and mapped memory: before a pipeline, after two steps, after `steps`, and when it is gone."""

    def held() -> tuple[int, int]:
        gc.collect()
        with open("/proc/self/maps", encoding="utf-8") as maps:
            return len(os.listdir("/proc/self/fd")), sum("memfd:zbsolve" in line for line in maps)

    first = _trained(1)[0]  # whatever gloo and torch open once
    carriers = len(first.peers.wires.pairs)
    del first
    counts = [held()]
    runner, _ = _trained(2)
    counts.append(held())
    x = torch.ones(6, 4)
    for _ in range(steps):
        runner.step(x, x)
    counts.append(held())
    result = runner.step(x, x)  # what is kept of a step keeps nothing open
    del runner
    counts.append(held())
    return {"counts": counts, "carriers": carriers, "loss": result.loss}


@contextmanager
def _elsewhere(broken: bool) -> Iterator[None]:
    """Numbers of another process's descriptors mean something else here, as in another container."""
    name = local._name

    def other(process: int | str, number: int) -> str:
        return name("self", 0) if process != "self" else name(process, number)

    with patch.object(local, "_name", other if broken else name):
        yield


def elsewhere(rank: int, which: list[int]) -> list[dict[str, Any]]:
    """Trained where no rank can open what others offer, then where rank `which` cannot, then where all can."""
    found = []
    for broken in (range(2), which, ()):
        before = len(os.listdir("/proc/self/fd"))
        with _elsewhere(rank in broken):
            runner, digest = _trained(3)
        carriers = len(runner.peers.wires.pairs)
        runner.wires.control.barrier().wait()
        open_here = len(os.listdir("/proc/self/fd")) - before
        found.append({"digest": digest, "carriers": carriers, "open": open_here})
    return found


def gone(rank: int, argument: None) -> bool:
    """Rank 0 breaks off while rank 1 waits, and a child of rank 0 still holds what it inherited. Whether this rank hears of
    it, and not only that nothing comes."""
    wires = Wires.of().paired({(0, 1): 1})
    end, child = wires.pairs[0, 1], 0
    if rank == 0:
        child = os.fork()
        while not child:
            signal.pause()  # until it is killed
    wires.control.barrier().wait()
    heard = False
    if rank:
        try:
            end.recv([torch.empty(3)], 0, 0).wait(timedelta(seconds=LIMIT / 4))
        except ConnectionError:
            heard = True
        wires.control.barrier().wait()
    else:
        time.sleep(0.2)  # so that the other one mostly waits
        end.break_off()
        wires.control.barrier().wait()
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return heard


SOON, LONG = timedelta(milliseconds=30), timedelta(seconds=300)


@pytest.fixture(scope="module")
def two() -> dict[str, list[Any]]:
    return jobs_on(2, __name__, {"elsewhere": [1], "leaks": 100, "gone": None})


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
    for here, gloo in on_ranks(3, __name__, jobs):
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
