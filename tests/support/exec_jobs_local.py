"""What the tests of messages within a machine run on gloo ranks (see `exec_ranks`)."""

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
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from zbsolve.exec import Pipeline
from zbsolve.exec.base.program import Message
from zbsolve.exec.transport import shared_memory as local
from zbsolve.exec.transport.format import PLAIN as DTYPES
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.transport.wires import CPU, Wires

from .exec_jobs import toy
from .exec_ranks import LIMIT
from .exec_tools import a_problem, random_schedule

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
