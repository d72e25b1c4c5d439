"""Training without an end: rounds, their period, and bounds of it."""
