"""`State`: the values of the page's controls, also as the query of an address.

A control is a row of CONTROLS, which defines its parsing, printing, limits and form on the page. A state also gives a
profile, a step, and the command lines for the same schedule.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import parse_qsl, urlencode

from ..features.feature import YES
from ..features.table import FIELDS
from ..partition.by_name import SEARCHED
from ..problem import OBJECTIVES
from ..problem.placement import parse_routes
from ..profile.given import given_profile
from ..profile.profile import Profile
from ..profile.step import Step
from ..systems.table import SYSTEMS, system
from ..util.errors import BadInput

NUMBERS_FILE = "numbers.json"  # of the command line


def in_its_placement(state: State) -> State:
    """The state with the backward of its named system, and with the system's placement if the state's has another shape."""
    if state.system == BEST:
        return state
    backward = "fused" if system(state.system).fused else "split"
    return replace(state, placement=own_placement(state), backward=backward)


def own_placement(state: State) -> str:
    """The placement of the state's system: the state's, or the named system's if that has another shape. The system may not
    be defined for it."""
    if state.system == BEST:
        return state.placement
    own = system(state.system).placement
    return state.placement if state.placement.rstrip("0123456789") == own else own


def step_of(state: State) -> Step:
    """The step of a state. Raises BadInput."""
    named = state.partition if not state.partition[0].isdigit() else tuple(map(int, state.partition.split(",")))
    return Step(
        state.ranks,
        state.microbatches,
        state.placement,
        named,
        f"{_plain(state.memory)}GiB" if state.memory else None,
        state.objective,
        state.backward == "fused",
        **{name: FEATURES[name].parse(text) for name, text in _features(state).items()},
    )


def _features(state: State) -> dict[str, str]:
    """The state's values of features' fields."""
    return {name: text for name in FEATURES if (text := getattr(state, name)) != NONE}


def profile_of(state: State) -> Profile:
    """The model of a state without a profile, with one layer for each stage. Raises BadInput."""
    if not state.F + state.B + state.W:
        raise BadInput("F: forward and backward take no time: give at least one of F, B, W")
    return given_profile({"ranks": str(_stages(state)), **_numbers(state)})


def _stages(state: State) -> int:
    return len(parse_routes(state.placement, state.ranks)[0])


def _numbers(state: State) -> dict[str, str]:
    """Options of `zbsolve numbers` → one value, or one a stage. Stages divide a model of as many equal parts as ranks."""
    stages = _stages(state)
    share = state.ranks / stages
    slow = [stage * state.ranks // stages + 1 == state.slow_part for stage in range(stages)]
    times = [share * (state.slow_factor if is_slow else 1.0) for is_slow in slow]
    times[-1] += state.output
    words = {kind: [f"{_plain(getattr(state, kind) * time)}ms" for time in times] for kind in ("F", "B", "W")}
    words["comm"] = [f"{_plain(state.comm)}ms"]
    words["activation"] = ["/".join(f"{_plain(share * size)}GiB" for size in (state.until_B, state.until_W))]
    return {option: ",".join(values if len(set(values)) > 1 else values[:1]) for option, values in words.items()}


def commands(state: State, path: str, options: str) -> tuple[str, ...]:
    """The command lines that make the same schedule: `zbsolve numbers` if the state has no profile, then `zbsolve solve`
    with these further options. path: of the profile."""
    step = {
        "ranks": str(state.ranks),
        "microbatches": str(state.microbatches),
        "placement": state.placement,
        "partition": state.partition if path and state.partition != "balanced" else "",
        "memory": f"{_plain(state.memory)}GiB" if state.memory else "",
        "objective": "" if state.objective == "makespan" else state.objective,
        **_features(state),
    }
    fused = " --fused" if state.system == BEST and state.backward == "fused" else ""  # a named one has its own
    solve = f"zbsolve solve {shlex.quote(path or NUMBERS_FILE)}{_options(step)}{fused} {options} -o schedule.json"
    if path:
        return (solve,)
    chunks, left = divmod(_stages(state), state.ranks)
    even = chunks > 1 and not left
    whose = {"ranks": str(state.ranks), "chunks": str(chunks)} if even else {"ranks": str(_stages(state))}
    return f"zbsolve numbers{_options({**whose, **_numbers(state)})} -o {NUMBERS_FILE}", solve


def _options(texts: Mapping[str, str]) -> str:
    words = {f"--{option.replace('_', '-')}": value for option, value in texts.items() if value}
    return "".join(f" {option}" if value == YES else f" {option} {shlex.quote(value)}" for option, value in words.items())


def _plain(value: float) -> str:
    """A number without an exponent."""
    return f"{value:.{DECIMALS}f}".rstrip("0").rstrip(".")


BEST, NONE = "best", "none"  # the system that is a search; the default value of a feature's field
MAX_QUERY = 2_000  # characters of an address after ?
DECIMALS = 6  # of a number in an address
MAX_DIGITS = 12  # of a whole number that are read: any number this long is too large


@dataclass(frozen=True)
class _Control:
    name: str
    label: str
    usual: Any


@dataclass(frozen=True)
class Slider(_Control):
    """A number. least, most: the allowed range. upto: the end of the slider; larger numbers can be typed. unit: shown after
    the number. zero: the meaning of 0, if it is a special value."""

    unit: str
    least: float
    most: float
    upto: float
    step: float
    group: str
    zero: str = ""

    @property
    def whole(self) -> bool:
        """Whether only whole numbers make sense."""
        return isinstance(self.usual, int)

    def parse(self, text: str) -> float:
        """The number. Raises BadInput."""
        try:
            return int(text[:MAX_DIGITS]) if self.whole else round(float(text), DECIMALS)
        except ValueError:
            what = "a whole number" if self.whole else "a number"
            raise BadInput(f"{self.name}: '{text[:40]}' is not {what}") from None

    def print(self, value: float) -> str:
        """The number without an exponent."""
        return str(value) if self.whole else _plain(value)

    def check(self, value: float) -> None:
        """Raise BadInput if the value is out of range."""
        if not (math.isfinite(value) and self.least <= value <= self.most):
            unit = f" {self.unit}" if self.unit else ""
            raise BadInput(f"{self.name}: {value:g} is not from {self.least:g} to {self.most:g}{unit}")


@dataclass(frozen=True)
class Choice(_Control):
    """One of several texts. options: (text, label on the page). free: other texts may be typed; they are checked later."""

    options: tuple[tuple[str, str], ...]
    group: str
    free: bool = False

    def parse(self, text: str) -> str:
        """The text as it is."""
        return text

    def print(self, value: str) -> str:
        """The text as it is."""
        return value

    def check(self, value: str) -> None:
        """Raise BadInput if the text is not one of the options."""
        known = [text for text, _ in self.options]
        if value not in known and not self.free:
            raise BadInput(f"{self.name}: '{value[:40]}' is none of {', '.join(known)}")


def _same(*texts: str) -> tuple[tuple[str, str], ...]:
    return tuple((text, text) for text in texts)


STEP, MODEL, UNEVEN, MORE, OF_PROFILE = GROUPS = ("Step", "Model", "Uneven stages", "More", "What the profile knows")
HIDDEN = ((OF_PROFILE,), (MODEL, UNEVEN))  # groups without a profile, and with one
SYSTEM_NAMES = tuple(entry.name for entry in SYSTEMS if not entry.feature)
FEATURES = {field.name: field for field in FIELDS if field.offered}
CONTROLS: tuple[Slider | Choice, ...] = (
    Slider("ranks", "ranks p", 4, "", 1, 64, 32, 1, STEP),
    Slider("microbatches", "microbatches m", 12, "", 1, 512, 128, 1, STEP),
    Choice("system", "system", BEST, ((BEST, "best found (search)"), *_same(*SYSTEM_NAMES)), STEP),
    Choice("placement", "placement", "single", _same("single", "loop", "loop4", "vee", "vee4", "mirror"), STEP, free=True),
    Slider("memory", "memory a rank", 0.0, "GiB", 0, 1e6, 96, 0.25, STEP, "no limit"),
    Slider("F", "forward F", 10.0, "ms", 0, 1e5, 40, 0.1, MODEL),
    Slider("B", "input gradient B", 10.0, "ms", 0, 1e5, 40, 0.1, MODEL),
    Slider("W", "weight gradient W", 10.0, "ms", 0, 1e5, 40, 0.1, MODEL),
    Slider("comm", "message", 0.0, "ms", 0, 1e5, 10, 0.1, MODEL),
    Slider("until_B", "kept until B", 0.5, "GiB", 0, 1e5, 4, 0.05, MODEL),
    Slider("until_W", "kept until W", 0.5, "GiB", 0, 1e5, 4, 0.05, MODEL),
    Slider("slow_part", "slower part", 0, "", 0, 64, 32, 1, UNEVEN, "none"),
    Slider("slow_factor", "its time, times", 1.5, "×", 0, 100, 3, 0.05, UNEVEN),
    Slider("output", "output layer, in parts", 0.0, "×", 0, 100, 3, 0.05, UNEVEN),
    Choice("backward", "backward", "split", (("split", "split into B and W"), ("fused", "one pass BW")), MORE),
    Choice("objective", "what counts", OBJECTIVES[0], _same(*OBJECTIVES), MORE),
    Choice("partition", "layers on stages", "balanced", _same(*SEARCHED), OF_PROFILE, free=True),
    *(
        Choice(name, name.replace("_", " "), NONE, _same(NONE, *field.offered), MORE if name == "recompute" else OF_PROFILE)
        for name, field in FEATURES.items()
    ),
)


class _State:
    """The values of all controls. Everything on the page follows from them, and from the profile if there is one.

    placement, objective: as in `Step`. partition: as in `Step`, by name; used with a profile only. system: a named schedule,
    or "best": a search. backward: "split" into B and W, or "fused" (a named system has its own). memory: GiB of a rank, 0:
    no other limit than the profile's. Fields of features: values of their options, or "none".

    Without a profile the model is `ranks` equal parts. F, B, W: ms of a part for one microbatch; until_B, until_W: GiB that
    it keeps from F until the end of B and of W; comm: ms of a message between two ranks. slow_part: a part (1 is the first,
    0 none) that takes slow_factor times as long. output: parts that the output layer's F, B and W take on top, at the end.
    """

    if TYPE_CHECKING:
        __dataclass_fields__: ClassVar[dict[str, Any]]
        placement: str

        def __init__(self, **fields: Any) -> None: ...
        def __getattr__(self, name: str) -> Any: ...

    def __post_init__(self) -> None:
        for control in CONTROLS:
            control.check(getattr(self, control.name))
        if self.slow_part > self.ranks:
            raise BadInput(f"slow_part: the model has {self.ranks} parts, one a rank; there is no part {self.slow_part}")
        if self.partition not in SEARCHED and not re.fullmatch(r"\d{1,6}(,\d{1,6})*", self.partition):
            raise BadInput(f"partition: '{self.partition[:40]}' is none of {', '.join(SEARCHED)}, nor layers like 5,5,6,4")
        parse_routes(self.placement, self.ranks)

    @property
    def query(self) -> str:
        """The state as the query of an address; default values are left out."""
        changed = {c.name: c.print(getattr(self, c.name)) for c in CONTROLS if getattr(self, c.name) != c.usual}
        return urlencode(changed)

    @classmethod
    def parse(cls, query: str) -> State:
        """The state of a query; missing values have their defaults. A whole address is accepted too: its query is read.
        Raises BadInput naming the control."""
        if len(query) > MAX_QUERY:
            raise BadInput(f"address: longer than {MAX_QUERY} characters")
        known = {control.name: control for control in CONTROLS}
        values: dict[str, Any] = {}
        for name, text in parse_qsl(query.rpartition("?")[2], keep_blank_values=True):
            if name not in known:
                raise BadInput(f"address: '{name[:40]}' is no control (one of {', '.join(known)})")
            if name in values:
                raise BadInput(f"{name}: the address has it twice")
            values[name] = known[name].parse(text)
        return cls(**values)


if TYPE_CHECKING:
    State = _State
else:
    State = make_dataclass(
        "State",
        [(control.name, Any, control.usual) for control in CONTROLS],
        bases=(_State,),
        frozen=True,
        namespace={"__module__": __name__, "__doc__": _State.__doc__},
    )

EXAMPLES = (  # words and query of each example on the page
    ("textbook times", ""),
    ("an output layer as long as a stage", "ranks=8&microbatches=24&output=1"),
    ("half of 1F1B's memory", "ranks=8&microbatches=24&placement=vee&memory=4"),
    ("slow messages", "ranks=8&microbatches=24&comm=5"),
    ("one slow stage", "ranks=8&microbatches=24&slow_part=4&slow_factor=1.4"),
)
