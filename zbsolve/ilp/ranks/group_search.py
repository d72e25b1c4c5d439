"""Higher lower bounds from searches over the orders of one rank, of groups of ranks, or of all ranks, within a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from functools import cached_property

from ...problem import Ints, Problem
from ...util.clock import Clock, TimeShare
from ..bounds.bound import Bound, value_unit
from ..bounds.closed_forms import all_closed_forms
from ..bounds.memory_arcs import INFINITE
from .end_losses import (
    ALONE,
    ENDS,
    FIRST_STATES,
    KINDS_OF_GROUPS,
    LEAN,
    NO_INCUMBENT,
    OWN,
    STATES_FACTOR,
    Answer,
    Share,
    both_ends_of_fullest,
    next_kind,
    refute,
)
from .induction import FIRST_BREADTH, WindowSearch, has_many_waves, refute_by_induction
from .lanes import MAX_LEAN_RANKS, MAX_WHOLE_RANKS, Group, all_ranks, group_bound, group_of, grown, in_own_windows, lanes_of
from .times_to_go import TimesToGo

SECONDS_PER_STATE = 1.5e-6  # time that the clock counts for one partial order (a state)
MIN_STATES = 1_000  # a try with fewer states is not worth its set-up
MAX_FAILURES = 3  # groups of one size that may use up their states without a bound before the rest of the size is skipped
# The searches end where none has gained on the closed forms within this share of the time, and at least these seconds. Of
# 192 problems 48 gained nothing in all of the time, and of the others one gained later than this (0.04 %).
GIVE_UP_SHARE, GIVE_UP_SECONDS = 0.25, 0.5
# The factor on states that one more rank takes (26 and 52 were measured). Where there is time for so many states, a grown
# group may take this share of the affordable states in one try, with this breadth, since merged states take more tries.
RANK_FACTOR, DEEP_SHARE, DEEP_BREADTH = 30, 0.7, 128
# For ranks in their own windows: the first breadth (refuting how a step begins needs few states), and the least states that
# two or more of them may take to refute the ceiling.
OWN_BREADTH, REACH_STATES = 1, 100_000
GAP_PARTS = 64  # a group of ranks is left where it can gain only less than the gap divided by this
LONG_LOOK = STATES_FACTOR * FIRST_STATES  # states of a try before all ranks are looked at in a long problem
# Until tries had this many states, a look at all ranks takes at most this share of the time left: it rarely finds more than
# what two or three ranks refute with 100,000 states.
LATE_LOOK, EARLY_SHARE = STATES_FACTOR * LONG_LOOK, 0.3
# The first step of a look has a small breadth and this share of its states: late, and early. The second step, with
# `DEEP_BREADTH`, comes where it may take so many times the states of the first. Early it always comes for few ranks of fewer
# lanes than this (one stage each): 8 ranks in half of 1F1B's memory need 600,000 to 750,000 states, 16 too many.
LOOK_SHARES, LOOK_STATES, FEW_LANES = (0.3, 0.1), 2.5, 4
PROBE_STATES = 100_000  # states of a short induction, which measures its speed
SETTLED = 0.98  # an incumbent above this share of its value a round before is worth a look
# Shares of the time left for one try of an induction: over the first rank, over all in a long problem, over all in another.
# With less, the induction of 8 ranks in half of 1F1B's memory does not end, and other searches gain far less in the rest.
FIRST_RANK_SHARE, LONG_SHARE, SHORT_SHARE = 0.1, 0.85, 0.5
MAX_INDUCTION_LANES = 24
INDUCTION_GOAL = 0.99  # share of the incumbent's value that an induction tries to prove
SINGLE_RANKS = 2  # the most single ranks searched, times ranks: one rank may appear with several windows
# The number of single ranks of the best closed forms that are searched first, and the states of each try.
PROMISING, PROMISING_STATES = 2, 30_000
# For both ends of one rank, before all else: states of each try; the share of affordable states that all tries may take; the
# factor on a try's states that all tries take; and the share of the best bound below which both ends get no further turn.
ENDS_STATES, ENDS_TIME, ENDS_TRIES, ENDS_SHARE = (3_000, 18_000, 108_000), 0.5, 12, 0.97
WINDOWS_PART = 3  # the gain of both ends divided by this counts for windows of single ranks too, which continue from it


def higher_bounds(
    problem: Problem, best: Bound, clock: Clock, seconds: float, incumbent: Ints = NO_INCUMBENT
) -> Iterator[Bound]:
    """Yield bounds above `best` as they are found, cheap ones first, until the incumbent's value or the time is reached.

    Closed forms come first, then single ranks. Groups of ranks follow with few states in each try, then with more; for the
    span also groups in their own windows, which need more states for each order. Early on, one look tests whether all ranks
    together refute any better value. The search ends early where nothing is gained in the first part of the time.

    seconds: the time of the clock that it may take.
    incumbent: its value, µs, shape (1,), which another thread may lower meanwhile; `INFINITE` or more: there is none.
    """
    forms = sorted(all_closed_forms(problem), key=lambda bound: -bound.value)
    if forms[0].value > best.value:
        best = forms[0]
        yield best
    search = _GroupSearch(problem, best, incumbent, clock.share(seconds))
    of_forms = [group_of(problem, bound) for bound in forms if bound.ranks]
    if not of_forms:  # no closed form names ranks, since no rank has only one stream
        return
    first_ranks = (of_form._replace(ranks=of_form.ranks[:1]) for of_form in of_forms)
    own = (Group((rank,)) for rank in range(problem.ranks))  # closed forms may omit windows that are not the best
    alone = list(dict.fromkeys([*first_ranks, *own]))[: SINGLE_RANKS * problem.ranks]
    yield from search.begin_with_ends()
    yield from search.raise_windows(alone[:PROMISING], PROMISING_STATES)
    yield from search.take_turns(alone, of_forms[0])


class _GroupSearch:
    """The best bound so far, and the searches of each group of ranks."""

    def __init__(self, problem: Problem, best: Bound, incumbent: Ints, share: TimeShare) -> None:
        self.problem, self.best, self.incumbent, self.share, self.clock = problem, best, incumbent, share, share.clock
        self.unknown = 4 * best.value  # the ceiling where there is no incumbent
        self.both_ends = both_ends_of_fullest(problem, best.value)
        self.unit = value_unit(problem)  # windows between two multiples of it have the same answer
        self.times = TimesToGo()
        self.searches: dict[Group, WindowSearch | None] = {}
        self.roots: dict[str, Group] = {}  # kind → the group that its groups are grown from
        self.answered: dict[Group, int] = {}  # states of the last try in which a window fitted the group
        self.breadth = FIRST_BREADTH  # of the last group's answer, and of the next group's first try
        self.rate, self.tried = 500_000.0, 0  # measured states per second; all states so far
        self.form, self.give_up = best, self.clock.share(max(GIVE_UP_SECONDS, GIVE_UP_SHARE * share.left))

    @cached_property
    def long(self) -> bool:
        """Whether all ranks together have many waves of microbatches (`has_many_waves`)."""
        lanes = lanes_of(self.problem, tuple(range(self.problem.ranks)), True)
        return lanes is not None and has_many_waves(lanes)

    @property
    def ceiling(self) -> int:
        """The incumbent's value, µs, which no bound can exceed; `unknown` where there is none."""
        value = int(self.incumbent[0])
        return self.unknown if value >= INFINITE else value

    @property
    def affordable(self) -> int:
        """The number of states that the time left allows."""
        return int(self.rate * self.share.left)

    @property
    def over(self) -> bool:
        """Whether the ceiling is reached, the time is over, or the searches gained nothing and are given up."""
        given_up = self.best is self.form and self.give_up.over
        return given_up or self.best.value >= self.ceiling or self.share.over

    def count_states(self, tried: int, began: float) -> None:
        """Count states tried since `began`, the clock's time, and measure their rate."""
        self.clock.spend(tried * SECONDS_PER_STATE)
        self.tried += tried
        if tried >= 20_000:
            self.rate = tried / max(1e-9, self.clock.used - began)

    def take_turns(self, alone: list[Group], otherwise: Group) -> Iterator[Bound]:
        """Yield higher bounds from single ranks and from groups of each kind in turn. otherwise: the group to start from
        where the best bound names no ranks."""
        without = {ENDS: self.both_ends is None, OWN: self.problem.objective != "span"}
        shares = {kind: Share() for kind in KINDS_OF_GROUPS if not without.get(kind)}
        if ENDS in shares:
            shares[ENDS] = Share(STATES_FACTOR * ENDS_STATES[-1], self.tried, self.best.value - self.form.value)
        settled, looked, before, idle = False, FIRST_STATES, self.ceiling, 0
        while not self.over:
            single = len(self.best.ranks) < 2
            if single:
                of_ends = shares[ENDS].gained if ENDS in shares else 0
                shares[ALONE].gained = self.best.value - self.form.value - of_ends + of_ends // WINDOWS_PART
            kind = next_kind(shares, single)
            everywhere = all_ranks(self.problem, [self.start(otherwise), *alone])
            if kind is None:
                if not settled:  # a look that had too little time, on a busy machine for example, gets what is left
                    yield from self.try_incumbent(everywhere, LATE_LOOK)
                return
            share = shares[kind]
            if share.states > looked and (kind != ALONE or self.long):
                if self.ceiling > SETTLED * before:  # otherwise the next turn looks
                    settled = settled or (yield from self.try_incumbent(everywhere, looked))
                    looked = share.states
                before = self.ceiling
            began, tried = self.best.value, self.tried
            if kind == ENDS:
                yield from self.raise_ends(share.states)
            elif kind == ALONE:
                yield from self.raise_windows(alone, share.states, failures=INFINITE if share.first else MAX_FAILURES)
                yield from self.raise_windows([self.start(otherwise)], STATES_FACTOR * share.states)
            else:
                yield from self.grow(self.start(otherwise), kind, share.states)
            share.count(self.best.value - began, self.tried - tried)
            if kind == ENDS and self.both_ends is None:
                del shares[ENDS]
            idle = 0 if self.best.value > began else idle + 1
            most_ranks = 2 * (1 + len(self.start(otherwise).ranks)) > self.problem.ranks  # with one more: over half of them
            if looked > FIRST_STATES and (most_ranks or idle >= len(shares)):
                yield from self.deepen()

    def begin_with_ends(self) -> Iterator[Bound]:
        """Yield higher bounds from both ends of one rank, where the time allows the states of `ENDS_STATES`."""
        if self.both_ends is not None:
            self.both_ends.ends[0].attempt(1, 1, 1)  # loads the compiled search, so that the rate does not include it
        for states in ENDS_STATES:
            if not self.over and ENDS_TRIES * states < ENDS_TIME * self.affordable:
                yield from self.raise_ends(states)

    def raise_ends(self, states: int) -> Iterator[Bound]:
        """Yield a higher bound from both ends of one rank; drop these where that is below `ENDS_SHARE` of the best."""
        ends, began = self.both_ends, self.clock.used
        if ends is None:
            return
        self.count_states(ends.raise_losses(states, self.affordable), began)
        if ends.bound.value > self.best.value:
            self.best = ends.bound
            yield self.best
        elif ends.bound.value < ENDS_SHARE * self.best.value:
            self.both_ends = None

    def start(self, otherwise: Group) -> Group:
        """The group of the best bound's ranks; `otherwise` where it names none."""
        return group_of(self.problem, self.best) if self.best.ranks else otherwise

    def grow(self, start: Group, kind: str, states: int) -> Iterator[Bound]:
        """Yield higher bounds from groups that grow by one rank as long as that helps. start: the first group; later calls
        continue from where the last one ended. states: in each try."""
        plain = start._replace(ranks=start.ranks[:2], lean=kind == LEAN, own=False)
        root = self.roots.setdefault(kind, in_own_windows(start) if kind == OWN else plain)
        most = min(MAX_LEAN_RANKS if kind == LEAN else MAX_WHOLE_RANKS, self.problem.ranks)
        for size in range(2 if len(root.ranks) < 3 else min(most, len(root.ranks) + 1), 1 + most):
            before = self.best
            large, groups = size > 2, grown(self.problem, root, size)
            yield from self.raise_windows(groups, states, MAX_FAILURES if large else INFINITE, once=large)
            if self.best is not before:
                root = group_of(self.problem, self.best)
            elif len(root.ranks) < size:
                break  # it may help with more states, in a later turn
        if root.own:
            yield from self.reach_ceiling(root, max(states, REACH_STATES))
        if not root.own or len(root.ranks) > 1:
            yield from self.raise_windows([root], states)
        self.roots[kind] = root

    def reach_ceiling(self, group: Group, states: int) -> Iterator[Bound]:
        """Yield the ceiling itself as a bound, where one try proves it. In their own windows ranks refute it at little more
        cost than far smaller windows, since they refute how the step begins."""
        search, asked = self.search_of(group), 0
        while search is not None and len(group.ranks) > 1 and not self.over and asked != self.ceiling < self.unknown:
            asked, began = self.ceiling, self.clock.used  # tried again where the ceiling falls meanwhile
            answer, tried = search.attempt(asked - 1, min(states, self.affordable))
            self.count_states(tried, began)
            if answer is Answer.REFUTED:
                self.best = group_bound(self.problem, group, asked)
                yield self.best
            elif answer is Answer.FITS and asked == self.ceiling:
                self.answered[group] = tried

    def deepen(self) -> Iterator[Bound]:
        """Yield higher bounds from whole groups with one rank more than the best one, as long as that group's last try
        answered that a window fits, and the time allows the expected states."""
        group = group_of(self.problem, self.best)._replace(lean=False)
        while 1 < len(group.ranks) < min(MAX_WHOLE_RANKS, self.problem.ranks):
            expected = RANK_FACTOR * self.answered.get(group, INFINITE)
            if not expected < self.affordable:
                return
            before, group = self.best, grown(self.problem, group, len(group.ranks) + 1)[0]
            most = int(DEEP_SHARE * self.affordable)
            yield from self.reach_ceiling(group, min(most, 2 * expected)) if group.own else self.raise_windows([group], most)
            if self.best is before:
                return

    def raise_windows(
        self, groups: list[Group], states: int, failures: int = INFINITE, once: bool = False
    ) -> Iterator[Bound]:
        """Yield higher bounds from each group in turn, as long as it gives them with `states` in each try.

        failures: end after this many groups that used up their states without a bound, since all groups have one size. once:
        end after the first group that gives a bound. A group that gave one also tries smaller windows where the next larger
        one takes too many states.
        """
        first = self.best
        for group in groups:
            if self.over or failures <= 0 or (once and self.best is not first):
                return
            search = self.search_of(group)
            while search is not None and failures > 0 and not self.over:
                grain = max(self.unit, (self.ceiling - self.best.value) // GAP_PARTS)
                allowed = min(states, self.affordable)
                window = search.next_window(self.best.value - 1, grain, allowed)
                if window is None or allowed < MIN_STATES:
                    break
                began = self.clock.used
                answer, tried = search.attempt(window, allowed)
                self.count_states(tried, began)
                if answer is Answer.REFUTED:
                    self.best = group_bound(self.problem, group, window + 1)
                    self.breadth = search.breadth if len(group.ranks) > 1 else FIRST_BREADTH
                    yield self.best
                elif answer is Answer.FITS:
                    self.answered[group] = tried
                else:
                    large = 4 * tried > states or window - self.best.value < search.min_step
                    if large and group_of(self.problem, self.best) != group:
                        failures -= 2 * tried > states
                        break

    def search_of(self, group: Group) -> WindowSearch | None:
        """The search of this group, made at the first call; None where its lanes allow none."""
        if group not in self.searches:
            lanes = lanes_of(self.problem, *group)
            gap, deep = self.ceiling - self.best.value, len(group.ranks) > 2 and not group.lean
            step, breadth = (gap // 2, DEEP_BREADTH) if deep else (gap // 5, self.breadth)
            breadth = OWN_BREADTH if group.own else breadth
            least = max(self.unit, gap // 32)
            known = breadth, self.incumbent, self.times
            self.searches[group] = None if lanes is None else WindowSearch(lanes, self.ceiling, least, step, *known)
        search = self.searches[group]
        if search is not None:
            search.fits = min(search.fits, self.ceiling)
        return search

    def try_incumbent(self, groups: list[Group], looked: int) -> Generator[Bound, None, bool]:
        """Yield the incumbent's value itself as a bound, from the first of the groups that proves it.

        Rising in small steps instead would spend most of the time on smaller windows. Returns False where a later look is
        worth it: the value fell meanwhile, or an early look gave no answer. looked: states of one try at the last look.
        """
        for group in groups:
            lanes = None if self.over or self.incumbent[0] >= INFINITE else lanes_of(self.problem, *group)
            if lanes is None:
                return True
            before, early = self.ceiling, looked < LATE_LOOK
            if has_many_waves(lanes):  # the value itself would take too many states
                if looked < LONG_LOOK:
                    return False
                yield from self.try_induction(group)
                return self.ceiling > SETTLED * before
            most = int((EARLY_SHARE if early else 1.0) * self.affordable)
            few = early and len(lanes.rank) < min(FEW_LANES * len(group.ranks), MAX_INDUCTION_LANES)
            window, states, began = before - 1, int(LOOK_SHARES[early] * most), self.clock.used
            to_go, tried = self.times.of(lanes, window, window, states)
            self.count_states(tried, began)
            for breadth in (FIRST_BREADTH, DEEP_BREADTH):
                began = self.clock.used
                answer, tried = refute(lanes, window, breadth, states, True, self.incumbent, to_go)
                self.count_states(tried, began)
                wide = few or (answer is Answer.MERGED and LOOK_STATES * tried <= most)
                if not wide or answer in (Answer.REFUTED, Answer.FITS):
                    break
                states = most - tried if few else most
            if answer is Answer.REFUTED:
                self.best = group_bound(self.problem, group, window + 1)
                yield self.best
            if self.ceiling < before:
                return False
            if answer is Answer.FITS and RANK_FACTOR * tried < most:
                continue  # the next group, whose ranks are whole, is affordable too
            if early and answer is not Answer.REFUTED:
                return False
            if answer in (Answer.MERGED, Answer.TOO_MANY):
                yield from self.try_induction(group)
            return self.ceiling > SETTLED * before
        return True

    def try_induction(self, group: Group) -> Iterator[Bound]:
        """Yield `INDUCTION_GOAL` of the incumbent's value as a bound, by induction over microbatches: first without the last
        rank, which takes fewer states, then with it. Where there are too many lanes: bounds of the first rank instead."""
        for kept in dict.fromkeys((group._replace(ranks=group.ranks[:-1] or group.ranks), group)):
            value, began = int(INDUCTION_GOAL * self.ceiling) + 1, self.clock.used
            lanes = None if self.over or value <= self.best.value else lanes_of(self.problem, *kept)
            if lanes is None:
                continue
            if len(lanes.rank) > MAX_INDUCTION_LANES:
                first = group._replace(ranks=group.ranks[:1], lean=False)
                yield from self.raise_windows([first], int(FIRST_RANK_SHARE * self.affordable))
                return
            answer, tried = refute_by_induction(lanes, value, PROBE_STATES, self.incumbent)  # measures the rate of states
            self.count_states(tried, began)
            if answer is Answer.TOO_MANY and self.affordable > PROBE_STATES:
                began = self.clock.used
                most = int((LONG_SHARE if has_many_waves(lanes) else SHORT_SHARE) * self.affordable)
                answer, tried = refute_by_induction(lanes, value, most, self.incumbent)
                self.count_states(tried, began)
            if answer is Answer.TOO_MANY:
                return
            if answer is Answer.REFUTED:
                self.best = group_bound(self.problem, kept, value)
                yield self.best
