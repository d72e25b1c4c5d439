"""What all of the executor stands on: programs, handlers, parts and what a rank holds. It knows no feature."""
