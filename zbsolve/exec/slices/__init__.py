"""A causal transformer run slice by slice: keys and values of earlier slices, their gradients, the loss, and a comparison
with whole sequences. `SliceStore` is what a stage holds, `attention` how its slices see each other."""
