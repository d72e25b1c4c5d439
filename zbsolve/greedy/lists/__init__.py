"""List scheduling: its memory, its policies and their annealing, and serial schedules where nothing else fits."""
