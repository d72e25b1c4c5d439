"""The backward split by the graph: a block's joint forward and backward, traced by torch, cut into F, B and W."""
