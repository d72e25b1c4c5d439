"""The state of the page in an address: there and back, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zbsolve.explore.state import CONTROLS, EXAMPLES, MAX_QUERY, Choice, State
from zbsolve.util.errors import BadInput


def test_every_field_has_one_control() -> None:
    assert [one.name for one in CONTROLS] != []
    assert sorted(one.name for one in CONTROLS) == sorted(one.name for one in fields(State))


def test_what_is_as_usual_is_left_out() -> None:
    assert State().query == ""
    assert State.parse("") == State()
    assert State(ranks=8, placement="vee", F=12.25).query == "ranks=8&placement=vee&F=12.25"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_an_address_holds_the_state(data: st.DataObject) -> None:
    said = {}
    for one in CONTROLS:
        if isinstance(one, Choice):
            said[one.name] = data.draw(st.sampled_from([text for text, _ in one.options]))
        elif one.whole:
            said[one.name] = data.draw(st.integers(int(one.least), int(one.upto)))
        else:
            said[one.name] = data.draw(st.integers(0, int(one.upto * 10**6))) / 10**6
    said["ranks"], said["slow_part"] = 2 * said["ranks"], min(said["slow_part"], said["ranks"])
    state = State(**said)
    assert State.parse(state.query) == state
    assert State.parse(f"http://127.0.0.1:1234/token/?{state.query}") == state


@pytest.mark.parametrize(
    ("query", "line"),
    [
        ("ranks=x", "ranks: 'x' is not a whole number"),
        ("ranks=4.5", "ranks: '4.5' is not a whole number"),
        ("ranks=0", "ranks: 0 is not from 1 to 64"),
        ("ranks=" + "9" * 1000, "ranks: "),
        ("F=nan", "F: nan is not from 0"),
        ("F=1e999", "F: inf is not from 0"),
        ("comm=-1", "comm: -1 is not from 0"),
        ("system=magic", "system: 'magic' is none of best, gpipe"),
        ("system=pipedream", "system: 'pipedream' is none of"),
        ("placement=0,2", "placement: no stage on rank 1"),
        ("placement=spiral", "placement 'spiral'"),
        ("partition=/etc/passwd.json", "partition: '/etc/passwd.json' is none of"),
        ("slow_part=9", "slow_part: the model has 4 parts"),
        ("ranks=4&ranks=8", "ranks: the address has it twice"),
        ("p=4", "address: 'p' is no control"),
        ("F=1" + "0" * MAX_QUERY, "address: longer than"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(query: str, line: str) -> None:
    with pytest.raises(BadInput) as wrong:
        State.parse(query)
    assert str(wrong.value).startswith(line)
    assert "\n" not in str(wrong.value)


def test_examples_are_states() -> None:
    for words, query in EXAMPLES:
        assert words
        assert State.parse(query).query == query


def test_a_state_checks_itself() -> None:
    with pytest.raises(BadInput, match="microbatches: 0 is not from 1"):
        replace(State(), microbatches=0)
