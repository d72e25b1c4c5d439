"""Measured runs of other engines: a reader a format gives a `Recording`; one function makes a `Trace` of any of them."""
