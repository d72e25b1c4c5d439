"""Steps on GPUs end: no schedule's programs wait in a circle under the executor's rules, and planted errors do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import networkx
import pytest

from zbsolve import Schedule, preset
from zbsolve.exec.base.program import Message, Program
from zbsolve.exec.lowering import lower
from zbsolve.exec.waits import circle, graph_of
from zbsolve.systems import problem_for

from ..support.exec_tools import random_schedule
from ..support.slice_problems import paper_order
from ..support.waiting import KINDS, random_problem, systems

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
