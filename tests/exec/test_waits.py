"""Steps on GPUs end: no schedule's programs wait in a circle under the executor's rules, and planted errors do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import networkx
import numpy as np
import pytest
import torch
import torch.distributed as dist

from zbsolve import BadInput, Problem, Schedule, ZbsolveError, pipeline, preset, updates
from zbsolve.build import (
    Host,
    Vocabulary,
    with_exchange,
    with_links,
    with_offload,
    with_sharding,
    with_slices,
    with_vocabulary,
)
from zbsolve.exec import Pipeline
from zbsolve.exec.awaits import begins_and_ends, turns
from zbsolve.exec.base.program import Message, Program
from zbsolve.exec.device.rank_device import DeviceRows
from zbsolve.exec.exchange import Shared
from zbsolve.exec.handlers import HANDLERS
from zbsolve.exec.interpreter import Interpreter
from zbsolve.exec.loop import evaluation
from zbsolve.exec.lowering import lower
from zbsolve.exec.transport.mailbox import Mailbox
from zbsolve.exec.waits import check_ends, circle, graph_of
from zbsolve.problem.placement import mirror
from zbsolve.schedule.handover import Handover
from zbsolve.systems import problem_for
from zbsolve.systems.table import SYSTEMS

from ..support.exec_tools import random_schedule
from ..support.slice_problems import paper_order

PLACEMENTS: tuple[tuple[int, ...], ...] = (
    *((0, 1), (0, 1, 2), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0)),
    *((0, 1, 2, 2, 1, 0), (0, 1, 2, 0, 1, 2), (0, 2, 1, 3, 0, 1), (1, 0, 0, 2, 1), (0, 0, 1)),
)


def systems(ranks: tuple[int, ...], times: tuple[tuple[int, int, int], ...]) -> Iterator[tuple[str, Schedule]]:
    """Every system of the table by name, on so many ranks, with one to three times as many microbatches, where it allows
    them; messages take time or none."""
    for system, p, factor, each, comm in product(SYSTEMS, ranks, (1, 2, 3), times, (0, 2)):
        more = {"exchange": 1} if system.placement == "mirror" and comm else {}
        try:
            yield system.name, preset(system.name, problem_for(system.name, p, factor * p, *each, comm=comm, **more))
        except ZbsolveError:  # it does not allow these numbers
            continue


def step(rng: random.Random, low: int = 1, **more: Any) -> Problem:
    """A random step on two to four ranks, of `low` µs a pass at least."""
    placement = more.pop("placement", None) or rng.choice(PLACEMENTS)
    stages = len(placement) if isinstance(placement[0], int) else len(placement[0])

    def some(least: int) -> list[int]:
        return [rng.randint(least, rng.choice((1, 3, 20))) for _ in range(stages)]

    backward = {"BW": some(low)} if more.pop("fused", rng.random() < 0.5) else {"B": some(low), "W": some(0)}
    m = more.pop("microbatches", None) or rng.randint(1, 5)
    return pipeline(some(low), placement=placement, microbatches=m, comm=rng.choice((0, 0, 3, 20)), **backward, **more)


def sharded_vocabulary(rng: random.Random) -> Problem:
    """One or two barriers, with the embedding or without."""
    one = step(rng)

    def some(low: int, high: int) -> list[int]:
        return [rng.randint(low, high) for _ in range(one.ranks)]

    more = {"lookup": rng.choice([None, 1]), "barriers": rng.choice([1, 2]), "statistics": some(0, 2)}
    return with_vocabulary(one, Vocabulary(some(1, 9), some(0, 9), broadcast=some(0, 4), reduce=some(0, 9), **more))


def two_directions(rng: random.Random, **more: Any) -> Problem:
    """Microbatches go down the ranks and up."""
    return step(rng, placement=mirror(rng.choice((2, 4))), microbatches=2 * rng.randint(1, 3), **more)


def offloaded(rng: random.Random) -> Problem:
    """Copies on streams of each rank, or over a bus that ranks share."""
    host = Host(shared_bus=1) if rng.random() < 0.3 else Host()
    return with_offload(step(rng, fused=True, held_until_W=2), rng.randint(1, 9), rng.randint(1, 9), host=host)


KINDS: dict[str, Callable[[random.Random], Problem]] = {
    "plain": step,
    "passes without time": lambda rng: step(rng, low=0),
    "recompute": lambda rng: step(rng, recompute="all"),
    "updates": lambda rng: updates(step(rng, microbatches=4), 1, every=2, delay=rng.choice((1, 2))),
    "all-to-all": lambda rng: step(rng, AF=rng.randint(0, 9), AB=rng.randint(0, 9)),
    "links": lambda rng: with_links(step(rng), rng.choice(("rank", "pair")), rng.randint(0, 9)),
    "offload": offloaded,
    "sharding": lambda rng: with_sharding(
        step(rng), gather=rng.randint(0, 9), reduce=rng.randint(0, 9), parameter_bytes=3, gradient_bytes=2, gathers=1
    ),
    "sums over replicas": lambda rng: with_exchange(step(rng), rng.randint(0, 9), replicas=True),
    "two directions": two_directions,
    "sums over ranks": lambda rng: two_directions(rng, exchange=rng.randint(0, 9)),
    "vocabulary": sharded_vocabulary,
    "slices": lambda rng: with_slices(step(rng, placement=rng.choice(PLACEMENTS[:6]), microbatches=6), rng.choice((2, 3))),
}


def random_problem(kind: str, seed: int) -> Problem:
    """One of these kinds of steps."""
    return KINDS[kind](random.Random(f"{kind} {seed}"))


SEEDS = 80  # of each kind: with the orders of papers some 1,000 schedules


def of_system(name: str, ranks: int, microbatches: int, **options: int) -> tuple[Program, ...]:
    return lower(preset(name, problem_for(name, ranks, microbatches, **options)))


def on_two_ranks() -> tuple[Program, ...]:
    """1F1B, four microbatches."""
    return of_system("1f1b", 2, 4)


def edited(programs: tuple[Program, ...], rank: int, **fields: object) -> tuple[Program, ...]:
    """The same but for what one rank's program says."""
    return tuple(replace(one, **fields) if one.rank == rank else one for one in programs)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_every_system_ends(ranks: int) -> None:
    seen = set()
    for name, schedule in systems((ranks,), ((3, 4, 2),)):
        assert circle(lower(schedule)) == (), name
        seen.add(name)
    assert len(seen) > 20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved", "dualpipe", "v-half-vocab", "po-h", "slimpipe"])
def test_larger_steps_end(name: str) -> None:
    for microbatches in (16, 32):
        assert circle(of_system(name, 8, microbatches, comm=1)) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_random_schedules_end(kind: str) -> None:
    """Any order that the graph allows."""
    for seed in range(SEEDS):
        assert circle(lower(random_schedule(random_problem(kind, seed), seed))) == (), seed


@pytest.mark.slow
def test_slices_of_papers_end() -> None:
    """Without an exchange of attention, which GPUs refuse."""
    orders = [order for seed in range(SEEDS) if "exchange" not in (order := paper_order(seed, 150))[0]]
    assert len(orders) > SEEDS / 3
    for name, schedule in orders:
        assert circle(lower(schedule)) == (), name


def test_a_receive_is_enqueued_when_its_message_is_sent() -> None:
    """Rank 0 sends 0F1, and rank 1 1BW0, at one time: one of them receives first; none behind the pass that takes it."""
    programs = on_two_ranks()
    for program in programs:
        place = {message: i for i, one in enumerate(program.actions) for message in one.receives}
        for i, action in enumerate(program.actions):
            if isinstance(action.takes, Message):
                assert place[action.takes] <= i
    assert [[m.before for m in one.receives] for one in programs[0].actions[:3]] == [[], [], ["1BW0"]]
    assert [[m.before for m in one.receives] for one in programs[1].actions[:3]] == [["0F0"], ["0F1"], []]


def received(programs: tuple[Program, ...], ahead: bool) -> tuple[Program, ...]:
    """Receives are enqueued when their memory is reserved (`ahead`), or else with the passes that take them."""
    each = [tuple(replace(one, receives=one.posts if ahead else ()) for one in program.actions) for program in programs]
    return tuple(replace(program, actions=actions) for program, actions in zip(programs, each, strict=True))


@pytest.mark.parametrize("ahead", [True, False])
def test_receives_in_other_places_hang(ahead: bool) -> None:
    """Ahead, what was seen on two GPUs: the host stands in a call behind a receive whose sender needs what it has not
    launched. With their takers, where messages cross: each host stands in a call behind its send."""
    found = circle(received(on_two_ranks(), ahead))
    assert any("1BW0 → 0BW0" in line for line in found)


def test_receives_out_of_turn_hang() -> None:
    programs = on_two_ranks()
    first, second, *rest = programs[1].incoming[0]
    assert circle(edited(programs, 1, incoming={0: (second, first, *rest)})) != ()


def test_a_receive_that_is_missing_hangs() -> None:
    programs = on_two_ranks()
    last = programs[1].incoming[0][-1]
    actions = tuple(
        replace(
            action,
            takes=None if action.takes is last else action.takes,
            receives=tuple(one for one in action.receives if one is not last),
        )
        for action in programs[1].actions
    )
    assert circle(edited(programs, 1, actions=actions)) == ("message 0F3 → 1F3 is through",)


def test_a_send_that_must_be_over_at_once_waits_in_no_circle() -> None:
    """In the one order its receiver comes before: each pass may wait until what the one before it sent is through."""
    programs = []
    for program in of_system("chimera", 2, 2, comm=2, exchange=1):
        given = zip(((), *(action.sends for action in program.actions)), program.actions, strict=False)
        programs.append(replace(program, actions=tuple(replace(action, gone=sends) for sends, action in given)))
    assert circle(programs) == ()
    late = received(tuple(programs), ahead=False)
    assert any("waits for sends over before" in line for line in circle(late))


def test_collectives_in_two_orders_hang() -> None:
    programs = of_system("1f1b-vocab", 3, 3)
    actions = list(programs[2].actions)
    one, other = [i for i, action in enumerate(actions) if action.kind == "VB"][:2]
    actions[one], actions[other] = actions[other], actions[one]
    found = circle(edited(programs, 2, actions=tuple(actions)))
    assert any(line.startswith("collective VB") for line in found)


def test_a_collective_without_one_of_its_ranks_hangs() -> None:
    programs = of_system("1f1b-vocab", 3, 3)
    actions = tuple(action for action in programs[2].actions if action.name[1:] != "VR2")
    assert circle(edited(programs, 2, actions=actions)) == ("collective VR2 ends",)


def test_collectives_that_begin_as_soon_as_a_rank_can_hang() -> None:
    """What `awaits.together` is for: a host that begins early may stand there while others need it."""
    hung = 0
    for seed in range(40):
        schedule = random_schedule(random_problem("sums over ranks", seed), seed)
        assert circle(lower(schedule)) == ()
        with patch("zbsolve.exec.awaits.together", lambda schedule, begin: begin):
            hung += bool(circle(lower(schedule)))
    assert hung > 0


@pytest.mark.parametrize("seed", range(8))
def test_collectives_are_begun_in_the_schedules_order(seed: int) -> None:
    """Each begins when the last of its ranks can (`awaits.together`), which alone would let later ones pass earlier ones."""
    schedule = random_schedule(random_problem("vocabulary", seed), seed)
    joins = set(np.array(schedule.problem.names)[schedule.problem.passes.that(together=True)].tolist())
    for program in lower(schedule):
        place = {action.name: i for i, action in enumerate(program.actions) if action.name in joins}
        for names in schedule.order.values():
            assert (own := [place[name] for name in names if name in place]) == sorted(own)


@pytest.mark.parametrize(("seed", "W"), [(609, [20, 20, 1, 0]), (1268, [0, 20, 0, 0])])
def test_a_message_comes_before_the_pass_that_takes_it_where_a_sum_waits_for_a_long_pass(seed: int, W: list[int]) -> None:
    """The sum waits for a W of one rank, and a pass of another rank for the sum: so does what takes its message."""
    B = [0, 0, int(seed == 1268), 0]
    problem = pipeline([1] * 4, B, W, placement=mirror(4), microbatches=4, exchange=0)
    schedule = random_schedule(problem, seed)
    begin = begins_and_ends(schedule)[0]
    handover = Handover.of(schedule, begin)
    place = turns(handover, begin)
    assert (place[handover.before] < place[handover.after]).all()


def all_schedules() -> Iterator[Schedule]:
    for kind in ("plain", "offload", "vocabulary", "two directions"):
        for seed in range(10):
            yield random_schedule(random_problem(kind, seed), seed)


def test_a_circle_is_one_and_there_is_one_where_networkx_finds_one() -> None:
    for schedule in all_schedules():
        programs = lower(schedule)
        for some in (programs, received(programs, True), received(programs, False)):
            graph = graph_of(some)
            edges = networkx.DiGraph((before, i) for i, some in enumerate(graph.before) for before in some)
            found = graph.circle()
            assert (found == ()) == networkx.is_directed_acyclic_graph(edges)
            number = {text: i for i, text in enumerate(graph.texts)}
            for before, after in zip((*found[-1:], *found), found, strict=False):
                assert number[before] in graph.before[number[after]]


# --- The executor's own calls are those of the graph ---


class RankHost(Mailbox):
    """One rank's host, which writes down what it calls in a step: the executor's own interpreter, mailbox and rows of a
    device, on a device that does nothing. A message stands for its row."""

    def __init__(self, program: Program) -> None:
        self.calls, self.begun = list[str](), set[str]()
        self.wires = SimpleNamespace(rank=program.rank, receive=self.receives, send=self.sends)
        marks = SimpleNamespace(computing=Stream(), mark=lambda stream: 0, fixed=False)
        rows = DeviceRows(self.wires, torch.device("cuda"), marks)  # type: ignore[arg-type]
        super().__init__(self.wires, program.incoming, torch.device("cpu"), 1.0, rows=rows)  # type: ignore[arg-type]
        part = SimpleNamespace(side=SimpleNamespace(settle=self.settle))
        state: Any = SimpleNamespace(parts=(), stages={}, part=lambda kind: part, find=lambda kind: None)
        self.interpreter = Interpreter(program, state, self)
        self.interpreter._work = {kind: (HANDLERS[kind], self.launch) for kind in self.interpreter._work}

    def run(self) -> list[str]:
        self.begin({})
        self.interpreter.run_all(self.interpreter.program.actions)
        return self.calls

    def _agreed(self, message: Message) -> Any:
        return SimpleNamespace(buffer=lambda device: message, unpack=lambda row: row)

    def send(self, message: Message, value: Any) -> None:
        self._rows.send(message, message)  # type: ignore[arg-type]

    def sends(self, row: Any, destination: int) -> Any:
        self.calls.append(f"sends {row.before} → {row.after}")
        return SimpleNamespace(wait=self.over)

    def receives(self, row: Any, source: int) -> Any:
        self.calls.append(f"receives {row.before} → {row.after}")
        return SimpleNamespace(wait=lambda: None)

    def over(self) -> None:
        self.note("takes sends over before")

    def settle(self, name: str, sure: bool) -> None:
        if sure and name in self.begun:
            self.note("takes work over before")

    def note(self, what: str) -> None:
        """Once for a pass."""
        line = f"{what} {self.interpreter._now}"
        self.calls += [] if line in self.calls else [line]

    def launch(self, state: Any, action: Any, given: Any) -> Any:
        self.calls.append(f"launches {action.name}")
        if HANDLERS[action.kind].settle is not None:
            self.begun.add(action.name)
        return action.name if action.sends or action.hands else None


class Stream:
    """Of a device that does nothing."""

    def __init__(self, device: Any = None) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self) -> int:
        return 0


@pytest.mark.parametrize("kind", KINDS)
def test_hosts_call_what_the_graph_says_and_in_that_order(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    for seed in range(6):
        programs = lower(random_schedule(random_problem(kind, seed), seed))
        texts = graph_of(programs).texts
        for program in programs:
            head = f"rank {program.rank}'s host "
            assert RankHost(program).run() == [text.removeprefix(head) for text in texts if text.startswith(head)], seed


def test_a_step_that_may_hang_is_refused_on_gpus_alone() -> None:
    late = received(on_two_ranks(), ahead=False)
    check_ends(late, torch.device("cpu"))
    check_ends(on_two_ranks(), torch.device("cuda"))
    with pytest.raises(BadInput, match="on GPUs its ranks would wait for each other: message 0F1"):
        check_ends(late, torch.device("cuda"))


def test_rounds_of_evaluation_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[list[str]]()

    def looked(programs: Any, device: torch.device) -> None:
        seen.append([action.name for program in programs for action in program.actions])

    monkeypatch.setattr(evaluation, "check_ends", looked)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        problem = pipeline([1], BW=[1], placement=(0,), microbatches=2)
        pipe = Pipeline([torch.nn.Linear(2, 2)], preset("1f1b", problem), loss=torch.nn.functional.mse_loss)
        for _ in range(2):  # the round is made once
            assert pipe.evaluate(torch.zeros(4, 2), pipe.forward(torch.zeros(4, 2))) == 0
    finally:
        dist.destroy_process_group()
    assert seen == [["0F0", "0F1"]] * 2  # without a loss, and with it


def test_sums_over_tied_stages_start_when_the_step_ends() -> None:
    """Ranks might come to their passes C in different orders."""
    started, shared = list[str](), object.__new__(Shared)
    shared.exchanged = frozenset({0, 3})
    buckets = {"one stage": (0,), "tied": (0, 3), "another": (1,)}
    shared._buckets = [
        SimpleNamespace(stages=stages, start=lambda name=name: started.append(name)) for name, stages in buckets.items()
    ]  # type: ignore[misc]
    for stage in (0, 3, 1):
        shared.exchange(stage)
    assert started == ["one stage"]
