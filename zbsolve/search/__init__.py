"""`solve` and what is built on it: an incumbent and a bound, races between placements, the frontier over memory."""
