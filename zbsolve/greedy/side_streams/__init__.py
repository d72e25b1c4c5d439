"""Passes on streams of their own: how they are placed beside others, what must come before, and one order of collectives."""
