"""Steps on GPUs end: no schedule's programs wait in a circle under the executor's rules, and planted errors do."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from unittest.mock import patch

import networkx
import pytest

from zbsolve import Schedule, preset
from zbsolve.exec.base.program import Message, Program
from zbsolve.exec.lowering import lower
from zbsolve.exec.waits import EXECUTOR, Rules, circle, graph_of
from zbsolve.systems import problem_for

from ..support.exec_tools import random_schedule
from ..support.slice_problems import paper_order
from ..support.waiting import KINDS, random_problem, systems

SEEDS = 80  # of each kind: with the orders of papers some 1,000 schedules
MILD = Rules(syncing=False, queues=0)
EVERY = [
    Rules(syncing=syncing, queues=queues, blocking=blocking, lazy=lazy, behind=behind, both_ways=both_ways)
    for syncing, queues, blocking, lazy, behind, both_ways in product((False, True), (0, 1, 2), *[(False, True)] * 4)
]


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
    """Any order that the graph allows, under the worst rules; a few under all others too."""
    for seed in range(SEEDS):
        programs = lower(random_schedule(random_problem(kind, seed), seed))
        assert circle(programs) == (), seed
        for rules in EVERY if seed < 3 else ():
            assert circle(programs, rules) == (), (seed, rules)


@pytest.mark.slow
def test_slices_of_papers_end_with_and_without_an_exchange() -> None:
    exchanged = 0
    for seed in range(SEEDS):
        name, schedule = paper_order(seed, 150)
        exchanged += "exchange" in name
        assert circle(lower(schedule)) == (), name
    assert exchanged > 5


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


def test_receives_ahead_hang_where_a_call_waits_for_the_device() -> None:
    """What was seen on two GPUs: the host stands in a call behind a receive whose sender needs what it has not launched."""
    assert circle(on_two_ranks(), replace(MILD, receives="ahead")) == ()
    found = circle(on_two_ranks(), replace(MILD, receives="ahead", syncing=True))
    assert found == (
        "message 1BW0 → 0BW0 is through",
        "rank 0's host launches 0F1",
        "rank 0's device runs 0F1",
        "rank 0's device sends 0F1 → 1F1",
        "message 0F1 → 1F1 is through",
        "rank 1's host launches 1BW0",
        "rank 1's device runs 1BW0",
        "rank 1's device sends 1BW0 → 0BW0",
    )


def test_receives_with_their_takers_hang_where_messages_cross() -> None:
    """Each host stands in a call behind its send, for the other has not come to its receive."""
    assert circle(on_two_ranks(), replace(MILD, receives="with taker")) == ()
    found = circle(on_two_ranks(), replace(MILD, receives="with taker", syncing=True))
    assert {"message 0F1 → 1F1 is through", "message 1BW0 → 0BW0 is through"} <= set(found)


def test_receives_with_their_takers_hang_in_one_hardware_queue() -> None:
    programs = of_system("interleaved", 2, 4)
    rules = replace(MILD, receives="with taker")
    assert circle(programs, rules) == ()
    assert circle(programs, replace(rules, queues=1))


def test_communicators_made_by_their_first_message_hang() -> None:
    for name, rules in (
        ("gpipe", Rules(receives="ahead", syncing=False, queues=0, blocking=True)),
        ("chimera", Rules(receives="ahead", syncing=False, queues=0)),
        ("chimera", Rules(receives="with taker", syncing=False, queues=0)),
    ):
        programs = of_system(name, 2, 2)
        assert circle(programs, rules) == ()
        assert circle(programs, replace(rules, lazy=True)) != ()


def test_one_communicator_for_both_directions_hangs() -> None:
    rules = replace(MILD, receives="with taker")
    assert circle(on_two_ranks(), rules) == ()
    assert circle(on_two_ranks(), replace(rules, both_ways=True)) != ()


def test_receives_out_of_turn_hang() -> None:
    programs = on_two_ranks()
    first, second, *rest = programs[1].incoming[0]
    assert circle(edited(programs, 1, incoming={0: (second, first, *rest)}), MILD) != ()


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
    assert circle(edited(programs, 1, actions=actions), MILD) == ("message 0F3 → 1F3 is through",)


def over_at_once(program: Program) -> Program:
    """Each pass waits until what the one before it sent is through."""
    given = zip(((), *(action.sends for action in program.actions)), program.actions, strict=False)
    return replace(program, actions=tuple(replace(action, gone=sends) for sends, action in given))


@pytest.mark.parametrize(("name", "queues"), [("1f1b", 1), ("chimera", 0)])
def test_a_send_that_must_be_over_before_its_receiver_comes_hangs(name: str, queues: int) -> None:
    more = {"comm": 2, "exchange": 1} if name == "chimera" else {}
    programs, rules = of_system(name, 2, 2, **more), Rules(receives="with taker", syncing=False, queues=queues)
    assert circle(programs, rules) == ()
    early = tuple(map(over_at_once, programs))
    assert any("waits for sends over before" in line for line in circle(early, rules))
    assert circle(early) == ()  # in the one order it never is before


def test_collectives_in_two_orders_hang() -> None:
    programs = of_system("1f1b-vocab", 3, 3)
    actions = list(programs[2].actions)
    one, other = [i for i, action in enumerate(actions) if action.kind == "VB"][:2]
    actions[one], actions[other] = actions[other], actions[one]
    found = circle(edited(programs, 2, actions=tuple(actions)), MILD)
    assert any(line.startswith("collective VB") for line in found)


def test_a_collective_without_one_of_its_ranks_hangs() -> None:
    programs = of_system("1f1b-vocab", 3, 3)
    actions = tuple(action for action in programs[2].actions if action.name[1:] != "VR2")
    assert circle(edited(programs, 2, actions=actions), MILD) == ("collective VR2 ends",)


def test_collectives_that_begin_as_soon_as_a_rank_can_hang() -> None:
    """What `awaits.together` is for: a host that begins early may stand there while others need it."""
    hung = 0
    for seed in range(40):
        schedule = random_schedule(random_problem("sums over ranks", seed), seed)
        assert circle(lower(schedule)) == ()
        with patch("zbsolve.exec.awaits.together", lambda schedule, begin: begin):
            hung += bool(circle(lower(schedule)))
    assert hung > 0


def all_schedules() -> Iterator[Schedule]:
    for kind in ("plain", "offload", "vocabulary", "two directions"):
        for seed in range(10):
            yield random_schedule(random_problem(kind, seed), seed)


def test_a_circle_is_one_and_there_is_one_where_networkx_finds_one() -> None:
    rng = random.Random(1)
    for schedule in all_schedules():
        programs = lower(schedule)
        for rules in (EXECUTOR, Rules(receives="ahead"), Rules(receives="with taker", syncing=rng.random() < 0.5)):
            graph = graph_of(programs, rules)
            edges = networkx.DiGraph((before, i) for i, some in enumerate(graph.before) for before in some)
            found = graph.circle()
            assert (found == ()) == networkx.is_directed_acyclic_graph(edges)
            number = {text: i for i, text in enumerate(graph.texts)}
            for before, after in zip((*found[-1:], *found), found, strict=False):
                assert number[before] in graph.before[number[after]]
