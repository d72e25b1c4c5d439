"""Programs: both ends of a pair see one order, every input arrives once, and what cannot run is refused by name."""

from dataclasses import replace

import pytest

from zbsolve import BadInput, Edge, Pass, Problem, Schedule, pipeline, updates
from zbsolve.exec.handlers import HANDLERS
from zbsolve.exec.layers import layer_counts
from zbsolve.exec.lowering import lower
from zbsolve.exec.memory import predicted
from zbsolve.problem.placement import mirror
from zbsolve.problem.tables import Edges

from ..support.exec_tools import a_problem, random_schedule

PLACEMENTS = [(0, 1), (0, 1, 2, 3), (0, 1, 0, 1), (0, 1, 1, 0), (0, 2, 1, 3, 0, 1), (1, 0, 0, 2, 1)]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("seed", range(5))
def test_both_ends_have_one_order(placement: tuple[int, ...], seed: int, fused: bool) -> None:
    problem = a_problem(placement, microbatches=5, fused=fused)
    programs = lower(random_schedule(problem, seed))
    sent = {(p.rank, q.rank): [] for p in programs for q in programs}
    taken = set()
    for program in programs:
        for action in program.actions:
            for message in action.sends:
                sent[program.rank, message.destination].append(message)
            if action.takes is not None and not isinstance(action.takes, str):
                taken.add(action.takes)
    for program in programs:
        for source in range(len(programs)):
            assert tuple(sent[source, program.rank]) == program.incoming.get(source, ())
    assert taken == {message for messages in sent.values() for message in messages}
    assert sorted(a.name for p in programs for a in p.actions) == sorted(problem.names)


def test_a_rank_hands_over_to_itself() -> None:
    programs = lower(random_schedule(a_problem((0, 0, 1), 1), 0))
    by_name = {a.name: a for a in programs[0].actions}
    assert [message.after for message in by_name["0F0"].hands] == ["1F0"]
    assert by_name["1F0"].takes == "0F0"
    assert by_name["0F0"].sends == ()


def test_one_edge_brings_what_a_pass_takes_and_many_take_what_it_makes() -> None:
    problem = a_problem((0, 1, 0), 1)
    brought = Edges.of([problem.index["0F0"]], [problem.index["2F0"]], carries="activation")
    with pytest.raises(BadInput, match=r"pass 2F0: 2 edges carry something to it, and run hands it one thing"):
        lower(random_schedule(replace(problem, edges=problem.edges + brought), 0))
    ends = [problem.index[name] for name in ("0W0", "2W0")]
    handed = Edges.of([problem.index["0F0"]] * 2, ends, carries="activation")
    (action,) = (
        action
        for action in lower(random_schedule(replace(problem, edges=problem.edges + handed), 0))[0].actions
        if action.name == "0F0"
    )
    assert [message.after for message in action.hands] == ["0W0", "2W0"]


def test_messages_that_wait_are_predicted() -> None:
    """Of 7 bytes: during the pass that sends one, and from where it is received until the pass that takes it."""
    schedule = random_schedule(a_problem((0, 1), 1, fused=True), 0)
    more = []
    for program in lower(schedule):
        both = predicted(schedule, program, lambda _: 7), predicted(schedule, program)
        more.append([with_messages - without for with_messages, without in zip(*both, strict=True)])
    assert more == [[7 + 7, 0], [0, 7]]


def test_a_deadlock_is_refused() -> None:
    problem = a_problem((0, 1), 1)
    schedule = Schedule(problem, {"compute:0": ("0F0", "0B0", "0W0"), "compute:1": ("1B0", "1F0", "1W0")})
    with pytest.raises(BadInput, match="deadlock"):
        lower(schedule)


def hand_made(passes: list[Pass], edges: list[Edge]) -> Schedule:
    return random_schedule(Problem.of(passes, edges))


def test_what_cannot_run_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    F, B, W = (Pass(kind, 0, 0, 0, 1) for kind in ("F", "B", "W"))
    with monkeypatch.context() as patched:
        patched.delitem(HANDLERS, "T")
        with pytest.raises(BadInput, match="pass 0T0: run does not know passes of kind T"):
            lower(hand_made([F, B, W, Pass("T", 0, 0, 0, 1)], []))
    with pytest.raises(BadInput, match="pass 0X0: no edge orders 0X0 and 0B0"):
        lower(hand_made([F, B, W, Pass("X", 0, 0, 0, 1)], [Edge("0F0", "0X0")]))
    with pytest.raises(BadInput, match=r"pass 0F0\.1: there is no 0F0"):
        lower(hand_made([Pass("F", 0, 0, 0, 1, 1)], []))
    with pytest.raises(BadInput, match="neither B nor BW"):
        lower(hand_made([F], []))
    with pytest.raises(BadInput, match="needs B and W, or BW"):
        lower(hand_made([F, B], [Edge("0F0", "0B0")]))
    with pytest.raises(BadInput, match="no edge brings its gradient"):
        lower(hand_made([F, B, W, *(Pass(k, 1, 0, 1, 1) for k in ("F", "B", "W"))], [Edge("0F0", "1F0")]))
    with pytest.raises(BadInput, match="pass 0B0: its microbatch is on rank 0 and on rank 1 for one stage"):
        lower(hand_made([F, Pass("B", 0, 0, 1, 1), W], []))
    two = pipeline([1, 1], BW=[1, 1], placement=((0, 1), (1, 0)), microbatches=2, exchange=1)
    passes, edges = list(two.passes), two.edges
    rows = zip(edges.before.tolist(), edges.after.tolist(), strict=True)
    named = [Edge(two.names[a], two.names[b]) for a, b in rows]
    with pytest.raises(BadInput, match="pass 0C1: no edge orders 0BW1 and 0C1"):
        lower(hand_made(passes, [one for one in named if (one.before, one.after) != ("0BW1", "0C1")]))
    with pytest.raises(BadInput, match=r"stage 0: it is on ranks \(0, 1\), but its passes C are on ranks \[0\]"):
        lower(hand_made([one for one in passes if one.name != "0C1"], [one for one in named if one.after != "0C1"]))


def test_routes_of_a_problem() -> None:
    for given in (((0, 1),), ((0, 1, 2, 3), (3, 2, 1, 0)), mirror(4, 2)):
        assert pipeline(1, BW=1, placement=given, microbatches=8).routes == given
    alone = pipeline(1, BW=1, placement=((0, 1), (1, 0)), microbatches=1)
    assert alone.routes == ((0, 1),)


def test_versions_and_groups_of_passes() -> None:
    """2BW on one rank, two microbatches a group: version max(⌊k/2⌋ − 1, 0), as its paper counts from 0."""
    step = pipeline([1], B=[1], W=[1], microbatches=6)
    actions = lower(random_schedule(updates(step, 1, every=2, delay=2), 1))[0].actions
    for one in actions:
        assert one.use is not None
        if one.kind == "U":
            assert (one.use.version, one.use.group) == (one.part + 1, one.part)
        else:
            assert (one.use.version, one.use.group) == (max(one.part // 2 - 1, 0), one.part // 2)
    for version in range(4):
        of = [one.use.over for one in actions if one.use is not None and one.use.version == version]
        assert of == [False] * (len(of) - 1) + [True]


def test_updates_that_cannot_run_are_refused_by_name() -> None:
    step = pipeline([1, 1], BW=[1, 1], microbatches=4)
    whole = updates(step, 1, every=2, delay=1)
    edges = [Edge(whole.names[a], whole.names[b]) for a, b in zip(whole.edges.before, whole.edges.after, strict=True)]
    passes = list(whole.passes)
    for wrong, text in (
        ([*edges, Edge("0BW0", "0U1")], "pass 0BW0: its gradient goes to 0U1 and to another update"),
        (
            [one for one in edges if (one.before, one.after) != ("1BW3", "1U1")],
            "every stage must update after the same microbatches",
        ),
        ([one for one in edges if one.before[1:] != "BW3" or one.after[1] != "U"], "groups of 1, 2 microbatches"),
    ):
        with pytest.raises(BadInput, match=text):
            lower(hand_made(passes, wrong))


def test_layers_must_fit_the_model() -> None:
    with pytest.raises(BadInput, match="does not say which of 8 layers"):
        layer_counts(pipeline([1, 1], BW=[1, 1], microbatches=1), 8)
    with pytest.raises(BadInput, match="for 7 layers, but the model has 8"):
        layer_counts(pipeline([1, 1], BW=[1, 1], microbatches=1, layers=(3, 4)), 8)
    with pytest.raises(BadInput, match="do not name 2 stages"):
        layer_counts(replace(pipeline([1, 1], BW=[1, 1], microbatches=1), layers=(3, 4, 1)), 8)
