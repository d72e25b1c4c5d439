"""Even steps in exactly 1F1B's memory, as docs/notes/tight-memory.md writes them."""

from __future__ import annotations

from typing import NamedTuple

from zbsolve import Problem, pipeline


class Case(NamedTuple):
    """Numbers of the page; times in µs, u and w in bytes."""

    p: int
    m: int
    F: int
    B: int
    W: int
    c: int
    u: int
    w: int

    @property
    def problem(self) -> Problem:
        held = {"held_until_B": self.u, "held_until_W": self.w, "capacity": self.p * (self.u + self.w)}
        return pipeline([self.F] * self.p, [self.B] * self.p, [self.W] * self.p, comm=self.c, microbatches=self.m, **held)

    @property
    def away(self) -> int:
        """D."""
        return (self.p - 1) * (self.F + self.B + 2 * self.c)

    @property
    def theorem_1(self) -> int:
        room = (self.p - 1) * (self.u + self.w)
        work = max(x * (self.B + self.W) + (room - x * (self.u + self.w)) // self.w * self.W for x in range(self.p))
        return self.m * (self.F + self.B + self.W) + (self.p - 1) * (self.B + 2 * self.c) + max(0, self.away - work)
