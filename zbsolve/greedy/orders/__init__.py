"""Orders of passes, improved move by move along critical paths: tabu search."""
