"""Schedules without proofs: the list scheduler and its annealed policies, building blocks and what is annealed from them."""
