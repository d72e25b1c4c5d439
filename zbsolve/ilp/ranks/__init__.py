"""Exact searches over the orders of one rank or a few: windows that no order fits, and so higher lower bounds."""
