"""The models of published tables."""

# Hidden size and attention heads of the models of arXiv 2401.10241, table 3.
HIDDEN = {"1.5B": (2304, 24), "6.2B": (4096, 32), "14.6B": (5120, 40), "28.3B": (6144, 48)}
