"""Where independent tasks run."""
