"""One stage of a model and its passes: the forward, the backward split into B and W, recompute."""
