"""A problem as flat arrays, as compiled code reads it: the whole, and the graph of one microbatch."""
