"""A vocabulary split over ranks: output layer, loss and embedding of each rank's shard (see `build.vocabulary`).

`shard`, `parts` and `loss` do not communicate: what other shards know comes in as values, so that one process can hold all
shards. `parts` takes a rank's shard out of a model; `rank` is what its passes run.
"""
