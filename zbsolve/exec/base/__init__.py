"""What all of the executor is built on: programs, handlers, parts and the state of a rank. It knows no feature."""
