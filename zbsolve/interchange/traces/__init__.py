"""Measured runs of other engines. A reader for each format makes a `Recording`; `trace_of` makes a `Trace` of it."""
